"""The loop leaves nothing behind: a model can be trained again in the same process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import llmtrain as lt
from llmtrain.training import loop

SETTINGS = lt.Settings(
    model=lt.GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, architecture="gpt2"),
    data=lt.DataConfig(tokenizer="byte", eval_fraction=0, global_batch_size=2),
    optim=lt.OptimConfig(optim="adamw", max_steps=3),
    run=lt.RunConfig(report_to=["none"]),
)


class CrashError(Exception):
    """Stands for a crash."""


def hooks_of(model: nn.Module) -> int:
    """Return how many hooks there are on a model's modules and parameters."""
    modules = sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    )
    parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return modules + parameters


@pytest.mark.parametrize("crashes", [False, True], ids=["to its end", "until it fails"])
def test_training_leaves_no_hooks_on_the_model(
    crashes: bool, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataclasses.replace(SETTINGS.data, dataset=[str(text_file)])
    rows = lt.tokenize(data, 16)
    model: Any = lt.GPT(SETTINGS.model, rows.vocabulary, seed=0)
    before = hooks_of(model)

    def crash(*arguments: Any, **named: Any) -> None:
        raise CrashError("out of luck")

    def train_once(name: str) -> None:
        settings = dataclasses.replace(
            SETTINGS,
            data=data,
            run=dataclasses.replace(SETTINGS.run, output_dir=str(tmp_path / name)),
        )
        accelerator = lt.start(settings)
        built = lt.ModelBundle(model, model.files(rows.tokenizer, rows.facts.dataset))
        optimizer = lt.make_optimizer(accelerator, model, settings.optim)
        with lt.open_run(accelerator, settings, rows, built) as run:
            batches, _ = lt.loaders(run)
            lt.train(run, *accelerator.prepare(model, optimizer, batches))

    for name in ("first", "second"):
        if crashes:
            monkeypatch.setattr(loop, "_count_if_skipped", crash)
            with pytest.raises(CrashError):
                train_once(name)
        else:
            train_once(name)
        assert hooks_of(model) == before
