"""What a model can do now: its eval loss, the losses of single rows, and texts that it writes."""

import bisect
import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Batch, Facts, Forward, MeasuresItself, Metric, Window
from llmtrain.errors import UserError
from llmtrain.models.generation import Sampling, draw
from llmtrain.models.loss import count_targets
from llmtrain.parallel.mesh import gather_rows, model_parallel_size, reshard
from llmtrain.training.step import plain_of, survey

_ROW_TOKENS = 64  # tokens of a row that `row_losses` returns
_LOSS = ""  # the name under which the loss is summed; it sorts before all others


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    windows: Iterable[Window],
    text_bytes: int,
    forward: Forward | None = None,
    metric: Metric | None = None,
    sources: Mapping[str, int] | None = None,
    load: Batch | None = None,
) -> dict[str, float]:
    """Return the eval loss over all ranks, and the metrics that follow from it.

    The loss is the mean negative log-likelihood in nats per target token. Every token counts once,
    whatever the layout. A model that measures itself has the mean of its own loss instead, and
    metrics of its own.

    Args:
        text_bytes: UTF-8 bytes of the text. Bits per byte are the summed loss, in bits, divided by
            them, so that models with different tokenizers can be compared.
        forward: computes the summed loss of a micro-batch, if that is not the model's ``forward``.
        metric: returns sums of a micro-batch by name, and what they are divided by. The metric
            ``eval/NAME`` is the first by the second, each summed over all micro-batches.
        sources: the number of rows of each source, in the order of the rows. The metric
            ``eval/loss/SOURCE`` is the loss of one. No window has rows of two sources.
        load: what ``forward`` takes beside each micro-batch.

    Raises:
        UserError: the names of a metric differ between micro-batches.
    """
    source_rows = sources or {}
    plain = plain_of(model)
    self_measuring = plain if isinstance(plain, MeasuresItself) else None

    model.eval()
    if self_measuring is not None:
        self_measuring.measured()  # drop the sums of earlier passes

    # Sums stay on the device: reading each would wait for it.
    sums: dict[str, torch.Tensor] = {}
    for window in windows:
        source = _source_of(window, source_rows)
        for batch in window.batches:
            of_metric = metric(plain, batch) if metric is not None else {}
            if self_measuring is None:
                units = count_targets(batch["labels"])
            else:
                units = self_measuring.units(batch)
            loss = (forward or model)(**batch, **(load or {}))

            pairs = {_LOSS: (loss, units)}
            for name in source_rows:
                nothing = (units.new_zeros(()), units.new_zeros(()))
                pairs[f"loss/{name}"] = (loss, units) if name == source else nothing
            _add(accelerator, sums, pairs | of_metric)
    reshard(model)
    model.train()

    measured = None if self_measuring is None else self_measuring.measured()
    ratios, measured_sums = _reduced(accelerator, sums, measured)
    nll, tokens = ratios.pop(_LOSS)
    loss_mean = nll / max(tokens, 1)

    if self_measuring is None:
        metrics = {
            "perplexity": math.exp(min(loss_mean, 700.0)),
            "bits_per_byte": nll / math.log(2) / max(text_bytes, 1),
        }
    else:
        metrics = self_measuring.readings(measured_sums)
    for name, (total, count) in ratios.items():
        metrics[name] = total / (count or 1)
    return {"eval/loss": loss_mean, **{f"eval/{name}": value for name, value in metrics.items()}}


def _source_of(window: Window, source_rows: Mapping[str, int]) -> str | None:
    """Return the source that the rows of a window are from; ``None`` if there are no sources."""
    if not source_rows:
        return None
    ends = list(itertools.accumulate(source_rows.values()))
    last_row = int(window.rows.max())
    return list(source_rows)[bisect.bisect_right(ends, last_row)]


