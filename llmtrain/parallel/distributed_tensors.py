"""Tensors that may be on other ranks, and can be gathered on one rank."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from llmtrain.parallel.shards import gather_to


class DistributedTensors(NamedTuple):
    """Tensors of a model by name, which may be sharded and divided among pipeline stages.

    Consecutive ranks are the stages of a pipeline.

    Attributes:
        tensors: the tensors of this rank. Those that other stages hold are on the meta device.
        holders: the stage from which each tensor is gathered, if there are several stages.
        stages: the number of pipeline stages.
    """

    tensors: dict[str, torch.Tensor]
    holders: Mapping[str, int] = {}
    stages: int = 1

    def gather_to(self, name: str, rank: int) -> torch.Tensor | None:
        """Gather a full tensor on one rank. All ranks call this.

        Returns:
            The full tensor on ``rank``, and ``None`` on all other ranks.
        """
        tensor = self.tensors[name]
        if self.stages == 1:
            return gather_to(tensor.detach(), rank)

        # Gather on the stage that holds the tensor, within the pipeline of `rank`.
        first_rank = rank - rank % self.stages
        holder = first_rank + self.holders[name]
        full = None if tensor.is_meta else gather_to(tensor.detach(), holder)
        if holder == rank:
            return full

        # Send it from there to `rank`.
        this_rank = dist.get_rank()
        if this_rank == holder:
            assert full is not None
            dist.send(full.contiguous(), rank)
            return None
        if this_rank == rank:
            received = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            dist.recv(received, holder)
            return received
        return None

    @property
    def _device(self) -> torch.device | None:
        """The device of the tensors that this stage holds; ``None`` if it holds none."""
        devices = (tensor.device for tensor in self.tensors.values() if not tensor.is_meta)
        return next(devices, None)
