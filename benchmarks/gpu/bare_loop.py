"""A loop of ten lines with the model, loss and optimizer of llmtrain, to compare its own loop with."""

import contextlib
import itertools
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.gpu.turns import Variant, bytes_of
from llmtrain.parallel.blocks import blocks_of


class BareLoop:
    """A model with its optimizer and its rows.

    Args:
        model: the model, on its device.
        optimizer: its optimizer.
        batches: tokens [B, T + 1] on the host, pinned for a GPU.
        dtype: of autocast, or ``None`` for no autocast.
        backend: compiles the blocks; ``None`` leaves them eager.
        compiles_all: compile the whole model as one graph instead, as nanoGPT does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: list[torch.Tensor],
        dtype: torch.dtype | None,
        backend: str | None = None,
        compiles_all: bool = False,
    ) -> None:
        self.model = model.train()
        self.call: Callable[..., torch.Tensor] = model
        self.optimizer = optimizer
        self.batches = itertools.cycle(batches)
        self.device = next(model.parameters()).device
        self.dtype = dtype
        self.positions = batches[0][:, 1:].numel()

        if backend is not None and compiles_all:
            self.call = torch.compile(model, dynamic=False, backend=backend)
        elif backend is not None:
            for block in blocks_of(model):
                block.forward = torch.compile(block.forward, dynamic=False, backend=backend)

    def next_batch(self) -> torch.Tensor:
        """Return the next tokens, on the device."""
        return next(self.batches).to(self.device, non_blocking=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens [B, T + 1]."""
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.dtype is not None:
            context = torch.autocast(self.device.type, self.dtype)

        with context:
            nll = self.call(ids, ids)
        return nll / self.positions

    def clip(self) -> torch.Tensor:
        """Scale the gradient down to the norm 1; return its norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class BareStep(Variant):
    """A step of a bare loop.

    Args:
        name: its name in the table.
        loop: the loop, which several variants may share.
        reads_norm: whether the host reads the norm of the gradient before the optimizer's step.
    """

    def __init__(self, name: str, loop: BareLoop, reads_norm: bool) -> None:
        super().__init__(name, loop.device, loop.positions)
        self.loop = loop
        self.weight_bytes = bytes_of(loop.model)
        self.reads_norm = reads_norm

    def step(self) -> None:
        self.phases.begin("data")
        ids = self.loop.next_batch()

        self.phases.begin("forward")
        loss = self.loop.forward(ids)

        self.phases.begin("backward")
        loss.backward()

        self.phases.begin("norm")
        norm = self.loop.clip()
        if self.reads_norm:
            float(norm)

        self.phases.begin("optimizer")
        self.loop.optimizer.step()
        self.loop.optimizer.zero_grad()


class GraphedStep(Variant):
    """A step of a bare loop as one CUDA graph, in which the device never waits for the host.

    A step's idle time is its time minus the time of this one.

    Args:
        name: its name in the table.
        loop: the loop. Its optimizer must be able to be captured.
        pool: the memory that graphs share.
    """

    def __init__(self, name: str, loop: BareLoop, pool: object) -> None:
        super().__init__(name, loop.device, loop.positions)
        self.loop = loop
        self.weight_bytes = bytes_of(loop.model)
        self.ids = loop.next_batch().clone()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)

        self.graph = torch.cuda.CUDAGraph()
        loop.optimizer.zero_grad()
        with torch.cuda.graph(self.graph, pool=pool):
            self._run()

    def _run(self) -> None:
        self.loop.forward(self.ids).backward()
        self.loop.clip()
        self.loop.optimizer.step()
        self.loop.optimizer.zero_grad()

    def step(self) -> None:
        self.phases.begin("data")
        self.ids.copy_(self.loop.next_batch())

        self.phases.begin("graph")
        self.graph.replay()


def let_capture(optimizer: torch.optim.Optimizer) -> None:
    """Let AdamW count its steps on the device, so that a CUDA graph can capture it."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
