"""Hugging Face causal LMs for training here: labels go in, and the summed negative log-likelihood comes out.

How a class computes logits beside its head (a softcap, a scale), and whether packed documents see each other in it, is
found by trying, on the model at hand.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmtrain.contract import Batch
from llmtrain.errors import UserError, first_line
from llmtrain.models.attention import NAME, Documents, register
from llmtrain.models.experts import balancing, count, counted_positions, loads, router_logits_of
from llmtrain.models.loss import (
    inputs_of,
    linear_logits,
    linear_nll,
    summed_nll,
    targets_of,
    trained_positions,
)
from llmtrain.parallel.mesh import reshard

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils.generic import ModelOutput
else:  # when a program runs, they stand in front of a class that is one
    PreTrainedModel = Module = object


class SummedLoss(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A ``forward`` in front of a Hugging Face causal LM's own.

    It is in a subclass and in no wrapper module, so that parameter names, tied weights and the units that sharding
    knows stay what they are.
    """

    own_class: ClassVar[type]
    head_is_linear: bool = False  # logits are made of hidden states, head and softcap alone
    balance: float = 0.0  # weight of the balancing loss of routers
    surveyed_as: ClassVar[str] = "balance_loss"
    row_length: int = 0  # tokens that attention spans
    shares_prompts: bool = False  # two answers may go on from one prompt
    vocabulary: int = 0

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        documents: Documents | None = None,
        trained: Tensor | None = None,
        load: Tensor | None = None,
        survey: bool = False,
        each: bool = False,
        **others: object,
    ) -> "Tensor | ModelOutput":
        """Return the summed nll in nats of ``input_ids`` [B, T] for ``labels`` [B, T], which are not shifted.

        Documents whose ``position_ids`` [B, T] restart do not see each other. What :meth:`prepare` has found on the
        host is not looked for on the device. With ``load`` [E] the gradient, but not the value, has the balancing loss
        of the routers; to ``survey`` is to return the counts that ``load`` is made of. With ``each`` return the nll of
        each target, [B * (T - 1)], or of those at ``trained``. Without labels, return what the model's own class does.
        """
        own, head = super().forward, _head_of(self)
        if labels is None:
            if documents is not None and (
                documents.starts is None or documents.starts.shape == input_ids.shape
            ):
                others |= {
                    "documents": documents
                }  # else they are of the rows that are trained on, a position shorter
            return cast(
                "ModelOutput", own(input_ids=input_ids, position_ids=position_ids, **others)
            )
        positions = None if position_ids is None else inputs_of(position_ids)
        arguments, targets = (
            arguments_of(self, inputs_of(input_ids), positions, documents),
            targets_of(labels),
        )
        linear, routed = self.head_is_linear and head is not None, survey or load is not None
        with router_logits_of(self.base_model, routed) as router_logits:
            out = self.base_model(**arguments) if linear else own(**arguments)
        if survey:
            chosen = int(self.config.get_text_config().num_experts_per_tok)
            return count(router_logits, counted_positions(targets), chosen)
        if linear and head is not None:
            nll: Tensor = head(
                out.last_hidden_state.view(*targets.shape, -1),
                targets,
                softcap_of(self),
                trained,
                each,
            )
        else:
            nll = summed_nll(out.logits.view(*targets.shape, -1), targets, each)
            if each and trained is not None:
                nll = nll[trained.clamp(min=0)].where(trained >= 0, 0)
        if load is None:
            return nll
        more = balancing(router_logits, counted_positions(targets), load)
        return nll + (more - more.detach())

    def told(self, arguments: dict[str, object]) -> Tensor:
        """Return logits for arguments of its own class's ``forward``."""
        return cast(Tensor, self(**arguments).logits)

    def loads(self, counts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``load`` for the micro-batches of a global batch with these counts, and its balancing loss."""
        return loads(counts, tokens, self.balance)

    def prepare(self, batch: Batch) -> Batch:
        """Return where documents begin in a micro-batch on the host, and which of its targets are trained."""
        on_gpu, found = self.device.type == "cuda", Batch()
        if "position_ids" in batch:
            found["documents"] = Documents.of(inputs_of(batch["position_ids"]), on_gpu)
        trained = trained_positions(batch["labels"], on_gpu)
        if len(trained) < targets_of(batch["labels"]).numel():
            found["trained"] = trained
        return found

    def flops_per_token(self) -> int:
        """Return the operations of forward and backward: 6 N + 12 L C T (Chowdhery et al. 2022, appendix B).

        They are of matrix products alone, less the gradients of frozen weights. 0 where not every token meets every
        weight.
        """
        config = self.config.get_text_config()
        if is_mixture_of_experts(config):
            return 0
        looked_up, head = {*self.get_input_embeddings().parameters()}, _head_of(self)
        multiplied = {*head.parameters()} if head is not None else set()
        parameters = [p for p in self.parameters() if p in multiplied or p not in looked_up]
        weights = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        attention = 12 * int(config.num_hidden_layers) * int(config.hidden_size) * self.row_length
        return 4 * weights + 2 * trained + attention


class SummedHead(Module):
    """A ``forward`` in front of a linear head's own: sharded weights are gathered only where their module is called."""

    own_class: ClassVar[type]

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        softcap: float | None = None,
        trained: Tensor | None = None,
        each: bool = False,
    ) -> Tensor:
        """Return the summed nll of ``hidden`` [B, T, C] for ``targets`` [B, T] (shifted); without them, logits."""
        weight, bias = linear_parts(self)
        assert weight is not None
        if targets is not None:
            return linear_nll(hidden, weight, targets, bias, softcap, trained, each)
        logits: Tensor = (
            linear_logits(hidden, weight, bias)
            if isinstance(weight, DTensor)
            else super().forward(hidden)
        )
        return logits


