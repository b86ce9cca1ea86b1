"""Replicas: all processes have equal weights, as long as gradients are summed."""

import torch

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import batch, claim, error_of, prepare, rank_rows, show, small_gpt
from llmtrain.observe.replicas import check_replicas, weight_checksums
from llmtrain.training.step import train_step

PROCESSES = 2


def main() -> None:
    """Compare the weights of two ranks after steps with and without summed gradients."""
    accelerator = start_accelerator()
    model = small_gpt()
    engine, optimizer = prepare(accelerator, model)

    def checksums() -> tuple[torch.Tensor, torch.Tensor]:
        first, second = accelerator.gather(weight_checksums(model)[None])
        return first, second

    before = checksums()
    train_step(engine, optimizer, [batch(rank_rows(accelerator, 8))], max_grad_norm=1.0)
    after = checksums()
    claim("before the first step, both ranks have the same weights", torch.equal(*before))
    claim(
        "after a step, each with its own rows, both ranks have the same weights",
        torch.equal(*after),
    )
    claim("the step has changed them", not torch.equal(before[0], after[0]))

    with engine.no_sync():
        train_step(engine, optimizer, [batch(rank_rows(accelerator, 8, 1))], max_grad_norm=1.0)
    are_same = torch.equal(*checksums())
    claim(
        "after a step without the sum of the gradients, both ranks have the same weights",
        are_same,
        expected=False,
    )
    error = error_of(check_replicas, accelerator, engine.model)
    show(f"llmtrain compares them regularly, and would stop: {error.partition(';')[0]}")
