"""Tokens per second, and the share of the hardware's peak FLOP/s that a run reaches."""

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.devices import DEVICES, known_device
from llmtrain.types import Callback, LocalBatch, StepInfo, StepResult

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Sizes of the square matrices whose product measures a device, and how often it is computed.
_SIZES_CPU = (192, 768)
_SIZES_GPU = (1024, 4096)
_REPEATS = 20


@runtime_checkable
class CountsFlops(Protocol):
    """A model that knows how much arithmetic it needs."""

    def flops_per_token(self) -> int:
        """Return the FLOPs of a forward and backward pass for one token; 0 if they are unknown."""


class Throughput(Callback):
    """Counts tokens and positions between two log entries. Time inside :meth:`paused` is left out.

    Args:
        accelerator: the Accelerator of this run.
        model: the unwrapped model.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self.flops_per_token = model.flops_per_token() if isinstance(model, CountsFlops) else 0
        self.peak = peak_flops(accelerator) if self.flops_per_token else 0.0
        self.restart()

    def restart(self) -> None:
        """Count from 0 again."""
        self.tokens = 0
        self.positions = 0
        self.started = time.perf_counter()

    def on_train_begin(self) -> None:
        self.restart()

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        """Count the target tokens of the global batch, and the positions of this process.

        In a conversation only some positions have a target token. Positions that were trimmed from
        unpacked rows do not count.
        """
        self.tokens += result.target_tokens
        self.positions += batch.positions

    def read(self, positions: float) -> dict[str, float]:
        """Return ``train/tokens_per_second`` since the last call.

        The result also has ``train/mfu`` if the model's FLOPs and the peak are known.

        Args:
            positions: the mean of :attr:`positions` over all processes, which trim unpacked rows to
                different lengths.
        """
        seconds = max(time.perf_counter() - self.started, 1e-9)
        metrics = {"train/tokens_per_second": self.tokens / seconds}
        if self.peak:
            metrics["train/mfu"] = positions / seconds * self.flops_per_token / self.peak
        self.restart()
        return metrics

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        start = time.perf_counter()
        yield
        self.started += time.perf_counter() - start


def peak_flops(accelerator: Accelerator) -> float:
    """Return the most FLOP/s that one process can reach; 0 on a CPU.

    For 16-bit training on a GPU in :data:`llmtrain.devices.DEVICES`, that is the data sheet's
    figure. On another GPU it is measured. On a CPU a measurement would tell how busy its cores are
    at that moment.
    """
    device = accelerator.device
    if device.type == "cpu":
        return 0.0

    dtype = _DTYPES.get(accelerator.mixed_precision, torch.float32)
    if device.type == "cuda" and dtype != torch.float32:
        name = known_device(torch.cuda.get_device_name(device))
        if name is not None:
            return DEVICES[name].peak
    return measured_peak(device, dtype)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product, the best of several."""
    best = 0.0
    for size in _SIZES_GPU if device.type == "cuda" else _SIZES_CPU:
        flops = 2 * size**3
        # If the larger product would take more than a second, this precision is emulated here.
        if best and _REPEATS * flops / best > 1:
            break

        a = torch.ones(size, size, device=device, dtype=dtype)
        b = torch.ones(size, size, device=device, dtype=dtype)
        float((a @ b)[0, 0])  # the first product loads the kernel
        for _ in range(_REPEATS):
            start = time.perf_counter()
            float((a @ b)[0, 0])  # reading the result waits for the device
            best = max(best, flops / (time.perf_counter() - start))
    return best
