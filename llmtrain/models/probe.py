"""Find out how a Hugging Face model computes by trying it, because its class declares little of it.

A model is tried when its weights are in place. If it is sharded, all ranks call these functions.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmtrain.errors import UserError, first_line, is_out_of_memory
from llmtrain.interfaces.batches import Batch
from llmtrain.models.attention import ATTENTION_NAME, register
from llmtrain.models.causal_lm import (
    CausalLM,
    LossHead,
    head_of,
    own_arguments,
    sliding_window,
    softcap_of,
)
from llmtrain.models.documents import Documents
from llmtrain.models.experts import is_mixture_of_experts
from llmtrain.models.text_tower import outermost_modules
from llmtrain.parallel.blocks import blocks_of, reshard


def probe(model: CausalLM) -> None:
    """Choose the model's attention, and find out whether its head is linear.

    Raises:
        UserError: if tokens attend to later tokens, so the model is no causal LM.
    """
    with trying(model):
        _choose_attention(model)
        model.head_is_linear = _head_is_linear(model)

        ids, other_ids = example_tokens(model, 2, probe_length(model)).chunk(2)
        changed_at_the_end = torch.cat([ids[:, :-1], other_ids[:, -1:]], dim=1)
        logits = probe_output(model, ids)[:, :-1]
        if logits.isnan().any():
            raise UserError(
                f"{model.own_class.__name__} computes NaN for a short row of tokens; its weights "
                "may be damaged."
            )
        if differ(logits, probe_output(model, changed_at_the_end)[:, :-1]):
            raise UserError(
                f"{model.own_class.__name__} lets tokens see the ones that follow: "
                "it is no causal language model."
            )


def _choose_attention(model: CausalLM) -> None:
    """Give a model this package's attention, if it computes the same as transformers' own."""
    config = model.config
    own_attention = config._attn_implementation
    chunk = getattr(config.get_text_config(), "attention_chunk_size", None)
    if own_attention != "sdpa" or (chunk or model.row_length) < model.row_length:
        return
    if sliding_window(model) and not model.shares_prompts:
        return

    register()
    rows = _short_rows(model)
    try:
        expected = [probe_output(model, rows.ids), probe_output(model, rows.ids, rows.positions)]
        config._attn_implementation = ATTENTION_NAME
        outputs = [probe_output(model, rows.ids), probe_output(model, rows.ids, rows.positions)]
        if not any(map(differ, outputs, expected)):
            return
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        # Otherwise the class takes no position_ids, or does not pass on its arguments.
    config._attn_implementation = own_attention


def _head_is_linear(model: CausalLM) -> bool:
    """Return whether logits are the head's output for the last hidden states.

    A known softcap may follow. To find any other operation, the head is made to return numbers from
    -100 to 100, which a further scale or cap would change.
    """
    head = head_of(model)
    base = model.base_model
    if not isinstance(head, LossHead) or base is model:
        return False
    hidden_states: list[Tensor] = []
    head_inputs: list[Tensor] = []

    def large_numbers(like: Tensor) -> Tensor:
        numbers = torch.linspace(-100, 100, like.shape[-1], device=like.device, dtype=like.dtype)
        return numbers.expand_as(like)

    def record_hidden_states(_: nn.Module, __: object, output: Any) -> None:
        hidden_states.append(output.last_hidden_state)

    def replace_output(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(inputs[0])
        return large_numbers(output)

    with (
        base.register_forward_hook(record_hidden_states),
        head.register_forward_hook(replace_output),
    ):
        logits = probe_output(model, example_tokens(model, 1, probe_length(model)))

    expected = large_numbers(logits)
    softcap = softcap_of(model)
    if softcap:
        expected = softcap * torch.tanh(expected / softcap)
    is_called_once = len(hidden_states) == len(head_inputs) == 1
    return (
        is_called_once
        and torch.equal(head_inputs[0], hidden_states[0])
        and torch.allclose(logits, expected, rtol=1e-2)
    )


def leaks(model: CausalLM) -> bool:
    """Return whether the outputs of a document depend on another document in its packed row.

    Several rows are tried at once, with the border at different places, because some attention
    looks for borders only in batches of one row. A model with a sliding window or attention chunks
    is also tried on rows that are longer than these.
    """
    with trying(model):
        try:
            # Ranks that share a model make every pass together, so none may stop at its first leak.
            verdicts = [_second_changes_with_first(model, rows) for rows in _packed_probes(model)]
        except TypeError:  # the class takes no position_ids
            return True
    return any(verdicts)


def _packed_probes(model: CausalLM) -> Iterator["PackedRows"]:
    """Yield rows of two documents: short rows, and rows longer than the longest attention span."""
    yield _short_rows(model)

    span = _longest_span(model)
    if span is None or span < probe_length(model):
        return
    length = min(span + 16, _most_positions(model))
    past_the_span = (span + length) // 2
    within_the_span = 8
    yield _packed_rows(model, length, borders=(past_the_span, within_the_span))


def _second_changes_with_first(model: CausalLM, rows: "PackedRows") -> bool:
    """Return whether logits of the second documents depend on the first ones."""
    change, is_beyond_rounding = _change_in_second(model, rows, rows.positions)

    # The rounding of bfloat16 can hide a leak. But without positions the two documents are one, and
    # a leak is about as large as the change in that case.
    change_if_unpacked, _ = _change_in_second(model, rows, positions=None)
    return is_beyond_rounding or bool(change > change_if_unpacked / 2)


def _change_in_second(
    model: CausalLM, rows: "PackedRows", positions: Tensor | None
) -> tuple[Tensor, bool]:
    """Return how far logits of the second documents move if the first documents change.

    The second result is whether they move by more than rounding.
    """
    logits = probe_output(model, rows.ids, positions)[rows.is_compared]
    logits_if_changed = probe_output(model, rows.changed_ids, positions)[rows.is_compared]
    change = (logits - logits_if_changed).abs().max()
    return change, differ(logits, logits_if_changed)


def shares_prompts(model: CausalLM) -> bool:
    """Return whether two answers that share a prompt get the same outputs as in two rows.

    Only this package's attention can keep the answers apart.
    """
    with trying(model):
        is_correct = _computes_shared_prompts(model)
    return is_correct and model.config._attn_implementation == ATTENTION_NAME


def _computes_shared_prompts(model: CausalLM) -> bool:
    window = sliding_window(model) or 0
    prompt = min(model.row_length, window + 8) - 5
    ids = example_tokens(model, 1, prompt + 8)[0]
    first = ids[: prompt + 4]
    second = torch.cat([ids[:prompt], ids[prompt + 4 :]])

    # One row: the prompt and both answers. The second begins with the last token of the prompt.
    row = torch.cat([first, second[prompt - 1 :]])[None]
    positions = torch.cat([torch.arange(prompt + 4), torch.arange(prompt - 1, prompt + 4)])[None]
    answers = (torch.arange(row.shape[1]) >= prompt + 4).long()[None]
    documents = Documents.of(positions, row.is_cuda, answers).to(row.device)
    arguments = own_arguments(
        model,
        row,
        positions=positions.to(row.device),
        documents=documents,
    )
    shared = output_for(model, arguments)[0]

    # Two rows: each answer with its own copy of the prompt.
    separate = []
    for answer in (first, second):
        arguments = own_arguments(model, answer[None], positions=None, documents=None)
        separate.append(output_for(model, arguments)[0, prompt - 1 :])
    return not differ(shared[prompt - 1 :], torch.cat(separate))


def check_gradients(model: CausalLM) -> None:
    """Check that a forward and a backward pass in training mode reach every trained parameter.

    DDP waits for the gradient of each of them. The gradients of this trial are thrown away.

    Raises:
        UserError: if a trained parameter gets no gradient. An expert may get none, because no token
            of a short row may reach it.
    """
    parameters = dict(model.named_parameters())
    trained = [
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad and not parameter.is_meta
    ]
    with trying(model, in_training=True):
        ids = example_tokens(model, 1, probe_length(model))
        loss = model(ids, compute=_sum_of_scores) if model.gives_scores else model(ids, labels=ids)
        loss.backward()

    unreached = {name for name in trained if parameters[name].grad is None}
    model.zero_grad()
    if is_mixture_of_experts(model.config.get_text_config()):
        unreached -= _parameters_of_listed_experts(model)
    if not unreached:
        return

    modules = outermost_modules(
        [name for name in trained if name in unreached],
        others=[name for name in trained if name not in unreached],
    )
    raise UserError(_without_gradient(model, modules))


def _without_gradient(model: CausalLM, modules: dict[str, list[str]]) -> str:
    """Return the message about modules, with the names of their parameters, without a gradient."""
    names = [*modules]
    if len(names) > 2:
        names = [names[0], f"{len(names) - 1} more modules"]
    parameters = [name for group in modules.values() for name in group]
    count = sum(model.get_parameter(name).numel() for name in parameters)

    if any("lora_" in name for name in parameters):
        remedy = "name other modules with --lora_target_modules"
    else:
        # One pattern for the same module of all layers.
        patterns = {re.sub(r"\b\d+\b", r"\\d+", re.escape(name)): None for name in modules}
        remedy = f"leave them out with --freeze '^({'|'.join(patterns)})(\\.|$)'"
    return (
        f"{model.own_class.__name__}: text gives no gradient to {' and '.join(names)}, whose "
        f"{count:,} parameters would be trained; {remedy}."
    )


def _sum_of_scores(model: CausalLM, batch: Batch) -> Tensor:
    """Return the sum of a reward model's scores of all tokens."""
    scores: Tensor = model.get_submodule("score")(_hidden_states(model, batch))
    return scores.float().sum()


