"""Parts instead of copies: FSDP, and the idea of tensor and pipeline parallelism.

DDP needs the whole model on every device. FSDP keeps a part of every tensor on each and gathers a block's weights for
the moment in which it computes. Tensor parallelism cuts a product, and sends its results instead of weights; a pipeline
cuts the model between blocks, and sends what flows from one to the next. Use DDP while the model fits, FSDP when it
does not, the others inside fast links or when a batch is too small to be cut further.
"""

import os

import torch
import torch.distributed as dist

from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, rows, show, small_gpt
from llmtrain.models.gpt import GPT, GPTConfig
from llmtrain.parallel.fsdp import empty_if_sharded, held_bytes, shard
from llmtrain.training.loop import train_step
from llmtrain.training.optim import OptimConfig, make_optimizer

PROCESSES = 2
OPTIM = OptimConfig(optim="adamw", learning_rate=3e-3)


def main() -> None:
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    accelerator = start_accelerator()
    rank = accelerator.process_index

    whole = small_gpt()
    with empty_if_sharded(accelerator):
        model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=32), 64, seed=0)
    shard(accelerator, model, model.first_weights(0))
    model, optimizer = accelerator.prepare(model, make_optimizer(model, OPTIM))
    here, everywhere = held_bytes(model)
    show(f"of {everywhere:,} bytes of weights this process holds {here / everywhere:.0%}")
    assert here < 0.6 * everywhere

    alone = torch.optim.AdamW(whole.parameters(), lr=3e-3, betas=(OPTIM.adam_beta1, OPTIM.adam_beta2), weight_decay=0)
    losses = []
    for step in range(5):
        update = train_step(accelerator, model, optimizer, [batch(rows(8, step)[4 * rank :][:4])], 1e9)
        nll = whole(**batch(rows(8, step)))
        (nll / update.tokens).backward()
        alone.step()
        alone.zero_grad()
        losses.append((float(accelerator.reduce(update.nll, reduction="sum")), nll.item()))
    same = all(abs(a - b) < 1e-4 * b for a, b in losses)
    show(f"5 updates in parts, and whole in one process: the same losses: {same}")
    assert same

    a, b = (
        torch.randn(8, 64, generator=torch.Generator().manual_seed(1)),
        whole.state_dict()["transformer.h.0.mlp.c_fc.weight"],
    )
    columns = a @ b.chunk(2, dim=1)[rank]  # tensor parallel: each process has half of the columns
    pieces = [torch.empty_like(columns) for _ in range(2)]
    dist.all_gather(pieces, columns)
    same = torch.allclose(torch.cat(pieces, dim=1), a @ b, atol=1e-5)
    show(f"a product of which each process computes half the columns: the same: {same}")
    assert same

    half = torch.empty(8, 64)
    if rank == 0:  # a pipeline: the first process computes the first part, and sends on what comes out
        dist.send(torch.tanh(a), dst=1)
    else:
        dist.recv(half, src=0)
        half = half @ b
    done = [torch.empty(8, b.shape[1]) for _ in range(2)]
    dist.all_gather(done, half if rank else torch.zeros(8, b.shape[1]))
    same = torch.allclose(done[1], torch.tanh(a) @ b, atol=1e-5)
    show(f"two layers, each on its own process, one after the other: the same: {same}")
    assert same
