"""The cost of a checkpoint of weights and AdamW state, beside torch.distributed.checkpoint (dcp): ratios of medians.

Both write the same tensors; all kinds of save and load take turns.

python -m benchmarks.checkpoint [--folder DIR]
"""

import argparse
import functools
import hashlib
import os
import shutil
import statistics
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator

from benchmarks.comparison import forget
from benchmarks.runs import scratch
from llmtrain import GPT, GPTConfig, OptimConfig, make_optimizer
from llmtrain.console import say
from llmtrain.launching.process import launch
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.shards import fill
from llmtrain.record import checkpoint
from llmtrain.record.saver import Saver
from llmtrain.record.tensor_files import read_tensors
from llmtrain.training.run_state import optimizer_tensors, restore_optimizer

ROUNDS, UNCOUNTED = 9, 3
VOCABULARY, TOKENS = 16384, 32
BLOCK = 1 << 28  # bytes


class WeightsOnly:
    """The files of a model folder that holds nothing but weights, which are all that dcp writes."""

    weights_name, may_split_weights = "model.safetensors", True

    def write(self, folder: Path, parameters: int) -> None:
        pass


class Bench:
    """A model that trains, and the seconds of each kind of work."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, defaultdict[str, list[float]](list)
        config = GPTConfig(n_layer=6, n_head=12, n_embd=768, block_size=TOKENS)
        self.model = GPT(config, VOCABULARY)
        self.optimizer = make_optimizer(Accelerator(cpu=True), self.model, OptimConfig())
        self.ids = torch.randint(VOCABULARY, (1, TOKENS))
        self.step()
        self.weights = self.model.state_dict()
        self.state = optimizer_tensors(self.model, self.optimizer)
        self.savers = [
            Saver(folder / name, WeightsOnly(), 1 << 30, name == "later")
            for name in ("ours", "later")
        ]

    def step(self) -> None:
        self.model(self.ids, self.ids).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clock(self, name: str, action: Callable[[], object]) -> None:
        began = time.perf_counter()
        action()
        self.seconds[name].append(time.perf_counter() - began)

    def save(self, saver: int, number: int, done: Callable[[], None]) -> None:
        self.savers[saver].save(
            number,
            DistributedTensors(self.weights),
            DistributedTensors(self.state),
            {"step": number},
            done,
        )

    def round(self, number: int) -> None:
        ours, theirs = self.folder / f"ours/step-{number:08d}", self.folder / "dcp"
        both = {"model": self.weights, "optimizer": self.state}
        self.clock("save", functools.partial(self.save, 0, number, lambda: None))
        writer = dcp.FileSystemWriter(theirs)
        self.clock("dcp save", lambda: dcp.save(both, storage_writer=writer, no_dist=True))
        self.clock("check", lambda: checkpoint.find_fault(ours))
        for temperature in ("warm", "cold"):
            for name, load in (
                ("load", lambda: self.load(ours)),
                ("dcp load", lambda: self.load_dcp(theirs)),
            ):
                if temperature == "cold":
                    forget(self.folder)
                self.clock(f"{temperature} {name}", load)
        self.save_meanwhile(number)
        for path in (ours, theirs, self.folder / f"later/step-{number:08d}"):
            shutil.rmtree(path)

    def load(self, path: Path) -> None:
        assert checkpoint.find_fault(path) is None
        fill(self.model.state_dict(), read_tensors(path / "model"))
        self.take(dict(read_tensors(path / "optimizer")))

    def load_dcp(self, path: Path) -> None:
        into = {
            "model": self.weights,
            "optimizer": {name: torch.empty_like(t) for name, t in self.state.items()},
        }
        dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        self.take(into["optimizer"])

    def take(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the optimizer and write to each tensor: what is only mapped is not yet read."""
        restore_optimizer(self.model, self.optimizer, state.items())
        self.state = optimizer_tensors(self.model, self.optimizer)
        for tensor in self.state.values():
            tensor.mul_(1)

    def save_meanwhile(self, number: int) -> None:
        """Train while a checkpoint is saved in the background, then as many steps without one."""
        durable = threading.Event()
        began = time.perf_counter()

        def done() -> None:
            self.seconds["durable"].append(time.perf_counter() - began)
            durable.set()

        self.clock("stall", functools.partial(self.save, 1, number, done))
        steps, since = 0, time.perf_counter()
        while not durable.is_set() or not steps:
            self.step()
            steps += 1
        meanwhile = time.perf_counter() - since
        self.savers[1].wait()
        since = time.perf_counter()
        for _ in range(steps):
            self.step()
        alone = time.perf_counter() - since
        self.seconds["step"].append(alone / steps)
        self.seconds["step meanwhile"].append(meanwhile / steps)
        self.seconds["async cost"].append(self.seconds["stall"][-1] + meanwhile - alone)

    def report(self) -> None:
        size = sum(t.nbytes for part in (self.weights, self.state) for t in part.values())
        parameters = sum(p.numel() for p in self.model.parameters())
        m = {name: statistics.median(times[UNCOUNTED:]) for name, times in self.seconds.items()}
        threads = f"{torch.get_num_threads()} of {os.cpu_count()} CPUs compute"
        say(
            "tensors",
            f"{parameters / 1e6:.1f}M parameters and AdamW's state, {size / 1e6:.0f} MB; {threads}",
        )
        for name in ("save", "warm load", "cold load"):
            theirs = "dcp save" if name == "save" else name.replace("load", "dcp load")
            ratios = [a / b for a, b in zip(self.seconds[name], self.seconds[theirs], strict=True)][
                UNCOUNTED:
            ]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f} by round"
            say(
                name,
                f"{m[name]:.3f} s; dcp {m[theirs]:.3f} s: {m[name] / m[theirs]:.2f}x ({spread})",
            )
        for name, means in (
            ("stall", "the caller waits"),
            ("durable", "it is on the disk after"),
            ("async cost", "it delays training by"),
        ):
            say("async", f"{means} {m[name]:.3f} s, {m[name] / m['save']:.2f}x a save")
        slowed = m["step meanwhile"] / m["step"]
        say(
            "step",
            f"{m['step']:.3f} s; {m['step meanwhile']:.3f} s while a save is under way: {slowed:.2f}x",
        )
        rate = size / m["check"] / 1e9
        block = BLOCK / m["sha256"] / 1e9
        say(
            "hash",
            f"sha256 {block:.2f} GB/s on one core, of bytes at hand; find_fault {rate:.2f} GB/s, with reading",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="where checkpoints go for the time being (default: temporary)",
    )
    arguments = parser.parse_args()
    warnings.filterwarnings(
        "ignore", module=r"torch\.distributed\.checkpoint"
    )  # that there is no process group
    block = memoryview(bytearray(BLOCK))
    with scratch(arguments.folder) as folder:
        bench = Bench(folder)
        for number in range(1, 1 + UNCOUNTED + ROUNDS):
            bench.clock("sha256", lambda: hashlib.sha256(block).digest())
            bench.round(number)
        bench.report()


if __name__ == "__main__":
    launch(main)
