"""A recipe's own loop, step by step, and a bare loop of ten lines with its model, to compare it with."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import llmtrain as lt
from benchmarks.gpu.call import GPTSize
from benchmarks.gpu.turns import Variant, bytes_of
from llmtrain.interfaces.model import blocks_of
from llmtrain.parallel.placement import engine_for
from llmtrain.training.train import make_loop

# --- a recipe's loop, with its real run folder, loader, engine, optimizer and callbacks

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
        engine = engine_for(run.ranks, model, run.parts.objective, settings.parallel)
        engine.phases.recording = self.phases.starts
        loop = make_loop(run, engine, optimizer, batches)
        self.flops_per_position = loop.throughput.flops_per_token
        self._steps = loop.steps()
        next(self._steps)

    def step(self) -> None:
        next(self._steps)

    def close(self) -> None:
        self._steps.close()
        self._contexts.close()


# --- a bare loop, with the model, loss and optimizer of llmtrain


class BareLoop:
    """A model with its optimizer and its rows.

    Args:
        model: the model, on its device.
        optimizer: its optimizer.
        batches: tokens [B, T + 1] on the host, pinned for a GPU.
        dtype: of autocast, or ``None`` for no autocast.
        backend: compiles the blocks; ``None`` leaves them eager.
        compiles_all: compile the whole model as one graph instead, as nanoGPT does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: list[torch.Tensor],
        dtype: torch.dtype | None,
        backend: str | None = None,
        compiles_all: bool = False,
    ) -> None:
        self.model = model.train()
        self.call: Callable[..., torch.Tensor] = model
        self.optimizer = optimizer
        self.batches = itertools.cycle(batches)
        self.device = next(model.parameters()).device
        self.dtype = dtype
        self.positions = batches[0][:, 1:].numel()

        if backend is not None and compiles_all:
            self.call = torch.compile(model, dynamic=False, backend=backend)
        elif backend is not None:
            for block in blocks_of(model):
                block.forward = torch.compile(block.forward, dynamic=False, backend=backend)

    def next_batch(self) -> torch.Tensor:
        """Return the next tokens, on the device."""
        return next(self.batches).to(self.device, non_blocking=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens [B, T + 1]."""
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.dtype is not None:
            context = torch.autocast(self.device.type, self.dtype)

        with context:
            nll = self.call(ids, ids)
        return nll / self.positions

    def clip(self) -> torch.Tensor:
        """Scale the gradient down to the norm 1; return its norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class BareStep(Variant):
    """A step of a bare loop.

    Args:
        name: its name in the table.
        loop: the loop, which several variants may share.
        reads_norm: whether the host reads the norm of the gradient before the optimizer's step.
    """

    def __init__(self, name: str, loop: BareLoop, reads_norm: bool) -> None:
        super().__init__(name, loop.device, loop.positions)
        self.loop = loop
        self.weight_bytes = bytes_of(loop.model)
        self.reads_norm = reads_norm

    def step(self) -> None:
        self.phases.begin("data")
        ids = self.loop.next_batch()

        self.phases.begin("forward")
        loss = self.loop.forward(ids)

        self.phases.begin("backward")
        loss.backward()

        self.phases.begin("norm")
        norm = self.loop.clip()
        if self.reads_norm:
            float(norm)

        self.phases.begin("optimizer")
        self.loop.optimizer.step()
        self.loop.optimizer.zero_grad()


class GraphedStep(Variant):
    """A step of a bare loop as one CUDA graph, in which the device never waits for the host.

    A step's idle time is its time minus the time of this one.

    Args:
        name: its name in the table.
        loop: the loop. Its optimizer must be able to be captured.
        pool: the memory that graphs share.
    """

    def __init__(self, name: str, loop: BareLoop, pool: object) -> None:
        super().__init__(name, loop.device, loop.positions)
        self.loop = loop
        self.weight_bytes = bytes_of(loop.model)
        self.ids = loop.next_batch().clone()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)

        self.graph = torch.cuda.CUDAGraph()
        loop.optimizer.zero_grad()
        with torch.cuda.graph(self.graph, pool=pool):
            self._run()

    def _run(self) -> None:
        self.loop.forward(self.ids).backward()
        self.loop.clip()
        self.loop.optimizer.step()
        self.loop.optimizer.zero_grad()

    def step(self) -> None:
        self.phases.begin("data")
        self.ids.copy_(self.loop.next_batch())

        self.phases.begin("graph")
        self.graph.replay()


def let_capture(optimizer: torch.optim.Optimizer) -> None:
    """Let AdamW count its steps on the device, so that a CUDA graph can capture it."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
