"""The sizes that are measured on a GPU or rehearsed on a CPU, and what all sections of a call share."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

import llmtrain as lt
from benchmarks.gpu.journal import Journal
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.training.optim import make_optimizer


@dataclass(frozen=True)
class GPTSize:
    """A GPT and its global batch."""

    layers: int
    heads: int
    width: int
    block: int  # positions of a row
    rows: int  # of a step

    @property
    def positions(self) -> int:
        """Positions of a step."""
        return self.block * self.rows

    def config(self, dropout: float = 0.0) -> lt.GPTConfig:
        """Return the settings of a GPT-2 of this size."""
        return lt.GPTConfig(
            n_layer=self.layers,
            n_head=self.heads,
            n_embd=self.width,
            block_size=self.block,
            dropout=dropout,
            architecture="gpt2",
        )


@dataclass(frozen=True)
class LlamaSize:
    """A Llama and its micro-batch."""

    layers: int
    width: int
    inner: int
    vocabulary: int
    block: int
    rows: int

    @property
    def positions(self) -> int:
        """Positions of a step."""
        return self.block * self.rows


@dataclass(frozen=True)
class Sizes:
    """All sizes of a call.

    Attributes:
        gpt2: the GPT-2 of the tables.
        vocabularies: that of nanoGPT's benchmarks, padded, and GPT-2's own.
        recipe: the model that ``recipes/gpt.py`` trains without flags.
        recipe_vocabulary: the vocabulary of that recipe.
        short_run: the model of the runs whose weights are compared.
        short_steps: steps of such a run; it saves after half of them.
        check: the model whose passes are compared with float64.
        billion: a Llama that is trained in full.
        eight_billion: a Llama that gets LoRA adapters.
        steps: steps of a variant in one round.
        slow_steps: the same for steps that take a second.
        rounds: how often all variants take turns.
        curve_steps: steps whose losses are compared between precisions.
        product: rows of the square matrices whose product is timed.
        repeats: calls of which a median is taken.
    """

    gpt2: GPTSize
    vocabularies: tuple[int, int]
    recipe: GPTSize
    recipe_vocabulary: int
    short_run: GPTSize
    short_steps: int
    check: GPTSize
    billion: LlamaSize
    eight_billion: LlamaSize
    steps: int
    slow_steps: int
    rounds: int
    curve_steps: int
    product: int
    repeats: int


FULL = Sizes(
    gpt2=GPTSize(layers=12, heads=12, width=768, block=1024, rows=16),
    vocabularies=(50_304, 50_257),
    recipe=GPTSize(layers=4, heads=4, width=128, block=128, rows=32),
    recipe_vocabulary=2048,
    short_run=GPTSize(layers=12, heads=12, width=768, block=1024, rows=8),
    short_steps=8,
    check=GPTSize(layers=4, heads=4, width=256, block=512, rows=4),
    billion=LlamaSize(layers=20, width=2048, inner=5632, vocabulary=128_256, block=1024, rows=8),
    eight_billion=LlamaSize(
        layers=32, width=4096, inner=14_336, vocabulary=128_256, block=1024, rows=8
    ),
    steps=40,
    slow_steps=8,
    rounds=2,
    curve_steps=20,
    product=8192,
    repeats=20,
)

TINY = Sizes(
    gpt2=GPTSize(layers=2, heads=2, width=32, block=64, rows=4),
    vocabularies=(512, 501),
    recipe=GPTSize(layers=2, heads=2, width=32, block=32, rows=4),
    recipe_vocabulary=256,
    short_run=GPTSize(layers=2, heads=2, width=32, block=64, rows=4),
    short_steps=4,
    check=GPTSize(layers=2, heads=2, width=32, block=64, rows=4),
    billion=LlamaSize(layers=2, width=64, inner=128, vocabulary=512, block=64, rows=4),
    eight_billion=LlamaSize(layers=2, width=64, inner=128, vocabulary=512, block=64, rows=4),
    steps=4,
    slow_steps=2,
    rounds=2,
    curve_steps=6,
    product=128,
    repeats=3,
)


@dataclass
class Call:
    """One call of the benchmark.

    Attributes:
        sizes: of models, batches and rounds.
        device: that is measured.
        journal: takes the figures.
        folder: for run folders and everything that need not be kept.
        nanogpt: a checkout of nanoGPT, if there is one.
        peak: FLOP/s of the card's data sheet in 16 bits; 0 if unknown.
    """

    sizes: Sizes
    device: torch.device
    journal: Journal
    folder: Path
    nanogpt: str | None = None
    peak: float = 0.0

    @property
    def on_gpu(self) -> bool:
        """Whether this is no rehearsal."""
        return self.device.type == "cuda"

    @property
    def half(self) -> torch.dtype:
        """The dtype of products: bfloat16, which many CPUs only emulate."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; ``None`` for no autocast."""
        return torch.bfloat16 if self.on_gpu else None

    @property
    def backend(self) -> str:
        """The compiler of bare loops. A rehearsal traces them, and generates no code."""
        return "inductor" if self.on_gpu else "eager"

    def accelerator(self) -> Accelerator:
        """Make the Accelerator of the recipes' loops of a section."""
        return start_accelerator()

    def new_gpt(self, size: GPTSize, vocabulary: int) -> lt.GPT:
        """Return a GPT-2 with the weights of seed 0, on the device."""
        return lt.build_gpt(size.config(), vocabulary).to(self.device)


def new_optimizer(
    accelerator: Accelerator, model: torch.nn.Module, name: str
) -> torch.optim.Optimizer:
    """Return the optimizer of a bare loop."""
    return make_optimizer(accelerator, model, lt.OptimConfig(optim=name, learning_rate=6e-4))
