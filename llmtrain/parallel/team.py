"""The ranks of a run that act together: either an action works on all of them, or all of them raise."""

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from llmtrain.errors import UserError, first_line

T = TypeVar("T")


class Team(NamedTuple):
    """Ranks that act together; ``writers`` are those that see the run's folder, and write what all of them hold."""

    rank: int = 0
    writers: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None  # None: this rank is alone

    @classmethod
    def everyone(cls) -> "Team":
        """Return all ranks, over the default process group; this one alone where there is no group."""
        return cls(dist.get_rank(), group=dist.group.WORLD) if dist.is_initialized() else ALONE

    @classmethod
    def of_all(cls, sees_folder: bool, timeout: float = 1800) -> "Team":
        """Return all ranks, all of which call this, over a gloo group of its own.

        A save in the background must not meet the training's collectives. Actions fail after ``timeout`` seconds.
        """
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        seen = cls(dist.get_rank(), group=group).each(lambda: sees_folder)
        return cls(dist.get_rank(), tuple(rank for rank, sees in enumerate(seen) if sees), group)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def each(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank; return what it returned on each.

        Where it fails on one in a way that a person can mend, raises :class:`UserError` on all of them, so that none
        waits for another that has left.
        """
        mine: T | UserError
        try:
            mine = action()
        except UserError as error:
            mine = error
        except (OSError, ValueError) as error:
            place = (
                "" if isinstance(error, OSError) else "the run folder: "
            )  # an OSError names its file
            mine = UserError(f"{place}{first_line(error).rstrip('.')}.")
        outcomes = [mine]
        if self.group is not None:
            outcomes *= dist.get_world_size(self.group)
            dist.all_gather_object(outcomes, mine, self.group)
        for outcome in outcomes:
            if isinstance(outcome, UserError):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, UserError)]

    def main(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0; return, or raise, on all ranks what it did there."""
        [result] = self.each(lambda: [action()] if self.is_main else [])[0]
        return result


ALONE = Team()
