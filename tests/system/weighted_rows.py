"""Started by test_weighted_rows.py: a loss with weights of rows, whose denominator is their sum.

    python tests/system/weighted_rows.py FOLDER        (or under torchrun)

It writes the loss and the denominator of one global batch, and the weights after a step of SGD, with
the usual engine (FOLDER/replicated.pt) and with the one of --bitwise (FOLDER/bitwise.pt).
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import llmtrain as lt
from llmtrain.interfaces.batches import Batch
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.trainable import make_trainable
from llmtrain.parallel.bitwise import BitwiseEngine
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.training.step import train_step

VOCABULARY = 30
ROWS = 16
WEIGHTS = torch.tensor([0.1, 0.3, 1.7]) / 1024  # their sum over all targets is below 1


def global_batch() -> Batch:
    """Return rows whose first token says how much they weigh, one of them without targets."""
    ids = torch.randint(VOCABULARY, (ROWS, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[3] = -100
    return {"input_ids": ids, "labels": labels}


class Bigrams(nn.Module):
    """A model of a user, which predicts each token from the one before it.

    Its attribute `hidden` is a layer, and not the method of llmtrain's models.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if labels is not None:
            return lt.summed_nll(self(input_ids[:, :-1]), labels[:, 1:])
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states).tanh()
        return self.head(self.hidden(states))


def weights_of_targets(batch: Batch) -> torch.Tensor:
    """Return a weight for each target, 0 for positions without one; [B, T - 1]."""
    weights = WEIGHTS[batch["input_ids"][:, :1] % len(WEIGHTS)]
    return weights * (batch["labels"][:, 1:] != -100)


class WeightedRows(lt.Objective):
    """The mean nll per target token, in which each token counts with the weight of its row."""

    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        log_p = model(batch["input_ids"][:, :-1]).log_softmax(-1)
        targets = batch["labels"][:, 1:].clamp(min=0)
        nll = -log_p.gather(-1, targets[..., None]).squeeze(-1)
        return lt.LossSums((nll * weights_of_targets(batch)).sum())

    def denominator(self, batch: Batch) -> torch.Tensor:
        return weights_of_targets(batch).sum()


def make_step(engine: Engine, optimizer: Any) -> dict[str, torch.Tensor]:
    ranks = engine.ranks
    # Micro-batches of one row, so that all layouts add up the same numbers.
    rows_per_rank = ROWS // ranks.world_size
    own_rows = range(ROWS)[ranks.rank * rows_per_rank :][:rows_per_rank]
    batch = global_batch()
    batches = [{name: column[[row]] for name, column in batch.items()} for row in own_rows]
    result = train_step(engine, optimizer, batches, max_grad_norm=1e9)
    return {
        "loss": ranks.sum_over_ranks(result.sums.loss) / result.denominator,
        "weights": torch.cat([p.detach().flatten() for p in engine.model.parameters()]),
        "denominator": torch.tensor(result.denominator, dtype=torch.float64),
    }


def main() -> None:
    ranks = start_accelerator().ranks
    for name, engine_type in {"bitwise": BitwiseEngine, "replicated": ReplicatedEngine}.items():
        model = make_trainable(Bigrams())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if name == "replicated":
            model = ranks.accelerator.prepare(model)
        engine = engine_type(ranks, model, objective=WeightedRows())
        results = make_step(engine, ranks.accelerator.prepare(optimizer))
        if ranks.is_main:
            torch.save(results, Path(sys.argv[1], f"{name}.pt"))


if __name__ == "__main__":
    lt.launch(main)
