"""Types that several packages share."""

from __future__ import annotations  # so that annotations do not import torch

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import nn

# A label that is not trained on, the default of cross_entropy. In a stored row, padding.
IGNORED = -100

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
# A JSON object, such as an entry of run.json. Its reader knows the keys.
JsonObject: TypeAlias = dict[str, Any]
# The columns of a micro-batch: tensors, and what the model's `prepare_batch` has returned.
Batch: TypeAlias = dict[str, Any]
# Names and full tensors, one at a time.
Weights: TypeAlias = Iterable[tuple[str, "torch.Tensor"]]

# A custom metric of the user. It takes the unwrapped model and an eval micro-batch, and returns a
# sum and its denominator by name.
Metric: TypeAlias = Callable[[Any, Batch], dict[str, tuple["torch.Tensor", "torch.Tensor"]]]
# Takes the name and the value of a tensor in a checkpoint. Returns the tensors, by name, that the
# folder of the finished model has instead.
TensorConverter: TypeAlias = Callable[[str, "torch.Tensor"], dict[str, "torch.Tensor"]]


class Trimming(NamedTuple):
    """How much of their rows micro-batches keep. An unpacked row ends in padding.

    A row of preference data has two halves, one for each answer, and each half ends in padding.

    Attributes:
        columns: the names of the columns of tokens, [rows, length], which are trimmed.
        parts: 2 if rows have two halves, otherwise 1.
        widths: for each micro-batch, the number of tokens that it keeps of each part.
    """

    columns: tuple[str, ...]
    parts: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class LocalBatch:
    """This rank's share of a global batch, as micro-batches.

    Attributes:
        columns: the columns of all rows, one micro-batch after the other. They go to the device.
            Rows are not trimmed here.
        micro_batch: rows of a micro-batch.
        rows: int64 [rows], the number of each row in the data set; -1 if the row is padding.
        targets: int64 [rows], the number of target tokens of each row.
        token_fingerprint: a hash of the tokens. Those of all ranks add up to the hash of the
            global batch.
        label_fingerprint: the same for the labels.
        prepared: what the model's ``prepare_batch`` returned for each micro-batch.
        trimming: how much of their rows the micro-batches keep; ``None`` if they keep everything.
        source: in an evaluation, the number of the source whose rows this batch has.
    """

    columns: dict[str, torch.Tensor]
    micro_batch: int
    rows: torch.Tensor
    targets: torch.Tensor
    token_fingerprint: int
    label_fingerprint: int
    prepared: tuple[Batch, ...] = ()
    trimming: Trimming | None = None
    source: int = 0

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches."""
        count = -(-len(self.columns["labels"]) // self.micro_batch)
        slices = [self._micro_batch(index) for index in range(count)]
        if not self.prepared:
            return slices
        return [batch | prepared for batch, prepared in zip(slices, self.prepared, strict=True)]

    def _micro_batch(self, index: int) -> Batch:
        start = index * self.micro_batch
        end = start + self.micro_batch
        batch = {name: column[start:end] for name, column in self.columns.items()}
        if self.trimming is None:
            return batch

        width = self.trimming.widths[index]
        for name in self.trimming.columns:
            column = batch[name]
            parts = column.reshape(len(column), self.trimming.parts, -1)
            batch[name] = parts[:, :, :width].flatten(1).contiguous()
        return batch

    @property
    def positions(self) -> int:
        """Number of positions that the model computes, with or without a loss."""
        labels = self.columns["labels"]
        if self.trimming is None:
            return labels[:, 1:].numel()

        positions = 0
        for index, width in enumerate(self.trimming.widths):
            rows = min(self.micro_batch, len(labels) - index * self.micro_batch)
            positions += rows * (self.trimming.parts * width - 1)
        return positions

    def to(self, device: torch.device, non_blocking: bool = False) -> LocalBatch:
        """Return the batch on a device; Accelerate calls this."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LocalBatch:
        """Return the batch in pinned memory, for asynchronous copies; torch calls this."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, move: Callable[[Any], Any]) -> LocalBatch:
        """Return the batch with ``move`` applied to all columns and prepared values."""

        def move_all(values: dict[str, Any]) -> dict[str, Any]:
            return {name: move(value) for name, value in values.items()}

        return replace(
            self,
            columns=move_all(self.columns),
            prepared=tuple(move_all(batch) for batch in self.prepared),
        )


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of target tokens in labels [B, T], after the shift; an int64 scalar."""
    return (labels[:, 1:] != IGNORED).sum()


class LossSums(NamedTuple):
    """Sums of the loss and of further metrics, over one or several micro-batches."""

    loss: torch.Tensor  # a sum, not a mean; scalar
    metrics: Mapping[str, torch.Tensor] = MappingProxyType({})  # sums of further metrics; scalars


class StepTotals(NamedTuple):
    """Counts over the global batch, before its gradient is computed; int64 scalars."""

    target_tokens: torch.Tensor
    denominator: torch.Tensor  # divides the summed loss
    stop_votes: torch.Tensor  # how many ranks were asked to stop


class StepResult(NamedTuple):
    """The result of one step."""

    sums: LossSums  # this rank's sums over its micro-batches
    extra: Batch  # what the objective's `prepass` returned
    target_tokens: int  # of the global batch
    denominator: int  # divides the summed loss of the global batch
    grad_norm: float  # of the global batch's mean loss, before clipping
    should_stop: bool  # whether any rank was asked to stop


