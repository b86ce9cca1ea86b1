"""Verdicts on the losses of short runs in 16 bits, against the same runs in float32.

Two runs in float32 whose first weights are one ulp apart show how far rounding alone carries a run.

Repeat them with `python -m benchmarks.gpu --out FOLDER --sections curves`.
"""

import torch
from accelerate.utils import patch_environment

import llmtrain as lt
from benchmarks.gpu.call import Call
from benchmarks.gpu.recipe_loop import GPTSettings, build_gpt, common_settings
from benchmarks.gpu.rows import text_rows

_BOUND = 0.02  # nats that 16 bits may add
_LEARNING_RATES = {"adamw": 2e-3, "muon": 2e-2}


def judge(call: Call) -> None:
    """Judge AdamW and Muon in 16 bits by float32, and by how far one ulp carries a run."""
    for optim in ("adamw", "muon"):
        exact = _losses(call, optim, "no")
        nudged = _losses(call, optim, "no", nudge=True)
        floor = _largest_difference(exact, nudged)
        call.journal.record("curves", f"{optim}: one ulp in each embedding", nats=floor)
        for precision in ("bf16", "fp16") if call.on_gpu else ("no",):
            nats = _largest_difference(exact, _losses(call, optim, precision))
            call.journal.judge(
                f"{optim} in {precision}, {call.sizes.curve_steps} steps, by float32",
                nats <= _BOUND,
                nats=nats,
                bound=_BOUND,
            )


def _largest_difference(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def _losses(call: Call, optim: str, precision: str, nudge: bool = False) -> list[float]:
    """Return the loss of each step of a small run."""
    size = call.sizes.recipe
    folder = call.folder / f"curve-{optim}-{precision}-{nudge}"
    shared = common_settings(folder, size.rows, compiled=False)
    shared["optim"] = lt.OptimConfig(
        optim=optim,
        max_steps=call.sizes.curve_steps,
        warmup_steps=2,
        learning_rate=_LEARNING_RATES[optim],
    )
    shared["log"] = lt.LogConfig(logging_steps=1)
    settings = GPTSettings(model=size.config(), **shared)
    rows = text_rows(call.sizes.recipe_vocabulary, size.block, 4 * size.rows)
    with patch_environment(ACCELERATE_MIXED_PRECISION=precision):
        accelerator = lt.start(settings)
        # Exact products, so that a nudge is the only difference.
        torch.set_float32_matmul_precision("highest")
        bundle = lt.place(accelerator, build_gpt, settings=settings, rows=rows)
        if nudge:
            weight = next(bundle.model.parameters()).data
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, 10.0)))
        optimizer = lt.make_optimizer(accelerator, bundle.model, settings.optim)
        with lt.open_run(accelerator, settings, rows, bundle, optimizer) as run:
            lt.train(run, *accelerator.prepare(bundle.model, optimizer, *lt.loaders(run)))
    losses: list[float] = run.history()["train/loss"].dropna().tolist()
    return losses
