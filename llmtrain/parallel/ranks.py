"""The ranks of a run: who this process is, and sums over all of them."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from llmtrain.device_numbers import DeviceNumbers
from llmtrain.parallel.sharding import Sharding, TrainingAccelerator


class Ranks:
    """The ranks of a run, where this process is among them, and how they shard the model.

    An open run has one of these in ``Run.ranks``, which its engine holds, too.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def rank(self) -> int:
        """The number of this process."""
        return int(self.accelerator.process_index)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that logs and writes files."""
        return bool(self.accelerator.is_main_process)

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return bool(self.accelerator.is_local_main_process)

    @property
    def sharding(self) -> Sharding:
        """How the ranks shard the model: into one shard if every rank holds the full model."""
        if isinstance(self.accelerator, TrainingAccelerator):
            return self.accelerator.sharding
        return Sharding(replicas=self.world_size, shards=1)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only a shard of the weights."""
        return self.sharding.is_sharded

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks; all ranks call this."""
        total: Tensor = self.accelerator.reduce(tensor, reduction="sum")
        return total

    def start_sum(self, tensor: Tensor) -> dist.Work | None:
        """Begin to sum a tensor over all ranks, in place; all ranks call this.

        Returns:
            The work to wait for before the tensor is read; ``None`` if there is nothing to do.
        """
        if self.world_size == 1:
            return None
        work: dist.Work = dist.all_reduce(tensor, async_op=True)
        return work

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Gather values of rows from all ranks; all ranks call this.

        Args:
            tensor: the values of this rank's rows, [rows, ...]. Every rank has as many.

        Returns:
            The values of all rows, [``world_size`` * rows, ...], in the order of the ranks.
        """
        gathered: Tensor = self.accelerator.gather(tensor[None].to(self.device))
        return gathered.flatten(0, 1)

    def gather_numbers(self, numbers: Mapping[str, float]) -> dict[str, list[float]]:
        """Gather numbers of every process, by name and in rank order; all ranks call this."""
        return self.start_gathering_numbers(numbers)()

    def start_gathering_numbers(
        self, numbers: Mapping[str, float]
    ) -> Callable[[], dict[str, list[float]]]:
        """Begin to gather numbers of every process; all ranks call this.

        Returns:
            A function that waits, and returns the numbers by name and in rank order.
        """
        if self.world_size == 1:
            return lambda: {name: [number] for name, number in numbers.items()}

        local = torch.tensor([[*numbers.values()]], dtype=torch.float64)
        if self.device.type == "cuda":
            # From pinned memory, so that the host does not wait for the device.
            local = local.pin_memory().to(self.device, non_blocking=True)
        gathered = DeviceNumbers(self.accelerator.gather(local).T)

        def read() -> dict[str, list[float]]:
            return dict(zip(numbers, gathered.read(), strict=True))

        return read
