"""A step over a slow link: two machines, joined at 100 Mbit/s, that average their gradients.

| measured | compared with |
|---|---|
| a step that sends gradients in float32 | the time of their bytes at that rate |

The model is a GPT with 11.1 million parameters. The machines are network namespaces on one
computer. The run is long, so there is one.

Repeat it as root with `python -m benchmarks.links`, which takes about five minutes.
"""

import statistics
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.comparison import Figures, Table
from benchmarks.runs import (
    GPT_RECIPE,
    ROOT,
    GPTShape,
    environment,
    flags,
    launcher,
    metrics,
    scratch,
)
from llmtrain.console import say
from llmtrain.launching.children import kill_tree
from llmtrain.phase_names import OWN_PHASES
from tests.machines import ADDRESS, INTERFACE, on_machine, two_machines

MBIT = 100
STEPS = 32
WARM_UP_STEPS = 4
PARAMETERS = 11.1e6
RECIPE_FLAGS = [
    *GPTShape(layers=6, heads=6, width=384, block=128, batch=22).recipe_flags(
        architecture="gpt2", micro_batch=11
    ),
    *flags(
        tokenizer="bpe:1024",
        eval_fraction=0,
        optim="adamw",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        # With large buckets, the link has nothing to do for most of the backward pass.
        ddp_bucket_cap_mb=2,
        max_steps=STEPS,
        logging_steps=1,
        report_to="none",
    ),
]
_TIMEOUT = 900  # seconds of a run


def train(machines: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run the recipe on one process of each machine, and return its log entries of steps."""
    env = environment(GLOO_SOCKET_IFNAME=INTERFACE, LLMTRAIN_CACHE=str(folder.parent / "cache"))
    run_flags = flags(output_dir=folder, threads=1)
    launches: list[subprocess.Popen[bytes]] = []
    try:
        for machine_rank, machine in enumerate(machines):
            launch = launcher(
                "multi_node",
                machine_rank=machine_rank,
                main_process_ip=ADDRESS[machines[0]],
            )
            command = [*launch, GPT_RECIPE, *RECIPE_FLAGS, *run_flags]
            launches.append(
                subprocess.Popen(
                    on_machine(machine, command),
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


def measure(machines: list[str], folder: Path) -> Figures:
    """Return the seconds of a step, those of its computing, and the last loss."""
    entries = train(machines, folder)
    timed = entries[WARM_UP_STEPS:]
    return {
        "step": statistics.median(step_seconds(entry) for entry in timed),
        "compute": statistics.median(step_seconds(entry, OWN_PHASES) for entry in timed),
        "loss": entries[-1]["train/loss"],
    }


def main() -> None:
    with scratch() as folder, two_machines(MBIT) as machines:
        run = measure(machines, folder / "run")

    step = run["step"]
    say("link", f"{step:.2f} s per step, {run['compute']:.2f} s of it computing")

    bytes_sent = 4 * PARAMETERS
    bound = bytes_sent / (MBIT * 1e6 / 8)
    table = Table("links")
    table.add(
        work=f"a step with float32 gradients, {MBIT} Mbit/s",
        against="their bytes at that rate",
        ours=step,
        theirs=bound,
        unit="s",
        target="<= 10",
    )
    table.write(figures={"float32": run}, steps=STEPS, bound_seconds=bound)


if __name__ == "__main__":
    main()
