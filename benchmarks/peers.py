"""Loops of other packages, each as its authors run it, in a process of its own: prints what it measured as JSON.

python -m benchmarks.peers nanogpt FOLDER ...       FOLDER: a checkout of github.com/karpathy/nanoGPT
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

BETWEEN_READINGS = 10  # updates


class Readings:
    """Tokens per second between readings, ten updates each."""

    def __init__(self, tokens_per_update: int) -> None:
        self.tokens = tokens_per_update * BETWEEN_READINGS
        self.speeds: list[float] = []
        self.began = time.perf_counter()

    def updated(self, number: int, loss: torch.Tensor) -> None:
        if number % BETWEEN_READINGS == 0:
            loss.item()
            now = time.perf_counter()
            self.speeds.append(self.tokens / (now - self.began))
            self.began = now

    def report(self, **others: Any) -> None:
        """The median, without the first, which pays for what is done once."""
        print(json.dumps({"tokens_per_second": statistics.median(self.speeds[1:]), **others}), flush=True)


def nanogpt(arguments: argparse.Namespace) -> None:
    """The loop of train.py (lines 255 to 333) around its own model, on the CPU, with its own way to draw a batch; it
    takes no autocast there, which is added where bf16 is asked for."""
    sys.path.insert(0, arguments.folder)
    import model as nano

    layers, heads, width, block, batch = arguments.shape
    config = nano.GPTConfig(block, arguments.vocabulary, layers, heads, width, dropout=0.0, bias=False)
    network = nano.GPT(config)
    decayed = [p for p in network.parameters() if p.dim() >= 2]
    plain = [p for p in network.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=arguments.fused)
    forward = torch.compile(network) if arguments.compile else network
    autocast = torch.autocast("cpu", torch.bfloat16) if arguments.bf16 else contextlib.nullcontext()

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(arguments.tokens, dtype=np.uint16, mode="r")
        places = torch.randint(len(data) - block, (batch,))
        x = torch.stack([torch.from_numpy(data[i : i + block].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block].astype(np.int64)) for i in places])
        return x, y

    readings = Readings(batch * block)
    x, y = draw()
    for number in range(1, arguments.steps + 1):
        with autocast:
            _, loss = forward(x, y)
        x, y = draw()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        readings.updated(number, loss)
    readings.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    peers = parser.add_subparsers(required=True)
    one = peers.add_parser("nanogpt")
    one.add_argument("folder", type=str)
    one.add_argument("--tokens", type=Path, required=True, help="uint16, one after the other")
    one.add_argument("--vocabulary", type=int, required=True)
    one.add_argument("--shape", type=int, nargs=5, metavar=("LAYERS", "HEADS", "WIDTH", "BLOCK", "BATCH"))
    one.add_argument("--steps", type=int, required=True)
    for flag in ("--compile", "--fused", "--bf16"):
        one.add_argument(flag, action="store_true")
    one.set_defaults(run=nanogpt)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
