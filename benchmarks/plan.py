"""The predictions of `llmtrain plan`, against measurements: two tables.

| table | predicted |
|---|---|
| memory | the bytes of two processes, with DDP and FSDP2 |
| dtypes | the bytes per parameter of optimizers and dtypes |

**memory**: the models are a GPT, also with AdamW and recomputation, and with one micro-batch, and a
Llama. The bytes of the weights and the optimizer have to be the same. The rest of the peak without
the planned gradients, the activations, may differ by a tenth.

**dtypes**: a GPT with 100 million parameters is trained on one process with several optimizers, in
float32 and with weights in bfloat16. The bytes per parameter of the weights, the gradients and the
optimizer's state have to be the same. The peak, which is all that training adds to the process, may
differ by a twentieth.

Repeat all or some with `python -m benchmarks.plan [memory] [dtypes]`. Both take about ten
minutes.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.comparison import Table
from benchmarks.runs import FINETUNE_RECIPE, GPT_RECIPE, flags, launcher, scratch
from llmtrain.lab.commands.plan import as_json
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import make_plan
from tests.memory import measure_run, planned_step

# --- memory

MIB = 2**20
_TIMEOUT = 1800  # seconds of a run whose memory is measured
CONFIG_OF_LAYOUT = {"DDP": "cpu_ddp", "FSDP2": "fsdp2"}  # files of accelerate_configs/

RUN_FLAGS = flags(
    max_steps=5,
    dataset="builtin:python-docs",
    tokenizer="bpe:2048",
    block_size=128,
    per_device_train_batch_size=4,
    eval_fraction=0,
    report_to="none",
    resume_from_checkpoint="never",
)
SMALL_GPT_FLAGS = [*RUN_FLAGS, *flags(n_layer=4, n_head=4, n_embd=256, architecture="gpt2")]
LLAMA_SIZES = "hidden_size=256,intermediate_size=704,head_dim=64,tie_word_embeddings=false"
LLAMA_FLAGS = [*RUN_FLAGS, *flags(from_config="llama", config_overrides=LLAMA_SIZES)]


class MemoryCase(NamedTuple):
    """A recipe and its flags, which are planned and trained."""

    name: str
    recipe: str
    recipe_flags: list[str]


MEMORY_CASES = [
    MemoryCase("GPT", GPT_RECIPE, [*SMALL_GPT_FLAGS, *flags(global_batch_size=16)]),
    MemoryCase(
        "GPT, AdamW, recomputed",
        GPT_RECIPE,
        [
            *SMALL_GPT_FLAGS,
            *flags(global_batch_size=16, optim="adamw", gradient_checkpointing=True),
        ],
    ),
    MemoryCase(
        "GPT, AdamW, one micro-batch",
        GPT_RECIPE,
        [*SMALL_GPT_FLAGS, *flags(global_batch_size=8, optim="adamw")],
    ),
    MemoryCase("Llama", FINETUNE_RECIPE, [*LLAMA_FLAGS, *flags(global_batch_size=8)]),
]


def measure_memory() -> None:
    table = Table("plan_memory")
    with scratch() as folder:
        for case in MEMORY_CASES:
            request = PlanRequest(
                case.recipe,
                case.recipe_flags,
                processes=2,
                device="cpu",
                per_machine=2,
            )
            for layout in as_json(make_plan(request))["layouts"]:
                compare_memory(table, case, layout, folder)
    table.write()


def compare_memory(table: Table, case: MemoryCase, layout: dict[str, Any], folder: Path) -> None:
    """Add the rows of a case and a layout."""
    sizes = layout["bytes"]
    name = f"{case.name}, {layout['name']}"
    launch = launcher(CONFIG_OF_LAYOUT[layout["name"]])
    run_folder = folder / name.replace(" ", "-")
    measured = measure_run(launch, case.recipe, case.recipe_flags, run_folder, _TIMEOUT)

    for part in ("weights", "optimizer"):
        table.add(
            work=f"{name}: {part}",
            against="measured",
            ours=sizes[part],
            theirs=getattr(measured, part),
            unit="bytes",
            target="+- 0",
        )

    # The rise includes the gradients of FSDP2, which are known exactly.
    gradients = 0.0 if layout["name"] == "DDP" else sizes["gradients"]
    table.add(
        work=f"{name}: activations",
        against="measured",
        ours=(planned_step(layout) - gradients) / MIB,
        theirs=(measured.added_by_step - gradients) / MIB,
        unit="MiB",
        target="+- 0.1",
    )


# --- dtypes

LARGE_GPT_FLAGS = flags(
    max_steps=4,
    n_layer=14,
    n_head=12,
    n_embd=768,
    architecture="gpt2",
    block_size=128,
    tokenizer="bpe:2048",
    global_batch_size=2,
    per_device_train_batch_size=1,
    eval_fraction=0,
    report_to="none",
    resume_from_checkpoint="never",
)
# Rows are short, because a CPU without instructions for bfloat16 takes 40 times as long.
BFLOAT16 = {"dtype": "bfloat16", "block_size": 16}
DTYPE_CASES = {
    "adamw": flags(optim="adamw"),
    "adamw_torch_8bit": flags(optim="adamw_torch_8bit"),
    "adamw_torch_8bit, recomputed": flags(optim="adamw_torch_8bit", gradient_checkpointing=True),
    "muon": flags(optim="muon"),
    "adamw, bfloat16": flags(optim="adamw", **BFLOAT16),
    "adamw_torch_8bit, bfloat16": flags(optim="adamw_torch_8bit", **BFLOAT16),
    "muon, bfloat16": flags(optim="muon", **BFLOAT16),
}


def measure_dtypes() -> None:
    table = Table("plan_dtypes")
    with scratch() as folder:
        for name, case_flags in DTYPE_CASES.items():
            compare_dtypes(
                table, name, [*LARGE_GPT_FLAGS, *case_flags], folder / name.replace(" ", "-")
            )
    table.write()


def compare_dtypes(table: Table, name: str, recipe_flags: list[str], folder: Path) -> None:
    """Add the rows of a case."""
    plan = as_json(make_plan(PlanRequest(GPT_RECIPE, recipe_flags, device="cpu")))
    [layout] = plan["layouts"]
    predicted = plan["bytes_per_parameter"]
    measured = measure_run([sys.executable], GPT_RECIPE, recipe_flags, folder, _TIMEOUT)
    parameters = layout["bytes"]["weights"] / predicted["weights"]

    for part, predicted_bytes, measured_bytes in (
        ("weights", predicted["weights"], measured.weights),
        ("gradients", predicted["gradients"], measured.gradients),
        ("state", predicted["moments"] + predicted["compensation"], measured.optimizer),
    ):
        table.add(
            work=f"{name}: {part}",
            against="measured",
            ours=predicted_bytes,
            theirs=measured_bytes / parameters,
            unit="bytes",
            target="+- 0",
        )

    measured_peak = measured.total
    table.add(
        work=f"{name}: peak",
        against="measured",
        ours=layout["bytes"]["total"] / MIB,
        theirs=measured_peak / MIB,
        unit="MiB",
        target="+- 0.05",
    )


TABLES = {"memory": measure_memory, "dtypes": measure_dtypes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="all by default")
    names = parser.parse_args().tables or list(TABLES)
    unknown = sorted(set(names) - set(TABLES))
    if unknown:
        parser.error(f"no table {', '.join(unknown)}: there are {' '.join(TABLES)}")
    for name, measure in TABLES.items():
        if name in names:
            measure()


if __name__ == "__main__":
    main()
