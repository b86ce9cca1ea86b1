"""A short run that several tests start, each with its own parts."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import llmtrain as lt
from llmtrain.training.run import Run
from tests.training.small_runs import TWELVE_STEPS


@pytest.fixture
def train_gpt(text_file: Path, tmp_path: Path) -> Callable[..., Run]:
    """A function that trains a small GPT with the parts of a test."""

    def train(
        folder: str = "run",
        *,
        resume: str = "auto",
        async_save: bool = False,
        model: nn.Module | None = None,
        log: lt.LogConfig = TWELVE_STEPS.log,
        optim: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, Any] | None = None,
        **parts: Any,
    ) -> Run:
        settings = dataclasses.replace(
            TWELVE_STEPS,
            data=dataclasses.replace(TWELVE_STEPS.data, dataset=[str(text_file)]),
            optim=dataclasses.replace(TWELVE_STEPS.optim, **(optim or {})),
            eval=dataclasses.replace(TWELVE_STEPS.eval, **(evaluation or {})),
            log=log,
            run=dataclasses.replace(
                TWELVE_STEPS.run,
                output_dir=str(tmp_path / folder),
                resume_from_checkpoint=resume,
                async_save=async_save,
            ),
        )
        rows = lt.tokenize(settings.data, 16)
        gpt_model = model or lt.GPT(settings.model, rows.vocabulary, seed=0)
        files = gpt_model.files(rows.tokenizer, rows.metadata.dataset)
        bundle = lt.ModelBundle(gpt_model, files)
        return lt.fit(settings, rows, lambda *_: bundle, **parts)

    return train
