"""A recipe's loop, run step by step: the real run folder, loader, engine, optimizer and callbacks."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import llmtrain as lt
from benchmarks.gpu.sizes import GPTSize
from benchmarks.gpu.turns import Variant, bytes_of
from llmtrain.observe.throughput import Throughput
from llmtrain.training.context import LoopContext
from llmtrain.training.loop import make_engine, training_steps

_ENDLESS = 100_000  # steps: no run of a benchmark gets there

Build = Callable[[Any, lt.Tokenized, str], lt.ModelBundle]


@dataclass
class GPTSettings(lt.Settings):
    """The settings of a GPT that is trained on random tokens."""

    model: lt.GPTConfig


def gpt_settings(size: GPTSize, folder: Path, compiled: bool, **optim: object) -> GPTSettings:
    """Return the settings of ``recipes/gpt.py`` for a GPT-2 of this size, without evaluations.

    Args:
        size: of the model and of the global batch.
        folder: the run folder.
        compiled: whether blocks are compiled.
        **optim: optimizer settings.
    """
    return GPTSettings(
        model=size.config(),
        **common_settings(folder, rows=size.rows, compiled=compiled, **optim),
    )


def common_settings(folder: Path, rows: int, compiled: bool, **optim: object) -> dict[str, object]:
    """Return the settings that do not depend on the model: a run that only makes steps.

    Args:
        folder: the run folder.
        rows: of a step, which is one micro-batch.
        compiled: whether blocks are compiled.
        **optim: optimizer settings.
    """
    return {
        "data": lt.BatchConfig(global_batch_size=rows, per_device_train_batch_size=rows),
        "optim": lt.OptimConfig(**{"max_steps": _ENDLESS, "warmup_steps": 10, **optim}),
        "parallel": lt.ParallelConfig(torch_compile="always" if compiled else "never"),
        "eval": lt.EvalConfig(eval_steps=0),
        "run": lt.RunConfig(
            output_dir=str(folder),
            report_to=["none"],
            save_steps=_ENDLESS,
            resume_from_checkpoint="never",
        ),
    }


def build_gpt(settings: GPTSettings, rows: lt.Tokenized, precision: str) -> lt.ModelBundle:
    """Build a GPT as ``recipes/gpt.py`` does."""
    with torch.device("meta"):
        model = lt.build_gpt(settings.model, rows.vocabulary)
    return model.bundle(rows.tokenizer, trained_on="random tokens", seed=settings.optim.seed)


class RecipeLoop(Variant):
    """The steps of a recipe, with everything that happens around them."""

    def __init__(
        self,
        name: str,
        accelerator: Accelerator,
        settings: lt.Settings,
        rows: lt.Tokenized,
        build: Build = build_gpt,
    ) -> None:
        positions = settings.data.global_batch_size * rows.positions
        super().__init__(name, accelerator.device, positions)

        bundle = lt.place(accelerator, build, settings, rows)
        self.weight_bytes = bytes_of(bundle.model)
        optimizer = lt.make_optimizer(accelerator, bundle.model, settings.optim)
        self._contexts = contextlib.ExitStack()
        run = self._contexts.enter_context(
            lt.open_run(accelerator, settings, rows, bundle, optimizer)
        )
        model, optimizer, batches, _ = accelerator.prepare(
            bundle.model, optimizer, *lt.loaders(run)
        )
        engine = make_engine(run, model)
        throughput = Throughput(accelerator, engine.unwrapped)
        self.phases.starts = engine.phases.record()
        self.flops_per_position = throughput.flops_per_token
        context = LoopContext(
            run=run,
            engine=engine,
            optimizer=optimizer,
            batches=batches,
            eval_batches=None,
            throughput=throughput,
        )
        self._steps = training_steps(context)
        next(self._steps)

    def step(self) -> None:
        next(self._steps)

    def close(self) -> None:
        self._steps.close()
        self._contexts.close()
