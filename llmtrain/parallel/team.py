"""Actions that either work on all ranks of a run, or raise on all of them."""

from collections.abc import Callable
from datetime import timedelta
from typing import Generic, NamedTuple, TypeVar, cast

import torch.distributed as dist

from llmtrain.errors import FailedElsewhereError, UserError, explain, first_line

T = TypeVar("T")


class _Outcome(NamedTuple, Generic[T]):
    """What an action of one rank has led to, as the other ranks receive it.

    Attributes:
        result: what the action returned; ``None`` if it failed.
        failure: the error that the other ranks raise; ``None`` if the action succeeded.
    """

    result: T | None = None
    failure: Exception | None = None


def _fixable(error: Exception) -> UserError | None:
    """Return the error as one that the user can fix, or ``None`` if it is a bug."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError):
        fixable = UserError(explain(error) or f"{first_line(error).rstrip('.')}.")
        fixable.__cause__ = error
        return fixable
    return None


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


class Team(NamedTuple):
    """Ranks that run actions together.

    Attributes:
        rank: the number of this process.
        group: the process group; ``None`` if the team is this rank only.
    """

    rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def everyone(cls) -> "Team":
        """Return the ranks of the default process group, or this rank if there is no group."""
        if not dist.is_initialized():
            return THIS_RANK
        return cls(dist.get_rank(), group=dist.group.WORLD)

    @classmethod
    def with_new_group(cls, timeout: float = 1800) -> "Team":
        """Return all ranks with a new gloo group; all of them call this.

        A save in the background needs a separate group, because its collectives would otherwise mix
        with those of training.

        Args:
            timeout: seconds after which an action fails if a rank is missing.
        """
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        return cls(dist.get_rank(), group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank, and return the results of all ranks in rank order.

        If the action fails on one rank, all ranks raise an error, so none of them waits for a rank
        that has left.

        Raises:
            UserError: on all ranks, if the failure is one that the user can fix.
            FailedElsewhereError: on the ranks that did not fail, for any other failure. The rank
                that failed raises the error itself, with its traceback.
        """
        failure: Exception | None = None
        outcome: _Outcome[T]
        try:
            outcome = _Outcome(result=action())
        except Exception as error:
            failure = _fixable(error) or error
            outcome = _Outcome(failure=_for_other_ranks(failure, self.rank))

        outcomes = [outcome]
        if self.group is not None:
            outcomes *= dist.get_world_size(self.group)
            dist.all_gather_object(outcomes, outcome, self.group)

        if failure is not None:
            raise failure
        for outcome in outcomes:
            if outcome.failure is not None:
                raise outcome.failure
        return [cast(T, outcome.result) for outcome in outcomes]

    def on_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0, and return its result on all ranks.

        Raises:
            UserError: on all ranks, if the action failed with an error that the user can fix.
            FailedElsewhereError: on all other ranks, if it failed with any other error.
        """

        def run_if_main() -> list[T]:
            return [action()] if self.is_main else []

        [result] = self.on_all(run_if_main)[0]
        return result


THIS_RANK = Team()
