"""Train a GPT with a user's own loss, optimizer, weight average, metric and two flags."""

import contextlib
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


class WeightAverage(lt.Callback):
    """Averages the weights over the steps, and evaluates the average beside the weights."""

    def __init__(self, decay):
        self.decay = decay

    def setup(self, training):
        self._training = training
        self._weights = [p for p in training.model.parameters() if p.requires_grad]
        self._average = [torch.zeros_like(p.detach(), dtype=torch.float32) for p in self._weights]

    @torch.no_grad()
    def on_step_end(self, batch, result, info):
        share = max(1 / info.step, 1 - self.decay)  # at first, it is the mean of all steps
        for average, weights in zip(self._average, self._weights, strict=True):
            average.mul_(1 - share).add_(weights, alpha=share)

    @contextlib.contextmanager
    def averaged(self):
        """Give the model the average until the block ends."""
        kept = [weights.detach().clone() for weights in self._weights]
        try:
            self._replace_weights(self._average)
            yield
        finally:
            self._replace_weights(kept)

    @torch.no_grad()
    def _replace_weights(self, tensors):
        for weights, tensor in zip(self._weights, tensors, strict=True):
            weights.copy_(tensor)

    def on_evaluate(self, evaluate):
        if self._training.step == 0:
            return {}
        with self.averaged():
            return {f"average/{name}": value for name, value in evaluate().items()}

    def on_train_end(self):
        if self._training.is_last:
            with self.averaged():
                self._training.write_model(self._training.folder / "model-average")

    def state_dict(self):
        return {"average": self._average}

    def load_state_dict(self, state):
        for average, stored in zip(self._average, state["average"], strict=True):
            average.copy_(stored)


def main(argv=None, average: type[WeightAverage] = WeightAverage) -> object:
    settings = lt.parse(DEFAULTS, argv, __doc__)
    rows = gpt.tokenized(settings)
    return lt.fit(
        settings,
        rows,
        gpt.build,
        objective=ZLoss(settings.own.z_loss),
        optimizer=lambda model: two_rates(model, settings),
        callbacks=[average(decay=0.9)],
        metrics=[accuracy],
    )


if __name__ == "__main__":
    lt.launch(main)
