"""Tokens per second, and the share of the hardware's arithmetic that they use."""

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.devices import peak_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@runtime_checkable
class CountsFlops(Protocol):
    """A model that knows its arithmetic."""

    def flops_per_token(self) -> int:
        """Return the FLOPs of a forward and a backward pass for one token; 0 where they are not known."""


class Throughput:
    """Counts tokens and positions between two readings; time spent in :meth:`paused` does not count."""

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self.flops_per_token = model.flops_per_token() if isinstance(model, CountsFlops) else 0
        self.peak = peak_flops(accelerator) if self.flops_per_token else 0.0
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self.tokens, self.positions, self.started = 0, 0, time.perf_counter()

    def add(self, tokens: int, positions: int) -> None:
        """Count an update.

        ``tokens`` are those that all processes trained on. ``positions`` are those that this one computed, as many as
        each other; of a conversation's only some are trained.
        """
        self.tokens += tokens
        self.positions += positions

    def read(self) -> dict[str, float]:
        """Return ``train/tokens_per_second`` since the last reading, and ``train/mfu`` where the FLOPs are known."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        metrics = {"train/tokens_per_second": self.tokens / seconds}
        if self.peak:
            metrics["train/mfu"] = self.positions / seconds * self.flops_per_token / self.peak
        self.restart()
        return metrics

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began


def peak_flops(accelerator: Accelerator) -> float:
    """Return the FLOP/s that one process can hope for: a GPU's data sheet for 16-bit training, else a measured product.

    The measurement runs on all processes of a machine at once, as training does.
    """
    device, dtype = accelerator.device, _DTYPES.get(accelerator.mixed_precision, torch.float32)
    known = (
        peak_of(torch.cuda.get_device_name(device))
        if device.type == "cuda" and dtype != torch.float32
        else None
    )
    return measured_peak(device, dtype) if known is None else known


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product, the best of some."""
    best, times = 0.0, 20
    for n in (1024, 4096) if device.type == "cuda" else (192, 768):
        if best and times * 2 * n**3 / best > 1:  # seconds: this precision is emulated here
            break
        a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
        float((a @ b)[0, 0])  # the first loads the kernel
        for _ in range(times):
            began = time.perf_counter()
            float((a @ b)[0, 0])  # reading the result waits for the device
            best = max(best, 2 * n**3 / (time.perf_counter() - began))
    return best
