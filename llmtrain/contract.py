"""Types that rooms share, each defined once."""

from __future__ import annotations  # torch is not loaded for them

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

IGNORED = -100  # a label that is not trained on (cross_entropy's default); in a stored row, a place without a token

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Facts: TypeAlias = dict[str, Any]  # a JSON object of a run's record, whose shape its reader knows
Batch: TypeAlias = dict[str, Any]  # a micro-batch by column: tensors, and what a model has prepared
Weights: TypeAlias = Iterable[tuple[str, "torch.Tensor"]]  # names and full tensors, one at a time

# A metric of one's own, of a held-out batch and the plain model: by name a sum, and what it is divided by.
Metric: TypeAlias = Callable[[Any, Batch], dict[str, tuple["torch.Tensor", "torch.Tensor"]]]
# Turns a tensor of a checkpoint into those of a finished model's folder.
Published: TypeAlias = Callable[[str, "torch.Tensor"], dict[str, "torch.Tensor"]]
# Leaves the gradient of sum(nll) / tokens of a window; returns this rank's summed nll.
ForwardBackward: TypeAlias = Callable[[Sequence[Batch], "torch.Tensor"], "torch.Tensor"]
Forward: TypeAlias = Callable[
    ..., "torch.Tensor"
]  # the summed nll of a batch, with or without a gradient


@dataclass(frozen=True)
class Window:
    """One rank's share of one global batch: columns, which go to the device, and what the host knows of them."""

    columns: dict[str, torch.Tensor]  # of all its rows, one micro-batch after the other
    micro_batch: int  # rows
    rows: (
        torch.Tensor
    )  # int64 [rows]: which row of the data set each is, -1 where none; in the order of the slots
    targets: (
        torch.Tensor
    )  # int64 [rows]: tokens of each that are trained, all labels but the first that are not -100
    content: (
        torch.Tensor
    )  # int64 [2]: fingerprints of tokens and of labels; those of ranks add up to the batch's
    prepared: tuple[
        Batch, ...
    ] = ()  # what a model that prepares batches has made of each micro-batch

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches."""
        starts = range(0, len(self.columns["labels"]), self.micro_batch)
        slices = [
            {name: one[i : i + self.micro_batch] for name, one in self.columns.items()}
            for i in starts
        ]
        more = self.prepared or ({},) * len(slices)
        return [batch | made for batch, made in zip(slices, more, strict=True)]

    @property
    def positions(self) -> int:
        """Positions for which the model computes something, trained on or not."""
        return self.columns["labels"][:, 1:].numel()

    def to(self, device: torch.device, non_blocking: bool = False) -> Window:
        """Return it with its columns on a device; Accelerate calls this."""
        return self._with(lambda one: one.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Window:
        """Return it in memory from which a device copies by itself; torch calls this."""
        return self._with(lambda one: one.pin_memory())

    def _with(self, moved: Callable[[Any], Any]) -> Window:
        columns, *prepared = (
            {key: moved(one) for key, one in part.items()}
            for part in (self.columns, *self.prepared)
        )
        return replace(self, columns=columns, prepared=tuple(prepared))


class Update(NamedTuple):
    """One update that was made."""

    nll: torch.Tensor  # this rank's sum over the window, in nats; float32 scalar
    tokens: int  # trained tokens of the global batch
    grad_norm: float  # of the global batch's mean loss, before clipping
    stop: bool  # whether any rank was asked to stop
    survey: torch.Tensor | None = None  # what a survey of the global batch has found
    units: int = 0  # what the loss is a mean over: trained tokens, or what the model counts
    measured: torch.Tensor | None = (
        None  # this rank's sums of what the model measures beside the loss
    )


@runtime_checkable
class TakesColumns(Protocol):
    """A model that takes columns of a batch beside ``input_ids`` and ``labels``."""

    @property
    def columns(self) -> frozenset[str]:
        """Their names, such as ``dropout_keys``."""


@runtime_checkable
class PreparesBatches(Protocol):
    """A model that computes something of a micro-batch on the host, before it is sent to the device."""

    def prepare(self, batch: Batch) -> Batch:
        """Return what its ``forward`` takes beside the columns: tensors, or objects that can be moved like them."""


@runtime_checkable
class SurveysBatches(Protocol):
    """A model with a part of its loss that depends on sums over the global batch.

    Called with ``survey=True`` beside a micro-batch, it returns what is to be summed.
    """

    @property
    def balance(self) -> float:
        """The weight of that part; 0: there is none."""

    @property
    def surveyed_as(self) -> str:
        """The name of the metric that tells what was found."""

    def loads(
        self, counts: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what ``forward`` takes as ``load``, and what is told of it, given the sums and the tokens."""


@runtime_checkable
class MeasuresItself(Protocol):
    """A model whose loss is a mean over something else than trained tokens, and which measures more beside it."""

    def units(self, batch: Batch) -> torch.Tensor:
        """Return how many of these a micro-batch has, an int64 scalar."""

    def measured(self) -> torch.Tensor:
        """Return the sums [K] of what was measured since this was last called."""

    def readings(self, sums: Sequence[float]) -> dict[str, float]:
        """Return metrics, given those sums over all ranks."""


@runtime_checkable
class TakesReference(Protocol):
    """A model whose loss compares with its first weights: ``logps=True`` asks for what it keeps of them."""

    @property
    def takes_reference(self) -> bool:
        """False where the loss at hand does not."""

    @property
    def slots(self) -> int:
        """Numbers that are kept of a row."""


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
class Built:
    """A model that a recipe has built, with all that belongs to it."""

    model: nn.Module  # real, or on the meta device until it is placed
    files: ModelWriter
    weights: Weights | None = (
        None  # what its parameters begin with, where they are on the meta device
    )
    start: dict[str, Any] | None = None  # where its weights came from, for a run's identity
    check: Callable[[], None] = field(
        default=lambda: None
    )  # once its weights are there; raises UserError


class Rows(Protocol):
    """Rows of tokens, by column."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, list[int]]: ...


class Due(NamedTuple):
    """How far the loop is after a step, and which periodic actions are due there."""

    step: int  # steps made so far
    finished: bool  # all steps of the run are made
    stop: bool  # the run stops here

    def at(self, every: int) -> bool:
        """Return whether an action that happens every ``every`` steps is due.

        The last step makes every action due. 0 means never.
        """
        if every == 0:
            return False
        return self.finished or self.step % every == 0


class Observer:
    """Watches the loop, or decides when something is done. All ranks call its hooks at the same places."""

    def around(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that is entered before the loop begins and exited when it ends, even by an error."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Called before the first update of this start."""

    def enter(self, phase: str) -> None:
        """Called where this rank begins another phase of its work."""

    def before_update(self, window: Window) -> None:
        """Called when a window is there, and nothing of its update is computed."""

    def after_update(self, window: Window, update: Update, due: Due) -> None:
        """Called when an update was made, or skipped."""

    def wants_to_stop(self) -> bool:
        """Return whether this rank wants all of them to save and stop after the update at hand."""
        return False

    def end(self) -> None:
        """Called when the last update of this start was made."""
