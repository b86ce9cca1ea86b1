"""Train recipes/gpt.py on two machines that are joined by a slow link."""

import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.machines import INTERFACE, Machine
from benchmarks.runs import GPT_RECIPE, ROOT, environment, flags, launcher, metrics
from llmtrain.launching.children import kill_tree

_TIMEOUT = 900  # seconds


def train(
    machines: list[Machine], folder: Path, recipe_flags: list[str], processes: int = 2
) -> list[dict[str, Any]]:
    """Run the recipe, and return its log entries of steps.

    Args:
        machines: the machines.
        folder: the run folder.
        recipe_flags: flags of the recipe. With ``logging_steps=1``, each step has an entry.
        processes: the processes on all machines together, each with one thread.
    """
    env = environment(
        threads=1,
        GLOO_SOCKET_IFNAME=INTERFACE,
        LLMTRAIN_CACHE=str(folder.parent / "cache"),
    )
    launches: list[subprocess.Popen[bytes]] = []
    try:
        for machine_rank, machine in enumerate(machines):
            launch = launcher(
                "multi_node",
                machine_rank=machine_rank,
                main_process_ip=machines[0].address,
                mixed_precision="no",
                num_processes=processes,
            )
            command = [*launch, GPT_RECIPE, *recipe_flags, *flags(output_dir=folder)]
            launches.append(
                subprocess.Popen(
                    machine.command(command),
                    cwd=ROOT,
                    env=env,
                    start_new_session=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            )
        for launch_process in launches:
            _, stderr = launch_process.communicate(timeout=_TIMEOUT)
            if launch_process.returncode:
                raise SystemExit(stderr.decode(errors="replace"))
    finally:
        for launch_process in launches:
            kill_tree(launch_process)
    return [entry for entry in metrics(folder) if "phases" in entry]


def step_seconds(entry: dict[str, Any], phases: Collection[str] | None = None) -> float:
    """Return the seconds of a step on its slowest process.

    Args:
        entry: the log entry of the step, which has the seconds of each phase and process.
        phases: count only these phases; ``None`` for all.
    """
    seconds_of_phases = entry["phases"]
    if phases is None:
        phases = seconds_of_phases.keys()
    counted = [seconds for phase, seconds in seconds_of_phases.items() if phase in phases]
    seconds_of_processes = [sum(seconds) for seconds in zip(*counted, strict=True)]
    return max(seconds_of_processes)
