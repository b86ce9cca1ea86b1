"""The log entry of a step, and the rows that it trained on."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch

from llmtrain.device_numbers import DeviceScalars
from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult
from llmtrain.interfaces.part import name_of
from llmtrain.json_types import JsonObject
from llmtrain.observe.rising_loss import RisingLoss
from llmtrain.observe.stragglers import Stragglers
from llmtrain.parallel.gradient_syncs import GradientSyncs
from llmtrain.phase_names import PHASES
from llmtrain.record.history import read_lines
from llmtrain.training.context import LoopCallback, LoopContext
from llmtrain.training.evaluate import add_metrics, as_numbers_by_name


class Logging(LoopCallback):
    """Writes the metrics of a step.

    They are computed before the next step changes the weights, and written when they are on the
    host, which may be during the next step.
    """

    def __init__(self, context: LoopContext, syncs: GradientSyncs | None) -> None:
        super().__init__(context)
        self.throughput = context.throughput
        self.syncs = syncs
        self.stragglers = Stragglers()
        # If the recipe orders the rows itself, later ones may be harder.
        is_ordered = self.run.rows.in_order
        self.rising_loss = RisingLoss(math.inf if is_ordered else self.settings.optim.max_steps)
        # Of the first steps of the run, until a log entry takes them along: this rank's summed
        # losses, and what those of all ranks are divided by.
        self._first_losses: list[torch.Tensor] = []
        self._first_denominators: list[float] = []
        self._measurements: _Measurements | None = None  # of a step that is not logged yet

    def on_train_begin(self) -> None:
        if self.run.step == 0:
            self.loop_context.log({"train/weight_norm": float(self.engine.weight_norm())})
        elif self.run.ranks.is_main:
            # The log of a resumed run has no other loss of its start.
            entries = read_lines(self.run.folder / "metrics.jsonl")
            losses = [entry["train/loss"] for entry in entries if entry.get("train/loss")]
            if losses:
                self.rising_loss.add_first_loss(losses[0])

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if self.rising_loss.needs_loss_of(info.step):
            self._first_losses.append(result.sums.loss)
        if info.is_due(self.settings.log.logging_steps) or info.should_stop:
            self._measurements = self._measure(batch, result)

    def on_step_result(self, step: int, result: StepResult) -> None:
        if self.rising_loss.needs_loss_of(step):
            self._first_denominators.append(result.denominator)
        measurements = self._measurements
        if measurements is None:
            return
        self._measurements = None

        scalars = measurements.scalars.read_tensors()
        by_rank = self._by_rank(measurements.read_by_rank())
        self._record_if_a_rank_is_late(by_rank.phase_seconds)

        objective = self.engine.objective
        metrics = objective.metrics(
            measurements.metric_sums.read(),
            {**measurements.extra, **measurements.extra_scalars.read_tensors()},
        )
        numbers = as_numbers_by_name(f"{name_of(objective)}.metrics", metrics)
        entry: JsonObject = {"train/loss": float(scalars["loss_sum"] / result.denominator)}
        add_metrics(entry, {f"train/{name}": number for name, number in numbers.items()})
        own_metrics = {
            "train/grad_norm": result.grad_norm,
            "train/weight_norm": float(scalars["weight_norm"]),
            **measurements.rates,
            **self.throughput.read(by_rank.mean_positions),
            "batch": by_rank.batch_fingerprint,
            "phases": by_rank.phase_seconds,
            "memory": {by_rank.memory_kind: by_rank.gib},
        }
        if measurements.syncs is not None:
            own_metrics["train/gradient_syncs"] = measurements.syncs
        add_metrics(entry, own_metrics)
        self.loop_context.log(entry)
        first_losses = measurements.first_losses.read().values()
        for loss, denominator in zip(first_losses, self._first_denominators, strict=True):
            if denominator:
                self.rising_loss.add_first_loss(loss / denominator)
        self._first_denominators.clear()
        rise = self.rising_loss.find_new(step, entry["train/loss"])
        if rise:
            self.run.record_event("rising", rise)

    def _measure(self, batch: LocalBatch, result: StepResult) -> "_Measurements":
        """Measure the values of a log entry, without waiting for the device.

        One all-reduce carries all sums.
        """
        loss, metrics = result.sums
        values = [loss, *metrics.values(), *self._first_losses]
        local_sums = torch.stack([value.to(loss.dtype) for value in values])
        loss_sum, *other_sums = self.engine.ranks.sum_over_ranks(local_sums)
        metric_sums = other_sums[: len(metrics)]
        first_losses = {str(i): value for i, value in enumerate(other_sums[len(metrics) :])}
        self._first_losses.clear()
        extra_scalars = {
            name: value
            for name, value in result.extra.items()
            if isinstance(value, torch.Tensor) and value.dim() == 0
        }
        device = self.engine.device
        return _Measurements(
            scalars=DeviceScalars(
                {"loss_sum": loss_sum, "weight_norm": self.engine.weight_norm()}, device
            ),
            metric_sums=DeviceScalars(dict(zip(metrics, metric_sums, strict=True)), device),
            first_losses=DeviceScalars(first_losses, device),
            extra=result.extra,
            extra_scalars=DeviceScalars(extra_scalars, device),
            read_by_rank=self._start_gathering(batch),
            rates=self.run.rates.logged(),
            syncs=None if self.syncs is None else self.syncs.count,
        )

    def _record_if_a_rank_is_late(self, phase_seconds: dict[str, list[float]]) -> None:
        """Record an event if one rank keeps the others waiting, but not in the first step."""
        if not self.engine.phases.has_dropped_first_step:
            return
        late_rank = self.stragglers.find_new(phase_seconds)
        if late_rank is not None:
            self.run.record_event("late", str(late_rank))

    def _start_gathering(self, batch: LocalBatch) -> Callable[[], dict[str, list[float]]]:
        """Begin to gather what every rank has measured since the last log entry."""
        return self.engine.ranks.start_gathering_numbers(
            {
                **self.engine.phases.read(),
                "gib": _memory_used(self.engine.device) / 2**30,
                "positions": self.throughput.positions,
                "token_fingerprint": batch.token_fingerprint,
                "label_fingerprint": batch.label_fingerprint,
            }
        )

    def _by_rank(self, gathered: dict[str, list[float]]) -> "_ByRank":
        """Return the measurements of all ranks, given their numbers by name."""
        # The fingerprint of the global batch is the sum over the ranks. A fingerprint is a sum with
        # an integer below 2^31 for each row, and float64 holds that of a rank exactly.
        token_fingerprint = sum(map(int, gathered["token_fingerprint"]))
        label_fingerprint = sum(map(int, gathered["label_fingerprint"]))
        return _ByRank(
            phase_seconds={
                phase: [round(seconds, 6) for seconds in gathered[phase]] for phase in PHASES
            },
            memory_kind=_memory_kind(self.engine.device),
            gib=[round(size, 4) for size in gathered["gib"]],
            mean_positions=statistics.fmean(gathered["positions"]),
            batch_fingerprint=f"{token_fingerprint:x}-{label_fingerprint:x}",
        )


class _Measurements(NamedTuple):
    """Values for the log entry of a step, some of them on their way to the host."""

    scalars: DeviceScalars  # the summed loss of the global batch, and the norm of the weights
    metric_sums: DeviceScalars  # over the global batch
    first_losses: DeviceScalars  # the summed losses of the first steps, if they are new
    extra: Batch  # what the objective's `prepass` returned
    extra_scalars: DeviceScalars  # the scalars of that
    read_by_rank: Callable[[], dict[str, list[float]]]  # numbers of all ranks by name
    rates: JsonObject  # the learning rates
    syncs: int | None  # the syncs of gradients, if they are counted


def _memory_kind(device: torch.device) -> str:
    """Return whose memory is measured: ``gpu`` or ``host``."""
    return "gpu" if device.type == "cuda" else "host"


def _memory_used(device: torch.device) -> int:
    """Return how many bytes this process uses.

    On a GPU, these are the most bytes that were allocated since the last call. Otherwise they are
    the bytes of host memory that the process uses now.
    """
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak_bytes
    return psutil.Process().memory_info().rss


class _ByRank(NamedTuple):
    """Measurements of all ranks; lists have a number for each rank."""

    phase_seconds: dict[str, list[float]]  # mean seconds of a step in each phase
    memory_kind: str  # ``gpu`` or ``host``
    gib: list[float]
    mean_positions: float  # that a rank has computed since the last log entry
    batch_fingerprint: str  # of the global batch's tokens and labels, to compare two runs by


class RowLedger(LoopCallback):
    """Writes to ``rows.jsonl`` which rows every step has, and how many target tokens each row has.

    Padding has the row -1. The loader counted the target tokens, independently of the loop.
    """

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        rows = self.engine.ranks.gather_rows(batch.rows)
        targets = self.engine.ranks.gather_rows(batch.targets)
        self.run.writer.append(
            "rows.jsonl", {"step": info.step, "rows": rows.tolist(), "targets": targets.tolist()}
        )
