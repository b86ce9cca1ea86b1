"""How long each process spends in each phase of a step, and which process keeps the others waiting.

This is cheap and always on.

Processes wait for each other at two places of a step: to count its tokens, and to add their
gradients. If one is late, the others wait, so waiting shows up on the processes where nothing is
wrong. The time that a process spends in its own phases shows which one is late.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from llmtrain.phase_names import OWN_PHASES, PHASES

# The phases in which a pass through the model is part of a step.
_PHASES_WITH_PASSES = ("count", "forward", "backward", "exchange")

# A process is late if it takes longer than the others by more than this share of a step.
_LATE_SHARE = 0.2


class Straggler(NamedTuple):
    """A process that the others wait for."""

    rank: int
    phase: str  # in which it is furthest behind the others
    seconds: float  # per step, by which its own phases exceed the median of the others
    share: float  # of the time of a step

    def __str__(self) -> str:
        return (
            f"rank {self.rank} takes {1000 * self.seconds:.1f} ms longer per step than the others, "
            f"most of it in {PHASES[self.phase]}; they wait for {self.share:.0%} of each step"
        )


class Mark(NamedTuple):
    """A moment of this process's work."""

    host: float  # seconds of ``time.perf_counter``
    event: torch.Event | None  # in the device's queue, if the device has one


