"""Replicas: all processes have equal weights, as long as gradients are summed."""

import torch

from llmtrain.errors import UserError
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import Training, claim, rank_rows, show, small_gpt
from llmtrain.observe.replicas import check_replicas


def main() -> None:
    """Compare the weights of two ranks after steps with and without summed gradients."""
    accelerator = start_accelerator()
    model = small_gpt()
    training = Training(accelerator, model)

    def weights_of_ranks() -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        first, second = accelerator.gather(weights[None])
        return first, second

    before = weights_of_ranks()
    training.step(rank_rows(accelerator, 8))
    after = weights_of_ranks()
    claim("before the first step, both ranks have the same weights", torch.equal(*before))
    claim(
        "after a step, each with its own rows, both ranks have the same weights",
        torch.equal(*after),
    )
    claim("the step has changed them", not torch.equal(before[0], after[0]))

    with training.engine.no_sync():
        training.step(rank_rows(accelerator, 8, 1))
    are_same = torch.equal(*weights_of_ranks())
    claim(
        "after a step without the sum of the gradients, both ranks have the same weights",
        are_same,
        expected=False,
    )
    try:
        check_replicas(training.engine.ranks, training.model)
    except UserError as error:
        difference = str(error).partition(";")[0]
        show(f"llmtrain compares them regularly, and would stop: {difference}")
    else:
        raise AssertionError("llmtrain compares them, and finds no difference")
