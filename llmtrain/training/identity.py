"""What makes a run this run: a checkpoint of another identity is never loaded."""

from dataclasses import asdict
from typing import Any

from accelerate import Accelerator

from llmtrain.data.config import DataConfig
from llmtrain.data.rows import PreparedData
from llmtrain.parallel.ddp import DDPConfig
from llmtrain.record.run import RunConfig
from llmtrain.training.layout import Layout
from llmtrain.training.optim import OptimConfig


def identity_of(
    rows: PreparedData,
    data: DataConfig,
    optim: OptimConfig,
    ddp: DDPConfig,
    run: RunConfig,
    layout: Layout,
    accelerator: Accelerator,
    **model: Any,
) -> dict[str, Any]:
    """All that the updates depend on, and nothing of how they are computed, but for the bits of ``--bitwise``.

    ``model``: what describes the model and where its weights came from.
    """
    return {
        **model,
        "data": rows.facts.data_sha256,
        "mixture": data.mixture,
        "tokenizer": rows.facts.tokenizer_sha256,
        "block_size": rows.facts.block_size,
        "global_batch_size": data.global_batch_size,
        "seed": run.seed,
        "bits": layout.bits(accelerator) if run.bitwise else None,
        "update": asdict(optim),
        **({"exchange": ddp.approximation} if ddp.approximation else {}),
    }
