"""What lessons share: a small model, rows to train on, and a voice."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.console import rank
from llmtrain.launch.children import kill
from llmtrain.models.gpt import GPT, GPTConfig
from llmtrain.observe.phases import Phases
from llmtrain.shipped import shipped
from llmtrain.training.loop import accumulate, train_step

VOCABULARY, BLOCK = 64, 32


def show(text: str = "") -> None:
    """A line, from one process."""
    if rank() == 0:
        print(text, flush=True)


def measured(text: str) -> None:
    """A line with what this machine took."""
    show(f"measured  {text}".rstrip())


def small_gpt(n_layer: int = 2, n_embd: int = 64) -> GPT:
    """The same weights on every process that calls this."""
    return GPT(GPTConfig(n_layer=n_layer, n_head=4, n_embd=n_embd, block_size=BLOCK), VOCABULARY, seed=0)


def rows(count: int, step: int = 0) -> torch.Tensor:
    """[count, BLOCK + 1] tokens with something to learn: each is the one before plus a step that its row keeps."""
    draw = torch.Generator().manual_seed(step)
    first, stride = (torch.randint(1, VOCABULARY, (count, 1), generator=draw) for _ in range(2))
    return (first + stride % 7 * torch.arange(BLOCK + 1)) % VOCABULARY


def batch(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens, "labels": tokens}


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The first digits of a hash over all bits."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:12]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train_in_phases(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    phases: Phases,
    mine: Iterable[torch.Tensor],
    after: Callable[[int], None],
) -> None:
    """An update for each of this process's shares of a batch, telling the phases as the package's loop does; ``after``
    is told how many are made."""
    passes = phases.before_optimizer(accumulate)
    for step, tokens in enumerate(phases.loading(mine)):
        phases.at("count", step)
        train_step(accelerator, model, optimizer, [batch(tokens)], 1.0, forward_backward=passes)
        phases.at("other", step + 1)
        after(step + 1)


TINY_RUN = [
    *("--n_layer", "2", "--n_head", "2", "--n_embd", "64", "--block_size", "64", "--eval_fraction", "0"),
    *("--global_batch_size", "8", "--per_device_train_batch_size", "4", "--logging_steps", "1", "--report_to", "none"),
]


def begin_recipe(processes: int, *flags: str, launcher_flags: tuple[str, ...] = ()) -> subprocess.Popen:
    """recipes/gpt.py under torchrun, in a process group of its own."""
    meeting = () if "--nnodes" in launcher_flags else ("--standalone",)
    launcher = ["-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(processes), *launcher_flags]
    command = [sys.executable, *launcher, str(shipped("recipes") / "gpt.py"), *flags]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> None:
    """Wait for a recipe that should end well."""
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said.decode(errors="replace")[-2000:]


def train_recipe(processes: int, *flags: str) -> None:
    process = begin_recipe(processes, *flags)
    try:
        finish(process)
    finally:
        kill(process)


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]
