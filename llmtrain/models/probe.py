"""Find out how a Hugging Face model computes by trying it, because its class declares little of it.

A model is tried when its weights are in place. If it is sharded, all ranks call these functions.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmtrain.console import say
from llmtrain.errors import UserError, first_line, is_out_of_memory
from llmtrain.interfaces.batches import Batch
from llmtrain.models.attention import ATTENTION_NAME, register
from llmtrain.models.causal_lm import (
    CausalLM,
    own_arguments,
)
from llmtrain.models.documents import Documents
from llmtrain.parallel.shards import reshard

_LENGTH = 16  # of a short row to try a model on
# How many positions at each end of a document are compared. The logits of all positions of a long
# row would fill the memory.
_COMPARED = 16


def check_model(model: CausalLM, is_packed: bool) -> None:
    """Try a model before the first step, and log what might surprise the user.

    Raises:
        UserError: if it is no causal LM, or if rows are packed and their documents would attend to
            each other.
    """
    probe(model)
    if is_packed and leaks(model):
        raise UserError(
            f"{model.own_class.__name__} lets the documents of a packed row see each other; "
            "use --no_packing, or for text leave --isolate_documents out."
        )

    if not model.gives_scores and not model.head_is_linear:
        say(
            "memory",
            "this model's head is more than one matrix product, so all logits of a micro-batch "
            "are in memory at once",
        )


def probe(model: CausalLM) -> None:
    """Choose the model's attention, and find out whether its head is linear.

    Raises:
        UserError: if tokens attend to later tokens, so the model is no causal LM.
    """
    with trying(model):
        model.head_is_linear = model.head_is_linear and _head_is_linear(model)
        _choose_attention(model)

        ids, other_ids = example_tokens(model, 2).chunk(2)
        changed_at_the_end = torch.cat([ids[:, :-1], other_ids[:, -1:]], dim=1)
        logits = probe_output(model, ids)[:, :-1]
        if logits.isnan().any():
            raise UserError(
                f"{model.own_class.__name__} computes NaN for a short row of tokens; its weights "
                "may be damaged."
            )
        if differ(logits, probe_output(model, changed_at_the_end)[:, :-1]):
            raise UserError(
                f"{model.own_class.__name__} lets tokens see the ones that follow, "
                "so it is not a causal LM."
            )


def _choose_attention(model: CausalLM) -> None:
    """Give a model this package's attention, if it computes the same as transformers' own."""
    config = model.config
    stock_attention = config._attn_implementation
    if stock_attention != "sdpa" or _span(model, "attention_chunk_size"):
        return
    if _span(model, "sliding_window") and not model.shares_prompts:
        return  # both need a mask then

    register()
    ids = example_tokens(model, 2)
    indices = torch.arange(ids.shape[1], device=ids.device)
    positions = (indices % max(len(indices) // 2, 1)).expand_as(ids)
    # If it fails, the class takes no position_ids, or does not pass on its arguments.
    with contextlib.suppress(_ForwardError):
        expected = [probe_output(model, ids), probe_output(model, ids, positions)]
        config._attn_implementation = ATTENTION_NAME
        outputs = [probe_output(model, ids), probe_output(model, ids, positions)]
        if not any(map(differ, outputs, expected)):
            return
    config._attn_implementation = stock_attention


def _head_is_linear(model: CausalLM) -> bool:
    """Return whether logits are the head's output for the last hidden states.

    A known softcap may follow. The output of the head is also made a thousand times larger, because
    another cap may change only large numbers.
    """
    ids = example_tokens(model, 1)
    arguments = own_arguments(model, ids, positions=None, documents=None)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    # Ranks that share a model make every pass together.
    verdicts = []
    for scale in (1.0, 1000.0):
        with head.register_forward_hook(lambda _, __, output, scale=scale: output * scale):
            logits_of_head = probe_output(model, ids)
            with _errors_of_forward(model):
                logits = model(ids, compute=lambda model, _: model.own_forward(**arguments).logits)
        has_same_shape = logits.shape == logits_of_head.shape
        verdicts.append(has_same_shape and not differ(logits, logits_of_head))
    return all(verdicts)


def leaks(model: CausalLM) -> bool:
    """Return whether the outputs of a document depend on another document in its packed row.

    Several rows are tried at once, with the border at different places, because some attention
    looks for borders only in batches of one row. A model with a sliding window or attention chunks
    is also tried on rows that are longer than these.
    """
    short = min(_LENGTH, model.row_length)
    half = max(short // 2, 1)
    trials = {short: (half, max(half - 1, 1))}
    span = max(_span(model, "sliding_window"), _span(model, "attention_chunk_size"))
    if span >= short:
        length = min(span + 16, model.row_length)
        trials[length] = ((span + length) // 2, 8)

    with trying(model):
        try:
            # Ranks that share a model make every pass together, so none may stop at its first leak.
            verdicts = [_leaks_in_rows(model, *trial) for trial in trials.items()]
        except _ForwardError as error:
            if isinstance(error.__cause__, TypeError):  # the class takes no position_ids
                return True
            raise
    return any(verdicts)


def _leaks_in_rows(model: CausalLM, length: int, borders: tuple[int, ...]) -> bool:
    """Return whether logits of second documents depend on the first documents of their rows.

    Args:
        model: the model.
        length: of the rows.
        borders: the position at which the second document of each row begins.
    """
    ids, other_ids = example_tokens(model, 2 * len(borders), length).chunk(2)
    starts = torch.tensor(borders, device=ids.device)[:, None]
    indices = torch.arange(length, device=ids.device)
    is_second = indices >= starts
    positions = torch.where(is_second, indices - starts, indices)
    changed_ids = torch.where(is_second, ids, other_ids)
    is_compared = is_second & ((positions < _COMPARED) | (indices >= length - _COMPARED))

    logits = probe_output(model, ids, positions)[is_compared]
    changed_logits = probe_output(model, changed_ids, positions)[is_compared]
    if_unpacked = probe_output(model, ids)[is_compared]
    changed_if_unpacked = probe_output(model, changed_ids)[is_compared]

    # The rounding of bfloat16 can hide a leak. But without positions the two documents are one, and
    # a leak is about as large as the change in that case.
    change = (logits - changed_logits).abs().max()
    change_if_unpacked = (if_unpacked - changed_if_unpacked).abs().max()
    return differ(logits, changed_logits) or bool(change > change_if_unpacked / 2)


def shares_prompts(model: CausalLM) -> bool:
    """Return whether two answers that share a prompt get the same outputs as in two rows.

    Only this package's attention can keep the answers apart.
    """
    prompt = min(model.row_length, _span(model, "sliding_window") + 8) - 5
    ids = example_tokens(model, 1, prompt + 8)[0]
    first = ids[: prompt + 4]
    second = torch.cat([ids[:prompt], ids[prompt + 4 :]])

    # One row: the prompt and both answers. The second begins with the last token of the prompt.
    row = torch.cat([first, second[prompt - 1 :]])[None]
    positions = torch.cat([torch.arange(prompt + 4), torch.arange(prompt - 1, prompt + 4)])[None]
    answers = (torch.arange(row.shape[1]) >= prompt + 4).long()[None]
    documents = Documents.of(positions, row.is_cuda, answers).to(row.device)

    with trying(model):
        shared = probe_output(model, row, positions.to(row.device), documents)[0, prompt - 1 :]
        # Two rows: each answer with its own copy of the prompt.
        separate = [probe_output(model, ids[None])[0, prompt - 1 :] for ids in (first, second)]
    is_correct = not differ(shared, torch.cat(separate))
    return is_correct and model.config._attn_implementation == ATTENTION_NAME


# --- rows to try a model on


def example_tokens(model: CausalLM, rows: int, length: int | None = None) -> Tensor:
    """Return different tokens, int64 [rows, length], as far as the vocabulary has so many.

    The default is a short row.
    """
    if length is None:
        length = min(_LENGTH, model.row_length)
    vocabulary: int = model.config.get_text_config().vocab_size
    # A prime, because with a divisor of the vocabulary fewer tokens would occur.
    numbers = 7919 * torch.arange(rows * length, device=model.device) + 1
    return (numbers % vocabulary).view(rows, length)


def _span(model: CausalLM, name: str) -> int:
    """Return the size of the model's sliding window or chunks; 0 if no row is longer."""
    span: int = getattr(model.config.get_text_config(), name, None) or 0
    return span if span < model.row_length else 0


