"""Shards instead of copies: FSDP.

DDP needs the full model on every device. FSDP keeps a shard of every tensor on each device, and
gathers the weights of a block only while it computes that block. Use DDP while the model fits, and
FSDP when it does not.
"""

import os

import torch

from llmtrain import OptimConfig
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    BLOCK,
    LEARNING_RATE,
    Training,
    batch,
    claim,
    rank_rows,
    rows,
    show,
    small_gpt,
)
from llmtrain.parallel.placement import place_sharded
from llmtrain.parallel.ranks import ranks_of


def main() -> None:
    """Train a model with FSDP, and the same model in one process."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    accelerator = start_accelerator()
    full_model = small_gpt()
    with torch.device("meta"):
        model = small_gpt()
    place_sharded(ranks_of(accelerator), model, model.initial_weights(0))
    training = Training(accelerator, model)
    model_bytes = sum(parameter.nbytes for parameter in training.model.parameters())
    rank_bytes = sum(parameter.to_local().nbytes for parameter in training.model.parameters())
    share = rank_bytes / model_bytes
    show(f"this process holds {share:.0%} of the {model_bytes:,} bytes of weights")
    assert rank_bytes < 0.6 * model_bytes

    full_optimizer = torch.optim.AdamW(
        full_model.parameters(),
        lr=LEARNING_RATE,
        betas=(OptimConfig.adam_beta1, OptimConfig.adam_beta2),
        weight_decay=0,
    )
    are_same = True
    for step in range(5):
        rank_loss = training.step(rank_rows(accelerator, 8, step), max_grad_norm=1e9)

        full_loss = full_model(**batch(rows(8, step))) / (8 * BLOCK)  # the mean over all tokens
        full_loss.backward()
        full_optimizer.step()
        full_optimizer.zero_grad()

        loss = float(accelerator.reduce(rank_loss, reduction="sum"))
        are_same &= abs(loss - full_loss.item()) < 1e-4 * full_loss.item()
    claim(
        "5 steps of a sharded model, or of the full model in one process: the losses are the same",
        are_same,
    )
