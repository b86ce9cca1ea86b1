"""What a slow link costs, and what sending less saves: two machines (network namespaces) joined at 100 Mbit/s.

python -m benchmarks.links      needs root, for the namespaces; about ten minutes
"""

import json
import os
import statistics
import subprocess
from pathlib import Path

from benchmarks.comparison import Row, report
from benchmarks.runs import GPT_RECIPE, ROOT, launcher, scratch
from llmtrain.launch.children import kill
from llmtrain.observe.phases import OWN
from tests.machines import ADDRESS, FIRST, on_machine, two_machines

MBIT, UPDATES = 100, 32
MODEL = [  # 11.1 million parameters; buckets are small, or the link has nothing to do for most of the backward pass
    *("--n_layer", "6", "--n_head", "6", "--n_embd", "384", "--block_size", "128", "--tokenizer", "bpe:1024"),
    *("--global_batch_size", "22", "--per_device_train_batch_size", "11", "--eval_fraction", "0", "--optim", "adamw"),
    *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--ddp_bucket_cap_mb", "2"),
    *("--max_steps", str(UPDATES), "--logging_steps", "1", "--report_to", "none"),
]
HOW = {
    "whole gradients": [],
    "bf16": ["--ddp_comm_hook", "bf16"],
    "powersgd": ["--ddp_comm_hook", "powersgd"],
    # not to the end at update 32, where a save averages the optimizer's state, too: once in --save_steps
    "sync_every 16": ["--sync_every", "16", "--logging_steps", "16", "--max_steps", "33"],
}


def train(names: list[str], folder: Path, flags: list[str], processes: int = 2) -> list[dict]:
    """What the run of the GPT wrote at each reading; of so many processes in all."""
    started = []
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "cable0", "OMP_NUM_THREADS": "1"}
    env |= {"LLMTRAIN_CACHE": str(folder.parent / "cache"), "HF_HUB_OFFLINE": "1"}
    try:
        for rank, name in enumerate(names):
            where = ["--machine_rank", str(rank), "--main_process_ip", ADDRESS[FIRST], "--mixed_precision", "no"]
            where += ["--num_processes", str(processes)]
            words = [*launcher("multi_node"), *where, GPT_RECIPE, *flags, "--output_dir", str(folder)]
            words = on_machine(name, words)
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            started.append(subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **quiet))
        for process in started:
            _, said = process.communicate(timeout=900)
            if process.returncode:
                raise SystemExit(said.decode(errors="replace"))
    finally:
        for process in started:
            kill(process)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "phases" in line]


def seconds(reading: dict, phases: object = None) -> float:
    """Of an update, on the slower process; in some of its phases or all."""
    chosen = [values for phase, values in reading["phases"].items() if phases is None or phase in phases]
    return max(sum(ranks) for ranks in zip(*chosen, strict=True))


def main() -> None:
    found = {}
    with scratch() as folder, two_machines(MBIT) as names:
        for name, flags in HOW.items():
            readings = train(names, folder / name.replace(" ", "-"), [*MODEL, *flags])
            readings = [reading for reading in readings if reading["step"] <= UPDATES]
            counted = readings[-1:] if "--sync_every" in flags else readings[4:]
            update = statistics.median(seconds(reading) for reading in counted)
            compute = statistics.median(seconds(reading, OWN) for reading in counted)
            found[name] = {"update": update, "compute": compute, "loss": readings[-1]["train/loss"]}
            print(f"{name:<18}{update:6.2f} s an update, {compute:.2f} of it its own; loss {found[name]['loss']:.3f}")
    whole, compute = found["whole gradients"]["update"], found["sync_every 16"]["compute"]
    size = 4 * 11.1e6
    bound = size / (MBIT * 1e6 / 8)
    table = [
        Row("an update with whole gradients, 100 Mbit/s", "its bytes at that rate", whole, bound, "s", "<= 10"),
        Row("an update with bf16", "with whole gradients", found["bf16"]["update"], whole, "s", "<= 0.6"),
        Row("an update with powersgd", "with whole gradients", found["powersgd"]["update"], whole, "s", "<= 1"),
        Row(
            "an update with --sync_every 16",
            "what it computes",
            found["sync_every 16"]["update"],
            compute,
            "s",
            "<= 1.15",
        ),
    ]
    report("links", table, found=found, updates=UPDATES, bound_seconds=bound)


if __name__ == "__main__":
    main()
