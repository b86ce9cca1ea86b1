"""Predictions of `llmtrain plan` beside measurements: bytes of a process, and seconds of an update over slow links.

python -m benchmarks.plan [memory] [dtypes] [seconds]      seconds needs root, for network namespaces; about 20 minutes
"""

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks.comparison import Row, report
from benchmarks.links import seconds, train
from benchmarks.runs import FINETUNE_RECIPE, GPT_RECIPE, flags, launcher, scratch
from llmtrain.lab.commands.plan import as_json
from llmtrain.lab.plan.calibration import calibrate
from llmtrain.lab.plan.hardware import GLOO_LATENCY, PlanRequest
from llmtrain.lab.plan.layouts import make_plan
from llmtrain.lab.plan.speed import Cluster, Compute, Link, step_time
from llmtrain.parallel.sharding import Sharding
from llmtrain.training.predicted_memory import Memory
from llmtrain.training.recipe_model import build_recipe_model
from tests.machines import two_machines
from tests.memory import measured, predicted_most

MODEL = flags(block_size=128, tokenizer="bpe:2048", eval_fraction=0, report_to="none")
COMMON = [
    *MODEL,
    *flags(max_steps=5, resume_from_checkpoint="never", dataset="builtin:python-docs"),
]
COMMON += flags(per_device_train_batch_size=4)
GPT_SIZE = flags(n_layer=4, n_head=4, n_embd=256, architecture="gpt2")
GPT = [*COMMON, *GPT_SIZE, *flags(global_batch_size=16)]
SIZES = "hidden_size=256,intermediate_size=704,head_dim=64,tie_word_embeddings=false"
LLAMA = [*COMMON, *flags(from_config="llama", config_overrides=SIZES, global_batch_size=8)]
CASES = [  # what, recipe, flags, precision
    ("GPT", GPT_RECIPE, GPT, "no"),
    (
        "GPT, AdamW, recomputed",
        GPT_RECIPE,
        [*GPT, *flags(optim="adamw", gradient_checkpointing=True)],
        "no",
    ),
    (
        "GPT, AdamW, one micro-batch",
        GPT_RECIPE,
        [*GPT, *flags(global_batch_size=8, optim="adamw")],
        "no",
    ),
    ("Llama", FINETUNE_RECIPE, LLAMA, "no"),
]
LARGE = [
    *MODEL,
    *flags(n_layer=14, n_head=12, n_embd=768, architecture="gpt2", max_steps=4),
    *flags(global_batch_size=2, per_device_train_batch_size=1, resume_from_checkpoint="never"),
]
# Without instructions for bfloat16, a CPU takes 40 times as long.
IN_BF16 = flags(dtype="bfloat16", block_size=16)
DTYPES = [  # what, flags of a GPT with 100 million parameters
    ("adamw", flags(optim="adamw")),
    ("adamw_torch_8bit", flags(optim="adamw_torch_8bit")),
    ("adamw_torch_8bit, recomputed", flags(optim="adamw_torch_8bit", gradient_checkpointing=True)),
    ("muon", flags(optim="muon")),
    ("adafactor", flags(optim="adafactor")),
    ("adamw, bfloat16", [*flags(optim="adamw"), *IN_BF16]),
    ("adamw_torch_8bit, bfloat16", [*flags(optim="adamw_torch_8bit"), *IN_BF16]),
    ("muon, bfloat16", [*flags(optim="muon"), *IN_BF16]),
]
CONFIGS = {"DDP": "cpu_ddp", "FSDP2": "fsdp2"}  # the accelerate config of each layout
MIB = 2**20

RATES, UPDATES = (50, 200, 1000), 12  # Mbit/s
TRIES, MOVED = 4, 0.15
ROWS = 8  # of a process and update
SLOW = [
    *MODEL,
    *GPT_SIZE,
    *flags(optim="adamw", ddp_bucket_cap_mb=2, logging_steps=1, max_steps=UPDATES),
]
SLOW += flags(per_device_train_batch_size=ROWS)


