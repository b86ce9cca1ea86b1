"""Shards instead of copies: FSDP, and the idea of tensor and pipeline parallelism.

DDP needs the full model on every device. FSDP keeps a shard of every tensor on each device, and
gathers the weights of a block only while it computes that block. Tensor parallelism splits a matrix
product, and sends its results instead of weights. A pipeline splits the model between blocks, and
sends hidden states from one part to the next. Use DDP while the model fits, and FSDP when it does
not. Use the others inside fast links, or when a batch is too small to be split further.
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    LEARNING_RATE,
    batch,
    claim,
    prepare,
    rank_rows,
    rows,
    show,
    small_gpt,
)
from llmtrain.models.gpt import GPT
from llmtrain.parallel.placement import parameter_bytes, place_sharded
from llmtrain.training.settings import OptimConfig
from llmtrain.training.step import train_step

PROCESSES = 2


def main() -> None:
    """Train with FSDP, then compute a product as tensor parallelism and a pipeline do."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    accelerator = start_accelerator()
    full_model = small_gpt()
    _train_sharded(accelerator, full_model)

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    weight = full_model.state_dict()["transformer.h.0.mlp.c_fc.weight"]
    _split_columns(accelerator, x, weight)
    _split_layers(accelerator, x, weight)


def _train_sharded(accelerator: Accelerator, full_model: GPT) -> None:
    """Train a sharded model on all ranks, and the full model in each rank by itself."""
    with torch.device("meta"):
        sharded_model = small_gpt()
    place_sharded(accelerator, sharded_model, sharded_model.initial_weights(0))
    engine, optimizer = prepare(accelerator, sharded_model)
    rank_bytes, model_bytes = parameter_bytes(engine.model)
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
        batches = [batch(rank_rows(accelerator, 8, step))]
        result = train_step(engine, optimizer, batches, max_grad_norm=1e9)

        full_loss = full_model(**batch(rows(8, step)))
        (full_loss / result.denominator).backward()
        full_optimizer.step()
        full_optimizer.zero_grad()

        loss = float(engine.sum_over_ranks(result.sums.loss))
        are_same &= abs(loss - full_loss.item()) < 1e-4 * full_loss.item()
    claim(
        "5 steps of a sharded model, or of the full model in one process: the losses are the same",
        are_same,
    )


def _split_columns(accelerator: Accelerator, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Compute half the columns of a product on each process: tensor parallelism."""
    columns = weight.chunk(2, dim=1)[accelerator.process_index]
    halves = accelerator.gather((x @ columns)[None])
    product = torch.cat([*halves], dim=1)
    claim(
        "a matrix product, half of its columns on each process: the result is the same",
        torch.allclose(product, x @ weight, atol=1e-5),
    )


def _split_layers(accelerator: Accelerator, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Compute one layer on each process: a pipeline."""
    output = torch.zeros(8, weight.shape[1])
    if accelerator.process_index == 0:
        dist.send(torch.tanh(x), dst=1)
    else:
        hidden = torch.empty(8, 64)
        dist.recv(hidden, src=0)
        output = hidden @ weight
    output_of_last = accelerator.gather(output[None])[1]
    claim(
        "two layers, one after the other on two processes: the result is the same",
        torch.allclose(output_of_last, torch.tanh(x) @ weight, atol=1e-5),
    )
