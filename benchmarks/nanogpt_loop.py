"""nanoGPT's model in the loop of its train.py (lines 255 to 333), which also draws the batches."""

import contextlib
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.runs import GPTShape


class NanoGPTLoop:
    """nanoGPT, step by step.

    Args:
        folder: a checkout of github.com/karpathy/nanoGPT.
        tokens: a file of uint16 tokens, one after the other.
        shape: the size of the model and of the batch.
        vocabulary: the number of tokens.
        device: ``cpu`` or ``cuda``.
        bias: whether linear layers and norms have biases, as GPT-2's have.
        dtype: of autocast, or ``None``. nanoGPT itself takes no autocast on a CPU.
        fused: whether AdamW is fused.
        backend: compiles the model; ``None`` leaves it eager.
    """

    def __init__(
        self,
        folder: str,
        tokens: Path,
        shape: GPTShape,
        vocabulary: int,
        device: str,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        fused: bool = True,
        backend: str | None = None,
    ) -> None:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        import model as nano

        self.tokens = tokens
        self.block = shape.block
        self.batch = shape.batch
        self.device = device
        if device == "cuda":  # as train.py does
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True

        config = nano.GPTConfig(
            block_size=shape.block,
            vocab_size=vocabulary,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.width,
            dropout=0.0,
            bias=bias,
        )
        self.network = nano.GPT(config).to(device)
        decayed = [p for p in self.network.parameters() if p.dim() >= 2]
        plain = [p for p in self.network.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=fused)
        self.forward = self.network
        if backend is not None:
            self.forward = torch.compile(self.network, backend=backend)
        self.autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if dtype is not None:
            self.autocast = torch.autocast(device, dtype)
        self.inputs, self.targets = self.draw()

    @property
    def positions(self) -> int:
        """Positions of a step."""
        return self.batch * self.block

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of a batch, from random positions of the file."""
        data = np.memmap(self.tokens, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - self.block, (self.batch,))
        rows = [data[start : start + self.block + 1].astype(np.int64) for start in starts]
        x = torch.stack([torch.from_numpy(row[:-1]) for row in rows])
        y = torch.stack([torch.from_numpy(row[1:]) for row in rows])
        if self.device != "cuda":
            return x, y
        return (
            x.pin_memory().to(self.device, non_blocking=True),
            y.pin_memory().to(self.device, non_blocking=True),
        )

    def step(self) -> torch.Tensor:
        """Make a step; return its loss."""
        with self.autocast:
            _, loss = self.forward(self.inputs, self.targets)
        self.inputs, self.targets = self.draw()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss
