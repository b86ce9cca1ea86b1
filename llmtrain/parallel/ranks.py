"""The ranks of a run: who this process is, how they share the model, and what they do together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from llmtrain.device_numbers import DeviceNumbers
from llmtrain.errors import FailedElsewhereError, UserError, explain, first_line

T = TypeVar("T")


def _for_other_ranks(failure: Exception, rank: int) -> UserError | FailedElsewhereError:
    """Return what the other ranks raise if this rank fails.

    The error itself stays here: it may refer to objects that cannot be sent.
    """
    if isinstance(failure, UserError):
        return UserError(str(failure))
    name = type(failure).__name__
    return FailedElsewhereError(
        f"rank {rank} has failed: {name}: {first_line(failure).rstrip('.')}; its output has the "
        "traceback."
    )


class Team:
    """Processes that run actions together: an action works on all of them, or raises on all.

    Args:
        rank: the number of this process.
        group: the process group; ``None`` if the team is this process only.
    """

    def __init__(self, rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.is_main = rank == 0  # which logs and writes files
        self.group = group

    def with_new_group(self, timeout: float = 1800) -> "Team":
        """Return the same ranks with a gloo group of their own; all of them call this.

        A save in the background needs a separate group, because its collectives would otherwise mix
        with those of training.

        Args:
            timeout: seconds after which an action fails if a rank is missing.
        """
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        return Team(self.rank, group)

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank, and return the results of all ranks in rank order.

        If the action fails on one rank, all ranks raise an error, so none of them waits for a rank
        that has left.

        Raises:
            UserError: on all ranks, if the failure is one that the user can fix.
            FailedElsewhereError: on the ranks that did not fail, for any other failure. The rank
                that failed raises the error itself, with its traceback.
        """
        result: T | None = None
        failure: Exception | None = None
        failure_elsewhere: Exception | None = None  # what the other ranks raise
        try:
            result = action()
        except OSError as error:  # which the user can fix
            failure = UserError(explain(error) or f"{first_line(error).rstrip('.')}.")
            failure.__cause__ = error
        except Exception as error:
            failure = error
        if failure is not None:
            failure_elsewhere = _for_other_ranks(failure, self.rank)

        outcomes = [(result, failure_elsewhere)]
        if self.group is not None:
            outcomes *= dist.get_world_size(self.group)
            dist.all_gather_object(outcomes, (result, failure_elsewhere), self.group)

        if failure is not None:
            raise failure
        for _, failure_elsewhere in outcomes:
            if failure_elsewhere is not None:
                raise failure_elsewhere
        return [cast(T, result) for result, _ in outcomes]

    def on_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0, and return its result on all ranks.

        Raises:
            UserError: on all ranks, if the action failed with an error that the user can fix.
            FailedElsewhereError: on all other ranks, if it failed with any other error.
        """
        [result] = self.on_all(lambda: [action()] if self.is_main else [])[0]
        return result


# The team of code without a run, which works in this process only.
THIS_RANK = Team()


@dataclass
class Sharding:
    """How many ranks hold one copy of the model, each of them a shard.

    These are the sizes of the device mesh of torch that Accelerate makes. Its dimensions are named
    ``dp_replicate`` and ``dp_shard``.

    Attributes:
        replicas: copies of the model.
        shards: ranks over which FSDP2 shards each weight.
        cpu_offload: whether FSDP2 keeps the weights in the memory of the host.
    """

    replicas: int
    shards: int
    cpu_offload: bool = False

    @property
    def layout(self) -> str:
        """The sizes as ``run.json`` records them, such as ``1x2``."""
        return f"{self.replicas}x{self.shards}"

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only a shard of the weights."""
        return self.shards > 1

    @property
    def processes(self) -> int:
        """The number of ranks of all replicas."""
        return self.replicas * self.shards


class Ranks(Team):
    """The ranks of a run.

    This is the only place that knows who this process is. The Accelerator that
    :func:`llmtrain.start` makes holds it; a run and its engine have it, too. Before that,
    :func:`llmtrain.console.rank` says what the launcher has told this process, for what it prints.

    Args:
        accelerator: the Accelerator, which has joined the process group.
        sharding: how the ranks share the model: one shard if every rank holds the full model.
    """

    def __init__(self, accelerator: Accelerator, sharding: Sharding) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        super().__init__(int(accelerator.process_index), group)
        self.accelerator = accelerator
        self.sharding = sharding
        self.device: torch.device = accelerator.device
        self.world_size = int(accelerator.num_processes)
        # Whether this is the first process of its machine.
        self.is_local_main = bool(accelerator.is_local_main_process)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only a shard of the weights."""
        return self.sharding.is_sharded

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks; all ranks call this."""
        total: Tensor = self.accelerator.reduce(tensor, reduction="sum")
        return total

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


class TrainingAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """Accelerate's Accelerator, which also holds the :class:`Ranks` of the run.

    Args:
        sharding: how ranks share models; ``None`` if every rank holds the full model.
        bitwise: whether the bits of the run must not depend on the number of ranks.
        settings: the arguments of Accelerate's own class.

    Attributes:
        ranks: who this process is, and how the ranks share models.
    """

    def __init__(
        self, sharding: Sharding | None = None, bitwise: bool = False, **settings: object
    ) -> None:
        super().__init__(**settings)
        replicated = Sharding(replicas=int(self.num_processes), shards=1)
        self.ranks = Ranks(self, sharding or replicated)
        self.bitwise = bitwise

    def register_for_checkpointing(self, *objects: object) -> NoReturn:
        """Refuse objects, because a run does not call ``save_state``."""
        raise UserError(
            "Accelerator.register_for_checkpointing has no effect here; return the state from the "
            "state_dict of a llmtrain.Callback."
        )


def ranks_of(accelerator: Accelerator) -> Ranks:
    """Return the ranks that an Accelerator of :func:`llmtrain.start` holds.

    Raises:
        UserError: if it is another Accelerator.
    """
    if not isinstance(accelerator, TrainingAccelerator):
        raise UserError("use the Accelerator that llmtrain.start() makes, instead of another one.")
    return accelerator.ranks
