"""One process: the loop that everything else must equal.

Rows go in, the gradient of their mean loss comes out, and the optimizer makes a step. Micro-batches
give the same gradient: each adds the gradient of its sum, divided by the number of all tokens.
"""

import math

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    VOCABULARY,
    Training,
    batch,
    claim,
    flat_gradient,
    rows,
    show,
    small_gpt,
)


def main() -> None:
    """Compute one gradient in two ways, then train."""
    accelerator = start_accelerator()
    training = Training(accelerator, small_gpt())

    one_batch = [batch(rows(8))]
    four_batches = [batch(part) for part in rows(8).chunk(4)]
    gradients = []
    for batches in (one_batch, four_batches):
        training.accumulate(batches)
        gradients.append(flat_gradient(training.model))
        training.model.zero_grad()
    largest_difference = float((gradients[0] - gradients[1]).abs().max())
    claim(
        "8 rows at once, or in 4 micro-batches of 2: the gradients differ by less than 1e-6",
        largest_difference < 1e-6,
    )

    losses = [float(training.step(rows(8, step))) for step in range(80)]
    show(f"a random guess among {VOCABULARY} tokens has a loss of {math.log(VOCABULARY):.2f} nats")
    show(f"loss in step 1: {losses[0]:.1f}; in step 80: {losses[-1]:.1f}")
    assert losses[-1] < losses[0] - 1
