"""Hugging Face causal LMs as this package trains them: labels in, the summed negative log-likelihood out.

What a class computes beside its head (a softcap, a scale), and whether packed documents see each other in it, is not
looked up but tried, on the model at hand.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.models.loss import inputs_of, linear_nll, summed_nll, targets_of


class SummedLoss:
    """A ``forward`` in front of a Hugging Face causal LM's own. A subclass and no wrapper module, so that parameter
    names, tied weights and the units that sharding knows stay what they are."""

    head_is_linear = False  # whether hidden states, head and softcap are all that the logits are made of

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """With ``labels`` [B, T] (not shifted) the summed nll in nats of ``input_ids`` [B, T], and documents whose
        ``position_ids`` [B, T] restart do not see each other; without, the model's own output."""
        if labels is None:
            return super().forward(input_ids=input_ids, position_ids=position_ids, **others)  # type: ignore[misc]
        positions = None if position_ids is None else inputs_of(position_ids)
        # a cache, or a mask, would keep transformers from seeing where documents end
        arguments = {"input_ids": inputs_of(input_ids), "position_ids": positions, "use_cache": False}
        if self.head_is_linear:
            head, hidden = self.get_output_embeddings(), self.base_model(**arguments).last_hidden_state  # type: ignore[attr-defined]
            return linear_nll(hidden, head.weight, targets_of(labels), head.bias, softcap_of(self))
        return summed_nll(super().forward(**arguments).logits, targets_of(labels))  # type: ignore[misc]

    def flops_per_token(self) -> int:
        """Forward and backward, matrix products alone: 6 N + 12 L C T (Chowdhery et al. 2022, appendix B), less the
        gradients of frozen weights. 0 where not every token meets every weight."""
        config = self.config.get_text_config()  # type: ignore[attr-defined]
        if is_mixture_of_experts(config):
            return 0
        embedding = self.get_input_embeddings().weight  # type: ignore[attr-defined]
        head = self.get_output_embeddings().weight  # type: ignore[attr-defined]
        parameters = [p for p in self.parameters() if p is not embedding or p is head]  # type: ignore[attr-defined]
        weights = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        attention = 12 * config.num_hidden_layers * config.hidden_size * self.row_length
        return 4 * weights + 2 * trained + attention

    row_length = 0  # tokens that attention spans


def summed(model: Any, row_length: int) -> None:
    """Give the model of a Hugging Face causal LM class the ``forward`` of :class:`SummedLoss`, in place."""
    model.__class__ = type(f"Summed{type(model).__name__}", (SummedLoss, type(model)), {})
    model.row_length = row_length
    model.head_is_linear = _head_is_linear(model)


def is_mixture_of_experts(config: Any) -> bool:
    return any(
        (getattr(config, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )


def softcap_of(model: Any) -> float | None:
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


@torch.no_grad()
def _head_is_linear(model: Any) -> bool:
    """Whether the logits are the head's product with the last hidden states, softcapped where the config says so.
    Otherwise they are taken from the model whole."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or getattr(model, "base_model", model) is model:
        return False
    training, _ = model.training, model.eval()
    ids = _tokens(model, 8)
    own = model(ids, use_cache=False).logits
    ours = F.linear(model.base_model(ids, use_cache=False).last_hidden_state, head.weight, head.bias)
    if cap := softcap_of(model):
        ours = cap * torch.tanh(ours / cap)
    model.train(training)
    return ours.shape == own.shape and _same(ours, own)


@torch.no_grad()
def leaks(model: Any) -> bool:
    """Whether the second of two documents in a packed row changes when the first does."""
    training, _ = model.training, model.eval()
    first, second, other = _tokens(model, 24).chunk(3, dim=1)
    positions = torch.arange(8, device=first.device).repeat(2)[None]
    try:
        one, two = (
            model(torch.cat([document, second], 1), position_ids=positions, use_cache=False).logits[:, 8:]
            for document in (first, other)
        )
    except TypeError:  # it takes no position_ids
        return True
    finally:
        model.train(training)
    return not _same(one, two)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding, which a mixture of experts does in other groups where other tokens are beside."""
    scale = torch.finfo(one.dtype).eps ** 0.5 * other.abs().max()
    return bool((one - other).abs().max() <= scale)


def _tokens(model: Any, count: int) -> torch.Tensor:
    """Different ones, int64 [1, count]."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(count, device=model.device)[None] * 7 + 1) % vocabulary
