"""The recipe of the GPT with a loss that is NaN in three steps."""

import torch
from torch import nn

import llmtrain as lt
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.callback import Training
from llmtrain.interfaces.objective import LossSums
from recipes.gpt import DEFAULTS, build, tokenized

# With a save and an evaluation after every third step: a step after a save, one before an
# evaluation and a save, and one after a step that was skipped.
POISONED_STEPS = (4, 6, 7)


class PoisonedLoss(lt.Objective):
    """The next-token loss, or NaN."""

    fingerprint = None
    is_poisoned = False

    def loss(self, model: nn.Module, batch: Batch, extra: Batch) -> LossSums:
        sums = super().loss(model, batch, extra)
        if not self.is_poisoned:
            return sums
        return sums._replace(loss=sums.loss * torch.nan)


class PoisonsSteps(lt.Callback):
    """Poisons a loss in some steps, but never during an evaluation."""

    fingerprint = None

    def __init__(self, objective: PoisonedLoss) -> None:
        self.objective = objective

    def setup(self, training: Training) -> None:
        self.training = training

    def on_step_begin(self, batch: object) -> None:
        self.objective.is_poisoned = self.training.step + 1 in POISONED_STEPS

    def on_step_end(self, *_: object) -> None:
        self.objective.is_poisoned = False


def main(argv: list[str] | None = None) -> object:
    settings = lt.parse(DEFAULTS, argv, description=__doc__)
    objective = PoisonedLoss()
    return lt.fit(
        settings,
        tokenized(settings),
        build,
        objective=objective,
        callbacks=[PoisonsSteps(objective)],
    )


if __name__ == "__main__":
    lt.launch(main)
