"""Saving and loading: a checkpoint belongs to the run, not to its processes.

Two processes train and save. One process resumes from the middle, and ends with the same weights. A
checkpoint holds everything that the next step depends on: the weights, the optimizer's state and
the step, from which the next rows follow.
"""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmtrain.lessons.common import claim, compare_shard, random_tensor, show, training_run

STEPS = 8


def main() -> None:
    """Train on two processes, resume with one from the middle, and compare the models."""
    with tempfile.TemporaryDirectory() as scratch:
        two_processes = Path(scratch) / "two"
        with training_run(two_processes, STEPS, "--save_steps", "4", processes=2):
            pass
        checkpoint = two_processes / "checkpoints" / "step-00000004"
        for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
            show(f"  {file.relative_to(two_processes)}")

        one_process = Path(scratch) / "one"
        with training_run(one_process, STEPS, "--resume_from_checkpoint", str(checkpoint)):
            pass
        claim(
            "8 steps on 2 processes, or 4 on 2 and then 4 on 1: weights differ by less than 1e-5",
            _have_same_weights(two_processes, one_process),
        )
        for processes in (2, 3):
            check(load_shard, processes, seed=0)
        claim("2 or 3 processes can each read their own rows of a saved tensor", holds=True)
        model = AutoModelForCausalLM.from_pretrained(two_processes / "model")
        parameters = model.num_parameters()
        show(f"transformers loads it: {type(model).__name__}, {parameters:,} parameters")
        assert all(bool(torch.isfinite(weight).all()) for weight in model.state_dict().values())


def load_shard(file: Path, name: str, rank: int, processes: int) -> object:
    """Read a rank's rows of a tensor, and nothing else of the file."""
    with safe_open(file, "pt") as tensors:
        rows = tensors.get_slice(name)
        count = rows.get_shape()[0]
        share = -(-count // processes)
        return rows[min(rank * share, count) : min((rank + 1) * share, count)]


def check(load: Callable[..., object], processes: int, seed: int) -> None:
    """Load tensors of random sizes. The last one has fewer rows than there are processes.

    Args:
        load: returns the rows of a rank, given the file, the name of the tensor, the rank and the
            number of processes.
        processes: the number of ranks.
        seed: chooses the tensors.
    """
    rows = processes * random.Random(seed).randint(2, 9)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.safetensors"
        for count in (rows, rows + 1, processes - 1):
            full = random_tensor(count, 3, seed=seed)
            save_file({"weight": full, "bias": full[:, 0].clone()}, file)
            for rank in [dist.get_rank()] if dist.is_initialized() else range(processes):
                shard = load(file, "weight", rank, processes)
                compare_shard(shard, full, rank, processes)


def _have_same_weights(first: Path, second: Path) -> bool:
    """Return whether each tensor of two models differs by less than 1e-5 of its norm."""
    first_weights = load_file(first / "model" / "model.safetensors")
    second_weights = load_file(second / "model" / "model.safetensors")
    return all(
        float((weight - second_weights[name]).norm() / weight.norm()) < 1e-5
        for name, weight in first_weights.items()
    )
