"""What an objective or a metric may call on the model."""

from __future__ import annotations  # so that annotations do not import torch

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from llmtrain.config.unknown_names import did_you_mean
from llmtrain.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn


class Model(Protocol):
    """What an objective or a metric may call on the model.

    Call these methods inside ``forward`` only, as :meth:`llmtrain.Objective.loss` and metrics do:
    DDP, FSDP2 and autocast work nowhere else. Pass them a micro-batch as ``**batch``. Columns that
    a method does not need are ignored. Documents of a packed row do not see each other.

    Shapes: B rows of T tokens, hidden states of C numbers, a vocabulary of V tokens. The last token
    of each row is only a target, so results have T - 1 positions. The target of position t of a row
    is ``labels[:, 1:][:, t]``.
    """

    @property
    def base_model(self) -> nn.Module:
        """The model without its head, such as for hooks. :meth:`hidden` calls it."""

    def nll(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        target_positions: Tensor | None = None,
        per_target: bool = False,
        **columns: Any,
    ) -> Tensor:
        """Return the summed negative log-likelihood of the labels, in nats.

        Args:
            input_ids: tokens [B, T].
            labels: tokens [B, T], which are not shifted; -100 is ignored.
            target_positions: int64 [N], which of the flattened targets [B * (T - 1)] count; -1 is
                padding. The sum over all targets is the same, because an ignored one has nll 0.
            per_target: return the nll of each target instead of their sum: [B * (T - 1)], or [N] if
                there are ``target_positions``.
            columns: the other columns of the micro-batch.
        """

    def hidden(self, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return the last hidden states [B, T - 1, C], of which the head makes logits."""

    def logits(self, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return the logits [B, T - 1, V] of all positions, in the precision of the head."""

    def logits_at(self, positions: Tensor, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return float32 logits [N, V] at some positions.

        Args:
            positions: int64 [N], indices into the flattened positions [B * (T - 1)]. The target of
                position i is ``labels[:, 1:].flatten()[i]``.
            input_ids: tokens [B, T].
            columns: the other columns of the micro-batch.
        """

    def run_layers(self, input_ids: Tensor, **columns: Any) -> None:
        """Run the layers, and return nothing, for hooks that read something there."""


_NAMES = ("base_model", "nll", "hidden", "logits", "logits_at", "run_layers")
_PAGE = "docs/guides/own-model.md"


@contextlib.contextmanager
def missing_names_explained(model: object) -> Iterator[None]:
    """Explain in one line which name of a model an objective or a metric has not found.

    If the model's own code lacks a name, the error stays as it is: its traceback is needed.

    Args:
        model: the unwrapped model.

    Raises:
        UserError: for an AttributeError of other code than the model's, about the model itself.
    """
    try:
        yield
    except AttributeError as error:
        reader = _reader(error)
        if error.obj is not model or reader.f_locals.get("self") is model:
            raise

        name = str(error.name)
        code = reader.f_code
        place = f"{code.co_qualname} ({Path(code.co_filename).name}, line {reader.f_lineno})"
        raise UserError(
            f"{place} uses {name} of the model, which {class_name(model)} does not have; "
            f"{_remedy(model, name)}"
        ) from error


def _reader(error: AttributeError) -> FrameType:
    """Return the frame that has read the missing attribute."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # nn.Module looks for parameters and modules in `__getattr__`.
    while frames[-1].f_code.co_name == "__getattr__":
        frames.pop()
    return frames[-1]


def _remedy(model: object, name: str) -> str:
    if name in _NAMES:
        return f"add it to the class, as {_PAGE} describes."
    names = [known for known in {*dir(model), *_NAMES} if not known.startswith("_")]
    question = did_you_mean(name, sorted(names)).removeprefix(" - ")
    return question or f"{_PAGE} lists what every model has."


def class_name(model: object) -> str:
    """Return the name of a model's class, before this package and FSDP2 have extended it."""
    own_class: type = getattr(model, "own_class", type(model))
    return own_class.__name__.removeprefix("FSDP")