def summed(
    model: "PreTrainedModel", row_length: int, loss: type[SummedLoss] = SummedLoss
) -> SummedLoss:
    """Give a model of a Hugging Face causal LM class, and its head, the ``forward`` of a ``loss``, in place.

    :func:`probe` has to follow, once its weights are there.
    """
    model.__class__ = _in_front(loss, model)
    model = cast(SummedLoss, model)
    model.row_length, model.vocabulary = (
        row_length,
        len(cast(nn.Embedding, model.get_input_embeddings()).weight),
    )
    head = _head_of(model)
    if head is not None and linear_parts(head)[0] is not None:
        head.__class__ = _in_front(SummedHead, head)
    return model


def arguments_of(
    model: SummedLoss, ids: Tensor, positions: Tensor | None, documents: Documents | None
) -> dict[str, object]:
    """Return what a model's own ``forward`` is called with, on whole rows: without a cache."""
    if documents is None and positions is not None:
        documents = Documents.of(positions.cpu(), ids.is_cuda).to(ids.device)
    arguments: dict[str, object] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    kind = model.config._attn_implementation or ""
    if (
        kind == NAME
    ):  # a mask of four dimensions, without memory, keeps transformers from looking for documents
        sees_all = torch.ones((), dtype=torch.bool, device=ids.device)
        arguments["attention_mask"] = sees_all.expand(len(ids), 1, ids.shape[1], ids.shape[1])
        device = ids.device.type
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
        )
        arguments["documents"] = (documents or Documents()).ready_for(dtype)
    elif kind.startswith("flash") and documents is not None:  # which wants rows laid end to end
        assert positions is not None
        borders = {f"cu_seq_lens_{one}": documents.borders for one in "qk"}
        longest = {f"max_length_{one}": ids.shape[1] for one in "qk"}
        arguments |= {
            "input_ids": ids.reshape(1, -1),
            "position_ids": positions.reshape(1, -1),
            **borders,
            **longest,
        }
    return arguments


def _in_front(mixin: type, module: nn.Module) -> type:
    kind = type(module)
    return type(kind.__name__, (mixin, kind), {"own_class": kind})


def _head_of(model: "PreTrainedModel") -> nn.Module | None:
    return cast("nn.Module | None", model.get_output_embeddings())  # type: ignore[no-untyped-call]


def probe(model: SummedLoss) -> None:
    """Find out how the head of a :func:`summed` model, which has its weights, computes.

    Raises :class:`UserError` where earlier tokens see later ones: it is no causal LM.
    """
    with trying(model):
        _choose_attention(model)
        model.balance = _balance_of(model)
        model.head_is_linear = _head_is_linear(model)
        ids, other = tokens_of(model, 2, _probe_length(model)).chunk(2)
        other = torch.cat([ids[:, :-1], other[:, -1:]], dim=1)
        if differ(_logits(model, ids)[:, :-1], _logits(model, other)[:, :-1]):
            kind = model.own_class.__name__
            raise UserError(
                f"{kind} lets tokens see the ones that follow: it is no causal language model."
            )


