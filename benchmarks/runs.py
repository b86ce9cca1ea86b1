"""Start recipes as their users start them, and the loops of other packages in the same way.

Every run is a process of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

if hasattr(os, "sched_getaffinity"):
    CORES = len(os.sched_getaffinity(0))
else:
    CORES = os.cpu_count() or 1

GPT_RECIPE = "recipes/gpt.py"
FINETUNE_RECIPE = "recipes/finetune.py"
PREFERENCE_RECIPE = "recipes/preference.py"

# Values of flags for a run that neither evaluates nor saves.
STEPS_ONLY = {"eval_fraction": 0, "save_steps": 100_000}

# What a table calls the values of --mixed_precision.
PRECISION_NAMES = {"bf16": "bf16", "no": "float32"}


class GPTShape(NamedTuple):
    """The size of a GPT and of its batch.

    Attributes:
        layers: transformer blocks.
        heads: attention heads.
        width: the size of a hidden state.
        block: tokens of a row.
        batch: rows of a step.
    """

    layers: int
    heads: int
    width: int
    block: int
    batch: int

    def recipe_flags(self, architecture: str, micro_batch: int | None = None) -> list[str]:
        """Return flags of ``recipes/gpt.py``. Without a ``micro_batch``, a step is one."""
        return flags(
            n_layer=self.layers,
            n_head=self.heads,
            n_embd=self.width,
            block_size=self.block,
            architecture=architecture,
            global_batch_size=self.batch,
            per_device_train_batch_size=micro_batch or self.batch,
        )


def flags(**values: object) -> list[str]:
    """Return the words of a command line.

    ``True`` makes a switch, ``False`` and ``None`` make nothing, and a tuple makes several words.
    """
    words = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, tuple):
            words.extend(str(item) for item in value)
        elif value is not True:
            words.append(str(value))
    return words


def new_run_flags(folder: Path) -> list[str]:
    """Return flags for a new run in ``folder`` that reports to no tracker."""
    return flags(report_to="none", output_dir=folder, resume_from_checkpoint="never")


def half_precision() -> str:
    """Return the value of ``--mixed_precision`` for bfloat16, or ``no`` if the CPU emulates it.

    A CPU without instructions for bfloat16 takes a hundred times as long.
    """
    import torch

    from llmtrain.launching.accelerator import cpu_has_bfloat16

    return "bf16" if torch.cuda.is_available() or cpu_has_bfloat16() else "no"


@contextmanager
def scratch(parent: Path | str | None = None) -> Iterator[Path]:
    """Make a temporary folder, and remove it after the block."""
    with tempfile.TemporaryDirectory(prefix="llmtrain-benchmark-", dir=parent) as folder:
        yield Path(folder)


def environment(threads: int = CORES, **variables: str) -> dict[str, str]:
    """Return the environment of a run, which downloads nothing.

    Packages that the caller has put on ``PYTHONPATH`` stay there.
    """
    python_path = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        python_path.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(python_path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "OMP_NUM_THREADS": str(threads),
        **variables,
    }


def run(command: Sequence[object], threads: int = CORES, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command; return its stdout. It must end with status 0."""
    words = [str(word) for word in command]
    process = subprocess.run(
        words,
        cwd=cwd,
        env=environment(threads, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}\n{process.stdout}\n{process.stderr}")
    return process.stdout


def run_for_json(command: Sequence[object], threads: int = CORES, **variables: str) -> Any:
    """Run a command; return the last line of its stdout, which is JSON."""
    stdout = run(command, threads, **variables)
    return json.loads(stdout.splitlines()[-1])


def launcher(config: str = "cpu", **values: object) -> list[str]:
    """Return ``accelerate launch`` with a file of ``accelerate_configs/`` and further flags."""
    launch = [str(BIN / "accelerate"), "launch"]
    return launch + flags(config_file=f"accelerate_configs/{config}.yaml", **values)


def recipe_speed(
    recipe: str,
    folder: Path,
    *recipe_flags: str,
    config: str = "cpu",
    precision: str = "no",
    threads: int = CORES,
    processes: int | None = None,
) -> float:
    """Run a recipe under ``accelerate launch``; return its target tokens per second.

    Args:
        recipe: the file of the recipe.
        folder: the run folder. Its parent has the cache of the data.
        *recipe_flags: flags of the recipe.
        config: a file of ``accelerate_configs/``, without its suffix.
        precision: the value of ``--mixed_precision``.
        threads: threads of each process.
        processes: how many processes; ``None`` for the number in the config.
    """
    launch = launcher(config, num_processes=processes)
    speed_flags = flags(mixed_precision=precision, threads=threads)
    run(
        [*launch, recipe, *recipe_flags, *speed_flags, *new_run_flags(folder)],
        LLMTRAIN_CACHE=str(folder.parent / "cache"),
    )
    return median_metric(folder, "train/tokens_per_second")


def run_peer(name: str, *arguments: object, threads: int = CORES, **options: object) -> float:
    """Run one of ``benchmarks.peers``; return the figure that it prints.

    Args:
        name: the name of the peer.
        *arguments: its positional arguments.
        threads: threads of the process.
        **options: its flags.
    """
    command = [sys.executable, "-m", "benchmarks.peers", name, *arguments, *flags(**options)]
    return float(run_for_json(command, threads))


def newest_file(folder: Path, name: str) -> Path:
    """Return a file of the newest run with this run folder, as each run takes the next free name."""
    files = folder.parent.glob(f"{folder.name}*/{name}")
    return max(files, key=lambda path: path.stat().st_mtime)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the log entries of the newest run with this run folder."""
    lines = newest_file(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def median_metric(folder: Path, key: str) -> float:
    """Return the median of a metric, without its first value, which includes one-time work."""
    values = [entry[key] for entry in metrics(folder) if key in entry]
    return statistics.median(values[1:])


def dataset_audit(folder: Path) -> dict[str, int]:
    """Return the counts of rows and tokens in the data of the newest run with this run folder."""
    run_json = json.loads(newest_file(folder, "run.json").read_text())
    audit: dict[str, int] = run_json["audit"]
    return audit


def speed_with_prompts(folder: Path, target_tokens_per_second: float) -> float:
    """Return the speed in all tokens, prompts included, from the speed in target tokens."""
    audit = dataset_audit(folder)
    return target_tokens_per_second * audit["tokens"] / audit["targets"]
