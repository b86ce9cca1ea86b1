"""The log entry of a step, and the rows that it trained on."""

import statistics
from typing import NamedTuple

import psutil
import torch

from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult
from llmtrain.observe.stragglers import Stragglers
from llmtrain.parallel.gradient_syncs import GradientSyncs
from llmtrain.training.context import LoopCallback, LoopContext


class Logging(LoopCallback):
    """Writes the metrics of a step."""

    def __init__(self, context: LoopContext, syncs: GradientSyncs | None) -> None:
        super().__init__(context)
        self.throughput = context.throughput
        self.syncs = syncs
        self.stragglers = Stragglers()

    def on_train_begin(self) -> None:
        if self.run.step == 0:
            self.loop_context.log({"train/weight_norm": float(self.engine.weight_norm())})

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if not (info.is_due(self.settings.log.logging_steps) or info.should_stop):
            return

        loss, metrics = self._loss_and_metrics(result)
        by_rank = self._gather_by_rank(batch)
        self._record_if_a_rank_is_late(by_rank.phase_seconds)
        entry = {
            "train/loss": loss,
            **{f"train/{name}": value for name, value in metrics.items()},
            "train/grad_norm": result.grad_norm,
            "train/weight_norm": float(self.engine.weight_norm()),
            **self.run.rates.logged(),
            **self.throughput.read(by_rank.mean_positions),
            "batch": by_rank.batch_fingerprint,
            "phases": by_rank.phase_seconds,
            "memory": {by_rank.memory_kind: by_rank.gib},
        }
        if self.syncs is not None:
            entry["train/gradient_syncs"] = self.syncs.count
        self.loop_context.log(entry)

    def _loss_and_metrics(self, result: StepResult) -> tuple[float, dict[str, float]]:
        """Return the mean loss of the global batch, and the objective's further metrics.

        One all-reduce carries all sums.
        """
        loss, metrics = result.sums
        local_sums = torch.stack([loss, *(value.to(loss.dtype) for value in metrics.values())])
        loss_sum, *totals = self.engine.ranks.sum_over_ranks(local_sums)
        metric_sums = {name: float(total) for name, total in zip(metrics, totals, strict=True)}
        mean_loss = float(loss_sum / max(result.denominator, 1))
        # `extra` is what the loss depended on besides the micro-batch, such as KTO's baseline.
        return mean_loss, self.engine.objective.metrics(metric_sums, result.extra)

    def _record_if_a_rank_is_late(self, phase_seconds: dict[str, list[float]]) -> None:
        """Record an event if one rank keeps the others waiting, but not in the first step."""
        if not self.engine.phases.has_dropped_first_step:
            return
        late_rank = self.stragglers.find_new(phase_seconds)
        if late_rank is not None:
            self.run.record_event("late", str(late_rank))

    def _gather_by_rank(self, batch: LocalBatch) -> "_ByRank":
        """Gather what every rank has measured since the last log entry."""
        phase_seconds = self.engine.phases.read()
        memory_kind, bytes_held = _memory_used(self.engine.device)
        gathered = self.engine.ranks.gather_numbers(
            {
                **phase_seconds,
                "gib": bytes_held / 2**30,
                "positions": self.throughput.positions,
                "token_fingerprint": batch.token_fingerprint,
                "label_fingerprint": batch.label_fingerprint,
            }
        )
        # The fingerprint of the global batch is the sum over the ranks. A fingerprint is a sum with
        # an integer below 2^31 for each row, and float64 holds that of a rank exactly.
        token_fingerprint = sum(map(int, gathered["token_fingerprint"]))
        label_fingerprint = sum(map(int, gathered["label_fingerprint"]))
        return _ByRank(
            phase_seconds={
                phase: [round(seconds, 6) for seconds in gathered[phase]] for phase in phase_seconds
            },
            memory_kind=memory_kind,
            gib=[round(size, 4) for size in gathered["gib"]],
            mean_positions=statistics.fmean(gathered["positions"]),
            batch_fingerprint=f"{token_fingerprint:x}-{label_fingerprint:x}",
        )


def _memory_used(device: torch.device) -> tuple[str, int]:
    """Return the kind of memory, ``gpu`` or ``host``, and how many bytes this process uses.

    On a GPU, these are the most bytes that were allocated since the last call. Otherwise they are
    the bytes of host memory that the process uses now.
    """
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return "gpu", peak_bytes
    return "host", psutil.Process().memory_info().rss


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
