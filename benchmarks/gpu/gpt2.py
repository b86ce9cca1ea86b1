"""A step of GPT-2 124M: the recipe, the same model in a bare loop, and nanoGPT, in turns.

| measured | compared with |
|---|---|
| a step of the recipe, with Muon and with AdamW | a bare loop that reads the norm of the gradient |
| the same | a bare loop that does not, and that as one CUDA graph |
| the same | the bare loop compiled as a whole |
| the same, with a vocabulary that is a multiple of 64 | nanoGPT, with and without biases |

Repeat it with `python -m benchmarks.gpu --out FOLDER --nanogpt FOLDER --sections gpt2
gpt2-own-vocabulary recipe-model`.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator

import llmtrain as lt
from benchmarks.gpu.call import Call, GPTSize, new_optimizer
from benchmarks.gpu.journal import Figures
from benchmarks.gpu.loops import (
    BareLoop,
    BareStep,
    GraphedStep,
    RecipeLoop,
    gpt_settings,
    let_capture,
)
from benchmarks.gpu.rows import batches_on_host, text_rows
from benchmarks.gpu.turns import Variant, bytes_of, take_turns
from benchmarks.nanogpt import NanoGPTLoop
from benchmarks.runs import GPTShape

_ROWS = 256  # of the data; steps draw them again and again


@dataclass(frozen=True)
class Training:
    """What several loops train: a model, its rows and its optimizer.

    Attributes:
        call: the call.
        accelerator: of the recipe's loop.
        size: of the model and the batch.
        rows: the data.
        optim: the name of the optimizer.
        label: how the names of its variants begin.
    """

    call: Call
    accelerator: Accelerator
    size: GPTSize
    rows: lt.Tokenized
    optim: str
    label: str

    def variants(self) -> list[Variant]:
        """Return the recipe's loop, and the bare loop with and without reading the norm."""
        name = self.label.replace(", ", "-").replace(" ", "-")
        settings = gpt_settings(
            self.size,
            self.call.folder / name,
            compiled=self.call.on_gpu,
            optim=self.optim,
            learning_rate=6e-4,
        )
        bare = self.bare_loop()
        variants: list[Variant] = [
            RecipeLoop(f"{self.label}: recipe", self.accelerator, settings, rows=self.rows),
            BareStep(f"{self.label}: bare, norm read", bare, reads_norm=True),
            BareStep(f"{self.label}: bare, norm not read", bare, reads_norm=False),
        ]
        for variant in variants:
            variant.graph_name = self.graph_name
        return variants

    @property
    def graph_name(self) -> str:
        """The name of the bare loop as one CUDA graph."""
        return f"{self.label}: one graph"

    def graphed(self, pool: object) -> list[Variant]:
        """Return the bare loop as one CUDA graph; none if it cannot be captured."""
        try:
            return [GraphedStep(self.graph_name, self.bare_loop(capturable=True), pool)]
        except RuntimeError as error:
            reason = f"it cannot be captured: {error}"[:300]
            self.call.journal.record("gpt2", self.graph_name, left_out=reason)
            return []

    def bare_loop(self, capturable: bool = False, compiles_all: bool = False) -> BareLoop:
        """Return a bare loop with a model of its own."""
        model = self.call.new_gpt(self.size, self.rows.vocabulary)
        optimizer = new_optimizer(self.accelerator, model, self.optim)
        if capturable:
            let_capture(optimizer)

        return BareLoop(
            model=model,
            optimizer=optimizer,
            batches=batches_on_host(self.rows, self.size.rows, pinned=self.call.on_gpu),
            dtype=self.call.autocast_dtype,
            backend=self.call.backend,
            compiles_all=compiles_all,
        )


class NanoGPTStep(Variant):
    """A step of nanoGPT's loop."""

    def __init__(self, name: str, loop: NanoGPTLoop, device: torch.device) -> None:
        super().__init__(name, device, loop.positions)
        self.loop = loop
        self.weight_bytes = bytes_of(loop.network)

    def step(self) -> None:
        self.phases.begin("step")
        self.loop.step()


