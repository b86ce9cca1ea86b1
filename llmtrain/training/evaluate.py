"""The loss on held-out text, every token counted once whatever the layout."""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Batch, Forward, MeasuresItself, Metric, Window
from llmtrain.errors import UserError
from llmtrain.models.loss import count_targets
from llmtrain.parallel.mesh import model_parallel_size, reshard


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

    Of a model that measures itself it is the mean of its own loss, and what else it measures; ``load`` is what its
    ``forward`` takes beside each micro-batch.

    Bits per byte divides the same sum, in bits, by the UTF-8 bytes of the text (``text_bytes``), so that models with
    different tokenizers can be compared. The sums of a ``metric`` are added up alike: ``eval/NAME`` is sum by count.
    With the number of rows of each of several ``sources``, of which no window has two, there is ``eval/loss/SOURCE``.
    """
    sources = sources or {}
    ends = [*itertools.accumulate(sources.values())]
    model.eval()
    plain = accelerator.unwrap_model(model)
    own = plain if isinstance(plain, MeasuresItself) else None
    if own is not None:
        own.measured()  # of passes before
    device = "cpu" if accelerator.device.type == "mps" else accelerator.device  # which has no float64
    sums: dict[str, torch.Tensor] = {}  # by name [2]: a sum, and what it is divided by
    for window in windows:
        for batch in window.batches:
            found = metric(plain, batch) if metric is not None else {}
            units = count_targets(batch["labels"]) if own is None else own.units(batch)
            whole: tuple[torch.Tensor, torch.Tensor] = (forward or model)(**batch, **(load or {})), units
            none = whole[1].new_zeros(())
            here = bisect.bisect_right(ends, int(window.rows.max())) if ends else 0
            of_sources = {f"loss/{name}": whole if i == here else (none, none) for i, name in enumerate(sources)}
            found = {"": whole, **of_sources, **found}
            if sums and sums.keys() != found.keys():
                raise UserError(
                    f"a metric must have the same names for every batch, not {sorted(sums)} and {sorted(found)}."
                )
            for name, pair in found.items():  # added up where they are: to read each would wait for the device
                values = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in pair])
                sums[name] = sums[name] + values if name in sums else values
    reshard(model)
    model.train()
    names = sorted(sums)  # the first of which is the loss's, ""
    measured = own.measured().to(device, torch.float64) if own is not None else None
    total = torch.cat([torch.cat([sums[name] for name in names]), *([] if measured is None else [measured])])
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
    told |= {name: value / (count or 1) for name, (value, count) in zip(names[1:], pairs, strict=False)}
    return {"eval/loss": loss, **{f"eval/{name}": value for name, value in told.items()}}
