"""Tokens per second, and the share of the hardware's peak FLOP/s that a run reaches."""

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.devices import DEVICES, known_device
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult


@runtime_checkable
class CountsFlops(Protocol):
    """A model that knows how much arithmetic it needs."""

    def flops_per_token(self) -> int:
        """Return the FLOPs of a forward and backward pass for one token; 0 if they are unknown."""


class Throughput(Callback):
    """Counts tokens and positions between two log entries. Time inside :meth:`paused` is left out.

    A step ends when the device has computed it.

    Args:
        accelerator: the Accelerator of this run.
        model: the unwrapped model.
    """

    takes_late_results = True

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self.flops_per_token = model.flops_per_token() if isinstance(model, CountsFlops) else 0
        self.peak = peak_flops(accelerator) if self.flops_per_token else 0.0
        self._is_on_cpu = accelerator.device.type == "cpu"
        self._restart(at=time.perf_counter())

    def on_train_begin(self) -> None:
        self._restart(at=time.perf_counter())

    def _restart(self, at: float) -> None:
        """Count from 0 again."""
        self.tokens = 0
        self.positions = 0
        self.started = at
        self.ended = at  # of the last step

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        """Count the positions of this process.

        In a conversation only some positions have a target token. Positions that were trimmed from
        unpacked rows do not count.
        """
        self.positions += batch.positions
        if self._is_on_cpu:
            self.ended = time.perf_counter()

    def on_step_result(self, step: int, result: StepResult) -> None:
        """Count the target tokens of the global batch."""
        self.tokens += result.target_tokens
        if not self._is_on_cpu:  # the numbers of a step come when the device has computed it
            self.ended = time.perf_counter()

    def read(self, positions: float) -> dict[str, float]:
        """Return ``train/tokens_per_second`` since the last call.

        The result also has ``train/mfu`` if the model's FLOPs and the peak are known.

        Args:
            positions: the mean of :attr:`positions` over all processes, which trim unpacked rows to
                different lengths.
        """
        seconds = max(self.ended - self.started, 1e-9)
        metrics = {"train/tokens_per_second": self.tokens / seconds}
        if self.peak:
            metrics["train/mfu"] = positions / seconds * self.flops_per_token / self.peak
        self._restart(at=self.ended)
        return metrics

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        start = time.perf_counter()
        yield
        self.started += time.perf_counter() - start


def peak_flops(accelerator: Accelerator) -> float:
    """Return the FLOP/s that one process can reach, from the GPU's data sheet; 0 if it is unknown.

    It is known for 16-bit training on a GPU in :data:`llmtrain.devices.DEVICES`.
    """
    if accelerator.device.type != "cuda" or accelerator.mixed_precision not in ("bf16", "fp16"):
        return 0.0
    name = known_device(torch.cuda.get_device_name(accelerator.device))
    return 0.0 if name is None else DEVICES[name].peak
