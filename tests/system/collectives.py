"""Started on two ranks by test_collectives.py: count the buckets that DDP reduces in each micro-batch.

`collectives.py FILE [sync_every_micro_batch]` writes the counts. With the second argument, DDP
reduces gradients in every micro-batch, which is the bug that the counts would show.
"""

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

STEPS = 3
MICRO_BATCHES = 3
VOCABULARY = 300


class BucketCounter:
    """Counts the buckets that a model in DDP reduces, by micro-batch.

    Args:
        model: the model, wrapped in DDP.
        processes: the number of ranks.
    """

    def __init__(self, model: torch.nn.parallel.DistributedDataParallel, processes: int) -> None:
        self.processes = processes
        self.forward = model.forward
        self.reduced = 0
        self.reduced_before: list[int] = []  # at the beginning of each micro-batch of a step
        model.register_comm_hook(None, self._reduce)
        model.forward = self._counted_forward

    def _reduce(
        self, state: None, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        self.reduced += 1
        mean = bucket.buffer().div_(self.processes)
        reduction = torch.distributed.all_reduce(mean, async_op=True).get_future()
        return reduction.then(lambda future: future.value()[0])

    def _counted_forward(self, **batch: torch.Tensor) -> torch.Tensor:
        self.reduced_before.append(self.reduced)
        return self.forward(**batch)

    def begin_step(self) -> None:
        self.reduced = 0
        self.reduced_before = []

    def counts_of_step(self) -> list[int]:
        """Return the number of buckets that each micro-batch of the step has reduced."""
        borders = [*self.reduced_before, self.reduced]
        return [borders[i + 1] - borders[i] for i in range(MICRO_BATCHES)]


def main() -> None:
    accelerator = start_accelerator()
    config = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=16)
    model = GPT(config, vocab_size=VOCABULARY, seed=1)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    counter = BucketCounter(model, accelerator.num_processes)

    if "sync_every_micro_batch" in sys.argv:
        model.require_forward_param_sync = False
        accelerator.no_sync = lambda _: torch.enable_grad()

    engine = ReplicatedEngine(Ranks(accelerator), model)
    generator = torch.Generator().manual_seed(engine.ranks.rank)
    counts = []
    for _ in range(STEPS):
        batches = []
        for _ in range(MICRO_BATCHES):
            ids = torch.randint(VOCABULARY, (2, 17), generator=generator)
            batches.append({"input_ids": ids, "labels": ids})

        counter.begin_step()
        train_step(engine, optimizer, batches, max_grad_norm=1.0)
        counts.append(counter.counts_of_step())

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    weights_of_ranks = accelerator.gather(weights).view(2, -1)
    assert torch.equal(weights_of_ranks[0], weights_of_ranks[1]), "the replicas differ"

    if accelerator.is_main_process:
        buckets = len(model._get_ddp_logging_data()["bucket_sizes"].split(","))
        Path(sys.argv[1]).write_text(json.dumps({"steps": counts, "buckets": buckets}))


if __name__ == "__main__":
    launch(main)