def _choose_attention(model: SummedLoss) -> None:
    """Give a model the attention of this package, where that computes what transformers' own does."""
    config, own = model.config, model.config._attn_implementation
    chunk = getattr(config.get_text_config(), "attention_chunk_size", None)
    if own != "sdpa" or (chunk or model.row_length) < model.row_length:
        return
    if smallest_window(model) and not model.shares_prompts:
        return
    register()
    rows = _packed(model)
    try:
        expected = [_logits(model, rows.ids), _logits(model, rows.ids, rows.positions)]
        config._attn_implementation = NAME
        found = [_logits(model, rows.ids), _logits(model, rows.ids, rows.positions)]
        if not any(map(differ, found, expected)):
            return
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ):  # it takes no position_ids, or does not hand on what it is given
        pass
    config._attn_implementation = own


def smallest_window(model: SummedLoss) -> int | None:
    """Return the positions that a sliding window lets see, where that is less than a row may have."""
    window: int | None = getattr(model.config.get_text_config(), "sliding_window", None)
    return window if window and window < model.row_length else None


def _longest_span(model: SummedLoss) -> int | None:
    """Return the longest sliding window or attention chunk, if a row may be longer."""
    chunk: int | None = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    spans = [smallest_window(model), chunk]
    return max((span for span in spans if span and span < _most_positions(model)), default=None)


def _balance_of(model: SummedLoss) -> float:
    """Return the weight of the balancing loss in the model's configuration; 0 where its class has none."""
    weight = balance_weight(model.config)
    its_own = hasattr(sys.modules[model.own_class.__module__], "load_balancing_loss_func")
    if not weight or not its_own or model.base_model is model:
        return 0.0
    with router_logits_of(model.base_model, True) as found:
        _logits(model, tokens_of(model, 1, _probe_length(model)))
    return weight if found else 0.0


def balance_weight(config: "PreTrainedConfig") -> float:
    """Return the weight of a balancing loss that a configuration names; 0 of a model that has no experts."""
    settings = config.get_text_config()
    return (
        float(getattr(settings, "router_aux_loss_coef", None) or 0)
        if is_mixture_of_experts(settings)
        else 0.0
    )


def is_mixture_of_experts(config: "PreTrainedConfig") -> bool:
    """Return whether a model has several experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


def softcap_of(model: "PreTrainedModel") -> float | None:
    """Return the softcap of the logits, where a model has one."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def linear_parts(head: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return weight [V, C] and bias [V] of a linear head, with the rows that peft trains beside it in place.

    ``None`` of any other head.
    """
    if getattr(head, "own_class", type(head)) is nn.Linear:
        linear = cast(nn.Linear, head)
        return linear.weight, linear.bias
    rows = getattr(head, "token_adapter", None)  # of peft's wrapper
    if type(plain := getattr(head, "original_module", None)) is nn.Linear and rows is not None:
        weight: Tensor = rows.get_merged_weights(head.active_adapters)
        return weight, plain.bias
    return None, None


def leaks(model: SummedLoss) -> bool:
    """Return whether the second of two documents in a packed row changes when the first does.

    Several rows are tried at once, with the border at different places, because some attention
    looks for borders in a single row only. A model with a sliding window or attention chunks is
    also tried on rows that are longer than these.
    """
    with trying(model):
        try:
            # Ranks that share a model make every pass together, so none may stop at its first leak.
            verdicts = [_second_changes_with_first(model, rows) for rows in _packed_probes(model)]
        except TypeError:  # the class takes no position_ids
            return True
    return any(verdicts)


def _packed_probes(model: SummedLoss) -> Iterator["PackedRows"]:
    """Yield rows of two documents: short ones, and ones that leave the longest attention span."""
    yield _packed(model)

    span = _longest_span(model)
    if span is None or span < _probe_length(model):
        return
    length = min(span + 16, _most_positions(model))
    past_the_span = (span + length) // 2
    within_the_span = 8
    yield _packed_rows(model, length, borders=(past_the_span, within_the_span))


def _second_changes_with_first(model: SummedLoss, rows: "PackedRows") -> bool:
    """Return whether logits of the second documents depend on the first ones."""
    change, is_beyond_rounding = _change_in_second(model, rows, rows.positions)

    # The rounding of bfloat16 can hide a leak, but not one that is about as large as the change
    # without positions, which make the two documents one.
    change_if_unpacked, _ = _change_in_second(model, rows, positions=None)
    return is_beyond_rounding or bool(change > change_if_unpacked / 2)


def _change_in_second(
    model: SummedLoss, rows: "PackedRows", positions: Tensor | None
) -> tuple[Tensor, bool]:
    """Return how far logits of the second documents move with the first, and if beyond rounding."""
    logits = _logits(model, rows.ids, positions)[rows.is_compared]
    logits_if_changed = _logits(model, rows.changed_ids, positions)[rows.is_compared]
    change = (logits - logits_if_changed).abs().max()
    return change, differ(logits, logits_if_changed)


def _head_is_linear(model: SummedLoss) -> bool:
    """Return whether logits are the head's output for the last hidden states, softcapped as the configuration says.

    The head is made to return numbers from -100 to 100, which no scale and no cap leaves as they are.
    """
    head, base = _head_of(model), model.base_model
    if not isinstance(head, SummedHead) or base is model:
        return False
    made, taken = list[Tensor](), list[Tensor]()

    def loud(like: Tensor) -> Tensor:
        return torch.linspace(
            -100, 100, like.shape[-1], device=like.device, dtype=like.dtype
        ).expand_as(like)

    def replace_output(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        taken.append(inputs[0])
        return loud(output)

    keep = base.register_forward_hook(lambda _, __, output: made.append(output.last_hidden_state))
    with keep, head.register_forward_hook(replace_output):
        own = _logits(model, tokens_of(model, 1, _probe_length(model)))
    expected, cap = loud(own), softcap_of(model)
    if cap:
        expected = cap * torch.tanh(expected / cap)
    alone = len(made) == len(taken) == 1 and torch.equal(taken[0], made[0])
    return alone and torch.allclose(own, expected, rtol=1e-2)


@contextlib.contextmanager
def trying(model: SummedLoss) -> Iterator[None]:
    """Without dropout, gradients or autocast, whose rounding would hide what is looked for."""
    training, precision = model.training, torch.get_float32_matmul_precision()
    model.train(False)
    try:
        flash = (model.config._attn_implementation or "").startswith(
            "flash"
        )  # which refuses float32
        torch.set_float32_matmul_precision("highest")
        with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=flash):
            yield
    except (RuntimeError, IndexError, ValueError, AttributeError) as error:
        raise UserError(
            f"{model.own_class.__name__} cannot be trained here: {first_line(error)}"
        ) from None
    finally:
        torch.set_float32_matmul_precision(precision)
        reshard(model)
        model.train(training)


def _logits(model: SummedLoss, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return logits [B, T, V] as training computes them."""
    return model.told(arguments_of(model, ids, positions, None)).view(*ids.shape, -1)


