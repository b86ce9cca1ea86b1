"""A recipe as its users start it, in a process of its own; and whatever it is compared with, alike."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from llmtrain.launch.accelerator import cpu_has_bfloat16

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
GPT_RECIPE, FINETUNE_RECIPE = "recipes/gpt.py", "recipes/finetune.py"


def half() -> str:
    """The precision where bfloat16 is wanted: a CPU that has no instructions for it takes a hundred times as long."""
    return "bf16" if torch.cuda.is_available() or cpu_has_bfloat16() else "no"


NAMES = {"bf16": "bf16", "no": "float32"}


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="llmtrain-benchmark-") as folder:
        yield Path(folder)


def run(command: list[str], threads: int = CORES, cwd: Path = ROOT, **variables: str) -> str:
    """What the command printed on stdout; it must end with status 0. Nothing comes from the net."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "OMP_NUM_THREADS": str(threads),
        **variables,
    }
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def launcher(config: str = "cpu") -> list[str]:
    return [str(BIN / "accelerate"), "launch", "--config_file", f"accelerate_configs/{config}.yaml"]


def newest(folder: Path, name: str) -> Path:
    """A file of the newest run that was told to write to ``folder``: a run takes the next free name."""
    return max(folder.parent.glob(f"{folder.name}*/{name}"), key=lambda path: path.stat().st_mtime)


def readings(folder: Path, key: str) -> list[float]:
    """What the newest run of ``folder`` wrote of one key, one update's after the other."""
    lines = [json.loads(line) for line in newest(folder, "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def recipe(
    name: str,
    folder: Path,
    *flags: str,
    config: str = "cpu",
    precision: str = "no",
    threads: int = CORES,
    processes: int | None = None,
) -> float:
    """Run a recipe under accelerate launch; returns the median of its readings of tokens per second, without the
    first, which pays for what is done once. Its prepared data is kept beside ``folder``."""
    launch = [*launcher(config), "--mixed_precision", precision]
    launch += ["--num_processes", str(processes)] if processes else []
    place = ["--report_to", "none", "--output_dir", str(folder), "--resume_from_checkpoint", "never"]
    run([*launch, name, *flags, *place], threads, LLMTRAIN_CACHE=str(folder.parent / "cache"))
    return statistics.median(readings(folder, "train/tokens_per_second")[1:])


def peer(name: str, *arguments: object, threads: int = CORES) -> float:
    """What one of :mod:`benchmarks.peers` measured."""
    command = [sys.executable, "-m", "benchmarks.peers", name, *map(str, arguments)]
    return float(run(command, threads).splitlines()[-1])
