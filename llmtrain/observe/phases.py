"""The time of each process by phase, and who keeps the others waiting. Cheap, and always on.

Processes meet in an update: to count its tokens, and to add their gradients. Whoever is late there makes the others
wait, so waiting shows up where nothing is wrong; what a process takes for itself tells who it is.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

PHASES = {  # of an update, in their order, as a person calls them
    "data": "data loading",
    "count": "the count of tokens",
    "forward": "forward",
    "backward": "backward",
    "exchange": "the sum of gradients",
    "norm": "the norm of the gradient",  # to read it the host waits for its device, and that for the others
    "optimizer": "optimizer",
    "other": "other",
}
MEETINGS = ("count", "exchange", "norm")
OWN = tuple(phase for phase in PHASES if phase not in MEETINGS)
_INSIDE = (
    "count",
    "forward",
    "backward",
    "exchange",
)  # of an update; a model's passes elsewhere are not its
_WORTH_SAYING = 0.2  # of an update's time


def described(phase: str) -> str:
    """Return the name of a phase of an update, and its longer one where it has one."""
    return phase if PHASES[phase] == phase else f"{phase}: {PHASES[phase]}"


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


class Mark(NamedTuple):
    """A moment of this process's work."""

    host: float  # seconds of ``time.perf_counter``
    event: torch.Event | None  # in the queue of a device to which a call only adds work


class Clock:
    """Marks moments on one device.

    On CUDA they are events in its queue. What waits for the host is seen, too, as the queue is then empty.
    """

    def __init__(self, device: torch.device) -> None:
        self.queues = device.type == "cuda"

    def now(self) -> Mark:
        """Mark this moment."""
        if not self.queues:
            return Mark(time.perf_counter(), None)
        event: torch.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Mark(time.perf_counter(), event)

    def zero(self) -> Mark:
        """Mark a moment at which the device has nothing to do, for :meth:`since`."""
        if self.queues:
            torch.cuda.synchronize()
        return self.now()

    def since(self, zero: Mark, mark: Mark) -> float:
        """Wait for ``mark`` and return the seconds of ``time.perf_counter`` at which it passed."""
        if mark.event is not None:
            mark.event.synchronize()
        return zero.host + self.seconds(zero, mark)

    def has_passed(self, mark: Mark) -> bool:
        """Return whether the work before ``mark`` is done."""
        return mark.event is None or mark.event.query()

    def seconds(self, began: Mark, ended: Mark) -> float:
        """Return the seconds between two marks that have passed."""
        if began.event is None or ended.event is None:
            return ended.host - began.host
        return began.event.elapsed_time(ended.event) / 1000


class Phases:
    """The phase that the main thread is in, and how long each took.

    The loop names the phases that it begins (:meth:`at`). Hooks on the model, held by
    :meth:`watching`, find the forward and backward passes, and the moment from which this process
    only waits for the others' gradients.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.model = model
        self.clock = Clock(device)
        self.phase = "the start"
        self.step = 0
        self.since = time.monotonic()
        self.has_dropped_first_step = False
        # called with the new phase and when it began
        self.on_change: list[Callable[[str, Mark], None]] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)  # since the last reading
        self._updates = 0  # likewise
        # rank and phase of who was late in the last reading
        self._suspect: tuple[int, str] | None = None
        self._named: set[tuple[int, str]] = set()  # each is said once
        self._marks: deque[tuple[str, Mark]] = deque()  # phases whose end is not yet known
        # the parameter whose gradient comes last, until it is the only one with a hook
        self._last: torch.Tensor | None = None
        self._gradient_hooks: list[RemovableHandle] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep hooks on the model while the block runs."""
        passes = [
            self.model.register_forward_pre_hook(lambda *_: self._within("forward")),
            self.model.register_forward_hook(lambda *_: self._within("backward")),
        ]
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self._gradient_hooks.append(_when_accumulated(parameter, self._learn_the_last))
        try:
            yield
        finally:
            for hook in [*passes, *self._gradient_hooks]:
                hook.remove()
            self._gradient_hooks.clear()
            self._last = None

    def at(self, phase: str, step: int | None = None) -> None:
        """Begin ``phase`` on the main thread, after ``step`` steps."""
        if phase == "norm" and self._last is not None:
            self._watch_only(self._last)
            self._last = None
        mark = self.clock.now()
        self._marks.append((phase, mark))
        self.phase = phase
        self.since = time.monotonic()
        if step is not None:
            self.step = step
        for tell in self.on_change:
            tell(phase, mark)
        self._add_up()

    def drop_first_step(self) -> None:
        """Forget the seconds so far: those of the first step, which takes longer for many reasons."""
        self._forget()
        self.has_dropped_first_step = True

    def read(self) -> dict[str, float]:
        """Return the mean seconds of a step in each phase since this was last called."""
        if self._marks and (event := self._marks[-1][1].event) is not None:
            event.synchronize()
        self._add_up()
        seconds = {phase: self._seconds[phase] / max(self._updates, 1) for phase in PHASES}
        self._forget()
        return seconds

    def late(self, readings: dict[str, list[float]]) -> Late | None:
        """Return who kept the others waiting in these readings and the ones before, where that was not said before."""
        found = straggler(readings) if self.has_dropped_first_step else None
        suspect, self._suspect = self._suspect, found and (found.rank, found.phase)
        if found is None or suspect is None or self._suspect != suspect or suspect in self._named:
            return None
        self._named.add(suspect)
        return found

    def _within(self, phase: str) -> None:
        if self.phase in _INSIDE and torch.is_grad_enabled():
            self.at(phase)

    def _watch_only(self, last: torch.Tensor) -> None:
        """Keep one hook on the gradients: that of the parameter whose gradient comes last."""
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks = [_when_accumulated(last, self._all_gradients_are_here)]

    def _learn_the_last(self, parameter: torch.Tensor) -> None:
        self._last = parameter

    def _all_gradients_are_here(self, parameter: torch.Tensor) -> None:
        reduces = (
            isinstance(self.model, DistributedDataParallel)
            and self.model.require_backward_grad_sync
        )
        if self.phase == "backward" and reduces:
            self.at("exchange")

    def _add_up(self) -> None:
        while len(self._marks) > 1 and self.clock.has_passed(self._marks[1][1]):
            phase, began = self._marks.popleft()
            if phase in PHASES:
                self._seconds[phase] += self.clock.seconds(began, self._marks[0][1])
            self._updates += phase == "count"  # the one that every update has once

    def _forget(self) -> None:
        self._seconds, self._updates = dict.fromkeys(PHASES, 0.0), 0


def straggler(readings: dict[str, list[float]]) -> Late | None:
    """Return the process that takes longest for itself, and the phase in which it is longest behind the others.

    ``None`` where it does not take longer than they do (their median) by a fifth of an update.
    """
    own = [sum(ranks) for ranks in zip(*(readings[phase] for phase in OWN), strict=True)]
    if len(own) < 2:
        return None
    rank = max(range(len(own)), key=own.__getitem__)

    def behind(ranks: list[float]) -> float:
        return ranks[rank] - statistics.median(ranks[:rank] + ranks[rank + 1 :])

    seconds, update = behind(own), sum(readings[phase][rank] for phase in PHASES)
    if seconds <= _WORTH_SAYING * update:
        return None
    return Late(
        rank, max(OWN, key=lambda phase: behind(readings[phase])), seconds, seconds / update
    )


def _when_accumulated(
    parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    return cast(RemovableHandle, parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
