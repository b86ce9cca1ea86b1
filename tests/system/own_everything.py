"""Train a GPT with a user's own loss, optimizer, weight average, metric and two flags."""

from dataclasses import dataclass, field

import torch
from llmtrain.recipes import gpt
from torch import nn
from torch.nn import functional as F

import llmtrain as lt


@dataclass
class OwnConfig(lt.Config):
    """The flags that this recipe adds."""

    group = "own"

    z_loss: float = lt.flag(1e-3, "weight of the z-loss", affects="numbers")
    embedding_share: float = lt.flag(
        0.1, "learning rate of the embedding, as a share of --learning_rate", affects="numbers"
    )

    def __post_init__(self) -> None:
        if self.z_loss < 0:
            raise lt.UserError(f"--z_loss {self.z_loss} must be at least 0.")


@dataclass
class Settings(gpt.Settings):
    """The settings of the recipe for GPTs, and the added flags."""

    own: OwnConfig = field(default_factory=OwnConfig)


DEFAULTS = Settings(
    model=lt.GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, dropout=0.1),
    data=lt.DataConfig(tokenizer="byte", eval_fraction=0.1, global_batch_size=8),
    optim=lt.OptimConfig(max_steps=6, learning_rate=1e-2),
    eval=lt.EvalConfig(eval_steps=3),
    run=lt.RunConfig(output_dir="runs/own"),
)


class ZLoss(lt.Objective):
    """The cross-entropy, plus the squared logarithm of the softmax's denominator."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def loss(self, model, batch, extra):
        targets = batch["labels"][:, 1:].flatten()
        logits = model.logits(**batch).flatten(0, 1)
        nll = F.cross_entropy(logits, targets, reduction="sum")
        penalty = (logits.logsumexp(-1).square() * (targets != -100)).sum()
        return lt.LossSums(loss=nll + self.weight * penalty)

    def eval_metrics(self, loss_sum, mean_loss, text_bytes):
        return {}  # with the penalty, the loss is no likelihood, so it gives no perplexity


def accuracy(model, batch):
    """Count the targets that are the likeliest token, and all targets."""
    targets = batch["labels"][:, 1:]
    is_right = model.logits(**batch).argmax(-1) == targets
    is_target = targets != -100
    return {"accuracy": (is_right.sum(), is_target.sum())}


def two_rates(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return AdamW with a lower learning rate for the embeddings."""
    embeddings: list[nn.Parameter] = []
    layers: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if name.startswith(("transformer.wt", "transformer.wp")):
            embeddings.append(parameter)
        else:
            layers.append(parameter)

    rate = settings.optim.learning_rate
    embedding_rate = rate * settings.own.embedding_share
    return torch.optim.AdamW(
        [
            {"params": layers, "lr": rate, "name": "layers"},
            {"params": embeddings, "lr": embedding_rate, "name": "embeddings"},
        ]
    )


def main(argv=None, average: type[lt.WeightAverage] = lt.WeightAverage) -> object:
    settings = lt.parse(DEFAULTS, argv, __doc__)
    rows = gpt.tokenized(settings)
    return lt.fit(
        settings,
        rows,
        gpt.build,
        objective=ZLoss(settings.own.z_loss),
        optimizer=lambda model: two_rates(model, settings),
        callbacks=[average(decay=0.9, folder="model-average")],
        metrics=[accuracy],
    )


if __name__ == "__main__":
    lt.launch(main)
