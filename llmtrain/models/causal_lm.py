"""Hugging Face causal LMs for training: labels go in, and the summed nll comes out.

Model classes differ in ways that no configuration shows. Some change the logits after the head, for
example. :mod:`llmtrain.models.probe` tries the model itself to find out.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.models.attention import ATTENTION_NAME, ready_documents
from llmtrain.models.documents import Documents, keep_documents_apart
from llmtrain.models.loss import (
    inputs_of,
    linear_nll,
    linear_values,
    matmul_dtype,
    softcapped,
    target_positions_of,
    targets_of,
)
from llmtrain.models.trainable import TrainableModel, nll_of_logits, put_in_front

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    class _Base(TrainableModel, PreTrainedModel):  # type: ignore[no-untyped-call]
        """For type checkers. At run time, :func:`make_causal_lm` adds the model's own class."""
else:
    _Base = TrainableModel


# Types of layers, in ``layer_types`` of a configuration.
_WITHOUT_ATTENTION = {"linear_attention", "conv", "mamba", "mlp", "moe"}


class CausalLM(_Base):  # type: ignore[no-untyped-call]
    """The methods by which a Hugging Face model is trained.

    :func:`make_causal_lm` changes the class of a model, at run time, to a new subclass of this
    class and of the model's own: ``(CausalLM, LlamaForCausalLM)``, for example. There is no wrapper
    module, so parameter names, tied weights and the modules that FSDP knows stay what they are.

    Attributes:
        own_class: the class that the model had before.
        head_is_linear: whether logits come from the last hidden states, a linear head and a softcap
            alone. It is assumed until :func:`llmtrain.models.probe.probe` finds out. The loss is
            then computed in chunks, without holding all logits in memory.
        row_length: the number of tokens in a row, the longest span that attention can cover.
        shares_prompts: whether a row of preference pairs holds a prompt once, followed by both
            answers. Only this package's attention can keep the answers apart.
        gives_scores: whether this is a reward model, which has no head that makes logits.
        softcap: of the logits, if there is one.
        has_short_convolutions: whether layers other than attention take the documents of a row.
    """

    own_class: ClassVar[type]
    head_is_linear: bool = False
    row_length: int = 0
    shares_prompts: bool = False
    gives_scores: bool = False
    softcap: float | None = None
    has_short_convolutions: bool = False

    @property
    def base_model(self) -> nn.Module:
        """The model without its head, which returns hidden states; ``self`` if there is none."""
        base: nn.Module = super().base_model
        if base is self:  # transformers looks for that of Llama 4 under a wrong name
            base = getattr(self, "model", self)
        return base

    def recompute_blocks(self, enabled: bool) -> None:
        """Let all blocks recompute their activations in the backward pass, or none.

        Raises:
            UserError: if the class cannot recompute activations.
        """
        self.activation_checkpointing_disable()  # type: ignore[no-untyped-call]
        # Enabling adds a hook to the embedding each time.
        self.disable_input_require_grads()  # type: ignore[no-untyped-call]
        if not enabled:
            return
        if not self.supports_gradient_checkpointing:
            raise UserError(
                f"{self.own_class.__name__} cannot recompute activations; leave "
                "--gradient_checkpointing out."
            )
        self.activation_checkpointing_enable({"use_reentrant": False})

    def nll(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        target_positions: Tensor | None = None,
        per_target: bool = False,
        **columns: Any,
    ) -> Tensor:
        """Return the summed negative log-likelihood in nats, of labels [B, T] that are not shifted.

        Call this inside ``forward`` only, where FSDP has gathered the weights.

        Args:
            input_ids: tokens [B, T].
            labels: tokens [B, T]; -100 is ignored.
            target_positions: int64 [N], which of the flattened targets [B * (T - 1)] are trained
                on; -1 is padding. ``None`` computes the nll of all positions, and gives the same
                sum, because the nll of an ignored target is 0.
            per_target: return the nll of each target instead of their sum: [B * (T - 1)], or [N]
                if there are ``target_positions``.
            columns: see :meth:`hidden`.
        """
        if not self.head_is_linear:
            logits = self.logits(input_ids, **columns)
            return nll_of_logits(logits, labels, target_positions, per_target)

        loss = functools.partial(
            linear_nll,
            targets=targets_of(labels),
            softcap=self.softcap,
            target_positions=target_positions,
            per_target=per_target,
        )
        head: Any = self.get_output_embeddings()  # type: ignore[no-untyped-call]
        nll: Tensor = head(self.hidden(input_ids, **columns), loss)
        return nll

    def hidden(self, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return the last hidden states [B, T - 1, C] of all positions that have a next token.

        As with :meth:`nll`, call this inside ``forward`` only, where FSDP has gathered the weights.

        Args:
            input_ids: tokens [B, T].
            columns: ``position_ids`` [B, T], if a row may hold several documents: the positions of
                each begin at 0, and its tokens attend to nothing before it; ``documents``, if
                :meth:`prepare_batch` has found them; other columns are not needed.
        """
        hidden: Tensor = self.base_model(**self._arguments(input_ids, columns)).last_hidden_state
        return hidden.view(len(input_ids), -1, hidden.shape[-1])  # also if laid end to end

    def logits(self, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return the logits [B, T - 1, V] of all positions that have a next token.

        The arguments are those of :meth:`hidden`.
        """
        logits: Tensor = self.own_forward(**self._arguments(input_ids, columns)).logits
        return logits.view(len(input_ids), -1, logits.shape[-1])

    def logits_at(self, positions: Tensor, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return float32 logits [N, V] at some positions.

        Args:
            positions: int64 [N], indices into the flattened positions [B * (T - 1)]: all but the
                last one of each row, which has no next token.
            input_ids: tokens [B, T].
            columns: see :meth:`hidden`.
        """
        if not self.head_is_linear:
            logits = self.logits(input_ids, **columns)
            return logits.flatten(0, 1).index_select(0, positions).float()

        hidden = self.hidden(input_ids, **columns).flatten(0, 1).index_select(0, positions)
        head: Any = self.get_output_embeddings()  # type: ignore[no-untyped-call]
        return self.softcapped(head(hidden).float())

    def sum_over_logits(
        self,
        function: Callable[[Tensor, Any], Tensor],
        targets: Any,
        input_ids: Tensor,
        *,
        target_positions: Tensor | None = None,
        **columns: Any,
    ) -> Tensor:
        """Return the sum [M] of values that a function computes from the logits of each target.

        Args:
            function: see :func:`llmtrain.models.loss.linear_values`.
            targets: see there; those of the N target positions.
            input_ids: tokens [B, T].
            target_positions: int64 [N], as in :meth:`nll`; ``None``: all positions [B * (T - 1)].
            columns: see :meth:`hidden`.
        """
        if not self.head_is_linear:
            logits = _at(target_positions, self.logits(input_ids, **columns))
            return function(_wide(logits), targets[:]).sum(0)

        loss = functools.partial(
            linear_values, targets=targets, function=function, softcap=self.softcap
        )
        head: Any = self.get_output_embeddings()  # type: ignore[no-untyped-call]
        total: Tensor = head(_at(target_positions, self.hidden(input_ids, **columns)), loss)
        return total

    def deferred_logits(
        self, input_ids: Tensor, *, target_positions: Tensor | None = None, **columns: Any
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return numbers of each target [N, C], and a function that makes logits [n, V] of them.

        The function may be called after the forward pass, as FSDP2 keeps the head gathered. It
        computes as :meth:`sum_over_logits` does, and has no gradient.
        """
        if not self.head_is_linear:
            return _at(target_positions, self.logits(input_ids, **columns)), lambda logits: logits

        hidden = _at(target_positions, self.hidden(input_ids, **columns))
        hidden = hidden.to(matmul_dtype(hidden.device, hidden.dtype))
        head: Any = self.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight, bias = head(hidden, lambda _, weight, bias: (weight.detach(), bias))
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.detach().to(hidden.dtype)
        return hidden, lambda hidden: self.softcapped(_wide(F.linear(hidden, weight, bias)))

    def softcapped(self, head_output: Tensor) -> Tensor:
        """Return the logits that a linear head has computed, after the softcap of the model."""
        return softcapped(head_output, self.softcap)

    def _arguments(self, input_ids: Tensor, columns: Batch) -> dict[str, Any]:
        """Return the arguments of the model's own ``forward``, for all but the last position."""
        positions = columns.get("position_ids")
        if positions is not None:
            positions = inputs_of(positions)
        return own_arguments(self, inputs_of(input_ids), positions, columns.get("documents"))

    def outputs(self, input_ids: Tensor, **columns: Any) -> Any:
        """Return the outputs of the model's own ``forward``.

        Packed documents are found in the position ids again: ``documents`` are those of the first
        T - 1 positions. With a cache, or with an attention mask, transformers looks for none.
        """
        columns.pop("documents", None)
        positions = columns.get("position_ids")
        if positions is not None:
            uses_cache = columns.setdefault("use_cache", False)
            if self.has_short_convolutions and not uses_cache:
                columns["documents"] = Documents.of(positions)
        return self.own_forward(input_ids=input_ids, **columns)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return further columns of a micro-batch: where its documents begin and its targets are.

        Computed on the host to avoid a device sync.
        """
        for_gpu = self.device.type == "cuda"
        prepared = Batch()
        if "position_ids" in batch:
            prepared["documents"] = Documents.of(inputs_of(batch["position_ids"]), for_gpu)

        target_positions = target_positions_of(batch["labels"], for_gpu)
        # For a GPU they are padded to one of few sizes. If these are no fewer than all targets, all
        # targets are computed, and no positions are needed.
        if len(target_positions) < targets_of(batch["labels"]).numel():
            prepared["target_positions"] = target_positions
        return prepared

    def flops_per_token(self) -> int:
        """Return the operations of forward and backward: 6 N + 12 L H Q T.

        The formula is that of Chowdhery et al. (2022), arXiv:2204.02311, appendix B, for N weights
        and L layers with H attention heads of size Q, each over T positions.

        These are the operations of matrix products. A frozen weight costs 4 instead of 6, because
        it needs no gradient. 0 for a mixture of experts, where a token meets some weights only.
        """
        config = self.config.get_text_config()
        expert_counts = ("num_experts", "num_local_experts", "n_routed_experts")
        if any((getattr(config, name, None) or 0) > 1 for name in expert_counts):
            return 0

        # An embedding multiplies nothing, unless it is the head as well.
        head = self.get_output_embeddings()  # type: ignore[no-untyped-call]
        of_head = {*head.parameters()} if head is not None else set()
        unused = {*self.get_input_embeddings().parameters()} - of_head
        parameters = [p for p in self.parameters() if p not in unused]
        weights = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)

        attention = 0  # of all layers, per pair of tokens
        layer_configs = config.per_layer_config  # the layers of Gemma 4 have heads of two sizes
        layer_types = getattr(config, "layer_types", None) or ["attention"] * len(layer_configs)
        for layer, layer_type in zip(layer_configs, layer_types, strict=False):
            heads = getattr(layer, "num_attention_heads", None)
            if heads and layer_type not in _WITHOUT_ATTENTION:
                head_size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
                attention += 12 * heads * head_size
        return 4 * weights + 2 * trained + attention * self.row_length


def _at(target_positions: Tensor | None, values: Tensor) -> Tensor:
    """Return the values [N, C] of some positions, or of all, given those of rows [B, T - 1, C]."""
    values = values.flatten(0, 1)
    if target_positions is None:
        return values
    return values.index_select(0, target_positions.clamp(min=0))


def _wide(values: Tensor) -> Tensor:
    """Return values in float32, or in float64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class LossHead(nn.Module):
    """The ``forward`` of a linear head that also computes the loss.

    FSDP2 gathers the weights of the head only when the head itself is called, so whatever is
    computed with them is computed in this call. :func:`make_causal_lm` changes the class of a head
    to a subclass of ``LossHead`` and of the head's own class: ``nn.Linear``, or peft's wrapper of
    one.
    """

    own_class: ClassVar[type]

    def forward(self, hidden: Tensor, loss: Callable[..., Tensor] | None = None) -> Tensor:
        """Return the logits of hidden states [..., C], or ``loss(hidden, weight, bias=bias)``.

        With LoRA, peft can train a copy of the head, or the rows of some tokens next to a frozen
        head. Then ``weight`` is the copy's, or the frozen one with those rows replaced.
        """
        if loss is None:
            logits: Tensor = super().forward(hidden)  # that of the head's own class
            return logits
        original: Any = getattr(self, "original_module", self)
        return loss(hidden, self.weight, bias=getattr(self, "bias", original.bias))


def make_causal_lm(
    model: "PreTrainedModel",
    row_length: int,
    shares_prompts: bool = False,
    gives_scores: bool = False,
) -> CausalLM:
    """Give a Hugging Face model and its head the ``forward`` of :class:`CausalLM`, in place.

    Call :func:`llmtrain.models.probe.probe` once the weights are in place.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # The row of a padding token gets no gradient, and a token that ends texts may pad, too.
            module.padding_idx = None

    put_in_front(CausalLM, model)
    causal_lm = cast(CausalLM, model)
    causal_lm.row_length = row_length
    causal_lm.shares_prompts = shares_prompts
    causal_lm.gives_scores = gives_scores
    text_config = model.config.get_text_config()
    causal_lm.softcap = getattr(text_config, "final_logit_softcapping", None)
    causal_lm.has_short_convolutions = keep_documents_apart(model)

    head = cast("nn.Module | None", model.get_output_embeddings())  # type: ignore[no-untyped-call]
    # peft wraps the head if it trains a copy, or some of its rows.
    if head is not None and type(getattr(head, "original_module", head)) is nn.Linear:
        put_in_front(LossHead, head)
        causal_lm.head_is_linear = causal_lm.base_model is not causal_lm  # of nearly all models
    return causal_lm


def own_arguments(
    model: CausalLM, ids: Tensor, positions: Tensor | None, documents: Documents | None
) -> dict[str, Any]:
    """Return the arguments of the model's own ``forward`` for rows in one pass, without a cache.

    Args:
        model: the model.
        ids: tokens [B, T].
        positions: [B, T], restarting at each document.
        documents: the documents, if they are known.
    """
    if documents is None and positions is not None:
        documents = Documents.of(positions)
    arguments: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}

    implementation = model.config._attn_implementation or ""
    if implementation == ATTENTION_NAME:
        # Without a mask, transformers looks for documents in the position ids, and builds masks
        # that are not needed here. Our attention ignores this one; `expand` takes no memory.
        sees_all = torch.ones((), dtype=torch.bool, device=ids.device)
        arguments["attention_mask"] = sees_all.expand(len(ids), 1, ids.shape[1], ids.shape[1])
        known = documents or Documents()  # one document in each row
        dtype = matmul_dtype(model.device, model.dtype)
        arguments["documents"] = ready_documents(known, dtype)
    elif implementation.startswith("flash") and documents is not None:
        # Flash attention takes rows that are laid end to end.
        assert positions is not None
        arguments["input_ids"] = ids.reshape(1, -1)
        arguments["position_ids"] = positions.reshape(1, -1)
        for side in ("q", "k"):
            arguments[f"cu_seq_lens_{side}"] = documents.borders
            arguments[f"max_length_{side}"] = ids.shape[1]
    elif model.has_short_convolutions:
        arguments["documents"] = documents
    return arguments
