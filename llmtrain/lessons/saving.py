"""Saving and loading: a checkpoint is of the run, not of its processes.

Two processes train and save; one process goes on from the middle, and ends in the same weights. What is saved is what
an update depends on: weights, the optimizer's state, the step. Which rows come next follows from the step.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from llmtrain.lessons.stage import claim, show, training

PROCESSES = 1


def main() -> None:
    """Train on two processes, go on with one from the middle, and compare the models."""
    with tempfile.TemporaryDirectory() as scratch:
        two, one = folders = Path(scratch) / "two", Path(scratch) / "one"
        with training(two, 8, "--save_steps", "4", processes=2):
            pass
        middle = two / "checkpoints" / "step-00000004"
        for file in sorted(path for path in middle.rglob("*") if path.is_file()):
            show(f"  {file.relative_to(two)}")
        with training(one, 8, "--resume_from_checkpoint", str(middle)):
            pass
        a, b = (load_file(folder / "model" / "model.safetensors") for folder in folders)
        same = all(float((a[name] - b[name]).norm() / a[name].norm()) < 1e-5 for name in a)
        claim(
            "8 steps on 2 processes, and 4 on 2 then 4 on 1: weights differ by less than 1e-5", same
        )

        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(two / "model")
        show(
            f"transformers loads it: {type(model).__name__}, {model.num_parameters():,} parameters"
        )
        assert all(bool(torch.isfinite(weight).all()) for weight in model.state_dict().values())
