"""One process: the loop that everything else must equal.

Rows go in, the gradient of their mean loss comes out, the optimizer makes a step. In micro-batches the gradient is the
same, as each adds the gradient of its sum, divided by the tokens of all.
"""

import math

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import (
    VOCABULARY,
    batch,
    claim,
    gradient,
    prepare,
    rows,
    show,
    small_gpt,
)
from llmtrain.training.step import train_step

PROCESSES = 1


def main() -> None:
    """Compute one gradient in two ways, then train."""
    accelerator = start_accelerator()
    engine, optimizer = prepare(accelerator, small_gpt())

    found = []
    for batches in ([batch(rows(8))], [batch(share) for share in rows(8).chunk(4)]):
        engine.forward_backward(batches, engine.count(batches).denominator)
        found.append(gradient(engine.model))
        optimizer.zero_grad()
    furthest = float((found[0] - found[1]).abs().max())
    claim("8 rows at once and 4 times 2: gradients differ by less than 1e-6", furthest < 1e-6)

    losses = []
    for step in range(80):
        result = train_step(engine, optimizer, [batch(rows(8, step))], max_grad_norm=1.0)
        losses.append(float(result.sums.loss / result.denominator))
    show(f"a guess among {VOCABULARY} tokens costs {math.log(VOCABULARY):.2f} nats")
    show(f"loss of update 1: {losses[0]:.1f}; of update 80: {losses[-1]:.1f}")
    assert losses[-1] < losses[0] - 1
