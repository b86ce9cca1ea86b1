"""Run on three ranks by test_exchange.py: what is sent of gradients, and what is owed. Writes what it finds as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from llmtrain import GPT, GPTConfig, OptimConfig, launch, make_optimizer
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import DDPHandler, settle_buckets
from llmtrain.parallel.exchange import PowerSGD
from llmtrain.training.step import Accumulation, train_step


def batches(accelerator: Accelerator, step: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(100 * step + accelerator.process_index)
    ids = torch.randint(300, (2, 17), generator=draw)
    return [{"input_ids": ids, "labels": ids}]


def fresh(accelerator: Accelerator, hook: str = "none") -> tuple[Any, Any]:
    accelerator.ddp_handler = DDPHandler(
        ParallelConfig(ddp_comm_hook=hook, ddp_bucket_cap_mb=[0.2])
    )
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=16), 300, seed=1)
    return accelerator.prepare(
        model, make_optimizer(accelerator, model, OptimConfig(optim="adamw"))
    )


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def weights_after(accelerator: Accelerator, watched: bool) -> torch.Tensor:
    model, optimizer = fresh(accelerator)
    if watched:
        accelerator.ddp_handler.watch(model, lambda bucket, send, sent_bytes: send(bucket))
    for step in range(3):
        train_step(accelerator, model, optimizer, batches(accelerator, step), 1.0)
    return flat(model.parameters())


def gradient(accelerator: Accelerator, model: Any, step: int) -> torch.Tensor:
    """That the processes agree on, of one update's rows; the weights stay."""
    model.zero_grad()
    Accumulation(accelerator, model)(batches(accelerator, step), torch.tensor(96))
    return flat(p.grad for p in model.parameters())


def same_everywhere(accelerator: Accelerator, tensor: torch.Tensor) -> bool:
    everyone = accelerator.gather(tensor[None])
    return bool((everyone == everyone[0]).all())


def powersgd(accelerator: Accelerator) -> dict[str, Any]:
    exact, _ = fresh(accelerator)
    truth = [gradient(accelerator, exact, step) for step in range(5)]
    model, _ = fresh(accelerator, "powersgd")
    buckets: set[int] = set()
    accelerator.ddp_handler.watch(
        model, lambda bucket, send, _: buckets.add(bucket.index()) or send(bucket)
    )
    sent = [gradient(accelerator, model, step) for step in range(5)]
    exchange = accelerator.ddp_handler.exchange
    owed = [exchange.owed.get(p, torch.zeros_like(p)) for p in model.parameters()]
    theirs = accelerator.reduce(flat(owed), reduction="mean")
    paid = sum(sent) + theirs - sum(truth)
    matrices = flat(torch.full_like(p, p in exchange.owed) for p in model.parameters()).bool()
    return {
        "left out of one gradient": float(
            (sent[0] - truth[0])[matrices].norm() / truth[0][matrices].norm()
        ),
        "lost in the end": float(paid.norm() / sum(truth).norm()),
        "others are exact": bool(
            torch.allclose(sent[0][~matrices], truth[0][~matrices], atol=1e-7)
        ),
        "same everywhere": same_everywhere(accelerator, flat(sent)),
        "buckets": len(buckets),
        "bytes": sum(PowerSGD().sent_bytes(FakeBucket([p])) for p in model.parameters())
        / flat(owed).nbytes,
    }


class FakeBucket:
    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = lambda: parameters


def resumed(accelerator: Accelerator, hook: str, settle: bool = True) -> bool:
    """Whether six updates, with a save in the middle, end in the bits of three that go on from it."""
    model, optimizer = fresh(accelerator, hook)
    for step in range(3):
        train_step(accelerator, model, optimizer, batches(accelerator, step), 1.0)
    plain = accelerator.unwrap_model(model)
    carried = {
        name: tensor.clone()
        for name, tensor in accelerator.ddp_handler.exchange.tensors(plain).items()
    }
    weights = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    state = optimizer.optimizer.state_dict()["state"]
    state = {i: {key: value.clone() for key, value in entry.items()} for i, entry in state.items()}
    for step in range(3, 6):
        train_step(accelerator, model, optimizer, batches(accelerator, step), 1.0)
    straight = flat(model.parameters())

    model, optimizer = fresh(accelerator, hook)
    plain = accelerator.unwrap_model(model)
    plain.load_state_dict(weights)
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    passed_on = list(
        accelerator.ddp_handler.exchange.keep(plain, [*carried.items(), ("other.exp_avg", weights)])
    )
    assert [name for name, _ in passed_on] == ["other.exp_avg"]
    if settle:
        settle_buckets(accelerator, model, batches(accelerator, 9)[0])
    for step in range(3, 6):
        train_step(accelerator, model, optimizer, batches(accelerator, step), 1.0)
    return torch.equal(flat(model.parameters()), straight)


def poisoned(accelerator: Accelerator) -> dict[str, bool]:
    """One process's gradient is not finite, once; the weights stay, so what comes after must not know of it."""
    model, _ = fresh(accelerator, "powersgd")
    exchange = accelerator.ddp_handler.exchange
    gradient(accelerator, model, 0)
    owed = flat(exchange.owed.values())
    tokens = torch.tensor(float("nan") if accelerator.process_index == 1 else 96.0)
    Accumulation(accelerator, model)(batches(accelerator, 1), tokens)
    hurt = flat(p.grad for p in model.parameters())
    kept = torch.equal(owed, flat(exchange.owed.values()))
    return {
        "seen": not bool(hurt.isfinite().all()),
        "kept": kept,
        "over": bool(gradient(accelerator, model, 2).isfinite().all()),
    }


def main() -> None:
    accelerator = start_accelerator()
    whole, _ = fresh(accelerator)
    truth = gradient(accelerator, whole, 0)
    found: dict[str, Any] = {
        "watched": torch.equal(weights_after(accelerator, True), weights_after(accelerator, False))
    }
    for hook in ("bf16", "fp16"):
        half, _ = fresh(accelerator, hook)
        found[hook] = float((gradient(accelerator, half, 0) - truth).norm() / truth.norm())
    found["powersgd"] = powersgd(accelerator)
    found["resumed"] = {hook: resumed(accelerator, hook) for hook in ("none", "bf16", "powersgd")}
    found["forgotten"] = forgotten(accelerator)
    found["poisoned"] = poisoned(accelerator)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


def forgotten(accelerator: Accelerator) -> bool:
    """The same, where a checkpoint does not hold what is owed."""
    honest = PowerSGD.tensors
    PowerSGD.tensors = lambda self, model: {}  # type: ignore[method-assign]
    try:
        return resumed(accelerator, "powersgd")
    finally:
        PowerSGD.tensors = honest  # type: ignore[method-assign]


if __name__ == "__main__":
    launch(main)
