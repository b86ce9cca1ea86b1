"""The loss on held-out text, every token counted once whatever the layout."""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Forward, Metric, Window
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
) -> dict[str, float]:
    """Return the mean negative log-likelihood in nats per token over all ranks, and what follows from it.

    Bits per byte divides the same sum, in bits, by the UTF-8 bytes of the text (``text_bytes``), so that models with
    different tokenizers can be compared. The sums of a ``metric`` are added up alike: ``eval/NAME`` is sum by count.
    With the number of rows of each of several ``sources``, of which no window has two, there is ``eval/loss/SOURCE``.
    """
    sources = sources or {}
    ends = [*itertools.accumulate(sources.values())]
    model.eval()
    plain = accelerator.unwrap_model(model)
    device = "cpu" if accelerator.device.type == "mps" else accelerator.device  # which has no float64
    sums: dict[str, torch.Tensor] = {}  # by name [2]: a sum, and what it is divided by
    for window in windows:
        for batch in window.batches:
            found = metric(plain, batch) if metric is not None else {}
            whole: tuple[torch.Tensor, torch.Tensor] = (forward or model)(**batch), count_targets(batch["labels"])
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
    total = torch.stack([sums[name] for name in names])
    if accelerator.num_processes > 1:
        total = accelerator.reduce(total, reduction="sum") / model_parallel_size(accelerator)
    (nll, tokens), *others = total.tolist()
    loss = nll / max(tokens, 1)
    more = zip(names[1:], others, strict=True)
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/bits_per_byte": nll / math.log(2) / max(text_bytes, 1),
        **{f"eval/{name}": value / (count or 1) for name, (value, count) in more},
    }
