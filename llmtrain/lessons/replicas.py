"""Replicas: every process holds the same weights, before and after each update, and nothing but the gradients' sum
keeps it so."""

from functools import partial
from typing import Any

from accelerate.utils import gather_object

from llmtrain.errors import UserError
from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, digest, rows, show, small_gpt
from llmtrain.observe.replicas import check_replicas
from llmtrain.training.loop import accumulate, train_step
from llmtrain.training.optim import OptimConfig, make_optimizer

PROCESSES = 2


def main() -> None:
    accelerator = start_accelerator()
    rank = accelerator.process_index
    plain = small_gpt()
    optimizer = make_optimizer(plain, OptimConfig(optim="adamw", learning_rate=1e-3))
    model, optimizer = accelerator.prepare(plain, optimizer)

    def hashes() -> list[str]:
        return gather_object([digest(plain.parameters())])

    def mine(step: int) -> list[dict[str, Any]]:
        return [batch(rows(8, step)[rank * 4 : rank * 4 + 4])]

    before = hashes()
    train_step(accelerator, model, optimizer, mine(0), max_grad_norm=1.0)
    after = hashes()
    show(f"same weights before an update: {before[0] == before[1]}")
    show(f"other rows, the same weights after it: {after[0] == after[1]}; other weights than before: {before != after}")
    assert before[0] == before[1] != after[0] == after[1]

    train_step(accelerator, model, optimizer, mine(1), 1.0, forward_backward=partial(accumulate, reduce="never"))
    apart = hashes()
    show(f"and after one more, without adding gradients: {apart[0] == apart[1]}")
    assert apart[0] != apart[1]
    try:
        check_replicas(accelerator, model)
    except UserError as error:
        show(f"llmtrain compares them now and then, and would stop: {str(error).partition(';')[0]}")
    else:
        raise AssertionError("the comparison did not see it")
