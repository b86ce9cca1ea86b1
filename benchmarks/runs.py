"""A recipe as its users start it, in a process of its own; and other loops, started alike."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
GPT_RECIPE, FINETUNE_RECIPE, PREFERENCE_RECIPE = (
    "recipes/gpt.py",
    "recipes/finetune.py",
    "recipes/preference.py",
)
UPDATES_ALONE = {
    "eval_fraction": 0,
    "save_steps": 100_000,
}  # flags of a run that only makes updates
NAMES = {"bf16": "bf16", "no": "float32"}


def half() -> str:
    """Return the precision to use for bfloat16: none on a CPU that emulates it, a hundred times as slowly."""
    import torch

    from llmtrain.launching.accelerator import cpu_has_bfloat16

    return "bf16" if torch.cuda.is_available() or cpu_has_bfloat16() else "no"


def flags(**values: object) -> list[str]:
    """Return the words of a command line; a flag that is ``True`` is a switch."""
    pairs = [
        (f"--{name}",) if value is True else (f"--{name}", str(value))
        for name, value in values.items()
    ]
    return [word for pair in pairs for word in pair]


def gpt_flags(
    layers: int,
    heads: int,
    width: int,
    block: int,
    batch: int,
    per_device: int | None = None,
    architecture: str = "gpt2",
) -> list[str]:
    """Return the flags of a GPT of this shape, trained on ``batch`` rows an update, ``per_device`` in a micro-batch."""
    shape = flags(
        n_layer=layers, n_head=heads, n_embd=width, block_size=block, architecture=architecture
    )
    return shape + flags(global_batch_size=batch, per_device_train_batch_size=per_device or batch)


def place(folder: Path) -> list[str]:
    """Return the flags of a new run in ``folder`` that tells no tracker."""
    return flags(report_to="none", output_dir=folder, resume_from_checkpoint="never")


@contextmanager
def scratch(parent: Path | str | None = None) -> Iterator[Path]:
    """Make a folder for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="llmtrain-benchmark-", dir=parent) as folder:
        yield Path(folder)


def environment(threads: int = CORES, **variables: str) -> dict[str, str]:
    """Return the environment of a contender: nothing comes from the net.

    Packages that the caller has put on ``PYTHONPATH`` stay there.
    """
    python_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {
        "PYTHONPATH": os.pathsep.join(python_path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    return {**os.environ, **ours, "OMP_NUM_THREADS": str(threads), **variables}


def run(command: Sequence[object], threads: int = CORES, cwd: Path = ROOT, **variables: str) -> str:
    """Return what the command printed on stdout. It must end with status 0."""
    words, env = [str(word) for word in command], environment(threads, **variables)
    ended = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)}\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def figure(command: Sequence[object], threads: int = CORES, **variables: str) -> Any:
    """Return what the command printed last, which is JSON."""
    return json.loads(run(command, threads, **variables).splitlines()[-1])


def launcher(config: str = "cpu", **values: object) -> list[str]:
    """Return the words that launch a script under one of accelerate_configs/, with flags of the launcher's."""
    words = [
        str(BIN / "accelerate"),
        "launch",
        "--config_file",
        f"accelerate_configs/{config}.yaml",
    ]
    return words + flags(**values)


def newest(folder: Path, name: str) -> Path:
    """Return a file of the newest run that was told to write to ``folder``; a run takes the next free name."""
    return max(folder.parent.glob(f"{folder.name}*/{name}"), key=lambda path: path.stat().st_mtime)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of the newest run of ``folder``."""
    return [json.loads(line) for line in newest(folder, "metrics.jsonl").read_text().splitlines()]


def median_reading(folder: Path, key: str) -> float:
    """Return the median of a metric of the newest run, without the first reading, which pays for what is done once."""
    return statistics.median([line[key] for line in metrics(folder) if key in line][1:])


def with_ignored(folder: Path, trained: float) -> float:
    """Return a rate of all tokens, also those that are not trained on, from the rate of those that are."""
    audit = json.loads(newest(folder, "run.json").read_text())["audit"]
    return float(trained * audit["tokens"] / audit["targets"])


def recipe(
    name: str,
    folder: Path,
    *words: str,
    config: str = "cpu",
    precision: str = "no",
    threads: int = CORES,
    processes: int | None = None,
) -> float:
    """Run a recipe under accelerate launch; returns its tokens per second. Its data is kept beside ``folder``."""
    more = {} if processes is None else {"num_processes": processes}
    launch = launcher(config, mixed_precision=precision, **more)
    run(
        [*launch, name, *words, *place(folder)],
        threads,
        LLMTRAIN_CACHE=str(folder.parent / "cache"),
    )
    return median_reading(folder, "train/tokens_per_second")


def peer(name: str, *arguments: object, threads: int = CORES) -> float:
    """Return what one of :mod:`benchmarks.peers` measured."""
    return float(figure([sys.executable, "-m", "benchmarks.peers", name, *arguments], threads))