class Clock:
    """Marks moments on one device.

    On CUDA, marks are events in its queue. Time in which the device waits for the host is counted,
    too, because the queue is empty then.

    Attributes:
        uses_events: whether calls only add work to a queue, so that a mark needs an event.
    """

    def __init__(self, device: torch.device) -> None:
        self.uses_events = device.type == "cuda"

    def now(self) -> Mark:
        """Mark this moment."""
        if not self.uses_events:
            return Mark(time.perf_counter(), None)
        event: torch.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Mark(time.perf_counter(), event)

    def zero(self) -> Mark:
        """Mark a moment at which the device has nothing to do, for :meth:`since`."""
        if self.uses_events:
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

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks that have passed."""
        if start.event is None or end.event is None:
            return end.host - start.host
        return start.event.elapsed_time(end.event) / 1000


class _PhaseStart(NamedTuple):
    """The beginning of a phase."""

    phase: str
    mark: Mark


class Phases:
    """The phase that the main thread is in, and how long each phase took.

    The loop names the phases that it begins (:meth:`begin`). Hooks on the model, which
    :meth:`watching` keeps, find the forward and backward passes, and the moment from which this
    process only waits for the gradients of the others.

    Args:
        device: the device of this process.
        model: the model that ``accelerator.prepare`` returned.

    Attributes:
        phase: the current phase.
        step: steps made so far.
        since: when the phase began, in seconds of ``time.monotonic``.
        has_dropped_first_step: whether :meth:`drop_first_step` was called.
        on_change: functions that are called with each new phase and when it began.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.model = model
        self.clock = Clock(device)
        self.phase = "the start"
        self.step = 0
        self.since = time.monotonic()
        self.has_dropped_first_step = False
        self.on_change: list[Callable[[str, Mark], None]] = []

        # Since the last call of `read`: seconds of each phase, and the number of steps.
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = 0
        # Phases whose end has not been added to the seconds yet.
        self._starts: deque[_PhaseStart] = deque()

        # Rank and phase of the straggler in the last log entry, and those that were reported.
        self._suspect: tuple[int, str] | None = None
        self._reported: set[tuple[int, str]] = set()

        # Every parameter has a hook during the first step. It finds the parameter whose gradient
        # comes last, which then is the only one with a hook.
        self._last_parameter: torch.Tensor | None = None
        self._gradient_hooks: list[RemovableHandle] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep hooks on the model while the block runs."""
        pass_hooks = [
            self.model.register_forward_pre_hook(lambda *_: self._begin_pass("forward")),
            self.model.register_forward_hook(lambda *_: self._begin_pass("backward")),
        ]
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                hook = _on_gradient(parameter, self._remember_last_parameter)
                self._gradient_hooks.append(hook)
        try:
            yield
        finally:
            for hook in [*pass_hooks, *self._gradient_hooks]:
                hook.remove()
            self._gradient_hooks.clear()
            self._last_parameter = None

    def begin(self, phase: str, step: int | None = None) -> None:
        """Begin a phase on the main thread.

        Args:
            phase: one of :data:`PHASES`, or another phase that is not part of a step.
            step: steps made so far, if their number has changed.
        """
        if phase == "norm" and self._last_parameter is not None:
            self._watch_only(self._last_parameter)
            self._last_parameter = None

        mark = self.clock.now()
        self._starts.append(_PhaseStart(phase, mark))
        self.phase = phase
        self.since = time.monotonic()
        if step is not None:
            self.step = step
        for listener in self.on_change:
            listener(phase, mark)
        self._add_up()

    def drop_first_step(self) -> None:
        """Forget the seconds of the first step, which takes longer for many reasons."""
        self._forget()
        self.has_dropped_first_step = True

    def read(self) -> dict[str, float]:
        """Return the mean seconds of a step in each phase, since the last call."""
        if self._starts:
            event = self._starts[-1].mark.event
            if event is not None:
                event.synchronize()
        self._add_up()
        seconds = {phase: self._seconds[phase] / max(self._steps, 1) for phase in PHASES}
        self._forget()
        return seconds

    def new_straggler(self, phase_seconds: dict[str, list[float]]) -> Straggler | None:
        """Return the process that keeps the others waiting, when that is news.

        It must be the straggler of two log entries in a row, in the same phase, because one may be
        chance. Each rank and phase is returned once.

        Args:
            phase_seconds: mean seconds of a step by phase, with a number for each rank.
        """
        straggler = find_straggler(phase_seconds) if self.has_dropped_first_step else None
        previous_suspect = self._suspect
        if straggler is None:
            self._suspect = None
            return None

        suspect = (straggler.rank, straggler.phase)
        self._suspect = suspect
        if suspect != previous_suspect or suspect in self._reported:
            return None
        self._reported.add(suspect)
        return straggler

    def _begin_pass(self, phase: str) -> None:
        """Begin ``forward`` or ``backward``, unless the pass is not one of a step's."""
        if self.phase in _PHASES_WITH_PASSES and torch.is_grad_enabled():
            self.begin(phase)

    def _remember_last_parameter(self, parameter: torch.Tensor) -> None:
        self._last_parameter = parameter

    def _watch_only(self, last_parameter: torch.Tensor) -> None:
        """Keep a single hook on the gradients: on the parameter whose gradient comes last."""
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks = [_on_gradient(last_parameter, self._begin_exchange)]

    def _begin_exchange(self, parameter: torch.Tensor) -> None:
        """Begin ``exchange`` when all gradients of this process are there, and are reduced now."""
        reduces = (
            isinstance(self.model, DistributedDataParallel)
            and self.model.require_backward_grad_sync
        )
        if self.phase == "backward" and reduces:
            self.begin("exchange")

    def _add_up(self) -> None:
        """Add up the seconds of all phases whose end has passed."""
        while len(self._starts) > 1 and self.clock.has_passed(self._starts[1].mark):
            phase, start = self._starts.popleft()
            if phase in PHASES:
                self._seconds[phase] += self.clock.seconds(start, self._starts[0].mark)
            if phase == "count":  # every step has this phase once
                self._steps += 1

    def _forget(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = 0


def find_straggler(phase_seconds: dict[str, list[float]]) -> Straggler | None:
    """Return the process whose own phases take longest, with the phase in which it lags most.

    Args:
        phase_seconds: mean seconds of a step by phase, with a number for each rank.

    Returns:
        ``None`` unless the process takes longer than the median of the others, by more than a fifth
        of a step.
    """
    own_phases = [phase_seconds[phase] for phase in OWN_PHASES]
    own_seconds = [sum(rank_seconds) for rank_seconds in zip(*own_phases, strict=True)]
    if len(own_seconds) < 2:
        return None

    rank = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    lag = _lag(own_seconds, rank)
    step_seconds = sum(phase_seconds[phase][rank] for phase in PHASES)
    if lag <= _LATE_SHARE * step_seconds:
        return None
    return Straggler(
        rank=rank,
        phase=max(OWN_PHASES, key=lambda phase: _lag(phase_seconds[phase], rank)),
        seconds=lag,
        share=lag / step_seconds,
    )


def _lag(seconds: Sequence[float], rank: int) -> float:
    """Return how much longer one rank takes than the median of the others."""
    others = [*seconds[:rank], *seconds[rank + 1 :]]
    return seconds[rank] - statistics.median(others)


def _on_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call ``hook`` with the parameter whenever its gradient is accumulated."""
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return cast(RemovableHandle, handle)
