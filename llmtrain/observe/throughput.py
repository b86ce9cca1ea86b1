"""Tokens per second, and the share of the hardware's arithmetic that they use."""

import contextlib
import time
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.devices import peak_of


class Throughput:
    """Counts what was done between two readings; time spent in ``paused()`` does not count."""

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        flops = getattr(accelerator.unwrap_model(model), "flops_per_token", None)
        self.flops_per_token = flops() if flops else 0
        self.peak = peak_flops(accelerator) if self.flops_per_token else 0.0
        self.restart()

    def restart(self) -> None:
        self.tokens, self.positions, self.started = 0, 0, time.perf_counter()

    def add(self, tokens: int, positions: int) -> None:
        """Of an update: tokens that all processes trained on; and positions that this one computed, as many as each
        other, of which a conversation trains only some."""
        self.tokens += tokens
        self.positions += positions

    def read(self) -> dict[str, float]:
        """Since the last reading: ``train/tokens_per_second``, and ``train/mfu`` where the model's FLOPs are known."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        metrics = {"train/tokens_per_second": self.tokens / seconds}
        if self.peak:
            metrics["train/mfu"] = self.positions / seconds * self.flops_per_token / self.peak
        self.restart()
        return metrics

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began


def peak_flops(accelerator: Accelerator) -> float:
    """FLOP/s that one process can hope for: a GPU's data sheet for 16-bit training, else a measured product.

    The measurement runs on all processes of a machine at once, as training does.
    """
    device = accelerator.device
    mixed = accelerator.mixed_precision in ("bf16", "fp16")
    if device.type == "cuda" and mixed:
        known = peak_of(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    return measured_peak(device, dtype)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product, the best of some."""
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
