"""What rooms hand each other, said once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORED = -100  # a label that is not trained on (cross_entropy's default); in a stored row, a place without a token

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Facts: TypeAlias = dict[str, Any]  # a JSON object of a run's record, whose shape its reader knows
Batch: TypeAlias = dict[str, torch.Tensor]  # a micro-batch by column
Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]  # names and full tensors, one at a time

# A metric of one's own, of a held-out batch and the plain model: by name a sum, and what it is divided by.
Metric: TypeAlias = Callable[[Any, Batch], dict[str, tuple[torch.Tensor, torch.Tensor]]]
# Turns a tensor of a checkpoint into those of a finished model's folder.
Published: TypeAlias = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
# Leaves the gradient of sum(nll) / tokens of a window; returns this rank's summed nll.
ForwardBackward: TypeAlias = Callable[[Sequence[Batch], torch.Tensor], torch.Tensor]
Forward: TypeAlias = Callable[..., torch.Tensor]  # the summed nll of a batch, with or without a gradient


class Window(NamedTuple):
    """One rank's share of one global batch."""

    batches: list[Batch]  # micro-batches
    rows: torch.Tensor  # int64 [rows]: which row of the data set each is, -1 where none; in the order of the slots
    targets: torch.Tensor  # int64 [rows]: tokens of each that are trained, all labels but the first that are not -100
    content: torch.Tensor  # int64 [2]: fingerprints of tokens and of labels; those of ranks add up to the batch's

    @property
    def positions(self) -> int:
        """Positions for which the model computes something, trained on or not."""
        return sum(batch["labels"][:, 1:].numel() for batch in self.batches)


class Update(NamedTuple):
    """One update that was made."""

    nll: torch.Tensor  # this rank's sum over the window, in nats; float32 scalar
    tokens: torch.Tensor  # trained tokens of the global batch; int64 scalar
    grad_norm: float  # of the global batch's mean loss, before clipping; under sync_every the mean over the ranks
    stop: bool  # whether any rank was asked to stop


@runtime_checkable
class TakesColumns(Protocol):
    """A model that takes columns of a batch beside ``input_ids`` and ``labels``."""

    @property
    def columns(self) -> frozenset[str]:
        """Their names, such as ``dropout_keys``."""


class ModelWriter(Protocol):
    """How a model becomes a folder, and is restored from one."""

    @property
    def config(self) -> dict[str, Any]:
        """What describes the model, for a run's identity."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerFast": ...

    @property
    def weights(self) -> str:
        """The name of the file that holds the weights, where it is one."""

    @property
    def divisible(self) -> bool:
        """Whether there may be several."""

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
    weights: Weights | None = None  # what its parameters begin with, where they are on the meta device
    start: dict[str, Any] | None = None  # where its weights came from, for a run's identity
    check: Callable[[], None] = field(default=lambda: None)  # once its weights are there; raises UserError


class Rows(Protocol):
    """Token rows to train on, and those held out."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerFast": ...


class Observer:
    """Watches the loop, or decides when something is done. All ranks call its hooks at the same places."""

    def begin(self, step: int) -> None:
        """The loop begins, after ``step`` updates."""

    def before_update(self, window: Window) -> None:
        """A window is there, and nothing of its update is computed."""

    def after_update(self, window: Window, update: Update) -> None:
        """An update was made."""

    def wants_to_stop(self) -> bool:
        """Return whether this rank wants all of them to save and stop after the update at hand."""
        return False

    def end(self) -> None:
        """The loop is over, whether it came to its end or not."""
