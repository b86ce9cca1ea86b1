"""Types that packages hand to each other, each defined once."""

from __future__ import annotations  # torch is not loaded for them

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import nn

IGNORED = -100  # a label that is not trained on (cross_entropy's default); in a stored row, a place without a token

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Facts: TypeAlias = dict[str, Any]  # a JSON object of a run's record, whose shape its reader knows
Batch: TypeAlias = dict[str, Any]  # a micro-batch by column: tensors, and what a model has prepared
Weights: TypeAlias = Iterable[tuple[str, "torch.Tensor"]]  # names and full tensors, one at a time

# A metric of the user's own: takes the unwrapped model and an eval batch, and returns by name a sum and
# what it is divided by.
Metric: TypeAlias = Callable[[Any, Batch], dict[str, tuple["torch.Tensor", "torch.Tensor"]]]
# Turns a tensor of a checkpoint into those of a finished model's folder.
Published: TypeAlias = Callable[[str, "torch.Tensor"], dict[str, "torch.Tensor"]]


@dataclass(frozen=True)
class LocalBatch:
    """This rank's share of one global batch, as micro-batches.

    Attributes:
        columns: columns of all its rows, one micro-batch after the other. They go to the device.
        micro_batch: rows of a micro-batch.
        rows: int64 [rows], the number of each row in the data set; -1 if the row is padding.
        targets: int64 [rows], the number of target tokens of each row.
        token_fingerprint: a hash of the tokens. Those of all ranks add up to the hash of the
            global batch.
        label_fingerprint: a hash of the labels, likewise.
        prepared: what the model's ``prepare_batch`` returned for each micro-batch.
    """

    columns: dict[str, torch.Tensor]
    micro_batch: int
    rows: torch.Tensor
    targets: torch.Tensor
    token_fingerprint: int
    label_fingerprint: int
    prepared: tuple[Batch, ...] = ()

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches."""
        starts = range(0, len(self.columns["labels"]), self.micro_batch)
        slices = [self._rows_from(start) for start in starts]
        if not self.prepared:
            return slices
        return [batch | prepared for batch, prepared in zip(slices, self.prepared, strict=True)]

    def _rows_from(self, start: int) -> Batch:
        end = start + self.micro_batch
        return {name: column[start:end] for name, column in self.columns.items()}

    @property
    def positions(self) -> int:
        """Positions that the model computes, with or without a loss."""
        return self.columns["labels"][:, 1:].numel()

    def to(self, device: torch.device, non_blocking: bool = False) -> LocalBatch:
        """Return the batch with its columns on a device; Accelerate calls this."""
        return self._moved(lambda column: column.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LocalBatch:
        """Return the batch in pinned memory, from which a GPU copies by itself; torch calls this."""
        return self._moved(lambda column: column.pin_memory())

    def _moved(self, move: Callable[[Any], Any]) -> LocalBatch:
        columns = {name: move(column) for name, column in self.columns.items()}
        prepared = tuple(
            {name: move(value) for name, value in batch.items()} for batch in self.prepared
        )
        return replace(self, columns=columns, prepared=prepared)


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of target tokens in labels [B, T], after the shift; an int64 scalar."""
    return (labels[:, 1:] != IGNORED).sum()


class LossSums(NamedTuple):
    """What one or several micro-batches add to the loss and the metrics of a step."""

    loss: torch.Tensor  # a sum, not a mean; scalar
    metrics: dict[str, torch.Tensor]  # sums of further metrics; scalars without a gradient


class StepTotals(NamedTuple):
    """What is counted over the global batch before its gradient is computed; int64 scalars."""

    target_tokens: torch.Tensor
    denominator: torch.Tensor  # what the summed loss is divided by
    stop_votes: torch.Tensor  # how many ranks were asked to stop


class StepResult(NamedTuple):
    """The result of one step."""

    sums: LossSums  # this rank's sums over its micro-batches
    extra: Batch  # what the objective's `prepass` returned
    target_tokens: int  # of the global batch
    denominator: int  # what the summed loss of the global batch is divided by
    grad_norm: float  # of the global batch's mean loss, before clipping
    should_stop: bool  # whether any rank was asked to stop