def memory_table(folder: Path) -> list[Row]:
    table = []
    for case, recipe, words, precision in CASES:
        request = PlanRequest(
            recipe, words, processes=2, device="cpu", per_machine=2, mixed_precision=precision
        )
        for layout in as_json(make_plan(request))["layouts"]:
            name = f"{case}, {layout['name']}"
            launched = launcher(CONFIGS[layout["name"]], mixed_precision=precision)
            found = measured(launched, recipe, words, folder / name.replace(" ", "-"))
            for part in ("weights", "optimizer"):
                table.append(
                    Row(
                        f"{name}: {part}",
                        "measured",
                        layout["bytes"][part],
                        found[part],
                        "bytes",
                        "+- 0",
                    )
                )
            # what is known exactly, of gradients, stands on both sides
            gradients = 0.0 if layout["name"] == "DDP" else layout["bytes"]["gradients"]
            sizes = (predicted_most(layout) - gradients) / MIB, (found["most"] - gradients) / MIB
            table.append(Row(f"{name}: activations", "measured", *sizes, "MiB", "+- 0.1"))
            print(table[-1], flush=True)
    return table


def dtypes_table(folder: Path) -> list[Row]:
    """Return the bytes per parameter, and the peak of a process: all that training adds to it."""
    table = []
    for case, words in DTYPES:
        run_flags = [*LARGE, *words]
        plan = as_json(make_plan(PlanRequest(GPT_RECIPE, run_flags, device="cpu")))
        [layout] = plan["layouts"]
        found = measured([sys.executable], GPT_RECIPE, run_flags, folder / case.replace(" ", "-"))
        kinds = plan["bytes_per_parameter"]
        numel = layout["bytes"]["weights"] / kinds["weights"]
        peak = found["weights"] + found["optimizer"] + found["most"]
        for name, predicted, seen in (
            ("weights", kinds["weights"], found["weights"] / numel),
            ("gradients", kinds["gradients"], found["gradients"] / numel),
            ("state", kinds["moments"] + kinds["compensation"], found["optimizer"] / numel),
        ):
            table.append(Row(f"{case}: {name}", "measured", predicted, seen, "bytes", "+- 0"))
        sizes = (layout["bytes"]["total"] / MIB, peak / MIB)
        table.append(Row(f"{case}: peak", "measured", *sizes, "MiB", "+- 0.05"))
        print(*table[-4:], sep="\n", flush=True)
    return table


def seconds_table(folder: Path) -> list[Row]:
    table = []
    for processes in (2, 4):
        words = [*SLOW, *flags(global_batch_size=ROWS * processes)]
        memory = Memory(build_recipe_model(GPT_RECIPE, words, "no"), on_gpu=False)
        for rate in RATES:
            inside, between = (
                Link(2e9, GLOO_LATENCY["inside"]),
                Link(rate * 1e6 / 8, GLOO_LATENCY["between"]),
            )
            cluster = Cluster(processes // 2, inside, between, nccl=False)
            compute, update = side_by_side(memory, words, processes, rate, folder)
            step = step_time(memory, compute, cluster, Sharding(processes, 1), ROWS, 1)
            table.append(
                Row(
                    f"{processes} processes, {rate} Mbit/s",
                    "measured",
                    step.total,
                    update,
                    "s",
                    "+- 0.2",
                )
            )
            print(table[-1], step, flush=True)
    return table


def side_by_side(
    memory: Memory, words: list[str], processes: int, rate: int, folder: Path
) -> tuple[Compute, float]:
    """Return what calibrating says, and the seconds of an update over the link right after.

    Both are taken again where the machine's own speed has moved between them, which forward passes show: they wait for
    nobody.
    """
    numbers = sum(parameter.numel() for parameter in memory.parameters)
    for again in range(TRIES):
        compute = calibrate(GPT_RECIPE, words, processes, ROWS, "no", numbers)
        with two_machines(rate) as names:
            readings = train(names, folder / f"{processes}-{rate}-{again}", words, processes)[3:]
        forward = statistics.median(seconds(reading, ("forward",)) for reading in readings) / ROWS
        if abs(forward / compute.forward - 1) <= MOVED:
            break
        print(
            f"a forward pass took {forward / compute.forward:.2f} of what it took before: again",
            flush=True,
        )
    return compute, statistics.median(seconds(reading) for reading in readings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=[[], "memory", "dtypes", "seconds"])
    asked = parser.parse_args().tables or ["memory", "dtypes", "seconds"]
    with scratch() as folder:
        if "memory" in asked:
            report("plan_memory", memory_table(folder))
        if "dtypes" in asked:
            report("plan_dtypes", dtypes_table(folder))
        if "seconds" in asked:
            report("plan_seconds", seconds_table(folder))


if __name__ == "__main__":
    main()
