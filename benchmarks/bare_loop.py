"""The least that a training loop does: a step on a batch, and a clock."""

import statistics
import time

import torch

LOGGING_STEPS = 10


def bare_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> torch.Tensor:
    """Make a step with a model of llmtrain on tokens [B, T + 1]; return their mean loss."""
    target_tokens = ids[:, 1:].numel()
    loss: torch.Tensor = model(ids, ids) / target_tokens
    loss.backward()

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

    return loss


class Speedometer:
    """Measures tokens per second, every ``LOGGING_STEPS`` steps.

    Args:
        tokens_per_step: the tokens of a step, of all processes.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step * LOGGING_STEPS
        self._speeds: list[float] = []
        self._start = time.perf_counter()

    def end_step(self, step: int, loss: torch.Tensor) -> None:
        """Count a step. ``step`` starts at 1; reading its ``loss`` waits until it is computed."""
        if step % LOGGING_STEPS == 0:
            loss.item()
            now = time.perf_counter()
            self._speeds.append(self._tokens / (now - self._start))
            self._start = now

    @property
    def median(self) -> float:
        """The median speed, without the first one, which includes one-time work."""
        return statistics.median(self._speeds[1:])
