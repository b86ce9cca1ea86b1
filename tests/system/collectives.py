"""Run on two ranks by test_collectives.py: counts what DDP sends in each micro-batch."""

import json
import sys
from pathlib import Path

import torch

from llmtrain import GPT, GPTConfig, OptimConfig, make_optimizer
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.launching.process import launch
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.step import train_step


def main() -> None:
    accelerator = start_accelerator()
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=16), vocab_size=300, seed=1)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)

    reduced: list[int] = []

    def counting_hook(
        state: None, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.index())
        buffer = bucket.buffer().div_(accelerator.num_processes)
        return (
            torch.distributed.all_reduce(buffer, async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
        )

    model.register_comm_hook(None, counting_hook)
    forward, per_micro_batch = model.forward, []

    def counting_forward(**batch: torch.Tensor) -> torch.Tensor:
        per_micro_batch.append(len(reduced))
        return forward(**batch)

    model.forward = counting_forward
    if "sync_every_micro_batch" in sys.argv:  # the bug that this test is there to find
        model.require_forward_param_sync = False
        accelerator.no_sync = lambda _: torch.enable_grad()

    engine = ReplicatedEngine(Ranks(accelerator), model)
    generator = torch.Generator().manual_seed(engine.ranks.rank)
    rounds = []
    for _ in range(3):
        batches = []
        for _ in range(3):
            ids = torch.randint(300, (2, 17), generator=generator)
            batches.append({"input_ids": ids, "labels": ids})
        reduced.clear()
        per_micro_batch.clear()
        train_step(engine, optimizer, batches, max_grad_norm=1.0)
        starts = [*per_micro_batch, len(reduced)]
        rounds.append([starts[i + 1] - starts[i] for i in range(3)])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = accelerator.gather(weights).view(2, -1)
    assert torch.equal(gathered[0], gathered[1]), "the replicas differ"
    if accelerator.is_main_process:
        buckets = len(model._get_ddp_logging_data()["bucket_sizes"].split(","))
        Path(sys.argv[1]).write_text(json.dumps({"rounds": rounds, "buckets": buckets}))


if __name__ == "__main__":
    launch(main)
