"""Loops that take turns in one process, and what a step of each costs.

The loops stay alive from turn to turn, and the device's clock times them. Tables of runs that start
and end use ``benchmarks.comparison.take_turns``.
"""

import gc
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from unittest import mock

import torch
from torch.autograd import DeviceType

from benchmarks.gpu.journal import Figures
from llmtrain.phases import Clock, Mark, PhaseStart

_WARM_UP_STEPS = 4
_PROFILED_STEPS = 3


class PhaseTimes:
    """Collects when each phase of a step begins, on the host and on the device."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self.starts: list[PhaseStart] = []

    def begin(self, phase: str) -> None:
        """Begin a phase now."""
        self.add(phase, self.clock.now())

    def add(self, phase: str, mark: Mark) -> None:
        """Begin a phase at a mark."""
        self.starts.append(PhaseStart(phase, mark))

    def read(self, steps: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return milliseconds a step in each phase, of the host and of the device, and forget them."""
        host: Counter[str] = Counter()
        device: Counter[str] = Counter()
        for (phase, start), (_, end) in pairwise(self.starts):
            host[phase] += 1000 * (end.host - start.host) / steps
            device[phase] += 1000 * self.clock.seconds(start, end) / steps
        self.starts.clear()
        return dict(host), dict(device)


class Variant:
    """A loop whose steps are timed.

    Attributes:
        name: its name in the table.
        positions: positions of a step, with padding.
        flops_per_position: of a forward and a backward pass; 0 if unknown.
        weight_bytes: bytes of its weights, which are on the device before the first step.
        graph_name: the name of the variant that makes the same step as one CUDA graph; empty if
            there is none.
        phases: collects the phases of its steps.
    """

    flops_per_position = 0
    weight_bytes = 0
    graph_name = ""

    def __init__(self, name: str, device: torch.device, positions: int) -> None:
        self.name = name
        self.positions = positions
        self.phases = PhaseTimes(device)

    def step(self) -> None:
        """Make a step."""
        raise NotImplementedError

    def close(self) -> None:
        """End the loop."""


@dataclass
class _Measured:
    """The times of one variant, over all rounds."""

    round_ms: list[float] = field(default_factory=list)  # milliseconds a step, a number each round
    step_ms: list[float] = field(default_factory=list)  # of each step
    host_ms: list[dict[str, float]] = field(default_factory=list)  # by phase, for each round
    device_ms: list[dict[str, float]] = field(default_factory=list)
    peak_bytes: int = 0


