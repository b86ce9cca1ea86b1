"""Verdicts on runs that should end in the same weights and moments.

| run | compared with |
|---|---|
| a plain run, killed and resumed | the same command, run twice without a kill |
| a run with --bitwise, killed and resumed | the same command without a kill: equal bits |
| two processes on one card, one step skipped | one process |

Each run is a fresh process with an empty compiler cache.

Repeat them with `python -m benchmarks.gpu --out FOLDER --sections same-weights`.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.gpu.call import Call
from benchmarks.gpu.short_run import ShortRun
from benchmarks.runs import ROOT, environment

PROGRAM = (sys.executable, "-m", "benchmarks.gpu.short_run")

# Two layouts of a plain run in float32 may differ by this much after a few steps. A GPU computes
# products in TF32.
_LAYOUT_BOUNDS = {"cpu": 1e-4, "cuda": 2e-2}

# A resumed run may differ by this many times the difference between two identical commands.
_FLOOR_FACTOR = 4.0

# The time limit of runs that are started together.
_TIMEOUT_SECONDS = 150.0


@dataclass(frozen=True)
class Difference:
    """How far the weights and moments of two runs are apart.

    Attributes:
        relative: the norm of the difference, as a share of the norm: the largest of those of
            weights and of each kind of moments.
        largest: the largest difference of two numbers.
    """

    relative: float
    largest: float

    @property
    def is_none(self) -> bool:
        """Whether both runs have the same numbers."""
        return self.largest == 0


def judge(call: Call) -> None:
    """Compare runs that should end in the same weights."""
    judge_resume(call)
    judge_layouts(call)


def judge_resume(call: Call, program: Sequence[str] = PROGRAM) -> None:
    """Compare runs that were killed and resumed with runs that were not.

    Args:
        call: the call.
        program: starts a short run.
    """
    runs = _Runs(call, program)
    steps = call.sizes.short_steps
    plain = ShortRun(tiny=not call.on_gpu, steps=steps, compiled=call.on_gpu)
    bitwise = replace(plain, bitwise=True)
    kill_at = steps // 2 + 1

    # All at once: nothing is timed, and a process mostly waits for its compiler.
    runs.start("plain-1", plain)
    runs.start("plain-2", plain)
    runs.start("plain-killed", replace(plain, kill_at=kill_at))
    runs.start("bitwise-1", bitwise)
    runs.start("bitwise-killed", replace(bitwise, kill_at=kill_at))
    runs.wait()
    runs.start("plain-killed", plain, is_resumed=True)
    runs.start("bitwise-killed", bitwise, is_resumed=True)
    runs.wait()

    journal = call.journal
    floor = runs.difference("plain-1", "plain-2")
    journal.record("same weights", "the same plain command twice", **vars(floor))

    resumed = runs.difference("plain-1", "plain-killed")
    bound = _FLOOR_FACTOR * floor.relative
    journal.judge(
        "plain run, killed and resumed: as close as the same command twice",
        resumed.relative <= bound,
        bound=bound,
        **vars(resumed),
    )
    resumed = runs.difference("bitwise-1", "bitwise-killed")
    journal.judge(
        "bitwise run, killed and resumed: the same bits", resumed.is_none, **vars(resumed)
    )


def judge_layouts(call: Call, program: Sequence[str] = PROGRAM) -> None:
    """Compare the same run on one process and on two that share the card.

    It is eager, has two micro-batches for each rank or more, and skips a step.

    Args:
        call: the call.
        program: starts a short run.
    """
    runs = _Runs(call, program)
    plain = ShortRun(tiny=not call.on_gpu, steps=call.sizes.short_steps, breaks_at=2)
    plain = replace(plain, micro_batch=plain.size.rows // 4, in_float32=True)
    layouts = {"plain": plain}
    if not call.on_gpu:
        layouts["bitwise"] = replace(plain, bitwise=True)
    for name, options in layouts.items():
        runs.start(f"one-{name}", options)
        runs.start(f"two-{name}", options, processes=2)
    runs.wait()

    journal = call.journal
    name = "two processes on one card, with a skipped step"
    difference = runs.difference("one-plain", "two-plain")
    bound = _LAYOUT_BOUNDS[call.device.type]
    journal.judge(
        f"{name}: the weights of one process",
        difference.relative <= bound,
        bound=bound,
        **vars(difference),
    )
    if call.on_gpu:
        journal.record("same weights", f"{name}, bitwise", left_out="gloo sends no CUDA tensors")
        return
    difference = runs.difference("one-bitwise", "two-bitwise")
    journal.judge(
        f"{name}, bitwise: the bits of one process", difference.is_none, **vars(difference)
    )


@dataclass
class _Running:
    """A process of a short run.

    Attributes:
        process: the process.
        log: what it prints.
        expected_status: the exit status that it should have.
        is_resumed: whether it should continue a run that was killed.
    """

    process: "subprocess.Popen[bytes]"
    log: Path
    expected_status: int
    is_resumed: bool


class _Runs:
    """Short runs in processes of their own."""

    def __init__(self, call: Call, program: Sequence[str]) -> None:
        self.call = call
        self.program = program
        self.folder = call.folder / "same-weights"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.running: list[_Running] = []

    def start(
        self, name: str, options: ShortRun, is_resumed: bool = False, processes: int = 1
    ) -> None:
        """Start the processes of a run, each with an empty compiler cache."""
        port = _free_port()
        for rank in range(processes):
            label = f"{name}-{rank}{'-resumed' if is_resumed else ''}"
            variables = {
                "TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"inductor-{label}"),
                "TORCHINDUCTOR_COMPILE_THREADS": "4",  # several processes compile at once
            }
            if not self.call.on_gpu:
                variables["ACCELERATE_USE_CPU"] = "true"
            if processes > 1:
                # As if each process had a machine of its own, with this card as its only one.
                variables |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(processes),
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            path = self.folder / f"{label}.log"
            with path.open("wb") as log:
                process = subprocess.Popen(
                    [*self.program, str(self.folder / name), options.as_json()],
                    cwd=ROOT,
                    env=environment(threads=1, **variables),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.running.append(
                _Running(
                    process=process,
                    log=path,
                    expected_status=-signal.SIGKILL if options.kill_at else 0,
                    is_resumed=is_resumed,
                )
            )

    def wait(self) -> None:
        """Wait for all runs. A run that fails or takes too long ends the section.

        Raises:
            RuntimeError: with the end of the log of such a run.
        """
        deadline = time.monotonic() + min(self.call.journal.seconds_left, _TIMEOUT_SECONDS)
        try:
            while self.running:
                for run in list(self.running):
                    self._check(run, is_late=time.monotonic() > deadline)
                time.sleep(0.1)
        finally:
            for run in self.running:
                if run.process.poll() is None:
                    os.killpg(run.process.pid, signal.SIGKILL)
                    run.process.wait()
            self.running.clear()

    def _check(self, run: "_Running", is_late: bool) -> None:
        """Forget a run that has ended as it should."""
        status = run.process.poll()
        if status is None and not is_late:
            return
        log = run.log.read_text()
        if status != run.expected_status:
            ending = "took too long" if status is None else f"ended with status {status}"
            raise RuntimeError(f"{run.log.stem} {ending}: {log[-2000:]}")
        if run.is_resumed and "(resumes from step " not in log:
            raise RuntimeError(f"{run.log.stem} has not resumed: {log[-2000:]}")
        self.running.remove(run)

    def difference(self, first: str, second: str) -> Difference:
        """Compare two runs by the weights and the moments of their last checkpoints."""
        return compare(self.folder / first, self.folder / second)


def compare(first: Path, second: Path) -> Difference:
    """Return how far the newest checkpoints of two run folders are apart.

    They are infinitely far apart if one holds a number that is not finite.
    """
    tensors = _tensors(first)
    others = _tensors(second)
    assert tensors.keys() == others.keys()
    squares: Counter[str] = Counter()
    changed_squares: Counter[str] = Counter()
    largest = 0.0
    for name, tensor in tensors.items():
        is_moment = name.startswith("optimizer")
        kind = name.rsplit(".", 1)[-1] if is_moment else "weights"
        change = (tensor.double() - others[name].double()).abs()
        if not change.isfinite().all():
            return Difference(relative=math.inf, largest=math.inf)
        squares[kind] += float(tensor.double().square().sum())
        changed_squares[kind] += float(change.square().sum())
        largest = max(largest, float(change.max()))
    shares = [changed_squares[kind] / max(squares[kind], 1e-300) for kind in squares]
    return Difference(relative=max(shares) ** 0.5, largest=largest)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights and the moments of a run's newest checkpoint."""
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors[f"{file.parent.name}/{name}"] = tensor
    return tensors


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