def _parameters_of_listed_experts(model: CausalLM) -> set[str]:
    """Return the names of the parameters of experts that are modules of their own.

    They are in lists inside the blocks. Most classes fuse the weights of all experts instead.
    """
    lists: set[nn.Module] = set()
    for block in blocks_of(model):
        lists |= {module for module in block.modules() if isinstance(module, nn.ModuleList)}
    return {
        f"{list_name}.{name}"
        for list_name, experts in model.named_modules()
        if experts in lists
        for name, _ in experts.named_parameters()
    }


# --- rows to try a model on


class PackedRows(NamedTuple):
    """Rows of two documents, to try a model on. Each tensor is [B, T].

    Attributes:
        ids: tokens.
        changed_ids: tokens that differ in the first document.
        positions: position ids, which restart at the second document.
        is_compared: whether a position is in the second document and near one of its ends.
    """

    ids: Tensor
    changed_ids: Tensor
    positions: Tensor
    is_compared: Tensor


# How many positions at each end of a document are compared. The logits of all positions of a long
# row would fill the memory.
_COMPARED = 16


def _short_rows(model: CausalLM) -> PackedRows:
    """Return two short rows, with the border in the middle and one position before the middle."""
    half = max(probe_length(model) // 2, 1)
    return _packed_rows(model, 2 * half, borders=(half, max(half - 1, 1)))


def _packed_rows(model: CausalLM, length: int, borders: tuple[int, ...]) -> PackedRows:
    """Return a row for each border, which is the position at which its second document begins."""
    ids, other_ids = example_tokens(model, 2 * len(borders), length).chunk(2)
    starts = torch.tensor(borders, device=ids.device)[:, None]
    row_positions = torch.arange(length, device=ids.device)[None]
    is_second = row_positions >= starts
    is_near_an_end = (row_positions < starts + _COMPARED) | (row_positions >= length - _COMPARED)
    return PackedRows(
        ids=ids,
        changed_ids=torch.where(is_second, ids, other_ids),
        positions=torch.where(is_second, row_positions - starts, row_positions),
        is_compared=is_second & is_near_an_end,
    )


def example_tokens(model: CausalLM, rows: int, length: int) -> Tensor:
    """Return different tokens, int64 [rows, length], as far as the vocabulary has so many."""
    # With a common divisor, fewer tokens would occur, and rows could be equal.
    size = model.vocabulary_size
    stride = next(stride for stride in itertools.count(7) if math.gcd(stride, size) == 1)
    numbers = torch.arange(rows * length, device=model.device)
    return ((numbers * stride + 1) % size).view(rows, length)


def probe_length(model: CausalLM) -> int:
    """Return the length of a short row."""
    return min(16, _most_positions(model))


def _longest_span(model: CausalLM) -> int | None:
    """Return the longest sliding window or attention chunk, if a row may be longer."""
    chunk: int | None = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    spans = [sliding_window(model), chunk]
    return max((span for span in spans if span and span < _most_positions(model)), default=None)


def _most_positions(model: CausalLM) -> int:
    """Return the length of the longest row that the model is trained on."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(positions or model.row_length, model.row_length)


# --- trying a model


@contextlib.contextmanager
def trying(model: CausalLM, in_training: bool = False) -> Iterator[None]:
    """Turn off autocast in the block, to try a model. Its rounding would hide differences.

    A model that is bfloat16 in parts keeps it, because its modules have inputs of both dtypes.
    torch's generators are left as they were.

    Args:
        model: the model.
        in_training: try the model in training mode and with gradients. Otherwise dropout and
            gradients are turned off, too.

    Raises:
        UserError: if the model raises an error.
    """
    was_training = model.training
    matmul_precision = torch.get_float32_matmul_precision()
    takes_half_precision_only = (model.config._attn_implementation or "").startswith("flash")
    # The frozen base of an adapter may have modules beside it that are trained in float32.
    is_half_precision = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    devices = [model.device] if model.device.type == "cuda" else []
    model.train(in_training)
    try:
        torch.set_float32_matmul_precision("highest")
        with (
            torch.random.fork_rng(devices),
            torch.set_grad_enabled(in_training),
            torch.autocast(
                model.device.type,
                torch.bfloat16,
                enabled=takes_half_precision_only or is_half_precision,
            ),
        ):
            yield
    except (RuntimeError, IndexError, ValueError, AttributeError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{model.own_class.__name__} cannot be trained here: {first_line(error)}"
        ) from None
    finally:
        torch.set_float32_matmul_precision(matmul_precision)
        reshard(model)
        model.train(was_training)


def probe_output(model: CausalLM, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return logits [B, T, V] as training computes them.

    A reward model returns its last hidden states [B, T, C] instead.
    """
    arguments = own_arguments(model, ids, positions=positions, documents=None)
    return output_for(model, arguments).view(*ids.shape, -1)


def output_for(model: CausalLM, arguments: dict[str, Any]) -> Tensor:
    """Return the logits for arguments of the model's own ``forward``.

    A reward model returns its last hidden states instead.
    """
    if model.gives_scores:
        hidden: Tensor = model(**arguments, compute=_hidden_states)
        return hidden
    logits: Tensor = model(**arguments).logits
    return logits


def _hidden_states(model: CausalLM, batch: Batch) -> Tensor:
    """Return the last hidden states [B, T, C], in the precision in which they were computed."""
    arguments = {name: column for name, column in batch.items() if name != "labels"}
    states: Tensor = model.base_model(**arguments).last_hidden_state
    device = states.device.type
    if torch.is_autocast_enabled(device):
        return states.to(torch.get_autocast_dtype(device))
    return states


def differ(output: Tensor, expected: Tensor) -> bool:
    """Return whether two results differ by more than rounding.

    The limit is a share of the largest number: 1e-4 in float32, 0.02 in bfloat16. A leak moves
    logits by a tenth of their size or more. The limit is not lower, because a mixture of experts
    rounds differently when other tokens are in the batch. NaN differs from everything.
    """
    limit = max(torch.finfo(output.dtype).eps ** 0.5 / 4, 1e-4)
    largest = expected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
    # A model may mask logits with -inf, whose difference would be NaN.
    difference = torch.where(output == expected, 0.0, (output - expected).abs()).max()
    return not bool(difference <= limit * largest)
