"""Hugging Face causal LMs as this package trains them: labels in, the summed negative log-likelihood out.

What a class computes beside its head (a softcap, a scale), and whether packed documents see each other in it, is not
looked up but tried, on the model at hand.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.errors import UserError, first_line
from llmtrain.models.loss import inputs_of, linear_logits, linear_nll, summed_nll, targets_of
from llmtrain.parallel.mesh import reshard


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
            hidden = self.base_model(**arguments).last_hidden_state  # type: ignore[attr-defined]
            return self.get_output_embeddings()(hidden, targets_of(labels), softcap_of(self))  # type: ignore[attr-defined]
        return summed_nll(super().forward(**arguments).logits, targets_of(labels))  # type: ignore[misc]

    def flops_per_token(self) -> int:
        """Forward and backward, matrix products alone: 6 N + 12 L C T (Chowdhery et al. 2022, appendix B), less the
        gradients of frozen weights. 0 where not every token meets every weight."""
        config = self.config.get_text_config()  # type: ignore[attr-defined]
        if is_mixture_of_experts(config):
            return 0
        looked_up = {*self.get_input_embeddings().parameters()}  # type: ignore[attr-defined]
        head = self.get_output_embeddings()  # type: ignore[attr-defined]
        multiplied = {*head.parameters()} if head is not None else set()
        parameters = [p for p in self.parameters() if p in multiplied or p not in looked_up]  # type: ignore[attr-defined]
        weights = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        attention = 12 * config.num_hidden_layers * config.hidden_size * self.row_length
        return 4 * weights + 2 * trained + attention

    row_length = 0  # tokens that attention spans
    vocabulary = 0


class SummedHead:
    """A ``forward`` in front of a linear head's own: where it is called, and only there, its weights are whole."""

    own_class: type

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """With ``targets`` [B, T] (shifted) the summed nll of ``hidden`` [B, T, C]; without, logits."""
        weight, bias = linear_parts(self)
        assert weight is not None
        if targets is None:
            whole = super().forward  # type: ignore[misc]
            return linear_logits(hidden, weight, bias) if isinstance(weight, DTensor) else whole(hidden)
        return linear_nll(hidden, weight, targets, bias, softcap)


def summed(model: Any, row_length: int) -> None:
    """Give the model of a Hugging Face causal LM class, and its head, the ``forward`` of :class:`SummedLoss`, in
    place; :func:`probe` has to follow."""
    model.__class__ = _in_front(SummedLoss, model)
    model.row_length, model.vocabulary = row_length, model.get_input_embeddings().weight.shape[0]
    head = model.get_output_embeddings()
    if head is not None and linear_parts(head)[0] is not None:
        head.__class__ = _in_front(SummedHead, head)


def _in_front(of: type, module: nn.Module) -> type:
    kind = type(module)
    return type(f"Summed{kind.__name__}", (of, kind), {"own_class": kind})


def probe(model: Any) -> None:
    """Find out how the head of a :func:`summed` model, which has its weights, computes.

    Raises :class:`UserError` where earlier tokens see later ones: it is no causal LM.
    """
    kind = model.own_class.__name__
    with _trying(model):
        model.head_is_linear = _head_is_linear(model)
        ids, other = _tokens(model, 2, _probe_length(model)).chunk(2)
        other = torch.cat([ids[:, :-1], other[:, -1:]], dim=1)
        if _moved(_logits(model, ids)[:, :-1], _logits(model, other)[:, :-1]):
            raise UserError(f"{kind} lets tokens see the ones that follow: it is no causal language model.")


def is_mixture_of_experts(config: Any) -> bool:
    return any(
        (getattr(config, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )


def softcap_of(model: Any) -> float | None:
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def linear_parts(head: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weight [V, C] and bias [V] of a linear head, with the rows that peft trains beside it in place; ``None`` of any
    other head."""
    if getattr(head, "own_class", type(head)) is nn.Linear:
        return head.weight, head.bias
    plain, adapter = getattr(head, "original_module", None), getattr(head, "token_adapter", None)
    if type(plain) is nn.Linear and adapter is not None:
        return adapter.get_merged_weights(head.active_adapters), plain.bias
    return None, None


def leaks(model: Any) -> bool:
    """Whether the second of two documents in a packed row changes when the first does; tried on rows with their border
    at different places, which some attention looks for in a single row only."""
    length = max(_probe_length(model) // 2, 1)
    with _trying(model):
        ids, other = _tokens(model, 4, 2 * length).chunk(2)
        borders = torch.tensor([length, max(length - 1, 1)], device=ids.device)[:, None]
        places = torch.arange(2 * length, device=ids.device)[None]
        second = places >= borders
        positions = torch.where(second, places - borders, places)
        changed = torch.where(second, ids, other)
        try:
            one, two = (_logits(model, rows, positions)[second] for rows in (ids, changed))
        except TypeError:  # it takes no position_ids
            return True
        unpacked = (_logits(model, ids)[second] - _logits(model, changed)[second]).abs().max()
        return _moved(one, two) or bool((one - two).abs().max() > unpacked / 2)  # which bfloat16 cannot hide


def _head_is_linear(model: Any) -> bool:
    """Whether logits are what the head makes of the last hidden states, softcapped where the configuration says so.
    The head is made to say numbers from -100 to 100, which no scale and no cap leaves as they are."""
    head: Any = model.get_output_embeddings()
    if not issubclass(type(head), SummedHead) or getattr(model, "base_model", model) is model:
        return False
    said: list[torch.Tensor] = []
    heard: list[torch.Tensor] = []

    def say_loudly(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        heard.append(inputs[0])
        return torch.linspace(-100, 100, output.shape[-1], device=output.device, dtype=output.dtype).expand_as(output)

    listening = [
        model.base_model.register_forward_hook(lambda _, __, output: said.append(output.last_hidden_state)),
        head.register_forward_hook(say_loudly),
    ]
    own = _logits(model, _tokens(model, 1, _probe_length(model)))
    for hook in listening:
        hook.remove()
    loud = torch.linspace(-100, 100, own.shape[-1], device=own.device, dtype=own.dtype)
    if cap := softcap_of(model):
        loud = cap * torch.tanh(loud / cap)
    alone = len(said) == len(heard) == 1 and torch.equal(heard[0], said[0])
    return alone and torch.allclose(own, loud.expand_as(own), rtol=1e-2)


@contextlib.contextmanager
def _trying(model: Any) -> Iterator[None]:
    """Without dropout, gradients or autocast, whose rounding would hide what is looked for."""
    training, _ = model.training, model.eval()
    try:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    except (RuntimeError, IndexError, ValueError, AttributeError) as error:
        raise UserError(f"{model.own_class.__name__} cannot be trained here: {first_line(error)}") from None
    finally:
        reshard(model)
        model.train(training)


def _logits(model: Any, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    arguments = {} if positions is None else {"position_ids": positions}
    return model(ids, use_cache=False, **arguments).logits


def _moved(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results differ by more than rounding, which a mixture of experts does in other groups where other
    tokens are beside. What leaks moves logits by a tenth and more of their size."""
    limit = max(torch.finfo(one.dtype).eps ** 0.5 / 4, 1e-4)  # of the largest: 1e-4 in float32, 0.02 in bfloat16
    return bool((one - other).abs().max() > limit * other.abs().max())


def _probe_length(model: Any) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 16
    return min(16, positions, model.row_length)


def _tokens(model: Any, rows: int, length: int) -> torch.Tensor:
    """Different ones, int64 [rows, length]."""
    return ((torch.arange(rows * length, device=model.device) * 7 + 1) % model.vocabulary).view(rows, length)
