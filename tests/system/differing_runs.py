"""Run by test_diff.py: many small runs of recipes/gpt.py in one process, each with flags of its own or a known bug.

python differing_runs.py RUNS, a JSON list of {"flags": [...], "plant": NAME or null, "cache": FOLDER}
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import gpt

from llmtrain.data import loader, text
from llmtrain.models import gpt as model
from llmtrain.parallel import fsdp
from llmtrain.training import loop, optim, start, step
from tests.system import controls


def not_clipped(accelerator: Any, model: Any, limit: float) -> torch.Tensor:
    return fsdp.clip_grad_norm(accelerator, model, 1e9)


def mean_of_means(self: Any, batches: Any, tokens: torch.Tensor) -> torch.Tensor:
    accelerator, model = self.accelerator, self.model
    total = torch.zeros(())
    for batch in batches:
        nll = model(**batch)
        accelerator.backward(nll / step.count_targets(batch["labels"]).clamp(min=1) / len(batches))
        total += nll.detach()
    return total


def with_both_ends(
    tokenizer: Any, *arguments: Any, encoded: Any = text._encoded
) -> Iterator[np.ndarray]:
    """Puts the token at the end of a text there twice, as templates and tokenizers do that both add one."""
    for part in encoded(tokenizer, *arguments):
        yield part.repeat(2) if part.tolist() == [tokenizer.eos_token_id] else part


class LastLabel(loader.Collate):
    """Trains on all but the first half of a row."""

    def __call__(self, read: Any) -> Any:
        labels = read.columns["labels"].copy()
        labels[:, : labels.shape[1] // 2] = -100
        return super().__call__(read._replace(columns={**read.columns, "labels": labels}))


def with_masked_labels(*arguments: Any) -> Any:
    batches = loader.train_loader(*arguments)
    collate = LastLabel(batches.collate_fn.micro_batch)
    return torch.utils.data.DataLoader(
        batches.dataset, batch_sampler=batches.batch_sampler, collate_fn=collate
    )


PLANT: dict[str, tuple[Any, str, Any]] = {
    "another order": (loader, "permute", lambda positions, n, key: np.asarray(positions)[::-1] % n),
    "a mean of means": (step.Accumulation, "__call__", mean_of_means),
    "unshifted labels": (model, "targets_of", lambda labels: labels[:, :-1]),
    "a token twice": (text, "_encoded", with_both_ends),
    "masked labels": (start, "train_loader", with_masked_labels),
    "a schedule one late": (
        loop,
        "lr_at",
        lambda made, config: optim.lr_at(max(made - 1, 0), config),
    ),
    "no clipping": (step, "clip_grad_norm", not_clipped),
}


def main() -> None:
    for run in json.loads(Path(sys.argv[1]).read_text()):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        loader._order.cache_clear()
        os.environ["LLMTRAIN_CACHE"] = run["cache"]
        with controls.patched(*PLANT[run["plant"]]) if run["plant"] else contextlib.nullcontext():
            gpt.main(run["flags"])


if __name__ == "__main__":
    main()
