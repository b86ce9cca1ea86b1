"""Distillation as a user would write it: an objective with a teacher, and its gradient on any layout.

    python -m tests.system.distillation FILE             (or under torchrun; FSDP by the environment)

It writes the gradient of one global batch, and the metrics, to FILE.
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.interfaces.model_bundle import ModelBundle, ModelFormat
from llmtrain.interfaces.objective import LossSums, Objective
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.models.probe import probe
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.engine_choice import engine_for
from llmtrain.parallel.placement import place
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import full_tensor

VOCABULARY = 60
ROWS = 8


class Distillation(Objective):
    """The mean KL divergence from a teacher's distribution, per target token."""

    def __init__(self, teacher: LlamaForCausalLM) -> None:
        self.teacher = teacher.requires_grad_(False).eval()

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        targets = batch["labels"][:, 1:].flatten()
        positions = (targets != IGNORED).nonzero().flatten()
        student = model.logits_at(positions, **batch).log_softmax(-1)
        logits = self.teacher(batch["input_ids"][:, :-1]).logits
        teacher = logits.flatten(0, 1)[positions].log_softmax(-1)
        agrees = student.argmax(-1) == teacher.argmax(-1)
        return LossSums(
            loss=F.kl_div(student, teacher, reduction="sum", log_target=True),
            metrics={"agrees": agrees.sum().float(), "targets": agrees.new_ones(()) * len(agrees)},
        )

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        return {"agreement": sums["agrees"] / max(sums["targets"], 1)}

    def eval_metrics(self, loss_sum: float, mean_loss: float, text_bytes: int) -> dict[str, float]:
        return {}


def llama(seed: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).float()


def global_batch() -> Batch:
    """Return rows of different numbers of target tokens."""
    ids = torch.randint(VOCABULARY, (ROWS, 17), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : 2 * row] = IGNORED
    return {"input_ids": ids, "labels": labels}


def main(file: str) -> None:
    accelerator = start_accelerator()
    model = make_causal_lm(llama(seed=1, layers=2), row_length=16)
    bundle = ModelBundle(
        model=model,
        files=cast(ModelFormat, None),
        check=functools.partial(probe, model),
        objective=Distillation(llama(seed=2, layers=3)),
    )
    place(accelerator, bundle)
    engine = engine_for(
        Ranks(accelerator),
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0],
        objective=bundle.objective,
        config=ParallelConfig(),
        accumulation=2,
    )

    share = ROWS // engine.ranks.world_size // 2
    first_row = engine.ranks.rank * 2 * share
    starts = (first_row, first_row + share)
    batches = [
        {name: column[start : start + share] for name, column in global_batch().items()}
        for start in starts
    ]
    totals = engine.count(batches)
    sums = engine.forward_backward(batches, totals)
    gradient = {}
    for name, parameter in engine.unwrapped.named_parameters():
        assert parameter.grad is not None
        gradient[name] = full_tensor(parameter.grad)
    names = [*sums.metrics]
    local = torch.stack([sums.loss, *(sums.metrics[name].float() for name in names)])
    loss, *metrics = engine.ranks.sum_over_ranks(local).tolist()
    if engine.ranks.is_main:
        results = {
            "gradient": gradient,
            "loss": loss / int(totals.denominator),
            "metrics": engine.objective.metrics(dict(zip(names, metrics, strict=True)), extra={}),
        }
        torch.save(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
