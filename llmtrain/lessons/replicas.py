"""Replicas: every process holds the same weights, and nothing but the sum of the gradients keeps it so."""

import torch

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, claim, my_rows, prepare, refusal, show, small_gpt
from llmtrain.observe.replicas import check_replicas, fingerprint
from llmtrain.training.step import train_step

PROCESSES = 2


def main() -> None:
    """Compare the weights of two ranks after an update, and after one without a sum of the gradients."""
    accelerator = start_accelerator()
    plain = small_gpt()
    engine, optimizer = prepare(accelerator, plain)

    def fingerprints() -> tuple[torch.Tensor, torch.Tensor]:
        first, second = accelerator.gather(fingerprint(plain)[None])
        return first, second

    before = fingerprints()
    train_step(engine, optimizer, [batch(my_rows(accelerator, 8))], max_grad_norm=1.0)
    after = fingerprints()
    claim("before an update, the same weights on both", torch.equal(*before))
    claim("after an update, each with its own rows, the same weights on both", torch.equal(*after))
    claim("the update has changed them", not torch.equal(before[0], after[0]))

    with engine.no_sync():
        train_step(engine, optimizer, [batch(my_rows(accelerator, 8, 1))], max_grad_norm=1.0)
    same = torch.equal(*fingerprints())
    claim(
        "after another, without the sum of the gradients, the same weights on both",
        same,
        expected=False,
    )
    said = refusal(check_replicas, accelerator, engine.model)
    show(f"llmtrain compares them now and then, and would stop: {said.partition(';')[0]}")
