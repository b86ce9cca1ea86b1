"""Two gloo processes with a thread each, beside PyTorch's DDP in a bare loop and two processes that do not know each
other.

python -m benchmarks.processes
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import BIN, GPT_RECIPE, peer, recipe, run, scratch

SHAPE, VOCABULARY, UPDATES = (4, 4, 128, 128, 16), 2048, 60  # layers, heads, width, block, batch of a process


def ours(folder: Path) -> float:
    """The recipe's own model under accelerate_configs/cpu_ddp.yaml, which gives each process half of two cores."""
    flags = ["--global_batch_size", str(2 * SHAPE[-1]), "--per_device_train_batch_size", str(SHAPE[-1])]
    flags += ["--max_steps", str(UPDATES), "--eval_fraction", "0", "--save_steps", "100000"]
    return recipe(GPT_RECIPE, folder, *flags, config="cpu_ddp", threads=1)


_ARGUMENTS = ["--shape", *SHAPE, "--vocabulary", VOCABULARY, "--steps", UPDATES]


def bare_ddp() -> float:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.peers", "ddp"]
    return float(run([*command, *map(str, _ARGUMENTS)], threads=1).splitlines()[-1])


def alone() -> float:
    """The sum of two loops that run beside each other and never meet."""
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda _: peer("ddp", *_ARGUMENTS, threads=1), range(2)))


def main() -> None:
    with scratch() as folder:
        found = in_turn(
            {"ours": partial(ours, folder / "run"), "bare": bare_ddp, "alone": alone}, rounds=3, uncounted=0
        )
    work = "two gloo processes, one thread each"
    speed = found["ours"].value
    report(
        "processes",
        [
            Row(work, "bare DDP", speed, found["bare"].value, "tokens/s", ">= 1.0"),
            Row(work, "two lone processes", speed, found["alone"].value, "tokens/s", ">= 0.93"),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
