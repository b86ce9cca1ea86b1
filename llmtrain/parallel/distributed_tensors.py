"""Tensors that may be sharded, and can be gathered on one rank."""

from typing import NamedTuple

import torch

from llmtrain.parallel.shards import gather_to


class DistributedTensors(NamedTuple):
    """Tensors of a model by name, which may be sharded."""

    tensors: dict[str, torch.Tensor]

    def gather_to(self, name: str, rank: int) -> torch.Tensor | None:
        """Gather a full tensor on one rank. All ranks call this.

        Returns:
            The full tensor on ``rank``, and ``None`` on all other ranks.
        """
        return gather_to(self.tensors[name].detach(), rank)
