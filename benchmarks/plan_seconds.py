"""The seconds of a step that `llmtrain plan` predicts for two machines, against real steps.

The machines are network namespaces with one or two processes each, joined at 50, 200 and 1,000
Mbit/s. The plan measures computing on this computer, without a link, directly before the steps are
measured over the link. The prediction may be wrong by a fifth.

Repeat it as root with `python -m benchmarks.plan seconds`.
"""

import statistics
from pathlib import Path

from benchmarks.comparison import Table
from benchmarks.link_runs import step_seconds, train
from benchmarks.machines import two_machines
from benchmarks.runs import GPT_RECIPE, flags, scratch
from llmtrain.console import say
from llmtrain.lab.plan.calibration import calibrate
from llmtrain.lab.plan.hardware import GLOO_LATENCY
from llmtrain.lab.plan.speed import Cluster, Compute, Link, step_time
from llmtrain.parallel.sharding import Sharding
from llmtrain.training.predicted_memory import Memory
from llmtrain.training.recipe_model import build_recipe_model

LINK_RATES = (50, 200, 1000)  # Mbit/s
PROCESSES = (2, 4)
LOOPBACK_BANDWIDTH = 2e9  # bytes/s between two processes of a machine

STEPS = 12
WARM_UP_STEPS = 3
ROWS = 8  # of a micro-batch; each process has one per step
RECIPE_FLAGS = flags(
    n_layer=4,
    n_head=4,
    n_embd=256,
    architecture="gpt2",
    block_size=128,
    tokenizer="bpe:2048",
    per_device_train_batch_size=ROWS,
    max_steps=STEPS,
    logging_steps=1,
    optim="adamw",
    ddp_bucket_cap_mb=2,
    eval_fraction=0,
    report_to="none",
)

MAX_TRIES = 4
MAX_DRIFT = 0.15


def main() -> None:
    table = Table("plan_seconds")
    with scratch() as folder:
        for processes in PROCESSES:
            for rate in LINK_RATES:
                compare(table, processes, rate, folder)
    table.write()


def compare(table: Table, processes: int, rate: int, folder: Path) -> None:
    """Add the row of a number of processes and a rate in Mbit/s."""
    recipe_flags = [*RECIPE_FLAGS, *flags(global_batch_size=ROWS * processes)]
    memory = Memory(build_recipe_model(GPT_RECIPE, recipe_flags, "no"), on_gpu=False)
    compute, measured = calibrate_and_measure(memory, recipe_flags, processes, rate, folder)

    cluster = Cluster(
        per_machine=processes // 2,
        inside=Link(LOOPBACK_BANDWIDTH, GLOO_LATENCY["inside"]),
        between=Link(rate * 1e6 / 8, GLOO_LATENCY["between"]),
        nccl=False,
    )
    predicted = step_time(
        memory,
        compute,
        cluster,
        Sharding(processes, 1),
        rows=ROWS,
        accumulation=1,
    )
    table.add(
        work=f"{processes} processes, {rate} Mbit/s",
        against="measured",
        ours=predicted.total,
        theirs=measured,
        unit="s",
        target="+- 0.2",
    )
    say("predicted", str(predicted))


def calibrate_and_measure(
    memory: Memory, recipe_flags: list[str], processes: int, rate: int, folder: Path
) -> tuple[Compute, float]:
    """Return how long computing takes, and the seconds of a step over the link directly after.

    Forward passes do not wait for other processes. So they show whether the speed of this computer
    has changed in between, and then both are measured again.
    """
    parameters = sum(parameter.numel() for parameter in memory.parameters)
    for number in range(MAX_TRIES):
        compute = calibrate(
            GPT_RECIPE,
            recipe_flags,
            processes=processes,
            rows=ROWS,
            precision="no",
            trained_numel=parameters,
        )
        with two_machines(rate) as machines:
            run_folder = folder / f"{processes}-{rate}-{number}"
            entries = train(machines, run_folder, recipe_flags, processes)[WARM_UP_STEPS:]

        forward = statistics.median(step_seconds(entry, ("forward",)) for entry in entries) / ROWS
        drift = forward / compute.forward
        if abs(drift - 1) <= MAX_DRIFT:
            break
        say("drift", f"a forward pass took {drift:.2f} of its time before; both are repeated")
    return compute, statistics.median(step_seconds(entry) for entry in entries)


if __name__ == "__main__":
    main()