class PackedRows(NamedTuple):
    """Rows [B, T] of two documents, to try a model on."""

    ids: Tensor
    changed_ids: Tensor  # with other tokens in the first document
    positions: Tensor  # restart at the second document
    is_second: Tensor  # bool
    is_compared: Tensor  # bool: the second document's positions that are near its ends


_COMPARED = (
    16  # positions at each end of a document: all logits of a long row would fill the memory
)


def _packed(model: SummedLoss) -> PackedRows:
    """Return two short rows of two documents each, with the border in the middle or before it."""
    half = max(_probe_length(model) // 2, 1)
    return _packed_rows(model, 2 * half, borders=(half, max(half - 1, 1)))


def _packed_rows(model: SummedLoss, length: int, borders: tuple[int, ...]) -> PackedRows:
    """Return a row of two documents for each border, at which the second begins."""
    ids, other_ids = tokens_of(model, 2 * len(borders), length).chunk(2)
    starts = torch.tensor(borders, device=ids.device)[:, None]
    row_positions = torch.arange(length, device=ids.device)[None]
    is_second = row_positions >= starts
    is_near_an_end = (row_positions < starts + _COMPARED) | (row_positions >= length - _COMPARED)
    return PackedRows(
        ids=ids,
        changed_ids=torch.where(is_second, ids, other_ids),
        positions=torch.where(is_second, row_positions - starts, row_positions),
        is_second=is_second,
        is_compared=is_second & is_near_an_end,
    )


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two results differ by more than rounding.

    A mixture of experts rounds in other groups where other tokens are beside. A leak moves logits by a tenth and more
    of their size.
    """
    limit = max(
        torch.finfo(one.dtype).eps ** 0.5 / 4, 1e-4
    )  # of the largest: 1e-4 in float32, 0.02 in bfloat16
    return bool((one - other).abs().max() > limit * other.abs().max())


def _probe_length(model: SummedLoss) -> int:
    return min(16, _most_positions(model))


def _most_positions(model: SummedLoss) -> int:
    """Return the length of the longest row that the model is trained on."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(positions or model.row_length, model.row_length)


def tokens_of(model: SummedLoss, rows: int, length: int) -> Tensor:
    """Return different tokens, int64 [rows, length]."""
    return ((torch.arange(rows * length, device=model.device) * 7 + 1) % model.vocabulary).view(
        rows, length
    )
