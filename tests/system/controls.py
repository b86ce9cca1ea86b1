"""Run on two ranks by test_verify.py: plants known bugs in the step, one after the other.

It writes what shows each of them. The reference is a bare torch loop over the whole global batch,
which every rank computes for itself.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from llmtrain import GPT, GPTConfig, OptimConfig, launch, make_optimizer
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch, count_targets
from llmtrain.interfaces.objective import LossSums, StepTotals
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.ranks import ranks_of
from llmtrain.training.learning_rates import rate_at
from llmtrain.training.step import train_step
from tests.engines import split

OPTIM = OptimConfig(max_steps=4, warmup_steps=2, learning_rate=1e-2)
LIMIT = 1e-12  # relative; everything here is float64


def make_model() -> GPT:
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8), 30, seed=1).double()


def global_batch(step: int) -> Batch:
    ids = torch.randint(30, (8, 9), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    for row in range(8):
        labels[row, : row % 5] = -100
        labels[row, 9 - row % 4 :] = -100
    if step == 2:
        labels[4:] = -100  # the whole of rank 1
    labels[2:4] = -100  # a whole micro-batch
    return {"input_ids": ids, "labels": labels}


def micro_batches(step: int, rank: int) -> list[Batch]:
    """Return two micro-batches of two rows each."""
    return split(split(global_batch(step), 4)[rank], 2)


def bare_run(accelerator: Accelerator) -> dict[str, Any]:
    model = make_model()
    optimizer = make_optimizer(accelerator, model, OPTIM)
    losses, norms = [], []
    for made in range(OPTIM.max_steps):
        batch = global_batch(made)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = lr_at(made)
        loss = model(**batch) / (batch["labels"][:, 1:] != -100).sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "norms": norms, "weights": weights}


def lr_at(made: int) -> float:
    return rate_at(made, OPTIM, peak=OPTIM.learning_rate)


def our_run(
    accelerator: Accelerator, rows_of: Callable = micro_batches, lr_at: Callable = lr_at
) -> dict[str, Any]:
    model = make_model()
    optimizer = make_optimizer(accelerator, model, OPTIM)
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = ReplicatedEngine(ranks_of(accelerator), model)
    losses = []
    norms = []
    drift = ""
    for made in range(OPTIM.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(made)
        result = train_step(engine, optimizer, rows_of(made, engine.ranks.rank), max_grad_norm=1.0)
        losses.append(float(engine.ranks.sum_over_ranks(result.sums.loss) / result.denominator))
        norms.append(result.grad_norm)
        if made == 1 and PERTURB:
            with torch.no_grad():
                next(model.parameters())[0, 0] += engine.ranks.rank * 1e-7
        try:
            check_replicas(ranks_of(accelerator), model)
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


# --- bugs of an engine, in the place of its methods


def mean_of_means(
    engine: Engine,
    batches: Sequence[Batch],
    totals: StepTotals,
    extra: Batch | None = None,
) -> LossSums:
    """Average the mean losses of the micro-batches, instead of dividing by the global count."""
    total = torch.zeros((), device=engine.device)
    for i, batch in enumerate(batches):
        is_last = i == len(batches) - 1
        with contextlib.nullcontext() if is_last else engine.no_sync():
            loss = engine.loss(batch, extra).loss
            mean = loss / count_targets(batch["labels"]).clamp(min=1)
            engine.accelerator.backward(mean / len(batches))
        total += loss.detach()
    return LossSums(total)


def never_synced(
    engine: Engine,
    batches: Sequence[Batch],
    totals: StepTotals,
    extra: Batch | None = None,
) -> LossSums:
    """Never reduce a gradient over the ranks."""
    with engine.no_sync():
        for batch in batches:
            loss = engine.loss(batch, extra).loss
            engine.accelerator.backward(loss * engine.ranks.world_size / totals.denominator)
    return LossSums(loss.detach(), metrics={})


HONEST_COUNT = Engine.count
HONEST_FORWARD_BACKWARD = Engine.forward_backward


def averaged_over_ranks(
    engine: Engine,
    batches: Sequence[Batch],
    totals: StepTotals,
    extra: Batch | None = None,
) -> LossSums:
    """Forget that DDP averages over the ranks."""
    world_size = engine.ranks.world_size
    too_large = StepTotals(
        torch.stack([totals.target_tokens, totals.denominator * world_size, totals.stop_votes])
    )
    return HONEST_FORWARD_BACKWARD(engine, batches, too_large, extra)


def unshifted_count(
    engine: Engine, batches: Sequence[Batch], stop_requested: bool = False
) -> StepTotals:
    """Count the first label of each row, too."""
    totals = HONEST_COUNT(engine, batches, stop_requested)
    counts = [(batch["labels"] != -100).sum() for batch in batches]
    count = engine.ranks.sum_over_ranks(torch.stack(counts).sum())
    return StepTotals(torch.stack([count, count, totals.stop_votes]))


# --- bugs around an engine


def other_ranks_rows(made: int, rank: int) -> list[Batch]:
    return micro_batches(made, 0)


def scheduler_stepped_per_rank(made: int) -> float:
    return lr_at(2 * made)


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
    with patched(Engine, "forward_backward", mean_of_means):
        found["a mean of means"] = what_shows()
    with patched(Engine, "forward_backward", averaged_over_ranks):
        found["a forgotten data-parallel factor"] = what_shows()
    with patched(Engine, "forward_backward", never_synced):
        found["a missing sync"] = what_shows()
    with patched(Engine, "count", unshifted_count):
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