def measure(call: Call) -> None:
    """Time GPT-2 with a vocabulary that is a multiple of 64, with both optimizers, and nanoGPT."""
    variants = _of_vocabulary(call, call.sizes.vocabularies[0])
    if call.nanogpt is None:
        call.journal.record("gpt2", "nanoGPT", left_out="nanoGPT needs --nanogpt FOLDER")
    else:
        variants += _of_nanogpt(call, call.nanogpt)
    _time_and_record(call, "gpt2", variants)


def measure_own_vocabulary(call: Call) -> None:
    """Time GPT-2 with its own vocabulary, whose size is odd, with both optimizers."""
    variants = _of_vocabulary(call, call.sizes.vocabularies[1])
    _time_and_record(call, "gpt2, own vocabulary", variants)


def measure_recipe_model(call: Call) -> None:
    """Time the model that ``recipes/gpt.py`` trains without flags, which is bound by launches."""
    size = call.sizes.recipe
    training = Training(
        call=call,
        accelerator=call.accelerator(),
        size=size,
        rows=text_rows(call.sizes.recipe_vocabulary, size.block, _ROWS),
        optim="muon",
        label=f"{size.layers} x {size.width}, muon",
    )
    variants = training.variants()
    if call.on_gpu:
        variants += training.graphed(torch.cuda.graph_pool_handle())
    _time_and_record(call, "recipe model", variants)


def _of_vocabulary(call: Call, vocabulary: int) -> list[Variant]:
    """Return the variants of GPT-2 with a vocabulary, for both optimizers."""
    accelerator = call.accelerator()
    rows = text_rows(vocabulary, call.sizes.gpt2.block, _ROWS)
    pool = torch.cuda.graph_pool_handle() if call.on_gpu else None

    variants: list[Variant] = []
    for optim in ("muon", "adamw"):
        training = Training(
            call=call,
            accelerator=accelerator,
            size=call.sizes.gpt2,
            rows=rows,
            optim=optim,
            label=f"{optim}, V {vocabulary:,}",
        )
        variants += training.variants()
        if call.on_gpu:
            variants += training.graphed(pool)

    whole = training.bare_loop(compiles_all=True)
    name = f"{training.label}: bare, compiled as a whole"
    return [*variants, BareStep(name, whole, reads_norm=False)]


def _of_nanogpt(call: Call, folder: str) -> list[Variant]:
    size = call.sizes.gpt2
    tokens = call.folder / "tokens"
    vocabulary = call.sizes.vocabularies[0]
    random = np.random.default_rng(seed=0)
    random.integers(vocabulary, size=100 * size.positions, dtype=np.uint16).tofile(tokens)

    variants: list[Variant] = []
    for bias in (False, True):
        loop = NanoGPTLoop(
            folder=folder,
            tokens=tokens,
            shape=GPTShape(
                layers=size.layers,
                heads=size.heads,
                width=size.width,
                block=size.block,
                batch=size.rows,
            ),
            vocabulary=vocabulary,
            device=call.device.type,
            bias=bias,
            dtype=call.autocast_dtype,
            backend=call.backend,
        )
        name = f"nanoGPT {'with' if bias else 'without'} biases"
        variants.append(NanoGPTStep(name, loop, call.device))
    return variants


def _time_and_record(call: Call, section: str, variants: Sequence[Variant]) -> None:
    """Time variants in turns, and record each; then free them."""
    flops = max(variant.flops_per_position for variant in variants)
    for variant in variants:
        variant.flops_per_position = variant.flops_per_position or flops

    results = take_turns(
        variants,
        device=call.device,
        steps=call.sizes.steps,
        rounds=call.sizes.rounds,
        peak_flops=call.peak,
    )
    for variant in variants:
        figures = results[variant.name]
        if variant.graph_name in results:
            graph = results[variant.graph_name]
            figures["idle_ms"] = _milliseconds(figures) - _milliseconds(graph)
        call.journal.record(section, variant.name, **figures)

    for variant in variants:
        variant.close()
    gc.collect()
    if call.on_gpu:
        torch.cuda.empty_cache()


def _milliseconds(figures: Figures) -> float:
    return float(str(figures["ms"]))
