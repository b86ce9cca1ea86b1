"""The identity of a run: all that its updates depend on."""

from dataclasses import asdict

from accelerate import Accelerator

from llmtrain.contract import Built, Facts
from llmtrain.data.rows import Tokenized
from llmtrain.training.layout import Layout
from llmtrain.training.settings import AnySettings


def identity_of(
    accelerator: Accelerator, s: AnySettings, rows: Tokenized, built: Built, layout: Layout
) -> Facts:
    """Return all that the updates depend on, and nothing of how they are computed, but for the bits of ``--bitwise``.

    A checkpoint of another identity is never loaded.
    """
    patience = s.loop.early_stopping_patience
    return {
        "model": built.files.config,
        **({"start": built.start} if built.start is not None else {}),
        "data": rows.facts.data_sha256,
        "mixture": s.data.proportions,
        "tokenizer": rows.facts.tokenizer_sha256,
        "block_size": rows.facts.block_size,
        "global_batch_size": s.data.global_batch_size,
        "seed": s.loop.seed,
        "bits": layout.bits(accelerator) if s.loop.bitwise else None,
        "update": asdict(s.optim),
        **({"exchange": s.parallel.approximation} if s.parallel.approximation else {}),
        **({"order": "stored"} if rows.in_order else {}),
        **(
            {"stopping": [patience, s.loop.metric_for_best_model, s.loop.eval_steps]}
            if patience
            else {}
        ),
    }
