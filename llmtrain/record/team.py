"""The processes that write a checkpoint together: all of them where the model is sharded, else the main one alone."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from llmtrain.errors import UserError, first_line

Outcome = tuple[str, Any]


def attempt(action: Callable[[], Any]) -> Outcome:
    """What an action returned, or how it failed in a way that a person can mend."""
    try:
        return "done", action()
    except UserError as error:
        return "refused", str(error)
    except (OSError, ValueError) as error:
        return "failed", f"{getattr(error, 'filename', None) or 'the run folder'}: {first_line(error)}"


def value_of(outcome: Outcome) -> Any:
    """What was returned; else raise :class:`UserError`, or :class:`OSError`, with what was said of the failure."""
    how, value = outcome
    if how == "refused":
        raise UserError(value)
    if how == "failed":
        raise OSError(value)
    return value


@dataclass(frozen=True)
class Team:
    """``writers`` are the ranks that see the run's folder; what others hold is gathered to them."""

    rank: int = 0
    writers: tuple[int, ...] = (0,)
    group: Any = None  # over gloo, of its own: a save in the background must not meet the training's collectives

    @classmethod
    def of_all(cls, sees_folder: bool, timeout: float = 1800) -> "Team":
        """Of all processes, all of which call this; what they do together fails after ``timeout`` seconds."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        everyone = [False] * dist.get_world_size()
        dist.all_gather_object(everyone, sees_folder, group)
        return cls(dist.get_rank(), tuple(rank for rank, sees in enumerate(everyone) if sees), group)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def each(self, action: Callable[[], Any]) -> list[Any]:
        """Run ``action`` on every process; returns what it returned on each. Where it failed on one, raises on all of
        them, so that none waits for another that has left."""
        if self.group is None:
            return [action()]
        outcomes: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(outcomes, attempt(action), self.group)
        return [value_of(outcome) for outcome in outcomes]

    def main(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` on the main process; returns, or raises, on all what it did there."""
        return self.each(action if self.is_main else lambda: None)[0]


ALONE = Team()
