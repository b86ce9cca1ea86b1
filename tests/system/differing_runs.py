"""Started by test_diff.py: train small models in one process, each with a changed flag or a bug.

`differing_runs.py FILE` reads a JSON list of {"flags": [...], "bug": NAME or null, "cache": FOLDER}.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import gpt

from llmtrain.data import order
from llmtrain.data.corpus import EncodedCorpus
from llmtrain.data.loader import LocalBatches, train_loader
from llmtrain.models import gpt as gpt_model
from llmtrain.parallel.engine import Engine
from llmtrain.training import start
from llmtrain.training.learning_rates import LearningRates
from tests.system import controls

clip_grad_norm = Engine.clip_grad_norm
rates_after = LearningRates.after
init_corpus = EncodedCorpus.__init__


def reverse_order(positions: Any, n: int, key: int) -> Any:
    """Replace the random order of rows."""
    return np.asarray(positions)[::-1] % n


def unshifted_targets(labels: torch.Tensor) -> torch.Tensor:
    """Let each token predict itself."""
    return labels[:, :-1]


def clip_nothing(engine: Engine, max_norm: float) -> torch.Tensor:
    return clip_grad_norm(engine, 1e9)


def rates_one_step_late(rates: LearningRates, step: int) -> Any:
    return rates_after(rates, max(step - 1, 0))


def repeat_first_tokens(corpus: EncodedCorpus, *arguments: Any) -> None:
    """Repeat the token before each text, as if both the template and the tokenizer added it."""
    init_corpus(corpus, *arguments)
    corpus._before = np.repeat(corpus._before, 2)


class MaskingBatches(LocalBatches):
    """Ignores the labels in the first half of each row."""

    def read(self, slots: Any) -> Any:
        columns = super().read(slots)
        columns["labels"][:, : columns["labels"].shape[1] // 2] = -100
        return columns


def masking_train_loader(*arguments: Any, **options: Any) -> Any:
    loader = train_loader(*arguments, **options)
    loader.dataset.__class__ = MaskingBatches
    return loader


# The replaced attribute of each bug, and its replacement.
BUGS: dict[str, tuple[Any, str, Any]] = {
    "another order": (order, "permute", reverse_order),
    "a mean of means": (Engine, "forward_backward", controls.mean_of_means),
    "unshifted labels": (gpt_model, "targets_of", unshifted_targets),
    "a token twice": (EncodedCorpus, "__init__", repeat_first_tokens),
    "masked labels": (start, "train_loader", masking_train_loader),
    "a schedule one late": (LearningRates, "after", rates_one_step_late),
    "no clipping": (Engine, "clip_grad_norm", clip_nothing),
}


def main() -> None:
    for run in json.loads(Path(sys.argv[1]).read_text()):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ["LLMTRAIN_CACHE"] = run["cache"]

        planting = contextlib.nullcontext()
        if run["bug"]:
            target, attribute, replacement = BUGS[run["bug"]]
            planting = controls.patched(target, attribute, replacement)
        with planting:
            gpt.main(run["flags"])


if __name__ == "__main__":
    main()
