"""Run on two ranks by test_verify.py: plants known bugs in the update, one after the other, and says what shows them.

The reference is a bare torch loop over the whole global batch, which every rank computes for itself.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from llmtrain import GPT, GPTConfig, OptimConfig, launch, make_optimizer
from llmtrain.errors import UserError
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.observe.replicas import check_replicas
from llmtrain.training import optim, step

OPTIM = OptimConfig(max_steps=4, warmup_steps=2, learning_rate=1e-2)
LIMIT = 1e-12  # relative; everything here is float64


def make_model() -> GPT:
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8), 30, seed=1).double()


def global_batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(30, (8, 9), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    for row in range(8):
        labels[row, : row % 5] = -100
        labels[row, 9 - row % 4 :] = -100
    if step == 2:
        labels[4:] = -100  # the whole of rank 1
    labels[2:4] = -100  # a whole micro-batch
    return {"input_ids": ids, "labels": labels}


def micro_batches(step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    rows = {name: column[4 * rank : 4 * rank + 4] for name, column in global_batch(step).items()}
    return [{name: column[i : i + 2] for name, column in rows.items()} for i in (0, 2)]


def bare_run(accelerator: Accelerator) -> dict[str, Any]:
    model = make_model()
    optimizer = make_optimizer(accelerator, model, OPTIM)
    losses, norms = [], []
    for made in range(OPTIM.max_steps):
        batch = global_batch(made)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = optim.lr_at(made, OPTIM)
        loss = model(**batch) / (batch["labels"][:, 1:] != -100).sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "norms": norms, "weights": weights}


def our_run(
    accelerator: Accelerator, rows_of: Callable = micro_batches, lr_at: Callable = optim.lr_at
) -> dict[str, Any]:
    model = make_model()
    optimizer = make_optimizer(accelerator, model, OPTIM)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms, drift = [], [], ""
    for made in range(OPTIM.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(made, OPTIM)
        update = step.train_step(
            accelerator, model, optimizer, rows_of(made, accelerator.process_index), 1.0
        )
        losses.append(float(accelerator.reduce(update.nll, reduction="sum") / update.tokens))
        norms.append(update.grad_norm)
        if made == 1 and PERTURB:
            with torch.no_grad():
                next(model.parameters())[0, 0] += accelerator.process_index * 1e-7
        try:
            check_replicas(accelerator, model)
        except UserError as error:
            drift = drift or str(error)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "norms": norms, "weights": weights, "drift": drift}


PERTURB: list[bool] = []


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def mean_of_means(self: Any, batches: Any, tokens: torch.Tensor) -> torch.Tensor:
    accelerator, model = self.accelerator, self.model
    total = torch.zeros((), dtype=torch.float64)
    for i, batch in enumerate(batches):
        with contextlib.nullcontext() if i == len(batches) - 1 else accelerator.no_sync(model):
            nll = model(**batch)
            accelerator.backward(
                nll / step.count_targets(batch["labels"]).clamp(min=1) / len(batches)
            )
        total += nll.detach()
    return total


def never_synced(self: Any, batches: Any, tokens: torch.Tensor) -> torch.Tensor:
    accelerator, model = self.accelerator, self.model
    with accelerator.no_sync(model):
        for batch in batches:
            nll = model(**batch)
            accelerator.backward(nll * accelerator.num_processes / tokens)
    return nll.detach()


def unshifted(labels: torch.Tensor) -> torch.Tensor:
    return (labels != -100).sum()


def other_ranks_rows(made: int, rank: int) -> list[dict[str, torch.Tensor]]:
    return micro_batches(made, 0)


def scheduler_stepped_per_rank(made: int, config: OptimConfig) -> float:
    return optim.lr_at(2 * made, config)


def main() -> None:
    accelerator = start_accelerator()
    reference = bare_run(accelerator)

    def what_shows(**changes: Any) -> list[str]:
        run = our_run(accelerator, **changes)
        weights = float(
            (run["weights"] - reference["weights"]).norm() / reference["weights"].norm()
        )
        shown = ["weights"] if weights > LIMIT else []
        for name in ("losses", "norms"):
            pairs = zip(run[name], reference[name], strict=True)
            shown += [name] if max(abs(a - b) / b for a, b in pairs) > 1e-6 else []
        return shown + ([run["drift"]] if run["drift"] else [])

    found = {"nothing planted": what_shows()}
    with patched(step.Accumulation, "__call__", mean_of_means):
        found["a mean of means"] = what_shows()
    with patched(step, "data_parallel_size", lambda _: 1):
        found["a forgotten data-parallel factor"] = what_shows()
    with patched(step.Accumulation, "__call__", never_synced):
        found["a missing sync"] = what_shows()
    with patched(step, "count_targets", unshifted):
        found["unshifted token counts"] = what_shows()
    found["a rank reading another's rows"] = what_shows(rows_of=other_ranks_rows)
    found["a scheduler stepped per rank"] = what_shows(lr_at=scheduler_stepped_per_rank)
    PERTURB.append(True)
    found["one weight perturbed on rank 1"] = what_shows()
    everyone = gather_object([found])
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(
            json.dumps({name: [f[name] for f in everyone] for name in found})
        )


if __name__ == "__main__":
    launch(main)
