"""Saving and loading: a checkpoint is of the run, not of its processes.

Two processes train and save; one process goes on from the middle, and ends in the same weights. What is saved is what
an update depends on: weights, the optimizer's state, the step. Which rows come next follows from the step.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from llmtrain.lessons.stage import TINY_RUN, show, train_recipe

PROCESSES = 1


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        two, one = Path(scratch) / "two", Path(scratch) / "one"
        flags = [*TINY_RUN, "--max_steps", "8", "--save_steps", "4"]
        train_recipe(2, *flags, "--output_dir", str(two))
        middle = two / "checkpoints" / "step-00000004"
        for file in sorted(path for path in middle.rglob("*") if path.is_file()):
            show(f"  {file.relative_to(two)}")
        train_recipe(1, *flags, "--resume_from_checkpoint", str(middle), "--output_dir", str(one))
        weights = [load_file(folder / "model" / "model.safetensors") for folder in (two, one)]
        apart = max(
            float((weights[0][name] - weights[1][name]).norm() / weights[0][name].norm()) for name in weights[0]
        )
        show("on 2 processes to step 8; and on 2 to step 4, then on 1 to step 8:")
        show(f"weights differ by less than 1e-5: {apart < 1e-5}")
        assert apart < 1e-5

        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(two / "model")
        show(f"transformers loads it: {type(model).__name__}, {model.num_parameters():,} parameters")
        assert all(bool(torch.isfinite(weight).all()) for weight in model.state_dict().values())
