"""Run by test_diff.py: many small runs of recipes/gpt.py in one process, which differ by a flag or a bug.

python differing_runs.py RUNS, a JSON list of {"flags": [...], "plant": NAME or null, "cache": FOLDER}
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import gpt

from llmtrain.data import loader, samplers
from llmtrain.data.corpus import EncodedCorpus
from llmtrain.models import gpt as model
from llmtrain.parallel.engine import Engine
from llmtrain.training import start
from llmtrain.training.learning_rates import LearningRates
from tests.system import controls

HONEST_CLIP = Engine.clip_grad_norm
HONEST_RATES = LearningRates.after


def not_clipped(engine: Engine, max_norm: float) -> torch.Tensor:
    return HONEST_CLIP(engine, 1e9)


def with_both_ends(
    corpus: EncodedCorpus, sequences: Any, stream: Any = EncodedCorpus._stream
) -> Iterator[Any]:
    """Puts the token at the end of a text there twice, as templates and tokenizers do that both add one."""
    for piece in stream(corpus, sequences):
        is_end = piece.begins_document or len(piece) == 1
        tokens = np.concatenate([piece.tokens[:1], piece.tokens]) if is_end else piece.tokens
        yield replace(piece, tokens=tokens)


class LastLabel(loader.Collate):
    """Trains on all but the first half of a row."""

    def __call__(self, read: Any) -> Any:
        labels = read.columns["labels"].copy()
        labels[:, : labels.shape[1] // 2] = -100
        return super().__call__(read._replace(columns={**read.columns, "labels": labels}))


def with_masked_labels(*arguments: Any, **settings: Any) -> Any:
    batches = loader.train_loader(*arguments, **settings)
    collate = LastLabel(batches.collate_fn.micro_batch)
    return torch.utils.data.DataLoader(
        batches.dataset, batch_sampler=batches.batch_sampler, collate_fn=collate
    )


PLANT: dict[str, tuple[Any, str, Any]] = {
    "another order": (
        samplers,
        "permute",
        lambda positions, n, key: np.asarray(positions)[::-1] % n,
    ),
    "a mean of means": (Engine, "forward_backward", controls.mean_of_means),
    "unshifted labels": (model, "targets_of", lambda labels: labels[:, :-1]),
    "a token twice": (EncodedCorpus, "_stream", with_both_ends),
    "masked labels": (start, "train_loader", with_masked_labels),
    "a schedule one late": (
        LearningRates,
        "after",
        lambda rates, step: HONEST_RATES(rates, max(step - 1, 0)),
    ),
    "no clipping": (Engine, "clip_grad_norm", not_clipped),
}


def main() -> None:
    for run in json.loads(Path(sys.argv[1]).read_text()):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        samplers._rows_of_chunk.cache_clear()
        os.environ["LLMTRAIN_CACHE"] = run["cache"]
        with controls.patched(*PLANT[run["plant"]]) if run["plant"] else contextlib.nullcontext():
            gpt.main(run["flags"])


if __name__ == "__main__":
    main()