def _add(
    accelerator: Accelerator,
    sums: dict[str, torch.Tensor],
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Add the pairs of a micro-batch to the sums, float64 [2] by name, in place."""
    if sums and sums.keys() != pairs.keys():
        raise UserError(
            "a metric must have the same names for every batch, "
            f"not {sorted(sums)} and {sorted(pairs)}."
        )

    device = _float64_device(accelerator)
    for name, pair in pairs.items():
        numbers = [torch.as_tensor(number, dtype=torch.float64, device=device) for number in pair]
        values = torch.stack(numbers)
        sums[name] = sums[name] + values if name in sums else values


def _reduced(
    accelerator: Accelerator, sums: Mapping[str, torch.Tensor], measured: torch.Tensor | None
) -> tuple[dict[str, tuple[float, float]], list[float]]:
    """Return the pairs by name, and what the model measured, summed over all ranks."""
    names = sorted(sums)
    parts = [sums[name] for name in names]
    if measured is not None:
        parts.append(measured.to(_float64_device(accelerator), torch.float64))
    total = torch.cat(parts)
    if accelerator.num_processes > 1:
        total = accelerator.reduce(total, reduction="sum") / model_parallel_size(accelerator)

    numbers = total.tolist()
    pairs = {name: (numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(names)}
    return pairs, numbers[2 * len(names) :]


def _float64_device(accelerator: Accelerator) -> torch.device:
    """Return the device that sums in float64, which MPS does not have."""
    device: torch.device = accelerator.device
    return torch.device("cpu") if device.type == "mps" else device


@torch.no_grad()
def row_losses(
    accelerator: Accelerator, model: nn.Module, window: Window, forward: Forward | None = None
) -> list[Facts]:
    """Return each row of the global batch with its loss, before the step is made.

    All ranks call this. It draws no random numbers that the step would have drawn.

    Returns:
        A dictionary for each row: ``row``, ``targets`` (the number of target tokens), ``loss``
        (their mean in nats, or the mean over what the model counts) and ``tokens`` (the first).
    """
    plain = plain_of(model)
    self_measuring = plain if isinstance(plain, MeasuresItself) else None
    load: Batch = {}
    if self_measuring is not None:
        load, _ = survey(accelerator, model, window.batches, window.targets.sum())

    rows = [
        {name: column[i : i + 1] for name, column in window.columns.items()}
        for i in range(len(window.rows))
    ]
    with _same_random_numbers(accelerator):
        losses = [(forward or plain)(**row, **load).float().reshape(()) for row in rows]
    units = window.targets
    if self_measuring is not None:
        units = torch.stack([self_measuring.units(row) for row in rows])

    first_tokens = window.columns["input_ids"][:, :_ROW_TOKENS].contiguous()
    columns = (window.rows, window.targets, units, torch.stack(losses), first_tokens)
    of_all_ranks = [gather_rows(accelerator, column).tolist() for column in columns]
    return [
        {"row": row, "targets": targets, "loss": loss / max(count, 1), "tokens": tokens}
        for row, targets, count, loss, tokens in zip(*of_all_ranks, strict=True)
        if row >= 0
    ]


def _same_random_numbers(accelerator: Accelerator) -> contextlib.AbstractContextManager[None]:
    """Return a context after which the generators are as they were before."""
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    return torch.random.fork_rng(devices)


@torch.no_grad()
def sample(
    accelerator: Accelerator, model: nn.Module, tokenizer: Any, prompts: list[str], how: Sampling
) -> list[str]:
    """Generate a continuation of each prompt, or an answer if there is a chat template.

    All ranks call this and compute the same, because none may hold the full model. Torch's own
    generators stay as they are.
    """
    plain = plain_of(model)
    was_training = plain.training
    plain.eval()
    texts = []
    for prompt in prompts:
        ids = _ids_of(tokenizer, prompt)
        texts.append(_continued(plain, tokenizer, ids, how, accelerator.device))
    reshard(model)
    plain.train(was_training)
    return texts


def _ids_of(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt; at least one, to begin with."""
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if ids:
        return ids
    if tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    return [tokenizer.eos_token_id]


def _continued(
    plain: Any, tokenizer: Any, ids: list[int], how: Sampling, device: torch.device
) -> str:
    """Return the text that follows the tokens ``ids``, up to the end token."""
    most_positions = _most_positions(plain)
    generator = torch.Generator().manual_seed(how.seed)
    new_ids: list[int] = []
    # All ranks make the same number of passes, because they communicate in each.
    for _ in range(how.max_new_tokens):
        visible = [*ids, *new_ids][-most_positions:]
        output = plain(input_ids=torch.tensor([visible], device=device))
        logits = getattr(output, "logits", output)[0, -1].float().cpu()
        new_ids.append(draw(logits, how, generator))

    if tokenizer.eos_token_id in new_ids:
        new_ids = new_ids[: new_ids.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(new_ids, skip_special_tokens=True))


def _most_positions(model: Any) -> int:
    """Return the number of positions that a model can see, as its configuration has it."""
    config: Any = getattr(model, "config", None)
    for name in ("block_size", "max_position_embeddings"):
        positions: int | None = getattr(config, name, None)
        if positions:
            return positions
    return 2**31
