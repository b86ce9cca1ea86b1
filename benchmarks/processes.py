"""Two gloo processes with a thread each, beside PyTorch's DDP in a bare loop and two processes that never meet.

python -m benchmarks.processes
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import BIN, GPT_RECIPE, UPDATES_ALONE, figure, flags, peer, recipe, scratch

SHAPE, VOCABULARY, UPDATES = (
    (4, 4, 128, 128, 16),
    2048,
    60,
)  # layers, heads, width, block, batch of a process
_ARGUMENTS = ["--shape", *SHAPE, "--vocabulary", VOCABULARY, "--steps", UPDATES]


def ours(folder: Path) -> float:
    """Run the recipe's own model under accelerate_configs/cpu_ddp.yaml, each process with half of two cores."""
    batch = flags(global_batch_size=2 * SHAPE[-1], per_device_train_batch_size=SHAPE[-1])
    words = [*batch, *flags(max_steps=UPDATES, **UPDATES_ALONE)]
    return recipe(GPT_RECIPE, folder, *words, config="cpu_ddp", threads=1)


def bare_ddp() -> float:
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", 2]
    return float(figure([*torchrun, "-m", "benchmarks.peers", "ddp", *_ARGUMENTS], threads=1))


def alone() -> float:
    """Return the sum of two loops that run beside each other and never meet."""
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda _: peer("ddp", *_ARGUMENTS, threads=1), range(2)))


def main() -> None:
    with scratch() as folder:
        contenders = {"ours": partial(ours, folder / "run"), "bare": bare_ddp, "alone": alone}
        found = in_turn(contenders, rounds=3, uncounted=0)
    work, speed = "two gloo processes, one thread each", found["ours"].value
    report(
        "processes",
        [
            Row(work, "bare DDP", speed, found["bare"].value, "tokens/s", ">= 1.0"),
            Row(work, "two lone processes", speed, found["alone"].value, "tokens/s", ">= 0.93"),
        ],
    )


if __name__ == "__main__":
    main()
