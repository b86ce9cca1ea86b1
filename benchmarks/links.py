"""The cost of a slow link, and the gain of sending less: two machines (network namespaces) joined at 100 Mbit/s.

python -m benchmarks.links      needs root, for the namespaces; about ten minutes
"""

import statistics
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.comparison import Row, report
from benchmarks.runs import (
    GPT_RECIPE,
    ROOT,
    environment,
    flags,
    gpt_flags,
    launcher,
    metrics,
    scratch,
)
from llmtrain.launching.children import kill_tree
from llmtrain.phase_names import OWN_PHASES
from tests.machines import ADDRESS, FIRST, on_machine, two_machines

MBIT, UPDATES = 100, 32
MODEL = [  # 11.1 million parameters; buckets are small, or the link has nothing to do for most of the backward pass
    *gpt_flags(6, 6, 384, 128, 22, per_device=11),
    *flags(
        tokenizer="bpe:1024",
        eval_fraction=0,
        optim="adamw",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
    ),
    *flags(ddp_bucket_cap_mb=2, max_steps=UPDATES, logging_steps=1, report_to="none"),
]
HOW = {
    "whole gradients": [],
    "bf16": flags(ddp_comm_hook="bf16"),
}


def train(
    names: list[str], folder: Path, words: list[str], processes: int = 2
) -> list[dict[str, Any]]:
    """Return the readings of a run of the GPT on these machines, of so many processes in all."""
    started: list[subprocess.Popen[bytes]] = []
    cache = str(folder.parent / "cache")
    env = environment(threads=1, GLOO_SOCKET_IFNAME="cable0", LLMTRAIN_CACHE=cache)
    try:
        for rank, name in enumerate(names):
            where = flags(machine_rank=rank, main_process_ip=ADDRESS[FIRST], mixed_precision="no")
            where += flags(num_processes=processes)
            command = [
                *launcher("multi_node"),
                *where,
                GPT_RECIPE,
                *words,
                "--output_dir",
                str(folder),
            ]
            quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            here = on_machine(name, command)
            started.append(
                subprocess.Popen(here, cwd=ROOT, env=env, start_new_session=True, **quiet)
            )
        for process in started:
            _, said = process.communicate(timeout=900)
            if process.returncode:
                raise SystemExit(said.decode(errors="replace"))
    finally:
        for process in started:
            kill_tree(process)
    return [line for line in metrics(folder) if "phases" in line]


def seconds(reading: dict[str, Any], phases: Collection[str] | None = None) -> float:
    """Return the seconds of an update on the slower process; in some of its phases, or in all."""
    chosen = [
        values for phase, values in reading["phases"].items() if phases is None or phase in phases
    ]
    return max(sum(ranks) for ranks in zip(*chosen, strict=True))


def main() -> None:
    found = {}
    with scratch() as folder, two_machines(MBIT) as names:
        for name, words in HOW.items():
            readings = train(names, folder / name.replace(" ", "-"), [*MODEL, *words])
            figures = {
                "update": statistics.median(seconds(reading) for reading in readings[4:]),
                "compute": statistics.median(
                    seconds(reading, OWN_PHASES) for reading in readings[4:]
                ),
                "loss": readings[-1]["train/loss"],
            }
            found[name] = figures
            print(
                f"{name:<18}{figures['update']:6.2f} s a step, "
                f"{figures['compute']:.2f} of it computing; loss {figures['loss']:.3f}"
            )

    whole = found["whole gradients"]["update"]
    bound = 4 * 11.1e6 / (MBIT * 1e6 / 8)
    table = [
        Row(
            "an update with whole gradients, 100 Mbit/s",
            "its bytes at that rate",
            whole,
            bound,
            "s",
            "<= 10",
        ),
        Row(
            "an update with bf16",
            "with whole gradients",
            found["bf16"]["update"],
            whole,
            "s",
            "<= 0.6",
        ),
    ]
    report("links", table, found=found, updates=UPDATES, bound_seconds=bound)


if __name__ == "__main__":
    main()