class Objective:
    """What a run minimises. By default, the mean negative log-likelihood per target token.

    The loss of a step is the sum over the whole global batch, divided by one denominator. So every
    method works on sums, which add up over micro-batches and ranks.
    """

    reference_size: int = 0  # numbers that `reference` returns for each row; 0: there is none
    # What `reference` depends on besides the initial weights and the rows: the hash of a teacher's
    # weights, say. What is kept on disk for one is not used for another.
    reference_source: str = ""
    uses_prepass_in_eval: bool = False  # whether the eval loss needs `prepass`, too

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        """Return the summed loss of a micro-batch, and the sums of further metrics.

        This runs inside ``model.forward``, where weights are gathered and autocast is on.

        Args:
            model: the unwrapped model.
            batch: a micro-batch by column, among them ``input_ids`` and ``labels`` [B, T].
            extra: what :meth:`prepass` returned for the global batch.
        """
        return LossSums(model.nll(**batch), metrics={})

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Return what a micro-batch adds to the denominator, an int64 scalar.

        By default that is the number of its target tokens, after the shift.
        """
        return count_targets(batch["labels"])

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        """Return extra inputs of :meth:`loss` that depend on the whole global batch.

        All ranks call this before the first forward pass of a step. See ``engine.sum_over_batches``.
        """
        return {}

    def reference(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return what is kept of a reference model or a teacher, float [B, ``reference_size``].

        It is computed once, before training, and becomes the column ``reference`` of the rows. This
        runs inside ``model.forward``.
        """
        raise NotImplementedError

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        """Return further metrics, given their sums over the global batch."""
        return {}

    def eval_metrics(self, loss_sum: float, mean_loss: float, text_bytes: int) -> dict[str, float]:
        """Return metrics that follow from the eval loss.

        Args:
            loss_sum: the loss summed over all eval rows.
            mean_loss: that sum divided by the denominator.
            text_bytes: UTF-8 bytes of the eval text. Bits per byte compare models with different
                tokenizers.
        """
        return {
            "perplexity": math.exp(min(mean_loss, 700.0)),
            "bits_per_byte": loss_sum / math.log(2) / max(text_bytes, 1),
        }

    def check(self, model: Any) -> None:
        """Check that the objective suits a model whose weights are in place; all ranks call this.

        Raises:
            UserError: it does not.
        """

    def notable_event(self, metrics: Mapping[str, float]) -> tuple[str, str] | None:
        """Return the kind and the text of an event that the metrics of a log entry call for."""
        return None


class ModelWriter(Protocol):
    """How a model becomes a folder, and is restored from one."""

    @property
    def config(self) -> dict[str, Any]:
        """The description of the model in a run's identity."""

    @property
    def weights(self) -> str:
        """The name of the file that holds the weights, where it is one."""

    @property
    def divisible(self) -> bool:
        """True where the weights may be split over several files."""

    def write(self, folder: Path, parameters: int) -> None:
        """Write all of a model folder but its weights, of which there are ``parameters``."""

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps of a model: the tensors themselves, which are filled when it is loaded."""

    def exported(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return what the finished model's folder holds."""

    def publishing(self, model: nn.Module) -> Published:
        """Return what turns one of a checkpoint's tensors into those of the finished model's folder."""


@dataclass
class ModelBundle:
    """A model that a recipe has built, with everything that belongs to it.

    Attributes:
        model: the model. Its parameters may be on the meta device until it is placed.
        files: how the model becomes a folder.
        weights: the initial weights of parameters on the meta device.
        start: where the weights came from, for the fingerprint of a run.
        check: called when the weights are in place; raises UserError.
        objective: what is minimised.
        columns: columns that the model takes besides ``input_ids`` and ``labels``.
        prepare_batch: computes, on the host, more inputs of the model from a micro-batch.
    """

    model: nn.Module
    files: ModelWriter
    weights: Weights | None = None
    start: dict[str, Any] | None = None
    check: Callable[[], None] = field(default=lambda: None)
    objective: Objective = field(default_factory=Objective)
    columns: frozenset[str] = frozenset()
    prepare_batch: Callable[[Batch], Batch] | None = None


class Rows(Protocol):
    """Rows of tokens, by column."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, list[int]]: ...


class StepInfo(NamedTuple):
    """How far the loop is after a step, and which periodic actions are due."""

    step: int  # steps made so far
    is_last: bool  # all steps of the run are made
    should_stop: bool  # the run stops here

    def is_due(self, every: int) -> bool:
        """Return whether an action that happens every ``every`` steps is due.

        The last step makes every action due, whatever its period. 0 means never.
        """
        if every == 0:
            return False
        return self.is_last or self.step % every == 0


class Callback:
    """Watches the training loop, or decides when something is done.

    All ranks call the same methods at the same places of the loop.
    """

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that is open while the loop runs, and closed even after an error."""
        return contextlib.nullcontext()

    def on_train_begin(self) -> None:
        """Called before the first step of this start."""

    def on_step_begin(self, batch: LocalBatch) -> None:
        """Called when the batch of a step is there, before anything is computed."""

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        """Called when a step was made, or skipped."""

    def wants_to_stop(self) -> bool:
        """Return whether this rank wants all ranks to save and stop after the current step."""
        return False

    def on_train_end(self) -> None:
        """Called after the last step of this start."""
