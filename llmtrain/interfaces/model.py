"""What an objective or a metric may call on the model."""

from __future__ import annotations  # so that annotations do not import torch

from typing import TYPE_CHECKING, Any, Protocol

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
        """The model without its head."""

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
        """Return the last hidden states [B, T - 1, C], of which the head makes logits.

        It calls :attr:`base_model`, so hooks there can read something in the layers.
        """

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