# --- trying a model


@contextlib.contextmanager
def trying(model: CausalLM) -> Iterator[None]:
    """Turn off autocast, dropout and gradients in the block, to try a model.

    The rounding of autocast would hide differences.

    A model that is bfloat16 in parts keeps it, because its modules have inputs of both dtypes.
    torch's generators are left as they were.
    """
    was_training = model.training
    matmul_precision = torch.get_float32_matmul_precision()
    device = model.device
    # The frozen base of an adapter may have modules beside it that are trained in float32. Flash
    # attention takes half precision only.
    uses_bfloat16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    uses_bfloat16 |= (model.config._attn_implementation or "").startswith("flash")
    model.train(False)
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=uses_bfloat16),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul_precision)
        reshard(model)
        model.train(was_training)


class _ForwardError(UserError):
    """The forward pass of a model has raised an error, which is the cause of this one."""


@contextlib.contextmanager
def _errors_of_forward(model: CausalLM) -> Iterator[None]:
    """Raise :class:`_ForwardError` if the model cannot compute, but not if the memory is full."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError, AttributeError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise _ForwardError(
            f"{model.own_class.__name__} cannot be trained here: {first_line(error)}"
        ) from error


def probe_output(
    model: CausalLM,
    ids: Tensor,
    positions: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Return the logits [B, T, V] of rows [B, T], as training computes them.

    A reward model returns its last hidden states and the scores of all tokens instead, in the
    precision in which they were computed.

    Raises:
        UserError: if the model raises an error.
    """
    arguments = own_arguments(model, ids, positions, documents)

    def compute(model: CausalLM, _: Batch) -> Tensor:
        if not model.gives_scores and not model.head_is_linear:
            logits: Tensor = model.own_forward(**arguments).logits
            return logits

        hidden = model.base_model(**arguments).last_hidden_state
        if model.gives_scores:
            scores = model.get_submodule("score")(hidden)
            return torch.cat([hidden.to(scores.dtype), scores], dim=-1)
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return model.softcapped(head(hidden))

    with _errors_of_forward(model):
        output: Tensor = model(arguments["input_ids"], compute=compute)
    return output.view(*ids.shape, -1)


def differ(output: Tensor, expected: Tensor) -> bool:
    """Return whether two results differ by more than rounding.

    The limit is a share of the largest number: 1e-4 in float32, 0.02 in bfloat16. A leak moves
    logits by a tenth of their size or more. The limit is not lower, because a mixture of experts
    rounds differently when other tokens are in the batch. NaN differs from everything.
    """
    epsilon = max(torch.finfo(output.dtype).eps, torch.finfo(expected.dtype).eps)
    limit = max(epsilon**0.5 / 4, 1e-4)
    largest = expected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
    # A model may mask logits with -inf, whose difference would be NaN.
    difference = torch.where(output == expected, 0.0, (output - expected).abs()).max()
    return not bool(difference <= limit * largest)
