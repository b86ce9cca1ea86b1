"""Two gloo processes with one thread each: the tokens per second of both together.

recipes/gpt.py under accelerate_configs/cpu_ddp.yaml is compared with

- a bare loop around PyTorch's DistributedDataParallel, with the same model and optimizer;
- two bare loops side by side that exchange nothing, which is the most that two cores can do.

Repeat it on two cores with `python -m benchmarks.processes`.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.comparison import Table, take_turns
from benchmarks.runs import (
    BIN,
    GPT_RECIPE,
    STEPS_ONLY,
    GPTShape,
    flags,
    recipe_speed,
    run_for_json,
    run_peer,
    scratch,
)

STEPS = 60
VOCABULARY = 2048
SHAPE = GPTShape(layers=4, heads=4, width=128, block=128, batch=16)  # the batch of one process
PEER_OPTIONS = {"shape": SHAPE, "vocabulary": VOCABULARY, "steps": STEPS}


def recipe_on_two_processes(folder: Path) -> float:
    """Return the speed of the recipe with its default model, which has the same shape."""
    recipe_flags = flags(
        global_batch_size=2 * SHAPE.batch,
        per_device_train_batch_size=SHAPE.batch,
        max_steps=STEPS,
        **STEPS_ONLY,
    )
    return recipe_speed(GPT_RECIPE, folder, *recipe_flags, config="cpu_ddp", threads=1)


def bare_ddp() -> float:
    """Return the speed of a bare loop around DistributedDataParallel."""
    torchrun = [BIN / "torchrun", *flags(standalone=True, nproc_per_node=2)]
    command = [*torchrun, "-m", "benchmarks.peers", "ddp", *flags(**PEER_OPTIONS)]
    return float(run_for_json(command, threads=1))


def independent_processes() -> float:
    """Return the sum of the speeds of two bare loops that run side by side."""

    def bare_loop(_: int) -> float:
        return run_peer("ddp", threads=1, **PEER_OPTIONS)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return sum(pool.map(bare_loop, range(2)))


def main() -> None:
    with scratch() as folder:
        speeds = take_turns(
            {
                "recipe": lambda: recipe_on_two_processes(folder / "run"),
                "bare DDP": bare_ddp,
                "independent": independent_processes,
            },
            rounds=3,
            warm_up_rounds=0,
        )

    table = Table("processes")
    table.add(
        work="two gloo processes, one thread each",
        against="bare DDP",
        ours=speeds["recipe"].median,
        theirs=speeds["bare DDP"].median,
        unit="tokens/s",
        target=">= 1.0",
    )
    table.add(
        work="two gloo processes, one thread each",
        against="two independent processes",
        ours=speeds["recipe"].median,
        theirs=speeds["independent"].median,
        unit="tokens/s",
        target=">= 0.93",
    )
    table.write()


if __name__ == "__main__":
    main()
