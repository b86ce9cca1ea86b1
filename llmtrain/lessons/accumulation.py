"""Accumulation: a global batch in several micro-batches, and gradients sent once."""

from typing import Any, Literal

import torch

from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, gradients, rows, show, small_gpt
from llmtrain.parallel.ddp import DDPConfig, DDPHandler
from llmtrain.training.loop import accumulate, count_tokens

PROCESSES = 2


def main() -> None:
    accelerator = start_accelerator()
    counts: list[int] = []  # collectives for gradients, of each micro-batch

    def watch(bucket: Any, send: Any, sent_bytes: int) -> Any:
        counts[-1] += 1
        return send(bucket)

    accelerator.ddp_handler = DDPHandler(DDPConfig(ddp_bucket_cap_mb=0.1))
    model = accelerator.prepare(small_gpt())
    accelerator.ddp_handler.watch(model, watch)
    model.register_forward_pre_hook(lambda *_: counts.append(0))
    mine = rows(16)[8 * accelerator.process_index :][:8]
    window = [batch(part) for part in mine.split(2)]
    tokens, _ = count_tokens(accelerator, window, False)

    found = {}
    ways: list[tuple[str, list[dict[str, torch.Tensor]], Literal["once", "each"]]] = [
        ("8 rows at once", [batch(mine)], "once"),
        ("4 times 2 rows, under no_sync but for the last", window, "once"),
        ("4 times 2 rows, sent each time", window, "each"),
    ]
    for name, batches, reduce in ways:
        accumulate(accelerator, model, batches, tokens, reduce)
        model.zero_grad()  # buckets are settled in the first pass
        counts.clear()
        accumulate(accelerator, model, batches, tokens, reduce)
        found[name] = gradients(model)
        show(f"{name}: collectives in each micro-batch {counts}")
        assert [count > 0 for count in counts] == [
            reduce == "each" or i == len(batches) - 1 for i in range(len(batches))
        ]
        model.zero_grad()
    first, *others = found.values()
    same = all(torch.allclose(a, b, atol=1e-6) for other in others for a, b in zip(first, other, strict=True))
    show(f"the gradients are the same in all three: {same}")
    assert same
