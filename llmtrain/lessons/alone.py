"""One process: the loop that everything else must equal.

Rows go in, the gradient of their mean loss comes out, the optimizer makes a step. Cut into micro-batches, the gradient
is the same, as each adds the gradient of its sum, divided by the tokens of all.
"""

import math

from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import VOCABULARY, batch, gradients, rows, show, small_gpt
from llmtrain.training.loop import accumulate, count_tokens, train_step
from llmtrain.training.optim import OptimConfig, make_optimizer

PROCESSES = 1


def main() -> None:
    accelerator = start_accelerator()
    model = small_gpt()
    optimizer = make_optimizer(model, OptimConfig(optim="adamw", learning_rate=3e-3))
    model, optimizer = accelerator.prepare(model, optimizer)

    whole, pieces = [batch(rows(8))], [batch(part) for part in rows(8).split(2)]
    found = []
    for window in (whole, pieces):
        accumulate(accelerator, model, window, count_tokens(accelerator, window, False)[0])
        found.append(gradients(model))
        optimizer.zero_grad()
    furthest = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    show(f"8 rows at once and 4 times 2: gradients differ by less than 1e-6: {furthest < 1e-6}")
    assert furthest < 1e-6

    losses = []
    for step in range(80):
        update = train_step(accelerator, model, optimizer, [batch(rows(8, step))], max_grad_norm=1.0)
        losses.append(float(update.nll / update.tokens))
    show(f"a guess among {VOCABULARY} tokens costs {math.log(VOCABULARY):.2f} nats")
    show(f"loss of update 1: {losses[0]:.1f}; of update 80: {losses[-1]:.1f}")
    assert losses[-1] < losses[0] - 1
