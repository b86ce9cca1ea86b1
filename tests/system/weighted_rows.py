"""Started by test_weighted_rows.py: losses with weights, whose denominator is the sum of the weights.

    python tests/system/weighted_rows.py FOLDER        (or under torchrun)

For each case it writes the loss and the denominator of one global batch, and the weights after a
step of SGD, with the usual engine (FOLDER/CASE-replicated.pt) and with the one of --bitwise
(FOLDER/CASE-bitwise.pt).
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

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
from tests.engines import split
from tests.models.small_models import small_model

VOCABULARY = 30
ROWS = 16
TOKENS = 9
SECOND_DOCUMENT = 4  # where it begins in a packed row
WEIGHTS = torch.tensor([0.1, 0.3, 1.7]) / 1024  # their sum over all targets is below 1


class Bigrams(nn.Module):
    """A model of a user, which predicts each token from the one before it.

    Its attribute `hidden` is a layer, and not the method of llmtrain's models.
    """

    def __init__(self) -> None:
        super().__init__()
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


def weights_of_rows(batch: Batch) -> torch.Tensor:
    """Return a weight for each token, [B, T], which the first token of its row chooses."""
    return WEIGHTS[batch["input_ids"][:, :1] % len(WEIGHTS)].expand_as(batch["input_ids"])


class WeightedRows(lt.Objective):
    """The mean nll per target token, in which each token counts with the weight of its row."""

    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        log_p = model(batch["input_ids"][:, :-1]).log_softmax(-1)
        targets = batch["labels"][:, 1:].clamp(min=0)
        nll = -log_p.gather(-1, targets[..., None]).squeeze(-1)
        return lt.LossSums((nll * self._weights(batch)).sum())

    def denominator(self, batch: Batch) -> torch.Tensor:
        return self._weights(batch).sum()

    def _weights(self, batch: Batch) -> torch.Tensor:
        return weights_of_rows(batch)[:, 1:] * (batch["labels"][:, 1:] != -100)


class Case(NamedTuple):
    """A model and its rows. The weights are in the column `loss_weight`, or follow from the row."""

    model_name: str
    is_packed: bool = False
    has_column: bool = True

    def model(self) -> Any:
        torch.manual_seed(0)
        if self.model_name == "bigrams":
            return make_trainable(Bigrams())
        return small_model(self.model_name, vocabulary=VOCABULARY, tokens=TOKENS, width=16)

    def objective(self) -> lt.Objective:
        return lt.Objective() if self.has_column else WeightedRows()

    def global_batch(self) -> Batch:
        """Return rows that end in padding, one of them without targets. Padding has weights."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
        labels = ids.clone()
        labels[3] = -100
        labels[5:9, -3:] = -100
        batch = {"input_ids": ids, "labels": labels}
        if self.has_column:
            batch["loss_weight"] = torch.rand(ids.shape, generator=generator) / 1024
            batch["loss_weight"][::2, 2:4] = 0
        if self.is_packed:
            labels[:, SECOND_DOCUMENT] = -100
            lengths = (SECOND_DOCUMENT, TOKENS - SECOND_DOCUMENT)
            batch["position_ids"] = torch.cat([*map(torch.arange, lengths)]).expand_as(ids)
        return batch

    def micro_batches(self, model: Any, batch: Batch, rows: int) -> list[Batch]:
        """Return micro-batches of some rows, prepared as a loader does it."""
        micro_batches = split(batch, rows)
        if self.model_name == "bigrams":
            return micro_batches
        return [{**batch, **model.prepare_batch(batch)} for batch in micro_batches]


CASES = {
    "rows": Case("bigrams", has_column=False),
    "tokens": Case("bigrams"),
    "packed-tokens": Case("llama", is_packed=True),
}


def make_step(engine: Engine, optimizer: Any, batches: list[Batch]) -> dict[str, torch.Tensor]:
    result = train_step(engine, optimizer, batches, max_grad_norm=1e9)
    return {
        "loss": engine.ranks.sum_over_ranks(result.sums.loss) / result.denominator,
        "weights": torch.cat([p.detach().flatten() for p in engine.model.parameters()]),
        "denominator": torch.tensor(result.denominator, dtype=torch.float64),
        "target_tokens": torch.tensor(result.target_tokens),
    }


def main() -> None:
    ranks = start_accelerator().ranks
    rows_per_rank = ROWS // ranks.world_size
    engine_types = {"bitwise": BitwiseEngine, "replicated": ReplicatedEngine}
    for case_name, case in CASES.items():
        for engine_name, engine_type in engine_types.items():
            model = case.model()
            own_rows = split(case.global_batch(), rows_per_rank)[ranks.rank]
            # Micro-batches of one row, so that all layouts add up the same numbers.
            batches = case.micro_batches(model, own_rows, rows=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            if engine_name == "replicated":
                model = ranks.accelerator.prepare(model)
            engine = engine_type(ranks, model, objective=case.objective())
            results = make_step(engine, ranks.accelerator.prepare(optimizer), batches)
            if ranks.is_main:
                torch.save(results, Path(sys.argv[1], f"{case_name}-{engine_name}.pt"))


if __name__ == "__main__":
    lt.launch(main)
