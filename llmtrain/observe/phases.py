"""Where the time of each process goes, and who keeps the others waiting. Cheap, and always on.

Processes meet twice in an update: to count its tokens, and to add their gradients. Whoever is late there makes the
others wait, so waiting shows up where nothing is wrong; what a process takes for itself tells who it is.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

PHASES = {  # of an update, in their order, as a person calls them
    "data": "data loading",
    "count": "the count of tokens",
    "forward": "forward",
    "backward": "backward",
    "exchange": "the sum of gradients",
    "optimizer": "optimizer",
    "other": "other",
}
MEETINGS = ("count", "exchange")
OWN = tuple(phase for phase in PHASES if phase not in MEETINGS)
_INSIDE = ("count", "forward", "backward", "exchange")  # of an update; a model's passes elsewhere are not its
_WORTH_SAYING = 0.2  # of an update's time
T = TypeVar("T")


class Late(NamedTuple):
    """A process that the others wait for."""

    rank: int
    phase: str
    seconds: float  # an update, more than the others (their median) take for themselves
    share: float  # of the time of an update

    def __str__(self) -> str:
        return (
            f"rank {self.rank} takes {1000 * self.seconds:.1f} ms an update more than the others, most of it in "
            f"{PHASES[self.phase]}: {self.share:.0%} of the update, in which they wait"
        )


class Phases:
    """In which phase the main thread is, and how long each took. The loop says where it goes (:meth:`at`); passes
    through the model, and the moment from which it only waits for the others' gradients, are seen by hooks."""

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self.accelerator, self.model = accelerator, model
        self.clock = _Cuda() if accelerator.device.type == "cuda" else _Wall()
        self.phase, self.step, self.since = "the start", 0, time.monotonic()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.updates = 0
        self.is_warm = False  # past its first update, which takes longer for many reasons
        self._suspect: tuple[int, str] | None = None  # rank and phase of who was late in the last reading
        self._named: set[tuple[int, str]] = set()  # each is said once
        self.on_change: list[Callable[[str, Any], None]] = []  # told the new phase and the clock's mark
        self._marks: deque[tuple[str, Any]] = deque()  # phases whose end is not yet known
        self._last: nn.Parameter | None = None  # whose gradient comes last
        model.register_forward_pre_hook(lambda *_: self._within("forward"))
        model.register_forward_hook(lambda *_: self._within("backward"))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._learn_the_last) for p in parameters]

    def at(self, phase: str, step: int | None = None) -> None:
        """The main thread begins ``phase``, after ``step`` updates."""
        if phase == "optimizer" and self._hooks and self._last is not None:
            self._watch_the_last()
        mark = self.clock.now()
        self._marks.append((phase, mark))
        self.phase, self.since = phase, time.monotonic()
        self.step = self.step if step is None else step
        for tell in self.on_change:
            tell(phase, mark)
        self._add_up()

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches; waiting for each is a phase."""
        iterator = iter(batches)
        while True:
            self.at("data")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch
            if not self.is_warm:
                self.forget()
                self.is_warm = True

    def before_optimizer(self, forward_backward: Callable[..., T]) -> Callable[..., T]:
        """The same function; when it returns, the optimizer's phase begins."""

        def timed(*arguments: Any) -> T:
            result = forward_backward(*arguments)
            self.at("optimizer")
            return result

        return timed

    def read(self) -> dict[str, list[float]]:
        """Mean seconds of an update in each phase since the last reading, by rank; all processes call this."""
        return self.read_with(0.0)[0]

    def read_with(self, number: float) -> tuple[dict[str, list[float]], list[float]]:
        """The same; and a number that each process has, in the same gather."""
        if self._marks:
            self.clock.wait_for(self._marks[-1][1])
        self._add_up()
        mine = [*(self.seconds[phase] / max(self.updates, 1) for phase in PHASES), number]
        everyone = self.accelerator.gather(torch.tensor([mine], dtype=torch.float32, device=self.accelerator.device))
        self.forget()
        *columns, numbers = everyone.T.tolist()
        return {name: [round(s, 6) for s in column] for name, column in zip(PHASES, columns, strict=True)}, numbers

    def forget(self) -> None:
        """What was added up so far does not count."""
        self.seconds, self.updates = dict.fromkeys(PHASES, 0.0), 0

    def late(self, readings: dict[str, list[float]]) -> Late | None:
        """Who kept the others waiting in these readings and the ones before, where that was not said before."""
        found = straggler(readings) if self.is_warm else None
        suspect, self._suspect = self._suspect, found and (found.rank, found.phase)
        if found is None or suspect is None or self._suspect != suspect or suspect in self._named:
            return None
        self._named.add(suspect)
        return found

    def _within(self, phase: str) -> None:
        if self.phase in _INSIDE and torch.is_grad_enabled():
            self.at(phase)

    def _learn_the_last(self, parameter: nn.Parameter) -> None:
        self._last = parameter

    def _watch_the_last(self) -> None:
        """One hook is enough, once it is known which."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        assert self._last is not None
        self._last.register_post_accumulate_grad_hook(self._all_gradients_are_here)

    def _all_gradients_are_here(self, parameter: nn.Parameter) -> None:
        if self.phase == "backward" and getattr(self.model, "require_backward_grad_sync", False):
            self.at("exchange")

    def _add_up(self) -> None:
        while len(self._marks) > 1 and self.clock.has_passed(self._marks[1][1]):
            phase, began = self._marks.popleft()
            if phase in self.seconds:
                self.seconds[phase] += self.clock.seconds(began, self._marks[0][1])
            self.updates += phase == "count"  # the one that every update has once


def straggler(readings: dict[str, list[float]]) -> Late | None:
    """The process that takes longest for itself, where that is longer than the others (their median) by a fifth of an
    update; and the phase in which it is longest behind them."""
    own = [sum(ranks) for ranks in zip(*(readings[phase] for phase in OWN), strict=True)]
    if len(own) < 2:
        return None
    rank = max(range(len(own)), key=own.__getitem__)
    behind = {phase: readings[phase][rank] - statistics.median(_others(readings[phase], rank)) for phase in OWN}
    seconds = own[rank] - statistics.median(_others(own, rank))
    update = sum(readings[phase][rank] for phase in PHASES)
    if seconds <= _WORTH_SAYING * update:
        return None
    return Late(rank, max(behind, key=behind.__getitem__), seconds, seconds / update)


def _others(values: list[float], rank: int) -> list[float]:
    return values[:rank] + values[rank + 1 :]


class _Wall:
    """Where work is done when its call returns."""

    queues = False

    def now(self) -> float:
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        return True

    def wait_for(self, mark: float) -> None:
        pass

    def seconds(self, began: float, ended: float) -> float:
        return ended - began

    def zero(self) -> float:
        """A mark to which :meth:`since` refers."""
        return 0.0

    def since(self, zero: float, mark: float) -> float:
        """Seconds of ``time.perf_counter`` at which it passed."""
        return mark


class _Cuda:
    """Where a call only queues work: marks are events in the queue. What waits for the host is seen, too, as the queue
    is then empty."""

    queues = True

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def wait_for(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return began.elapsed_time(ended) / 1000

    def zero(self) -> tuple[torch.cuda.Event, float]:
        torch.cuda.synchronize()
        return self.now(), time.perf_counter()

    def since(self, zero: tuple[torch.cuda.Event, float], mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return zero[1] + self.seconds(zero[0], mark)
