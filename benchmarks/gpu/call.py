"""The sizes, the device and the journal that all sections of a call share."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

import llmtrain as lt
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.sizes import GPTSize, Sizes
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.training.optim import make_optimizer


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
