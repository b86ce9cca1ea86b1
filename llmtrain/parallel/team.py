"""Actions that either work on all ranks of a run, or raise on all of them."""

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from llmtrain.errors import UserError, first_line

T = TypeVar("T")


class Team(NamedTuple):
    """Ranks that run actions together.

    Attributes:
        rank: the number of this process.
        writers: the ranks that can write to the run folder. They write the tensors of all ranks.
        group: the process group; ``None`` if the team is this rank only.
    """

    rank: int = 0
    writers: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None

    @classmethod
    def everyone(cls) -> "Team":
        """Return the ranks of the default process group, or this rank if there is no group."""
        if not dist.is_initialized():
            return THIS_RANK
        return cls(dist.get_rank(), group=dist.group.WORLD)

    @classmethod
    def with_new_group(cls, can_write: bool, timeout: float = 1800) -> "Team":
        """Return all ranks with a new gloo group; all of them call this.

        A save in the background needs a separate group, because its collectives would otherwise mix
        with those of training.

        Args:
            can_write: whether this rank can write to the run folder.
            timeout: seconds after which an action fails if a rank is missing.
        """
        rank = dist.get_rank()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        answers = cls(rank, group=group).on_all(lambda: can_write)
        writers = tuple(i for i, is_writer in enumerate(answers) if is_writer)
        return cls(rank, writers, group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank, and return the results of all ranks in rank order.

        Raises:
            UserError: on all ranks, if the action failed on one of them with an error that the user
                can fix. So no rank waits for another one that has left.
        """
        outcome: T | UserError
        try:
            outcome = action()
        except UserError as error:
            outcome = error
        except OSError as error:  # its text names the file
            outcome = UserError(f"{first_line(error).rstrip('.')}.")
        except ValueError as error:
            outcome = UserError(f"the run folder: {first_line(error).rstrip('.')}.")

        outcomes = [outcome]
        if self.group is not None:
            outcomes *= dist.get_world_size(self.group)
            dist.all_gather_object(outcomes, outcome, self.group)

        results: list[T] = []
        for outcome in outcomes:
            if isinstance(outcome, UserError):
                raise outcome
            results.append(outcome)
        return results

    def on_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0, and return its result on all ranks.

        Raises:
            UserError: on all ranks, if the action failed with an error that the user can fix.
        """

        def run_if_main() -> list[T]:
            return [action()] if self.is_main else []

        [result] = self.on_all(run_if_main)[0]
        return result


THIS_RANK = Team()
