"""The same five extensions in llmtrain: a loss, two learning rates, a schedule, a callback, a metric.

python docs/migrate/llmtrain_own.py
"""

import math
from dataclasses import dataclass, field

import torch
from accelerate import PartialState
from datasets import Dataset
from task import BATCH, BLOCK, base_model, rows_with_labels, tokenizer
from torch.nn import functional as F

import llmtrain as lt


@dataclass
class OwnConfig(lt.Config):
    """The settings of this recipe."""

    group = "own"

    z_loss: float = lt.flag(1e-3, "weight of the z-loss")
    embedding_rate: float = lt.flag(1e-2, "learning rate of embeddings")


@dataclass
class Settings(lt.Settings):
    """The settings that every recipe has, and those of this one."""

    model: lt.ModelConfig
    own: OwnConfig = field(default_factory=OwnConfig)


DEFAULTS = Settings(
    model=lt.ModelConfig(model_name_or_path="runs/migrate-base", max_length=BLOCK),
    data=lt.BatchConfig(global_batch_size=BATCH, per_device_train_batch_size=4),
    optim=lt.OptimConfig(max_steps=18, learning_rate=1e-3),
    log=lt.LogConfig(logging_steps=1),
    eval=lt.EvalConfig(eval_steps=6),
    run=lt.RunConfig(output_dir="runs/llmtrain-own", save_steps=6),
)


class ZLoss(lt.Objective):
    """The cross-entropy, plus the squared logarithm of the softmax's denominator."""

    def __init__(self, weight):
        self.weight = weight

    def loss(self, model, batch, extra):
        targets = batch["labels"][:, 1:]
        logits = model.logits(**batch).float()
        is_target = targets != -100
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        penalty = (logits.logsumexp(-1).square() * is_target).sum()
        return lt.LossSums(loss=nll + self.weight * penalty)


class Spikes(lt.Callback):
    """Ends the run after several steps whose loss is far above its moving average."""

    def __init__(self, limit):
        self.limit = limit
        self._average = None
        self._count = 0

    def on_log(self, step, metrics):
        if "train/loss" not in metrics:
            return
        if self._average is None:
            self._average = metrics["train/loss"]
        self._count += metrics["train/loss"] > 1.5 * self._average
        self._average = 0.9 * self._average + 0.1 * metrics["train/loss"]

    def wants_to_stop(self):
        return "finish" if self._count >= self.limit else False

    def state_dict(self):
        return {"average": self._average, "count": self._count}

    def load_state_dict(self, state):
        self._average = state["average"]
        self._count = state["count"]


def share(step, max_steps):
    """Return the share of the peak rate: up in three steps, and down over the run."""
    return min((step + 1) / 3, math.sqrt(1 - step / max_steps))


def accuracy(model, batch):
    """Return how often the likeliest token is the right one: a sum and its denominator."""
    targets = batch["labels"][:, 1:]
    is_right = model.logits(**batch).argmax(-1) == targets
    return {"accuracy": (is_right.sum(), (targets != -100).sum())}


def build(settings, rows, precision):
    with PartialState().main_process_first():  # the others find the folder of rank 0
        base_model(settings.model.model_name_or_path)
    return lt.load_model(
        settings.model,
        None,
        rows,
        seed=settings.optim.seed,
        precision=precision,
        bitwise=settings.parallel.bitwise,
    )


def make_optimizer(model, settings):
    embeddings, others = [], []
    for name, parameter in model.named_parameters():
        (embeddings if "wte" in name or "wpe" in name else others).append(parameter)
    return torch.optim.AdamW(
        [{"params": embeddings, "lr": settings.own.embedding_rate}, {"params": others}],
        lr=settings.optim.learning_rate,
        weight_decay=0.0,
    )


def main(argv=None):
    settings = lt.parse(DEFAULTS, argv, __doc__)
    table = Dataset.from_dict(rows_with_labels())
    rows = lt.Tokenized.of(
        table.select(range(288)),
        tokenizer(),
        eval=table.select(range(288, 320)),
        in_order=True,
    )
    return lt.fit(
        settings,
        rows,
        build,
        objective=ZLoss(settings.own.z_loss),
        optimizer=lambda model: make_optimizer(model, settings),
        schedule=share,
        callbacks=[Spikes(limit=3)],
        metrics=[accuracy],
    )


if __name__ == "__main__":
    lt.launch(main)
