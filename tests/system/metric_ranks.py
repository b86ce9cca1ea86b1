"""Started by test_metrics.py on one process and on two: evaluate metrics with each engine.

`metric_ranks.py FILE` writes the metrics by model and engine. One process has the engines of a plain
model and of --bitwise. Two processes have those of DDP, FSDP2 and --bitwise.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import llmtrain as lt
from llmtrain.data.loader import eval_loader
from llmtrain.data.shards import ArrayRows, TokenRows
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.interfaces.part import FunctionMetric, Metric
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.trainable import make_trainable
from llmtrain.parallel.bitwise import BitwiseEngine
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import ShardedEngine
from llmtrain.parallel.placement import place_sharded
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.evaluate import evaluate
from tests.models.small_models import small_model
from tests.system.weighted_rows import VOCABULARY, Bigrams

TOKENS = 17
ROWS = 11  # odd, so that two ranks do not have the same number of rows


def build_model(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "own":
        return make_trainable(Bigrams())
    return small_model(name, vocabulary=VOCABULARY, tokens=TOKENS, width=32)


def packed_rows() -> TokenRows:
    """Return rows of two documents. Each row has fewer target tokens than the one before."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)

    labels = token_ids.clone()
    for row in range(ROWS):
        labels[row, :row] = IGNORED

    positions = torch.cat([torch.arange(7), torch.arange(TOKENS - 7)]).expand_as(token_ids)
    columns = {"input_ids": token_ids, "labels": labels, "position_ids": positions}
    return TokenRows([ArrayRows({name: column.numpy() for name, column in columns.items()})])


# --- metrics


def accuracy(model: lt.Model, batch: Batch) -> dict[str, Any]:
    targets = batch["labels"][:, 1:]
    is_right = model.logits(**batch).argmax(-1) == targets
    return {"accuracy": (is_right.sum(), (targets != IGNORED).sum())}


def accuracy_by_forward(model: Any, batch: Batch) -> dict[str, Any]:
    targets = batch["labels"][:, 1:]
    output = model(batch["input_ids"][:, :-1], position_ids=batch["position_ids"][:, :-1])
    is_right = getattr(output, "logits", output).argmax(-1) == targets
    return {"accuracy_by_forward": (is_right.sum(), (targets != IGNORED).sum())}


class ZLoss(lt.Metric):
    """The z-loss per target token, and the number of rows that have targets.

    The first value is a mean over all target tokens, and the second a sum over all rows.
    """

    def compute(self, model: lt.Model, batch: Batch) -> dict[str, Any]:
        targets = batch["labels"][:, 1:]
        positions = (targets.flatten() != IGNORED).nonzero().flatten()
        squares = model.logits_at(positions, **batch).logsumexp(-1).square()
        rows_with_targets = (targets != IGNORED).any(1).sum()
        return {"z_loss": (squares.sum(), torch.tensor(len(positions))), "rows": rows_with_targets}


METRICS: list[Metric] = [FunctionMetric(accuracy), FunctionMetric(accuracy_by_forward), ZLoss()]


# --- engines


def engines_of(ranks: Ranks, model: nn.Module) -> dict[str, Engine]:
    if ranks.world_size == 1:
        return {"plain": ReplicatedEngine(ranks, model), "bitwise": BitwiseEngine(ranks, model)}

    sharded = copy.deepcopy(model)
    place_sharded(ranks, sharded, weights=())
    return {
        "DDP": ReplicatedEngine(ranks, DistributedDataParallel(copy.deepcopy(model))),
        "FSDP2": ShardedEngine(ranks, sharded),
        "bitwise": BitwiseEngine(ranks, model),
    }


def metrics_of(accelerator: Accelerator, engine: Engine, is_bitwise: bool) -> dict[str, float]:
    loader = eval_loader(
        packed_rows(),
        engine.ranks.world_size,
        micro_batch=2,
        prepare=getattr(engine.unwrapped, "prepare_batch", None),
        source_rows=[4, ROWS - 4],
        bitwise=is_bitwise,
    )
    return evaluate(
        engine,
        accelerator.prepare(loader),
        text_bytes=0,
        metrics=METRICS,
        sources=["first", "second"],
    )


def main() -> None:
    accelerator = start_accelerator()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("gpt2", "lfm2", "llama", "own"):
        engines = engines_of(accelerator.ranks, build_model(name))
        results[name] = {
            kind: metrics_of(accelerator, engine, is_bitwise=kind == "bitwise")
            for kind, engine in engines.items()
        }
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    lt.launch(main)
