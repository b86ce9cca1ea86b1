"""Shards instead of copies: FSDP, and the idea of tensor and pipeline parallelism.

DDP needs the whole model on every device. FSDP keeps a shard of every tensor on each and gathers a block's weights for
the moment in which it computes. Tensor parallelism splits a product, and sends its results instead of weights; a
pipeline splits the model between blocks, and sends what flows from one to the next. Use DDP while the model fits, FSDP
when it does not, the others inside fast links or when a batch is too small to be split further.
"""

import os

import torch
import torch.distributed as dist

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import (
    LEARNING_RATE,
    batch,
    claim,
    my_rows,
    prepare,
    rows,
    show,
    small_gpt,
)
from llmtrain.parallel.placement import held_bytes, place_sharded
from llmtrain.training.settings import OptimConfig
from llmtrain.training.step import train_step

PROCESSES = 2


def main() -> None:
    """Train a sharded model beside a whole one, then compute a product as tensor parallelism and a pipeline do."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    accelerator = start_accelerator()
    rank = accelerator.process_index

    whole = small_gpt()
    with torch.device("meta"):
        sharded = small_gpt()
    place_sharded(accelerator, sharded, sharded.first_weights(0))
    engine, optimizer = prepare(accelerator, sharded)
    here, everywhere = held_bytes(engine.model)
    show(f"of {everywhere:,} bytes of weights this process holds {here / everywhere:.0%}")
    assert here < 0.6 * everywhere

    betas = OptimConfig.adam_beta1, OptimConfig.adam_beta2
    alone = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE, betas=betas, weight_decay=0)
    same = True
    for step in range(5):
        batches = [batch(my_rows(accelerator, 8, step))]
        result = train_step(engine, optimizer, batches, max_grad_norm=1e9)
        nll = whole(**batch(rows(8, step)))
        (nll / result.denominator).backward()
        alone.step()
        alone.zero_grad()
        total = float(engine.sum_over_ranks(result.sums.loss))
        same &= abs(total - nll.item()) < 1e-4 * nll.item()
    claim("5 updates of a sharded model, and of a whole one in one process: the same losses", same)

    a = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    b = whole.state_dict()["transformer.h.0.mlp.c_fc.weight"]
    halves = accelerator.gather((a @ b.chunk(2, dim=1)[rank])[None])
    same = torch.allclose(torch.cat([*halves], dim=1), a @ b, atol=1e-5)
    claim("a product of which each process computes half the columns: the same", same)

    second = torch.zeros(8, b.shape[1])
    if rank == 0:
        dist.send(torch.tanh(a), dst=1)
    else:
        between = torch.empty(8, 64)
        dist.recv(between, src=0)
        second = between @ b
    same = torch.allclose(accelerator.gather(second[None])[1], torch.tanh(a) @ b, atol=1e-5)
    claim("two layers, each on its own process, one after the other: the same", same)
