"""A look at a model as it stands: its loss on held-out text and on single rows, and texts that it writes."""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Batch, Facts, Forward, MeasuresItself, Metric, Window
from llmtrain.errors import require
from llmtrain.models.generation import Sampling, draw
from llmtrain.models.loss import count_targets
from llmtrain.parallel.mesh import gather_rows, model_parallel_size, reshard
from llmtrain.training.step import plain_of, survey

_ROW_TOKENS = 64  # of a row that are shown


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
    """Return the mean negative log-likelihood in nats per token over all ranks, and what follows from it.

    Every token is counted once, whatever the layout.
    Of a model that measures itself it is the mean of its own loss, and what else it measures; ``load`` is what its
    ``forward`` takes beside each micro-batch.

    Bits per byte divides the same sum, in bits, by the UTF-8 bytes of the text (``text_bytes``), so that models with
    different tokenizers can be compared. The sums of a ``metric`` are added up alike: ``eval/NAME`` is sum by count.
    With the number of rows of each of several ``sources``, of which no window has two, there is ``eval/loss/SOURCE``.
    """
    sources = sources or {}
    ends = [*itertools.accumulate(sources.values())]
    model.eval()
    plain = plain_of(model)
    own = plain if isinstance(plain, MeasuresItself) else None
    if own is not None:
        own.measured()  # of passes before
    device = (
        "cpu" if accelerator.device.type == "mps" else accelerator.device
    )  # which has no float64
    sums: dict[str, torch.Tensor] = {}  # by name [2]: a sum, and what it is divided by
    for window in windows:
        for batch in window.batches:
            found = metric(plain, batch) if metric is not None else {}
            units = count_targets(batch["labels"]) if own is None else own.units(batch)
            whole: tuple[torch.Tensor, torch.Tensor] = (
                (forward or model)(**batch, **(load or {})),
                units,
            )
            none = whole[1].new_zeros(())
            here = bisect.bisect_right(ends, int(window.rows.max())) if ends else 0
            of_sources = {
                f"loss/{name}": whole if i == here else (none, none)
                for i, name in enumerate(sources)
            }
            found = {"": whole, **of_sources, **found}
            same = not sums or sums.keys() == found.keys()
            require(
                same,
                f"a metric must have the same names for every batch, not {sorted(sums)} and {sorted(found)}.",
            )
            for (
                name,
                pair,
            ) in found.items():  # added up where they are: to read each would wait for the device
                values = torch.stack(
                    [torch.as_tensor(number, dtype=torch.float64, device=device) for number in pair]
                )
                sums[name] = sums[name] + values if name in sums else values
    reshard(model)
    model.train()
    names = sorted(sums)  # the first of which is the loss's, ""
    measured = own.measured().to(device, torch.float64) if own is not None else None
    total = torch.cat(
        [torch.cat([sums[name] for name in names]), *([] if measured is None else [measured])]
    )
    if accelerator.num_processes > 1:
        total = accelerator.reduce(total, reduction="sum") / model_parallel_size(accelerator)
    nll, tokens, *others = total.tolist()
    loss, pairs = nll / max(tokens, 1), zip(others[::2], others[1::2], strict=False)
    told = {
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nll / math.log(2) / max(text_bytes, 1),
    }
    if own is not None:
        told = own.readings(others[2 * len(names) - 2 :])
    told |= {
        name: value / (count or 1) for name, (value, count) in zip(names[1:], pairs, strict=False)
    }
    return {"eval/loss": loss, **{f"eval/{name}": value for name, value in told.items()}}


@torch.no_grad()
def row_losses(
    accelerator: Accelerator, model: nn.Module, window: Window, forward: Forward | None = None
) -> list[Facts]:
    """Return each row of the global batch with its loss, as the model stands before the update.

    Keys are ``row``, ``targets`` (trained tokens), ``loss`` (their mean, nats; or that over what the model counts) and
    ``tokens`` (the first). All ranks call this. It draws no random numbers that the update would have drawn.
    """
    plain = plain_of(model)
    own = plain if isinstance(plain, MeasuresItself) else None
    load = (
        survey(accelerator, model, window.batches, window.targets.sum())[0]
        if own is not None
        else {}
    )
    alone = [
        {name: one[i : i + 1] for name, one in window.columns.items()}
        for i in range(len(window.rows))
    ]
    with torch.random.fork_rng([accelerator.device] if accelerator.device.type == "cuda" else []):
        sums = torch.stack([(forward or plain)(**row, **load).float().reshape(()) for row in alone])
    units = window.targets if own is None else torch.stack([own.units(row) for row in alone])
    ids = window.columns["input_ids"][:, :_ROW_TOKENS].contiguous()
    columns = [
        gather_rows(accelerator, column).tolist()
        for column in (window.rows, window.targets, units, sums, ids)
    ]
    return [
        {"row": row, "targets": targets, "loss": nll / max(count, 1), "tokens": tokens}
        for row, targets, count, nll, tokens in zip(*columns, strict=True)
        if row >= 0
    ]


@torch.no_grad()
def sample(
    accelerator: Accelerator, model: nn.Module, tokenizer: Any, prompts: list[str], how: Sampling
) -> list[str]:
    """Return how the model, as it stands, goes on from each prompt, or answers it where there is a chat template.

    All ranks call this and compute the same, for none may hold the full model. Torch's own generators stay as they are.
    """
    plain = plain_of(model)
    was_training = plain.training
    plain.eval()
    texts = [
        _continued(plain, tokenizer, _ids_of(tokenizer, prompt), how, accelerator.device)
        for prompt in prompts
    ]
    reshard(model)
    plain.train(was_training)
    return texts


def _ids_of(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return ids or [
        tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ]


def _continued(
    plain: Any, tokenizer: Any, ids: list[int], how: Sampling, device: torch.device
) -> str:
    config: Any = getattr(plain, "config", None)
    limit = (
        getattr(config, "block_size", None)
        or getattr(config, "max_position_embeddings", None)
        or 2**31
    )
    generator = torch.Generator().manual_seed(how.seed)
    made: list[int] = []
    for _ in range(how.max_new_tokens):  # always as many: processes meet in each of these passes
        out = plain(input_ids=torch.tensor([[*ids, *made][-limit:]], device=device))
        made.append(draw(getattr(out, "logits", out)[0, -1].float().cpu(), how, generator))
    text = made[: made.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in made else made
    return str(tokenizer.decode(text, skip_special_tokens=True))