class Objective:
    """The loss that a run minimises; by default the mean negative log-likelihood per target token.

    The loss of a step is a sum over the whole global batch, divided by one denominator. So every
    method works on sums, which add up over micro-batches and ranks.
    """

    # Numbers that `reference` returns for each row; 0 if the objective has no reference.
    reference_size: int = 0
    # What `reference` depends on besides the initial weights and the rows, such as a hash of a
    # teacher's weights. References in the cache are only used for the same source.
    reference_source: str = ""
    # Whether the eval loss needs `prepass`, too.
    uses_prepass_in_eval: bool = False

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        """Return the summed loss of a micro-batch, and the sums of further metrics.

        This runs inside ``model.forward``, with weights gathered and autocast on.

        Args:
            model: the unwrapped model.
            batch: a micro-batch by column, among them ``input_ids`` and ``labels`` [B, T]. If rows
                are not packed, they are trimmed, so T differs between micro-batches.
            extra: what :meth:`prepass` returned for the global batch.
        """
        return LossSums(model.nll(**batch), metrics={})

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Return the micro-batch's part of the denominator, an int64 scalar.

        By default this is the number of its target tokens, after the shift.
        """
        return count_targets(batch["labels"])

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        """Return extra inputs of :meth:`loss` that depend on the whole global batch.

        All ranks call this before the first forward pass of a step. An objective that needs a
        separate pass uses ``engine.sum_over_batches``. With :attr:`uses_prepass_in_eval`, they call
        it before an evaluation, too, whose global batch is all eval rows.

        Args:
            engine: how this process computes.
            batches: this rank's micro-batches. They can be read once.
            totals: counts over the global batch, int64.
        """
        return {}

    def reference(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return numbers of a reference model or a teacher, float [B, ``reference_size``].

        They are computed once, before training, and become the column ``reference`` of the rows.
        This runs inside ``model.forward``.
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
            text_bytes: UTF-8 bytes of the eval text; 0 if the rows are no text. Bits per byte
                compare models with different tokenizers.
        """
        metrics = {"perplexity": math.exp(min(mean_loss, 700.0))}
        if text_bytes:
            metrics["bits_per_byte"] = loss_sum / math.log(2) / text_bytes
        return metrics

    def check(self, model: Any) -> None:
        """Check that the objective works with a model that has its weights; all ranks call this.

        Raises:
            UserError: if it does not.
        """


class ModelFormat(Protocol):
    """How a model is stored: the files of its folder, and the names of its tensors."""

    @property
    def config(self) -> dict[str, Any]:
        """The description of the model in the fingerprint of a run."""

    @property
    def weights_name(self) -> str:
        """The name of the file with the weights, if they are in a single file."""

    @property
    def may_split_weights(self) -> bool:
        """Whether the weights may be split over several files."""

    def write(self, folder: Path, parameters: int) -> None:
        """Write all files of a model folder except the weights.

        Args:
            folder: the folder.
            parameters: the number of weights.
        """

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint by name.

        They are the model's own tensors, not copies. Loading a checkpoint fills them.
        """

    def export_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors in the folder of the finished model, by name."""

    def tensor_converter(self, model: nn.Module) -> TensorConverter:
        """Return the function that converts a checkpoint's tensors to those of a finished model."""


@dataclass
class ModelBundle:
    """A model that a recipe has built, with its weights, files and objective.

    Attributes:
        model: the model. Its parameters may be on the meta device until it is placed.
        files: how the model is stored. Without it, :func:`llmtrain.place` adds files that
            describe a plain torch module.
        weights: the initial weights of parameters on the meta device.
        start: where the weights came from, for the fingerprint of a run.
        check: called when the model has its weights. It raises UserError if it rejects them.
        objective: the loss that is minimised.
        columns: columns that the model takes besides ``input_ids`` and ``labels``.
        prepare_batch: computes, on the host, more inputs of the model from a micro-batch.
    """

    model: nn.Module
    files: ModelFormat = None  # type: ignore[assignment] # `llmtrain.place` sets it
    weights: Weights | None = None
    start: dict[str, Any] | None = None
    check: Callable[[], None] = field(default=lambda: None)
    objective: Objective = field(default_factory=Objective)
    columns: frozenset[str] = frozenset()
    prepare_batch: Callable[[Batch], Batch] | None = None


class RowSequence(Protocol):
    """Rows of tokens, by column."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, list[int]]: ...


class StepInfo(NamedTuple):
    """How far the loop is after a step, and which periodic actions are due."""

    step: int  # steps made so far
    is_last: bool  # whether all steps of the run are made
    should_stop: bool  # whether the run stops after this step

    def is_due(self, every: float) -> bool:
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
        """Called when the batch of a step has been read, before anything is computed."""

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        """Called when a step was made, or skipped."""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a log entry was written, of the train loss or of an evaluation.

        Args:
            step: steps made so far.
            metrics: the numbers of the entry by the names that trackers show, such as
                ``train/loss`` and ``epoch``. They are those of the whole global batch, and the same
                on all ranks, except for times and rates.
        """

    def wants_to_stop(self) -> bool:
        """Return whether this rank wants all ranks to save and stop after the current step."""
        return False

    def on_train_end(self) -> None:
        """Called after the last step of this start."""