def take_turns(
    variants: Sequence[Variant], device: torch.device, steps: int, rounds: int, peak_flops: float
) -> dict[str, Figures]:
    """Let variants take turns, and return the costs of a step of each, by its name.

    Args:
        variants: the loops.
        device: the device of all of them.
        steps: steps of a turn.
        rounds: turns of each variant.
        peak_flops: FLOP/s of the card's data sheet; 0 if unknown.
    """
    own_bytes = {variant.name: _warm_up(variant, device) for variant in variants}
    measured = {variant.name: _Measured() for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            _take_turn(
                variant,
                measured[variant.name],
                device=device,
                steps=steps,
                own_bytes=own_bytes[variant.name],
            )

    results: dict[str, Figures] = {}
    for variant in variants:
        results[variant.name] = {
            **_figures(variant, measured[variant.name], peak_flops),
            **_waits_of_a_step(variant, device),
            **_launches_of_a_step(variant, device),
        }
    return results


def _warm_up(variant: Variant, device: torch.device) -> int:
    """Make the first steps, which compile; return the bytes that the variant keeps allocated."""
    gc.collect()
    before = _allocated(device)
    for _ in range(_WARM_UP_STEPS):
        variant.step()
    _synchronize(device)
    gc.collect()
    return _allocated(device) - before + variant.weight_bytes


def _take_turn(
    variant: Variant, measured: _Measured, device: torch.device, steps: int, own_bytes: int
) -> None:
    clock = variant.phases.clock
    _synchronize(device)
    gc.collect()
    before = _allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    variant.phases.starts.clear()
    marks = [clock.now()]
    for _ in range(steps):
        variant.step()
        marks.append(clock.now())
    variant.phases.add("end", marks[-1])
    _synchronize(device)

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - before + own_bytes
        measured.peak_bytes = max(measured.peak_bytes, peak)
    measured.round_ms.append(1000 * clock.seconds(marks[0], marks[-1]) / steps)
    for start, end in pairwise(marks):
        measured.step_ms.append(1000 * clock.seconds(start, end))
    host, on_device = variant.phases.read(steps)
    measured.host_ms.append(host)
    measured.device_ms.append(on_device)


def _figures(variant: Variant, measured: _Measured, peak_flops: float) -> Figures:
    """Return the costs of a step.

    ``ms`` is the median over the rounds of a step's mean time. ``ms_median`` is the median over all
    steps, which leaves out what only some steps do, such as log entries.
    """
    milliseconds = statistics.median(measured.round_ms)
    speed = 1000 * variant.positions / milliseconds
    figures: Figures = {
        "ms": milliseconds,
        "ms_median": statistics.median(measured.step_ms),
        "ms_rounds": measured.round_ms,
        "tokens/s": speed,
        "host_ms": _medians(measured.host_ms),
        "device_ms": _medians(measured.device_ms),
        "GiB": measured.peak_bytes / 2**30,
    }
    if peak_flops and variant.flops_per_position:
        figures["mfu"] = speed * variant.flops_per_position / peak_flops
    return figures


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    phases = dict.fromkeys(phase for times in rounds for phase in times)
    return {phase: statistics.median(times.get(phase, 0.0) for times in rounds) for phase in phases}


def _waits_of_a_step(variant: Variant, device: torch.device) -> Figures:
    """Return how often the host waits for the device in a step, and where."""
    with counted_waits(device) as waits:
        for _ in range(_PROFILED_STEPS):
            variant.step()
    return {"waits": waits.count / _PROFILED_STEPS, "waits_at": sorted(waits.places)}


def _launches_of_a_step(variant: Variant, device: torch.device) -> Figures:
    """Return how often and how long the device works in a step; nothing on a CPU.

    ``launches`` are kernels, copies and fills, each of which counts also in a CUDA graph.
    """
    if device.type != "cuda":
        return {}

    _synchronize(device)
    # Recording the CPU, too, would lengthen the launches.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_PROFILED_STEPS):
            variant.step()
        _synchronize(device)

    times: Counter[str] = Counter()
    launches = 0
    for event in profile.events():
        is_annotation = "#" in event.name  # of an optimizer's step, which holds kernels
        if event.device_type != DeviceType.CUDA or is_annotation:
            continue
        launches += 1
        times[event.name[:70]] += event.time_range.elapsed_us() / 1000 / _PROFILED_STEPS
    return {
        "launches": launches / _PROFILED_STEPS,
        "kernel_ms": times.total(),
        "kernels": dict(times.most_common(12)),
    }


@dataclass
class Waits:
    """How often the host has waited for the device, and where."""

    count: int = 0
    places: set[str] = field(default_factory=set)


@contextmanager
def counted_waits(device: torch.device) -> Iterator[Waits]:
    """Count how often the host waits for the device inside the block.

    torch's debug mode reports most waits, but none for an event or in ``torch.cuda.synchronize``.
    """
    waits = Waits()
    if device.type != "cuda":
        yield waits
        return

    synchronize = torch.cuda.Event.synchronize

    def counted_synchronize(event: torch.cuda.Event) -> None:
        waits.count += 1
        waits.places.add("Event.synchronize")
        synchronize(event)

    with (
        mock.patch.object(torch.cuda.Event, "synchronize", counted_synchronize),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing CUDA" in str(warning.message):
            waits.count += 1
            waits.places.add(f"{warning.filename.rsplit('/', 1)[-1]}:{warning.lineno}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def bytes_of(model: torch.nn.Module) -> int:
    """Return the bytes of a model's weights."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def median_ms(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median milliseconds of a call, after three warm-up calls."""
    clock = Clock(device)
    times = []
    for _ in range(repeats + 3):
        start = clock.zero()
        action()
        end = clock.now()
        _synchronize(device)
        times.append(1000 * clock.seconds(start, end))
    return statistics.median(times[3:])
