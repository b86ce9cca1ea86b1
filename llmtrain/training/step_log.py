"""The log entry of a step, and the rows that it trained on."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch

from llmtrain.device_numbers import DeviceScalars
from llmtrain.files import JsonObject
from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult
from llmtrain.interfaces.part import name_of
from llmtrain.observe.stragglers import Stragglers
from llmtrain.phase_names import PHASES
from llmtrain.training.evaluate import add_metrics, as_numbers_by_name
from llmtrain.training.loop import Loop, LoopCallback


class Logging(LoopCallback):
    """Writes the metrics of a step.

    They are computed before the next step changes the weights, and written when they are on the
    host, which may be during the next step.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.stragglers = Stragglers()
        self._measurements: _Measurements | None = None  # of a step that is not logged yet

    def on_train_begin(self) -> None:
        if self.run.step == 0:
            self.loop.log({"train/weight_norm": float(self.engine.weight_norm())})

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if info.is_due(self.run.settings.log.logging_steps) or info.should_stop:
            self._measurements = self._measure(batch, result)

    def on_step_result(self, step: int, result: StepResult) -> None:
        measurements = self._measurements
        if measurements is None:
            return
        self._measurements = None

        scalars = measurements.scalars.read_tensors()
        objective = self.engine.objective
        metrics = objective.metrics(
            {name: float(scalars[f"sum/{name}"]) for name in result.sums.metrics},
            {
                name: scalars.get(f"extra/{name}", value)
                for name, value in measurements.extra.items()
            },
        )
        numbers = as_numbers_by_name(f"{name_of(objective)}.metrics", metrics)
        entry: JsonObject = {"train/loss": float(scalars["loss"] / result.denominator)}
        add_metrics(entry, {f"train/{name}": number for name, number in numbers.items()})
        add_metrics(
            entry,
            {
                "train/grad_norm": result.grad_norm,
                "train/weight_norm": float(scalars["weight_norm"]),
                **measurements.rates,
                **self._of_ranks(step, measurements.read_by_rank()),
            },
        )
        if self.run.settings.log.log_rows:
            add_metrics(entry, {"train/gradient_syncs": measurements.syncs})
        self.loop.log(entry)

    def _measure(self, batch: LocalBatch, result: StepResult) -> "_Measurements":
        """Measure the values of a log entry, without waiting for the device.

        One all-reduce carries all sums.
        """
        loss, metrics = result.sums
        local_sums = torch.stack([loss, *[value.to(loss.dtype) for value in metrics.values()]])
        loss_sum, *metric_sums = self.engine.ranks.sum_over_ranks(local_sums)
        scalars = {"loss": loss_sum, "weight_norm": self.engine.weight_norm()}
        for name, value in zip(metrics, metric_sums, strict=True):
            scalars[f"sum/{name}"] = value
        for name, value in result.extra.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                scalars[f"extra/{name}"] = value

        # What every rank has measured since the last log entry.
        read_by_rank = self.engine.ranks.start_gathering_numbers(
            {
                **self.engine.phases.read(),
                "gib": _memory_used(self.engine.device) / 2**30,
                "positions": self.loop.throughput.positions,
                "token_fingerprint": batch.token_fingerprint,
                "label_fingerprint": batch.label_fingerprint,
            }
        )
        return _Measurements(
            scalars=DeviceScalars(scalars, self.engine.device),
            extra=result.extra,
            read_by_rank=read_by_rank,
            rates=self.run.rates.logged(),
            syncs=self.engine.gradient_syncs,
        )

    def _of_ranks(self, step: int, by_rank: dict[str, list[float]]) -> JsonObject:
        """Return the part of a step's entry that the ranks have measured, as numbers by name."""
        phase_seconds = {
            phase: [round(seconds, 6) for seconds in by_rank[phase]] for phase in PHASES
        }
        # The first step of a start is not typical.
        if step > self.run.resume_point.step + 1:
            late_rank = self.stragglers.find_new(phase_seconds)
            if late_rank is not None:
                self.run.record_event("late", str(late_rank))

        # The fingerprint of the global batch is the sum over the ranks. A fingerprint is a sum with
        # an integer below 2^31 for each row, and float64 holds that of a rank exactly.
        token_fingerprint = sum(map(int, by_rank["token_fingerprint"]))
        label_fingerprint = sum(map(int, by_rank["label_fingerprint"]))
        memory_kind = "gpu" if self.engine.device.type == "cuda" else "host"
        return {
            **self.loop.throughput.read(statistics.fmean(by_rank["positions"])),
            # To compare two runs by.
            "batch": f"{token_fingerprint:x}-{label_fingerprint:x}",
            "phases": phase_seconds,
            "memory": {memory_kind: [round(size, 4) for size in by_rank["gib"]]},
        }


class _Measurements(NamedTuple):
    """Values for the log entry of a step, some of them on their way to the host."""

    scalars: DeviceScalars  # the loss and metrics of the global batch, the norm of the weights
    extra: Batch  # what the objective's `prepass` returned
    read_by_rank: Callable[[], dict[str, list[float]]]  # numbers of all ranks by name
    rates: JsonObject  # the learning rates
    syncs: int  # backward passes that reduced gradients over the ranks


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
