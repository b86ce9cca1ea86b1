"""A team that stands for two ranks, of which only one is a process."""

from collections.abc import Callable
from typing import Any

from llmtrain.parallel.team import Team


class TwoRanks(Team):
    """Stands for two ranks. This one is rank 0, and the other one always has the same answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def on_all(self, action: Callable[[], Any]) -> list[Any]:
        return [action(), self.answer]
