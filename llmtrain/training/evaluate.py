"""The loss on held-out text, every token counted once whatever the layout."""

import math
from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.data.loader import Window
from llmtrain.models.loss import count_targets
from llmtrain.shards import reshard, same_rows


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    windows: Iterable[Window],
    text_bytes: int,
    forward: Callable[..., torch.Tensor] | None = None,
) -> dict[str, float]:
    """Mean negative log-likelihood in nats per token, over all processes.

    Bits per byte divides the same sum, in bits, by the UTF-8 bytes of the text (``text_bytes``), so that models with
    different tokenizers can be compared.
    """
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)  # nll in nats, targets
    for window in windows:
        for batch in window.batches:
            total[0] += (forward or model)(**batch).item()
            total[1] += count_targets(batch["labels"]).item()
    reshard(model)
    model.train()
    if accelerator.num_processes > 1:  # not on a lone MPS device, which has no float64
        total = accelerator.reduce(total.to(accelerator.device), reduction="sum") / same_rows(accelerator)
    nll, tokens = total.tolist()
    loss = nll / max(tokens, 1)
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/bits_per_byte": nll / math.log(2) / max(text_bytes, 1),
    }
