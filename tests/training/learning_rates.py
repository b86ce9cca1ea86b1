"""Learning rates as a user sets them: by flags, by groups of parameters, and by a schedule."""

from typing import Any

import torch
from torch import nn

from llmtrain.training.settings import OptimConfig


def user_set(config: OptimConfig, *names: str) -> OptimConfig:
    """Return a config as if the user had set these flags on the command line."""
    config.origins = dict.fromkeys(names, "command line")
    return config


def two_groups(embedding: Any = 1e-2, head: Any = 1e-4) -> torch.optim.AdamW:
    """Make an optimizer of two groups with these learning rates."""
    first = {"params": [nn.Parameter(torch.ones(2))], "lr": embedding, "name": "embedding"}
    second = {
        "params": [nn.Parameter(torch.ones(2))],
        "lr": head,
        "name": "head",
        "weight_decay": 0.3,
    }
    return torch.optim.AdamW([first, second], betas=(0.8, 0.9), eps=1e-7)


def triangle(step: int, max_steps: int) -> float:
    """Rise until the middle of the run, and fall again."""
    return 1 - abs(2 * step / max_steps - 1)
