"""Steps that changed nothing, because their gradient was not finite."""

import math

import torch

from llmtrain.errors import UserError
from llmtrain.parallel.engine import Engine
from llmtrain.training.run import Run


def count_if_skipped(
    run: Run, engine: Engine, step: int, rows: torch.Tensor, grad_norm: float
) -> None:
    """Count a step if it was skipped because its gradient is not finite; all ranks call this.

    Args:
        run: the run.
        engine: how this process computes.
        step: steps made, including this one.
        rows: int64 [rows], the rows of this rank; -1 for padding.
        grad_norm: the norm of the gradient.

    Raises:
        UserError: on every rank, if ``--skip_nonfinite`` allows no more skipped steps.
    """
    allowed = run.settings.optim.skip_nonfinite
    if math.isfinite(grad_norm):
        return
    # With fp16, a loss scale that is too large makes gradients overflow. Skipping such steps while
    # the scale is lowered is normal. A scale below 1 is not too large, so the gradient is at fault.
    scaler = engine.accelerator.scaler
    if scaler is not None and scaler.get_scale() >= 1:
        return

    rows_of_all_ranks = engine.ranks.gather_rows(rows).tolist()
    named_rows = [row for row in rows_of_all_ranks if row >= 0]
    event = f"step {step} was skipped: its gradient norm is {grad_norm}; its rows are {named_rows}"
    if run.status.skipped == allowed:
        raise UserError(
            f"{event}. Lower --learning_rate, or allow some skipped steps with --skip_nonfinite. "
            "The newest checkpoint is untouched."
        )
    run.status.count_skipped()
    run.record_event("skipped", f"{event} ({run.status.skipped} of --skip_nonfinite {allowed})")
