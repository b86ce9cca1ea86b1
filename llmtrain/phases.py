"""The phases of a step, and how long each process spends in them. This is cheap and always on."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from llmtrain.phase_names import PHASES, SYNC_PHASES

# The phases in which a pass through the model is part of a step.
_PHASES_WITH_PASSES = ("count", "forward", "backward", "exchange")


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


class PhaseStart(NamedTuple):
    """The beginning of a phase."""

    phase: str
    mark: Mark


class Phases:
    """The phase that the main thread is in, and how long each phase took.

    :meth:`begin` begins each phase. Hooks on the model, which :meth:`watching` keeps, call it for
    the forward and backward passes, and at the moment from which this process only waits for the
    gradients of the others.

    The seconds of the first step are dropped, because it takes longer for many reasons: it
    allocates memory, for example.

    Args:
        device: the device of this process.
        model: the model that ``accelerator.prepare`` returned.

    Attributes:
        phase: the current phase.
        step: steps made so far.
        callback: the method of a user's callback that runs now, such as ``Mine.on_step_end``; empty
            if none does.
        since: when the phase or that method began, in seconds of ``time.monotonic``.
        has_dropped_first_step: whether the second step of this start has begun.
        recording: a list to which each phase is appended when it begins, if there is one.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.model = model
        self.clock = Clock(device)
        self.phase = "the start"
        self.step = 0
        self.callback = ""
        self.since = time.monotonic()
        self.has_dropped_first_step = False
        self._first_step = 0  # steps made before this start
        self.recording: list[PhaseStart] | None = None

        # Since the last call of `read`: seconds of each phase, and the number of steps.
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = 0
        # Phases whose end has not been added to the seconds yet.
        self._starts: deque[PhaseStart] = deque()

        # Every parameter has a hook during the first step. It appends the parameter to a list. The
        # last one is that whose gradient comes last, which then is the only one with a hook.
        self._with_gradient: list[torch.Tensor] = []
        self._gradient_hooks: list[RemovableHandle] = []

    @contextlib.contextmanager
    def watching(self, first_step: int = 0) -> Iterator[None]:
        """Keep hooks on the model while the block runs.

        Args:
            first_step: steps made before the block.
        """
        self._first_step = first_step
        self.step = first_step
        pass_hooks = [
            self.model.register_forward_pre_hook(lambda *_: self.begin_pass("forward")),
            self.model.register_forward_hook(lambda *_: self.begin_pass("backward")),
        ]
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self._gradient_hooks.append(_on_gradient(parameter, self._with_gradient.append))
        try:
            yield
        finally:
            for hook in [*pass_hooks, *self._gradient_hooks]:
                hook.remove()
            self._gradient_hooks.clear()
            self._with_gradient.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether processes wait for each other in this phase."""
        return self.phase in SYNC_PHASES

    @property
    def location(self) -> str:
        """What the main thread does, in words, and how many steps are made."""
        return f"{self.callback or PHASES.get(self.phase, self.phase)} after step {self.step}"

    def enter_callback(self, name: str) -> None:
        """Enter a method of a user's callback, or leave it if ``name`` is empty."""
        self.callback = name
        self.since = time.monotonic()

    def begin(self, phase: str, step: int | None = None) -> None:
        """Begin a phase on the main thread.

        Args:
            phase: one of :data:`PHASES`, or another phase that is not part of a step.
            step: steps made so far, if their number has changed.
        """
        if phase == "norm" and self._with_gradient:
            # From now on, only the parameter whose gradient comes last has a hook.
            for hook in self._gradient_hooks:
                hook.remove()
            self._gradient_hooks = [_on_gradient(self._with_gradient[-1], self._begin_exchange)]
            self._with_gradient.clear()

        if step is not None:
            self.step = step
        # Every step begins with the phase `data`.
        is_after_first_step = phase == "data" and self.step > self._first_step
        if is_after_first_step and not self.has_dropped_first_step:
            self._forget()
            self.has_dropped_first_step = True

        start = PhaseStart(phase, self.clock.now())
        self._starts.append(start)
        if self.recording is not None:
            self.recording.append(start)
        self.phase = phase
        self.since = time.monotonic()
        self._add_up()

    def read(self) -> dict[str, float]:
        """Return the mean seconds of a step in each phase, since the last call.

        On CUDA, phases that the device has not ended yet are part of the next call.
        """
        self._add_up()
        seconds = {phase: self._seconds[phase] / max(self._steps, 1) for phase in PHASES}
        self._forget()
        return seconds

    def begin_pass(self, phase: str) -> None:
        """Begin ``forward`` or ``backward``, unless the pass is not one of a step's."""
        if self.phase in _PHASES_WITH_PASSES and torch.is_grad_enabled():
            self.begin(phase)

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
            if phase == "optimizer":  # every step has this phase once
                self._steps += 1

    def _forget(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = 0


def _on_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call ``hook`` with the parameter whenever its gradient is accumulated."""
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return cast(RemovableHandle, handle)
