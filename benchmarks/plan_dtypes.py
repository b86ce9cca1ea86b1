"""The bytes per parameter that `llmtrain plan` predicts, against the memory of real runs.

A GPT with 100 million parameters is planned and trained on one process with several optimizers, in
float32 and with weights in bfloat16. The bytes per parameter of the weights, the gradients and the
optimizer's state have to be the same. The peak, which is all that training adds to the process, may
differ by a twentieth.

Repeat it with `python -m benchmarks.plan dtypes`.
"""

import sys
from pathlib import Path

from benchmarks.comparison import Table
from benchmarks.memory import measure_run
from benchmarks.runs import GPT_RECIPE, flags, scratch
from llmtrain.lab.commands.plan import as_json
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import make_plan

MIB = 2**20

GPT_FLAGS = flags(
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
CASES = {
    "adamw": flags(optim="adamw"),
    "adamw_torch_8bit": flags(optim="adamw_torch_8bit"),
    "adamw_torch_8bit, recomputed": flags(optim="adamw_torch_8bit", gradient_checkpointing=True),
    "muon": flags(optim="muon"),
    "adamw, bfloat16": flags(optim="adamw", **BFLOAT16),
    "adamw_torch_8bit, bfloat16": flags(optim="adamw_torch_8bit", **BFLOAT16),
    "muon, bfloat16": flags(optim="muon", **BFLOAT16),
}


def main() -> None:
    table = Table("plan_dtypes")
    with scratch() as folder:
        for name, case_flags in CASES.items():
            compare(table, name, [*GPT_FLAGS, *case_flags], folder / name.replace(" ", "-"))
    table.write()


def compare(table: Table, name: str, recipe_flags: list[str], folder: Path) -> None:
    """Add the rows of a case."""
    plan = as_json(make_plan(PlanRequest(GPT_RECIPE, recipe_flags, device="cpu")))
    [layout] = plan["layouts"]
    predicted = plan["bytes_per_parameter"]
    measured = measure_run([sys.executable], GPT_RECIPE, recipe_flags, folder)
    parameters = layout["bytes"]["weights"] / predicted["weights"]

    for part, predicted_bytes, measured_bytes in (
        ("weights", predicted["weights"], measured["weights"]),
        ("gradients", predicted["gradients"], measured["gradients"]),
        ("state", predicted["moments"] + predicted["compensation"], measured["optimizer"]),
    ):
        table.add(
            work=f"{name}: {part}",
            against="measured",
            ours=predicted_bytes,
            theirs=measured_bytes / parameters,
            unit="bytes",
            target="+- 0",
        )

    measured_peak = measured["weights"] + measured["optimizer"] + measured["rise"]
    table.add(
        work=f"{name}: peak",
        against="measured",
        ours=layout["bytes"]["total"] / MIB,
        theirs=measured_peak / MIB,
        unit="MiB",
        target="+- 0.05",
    )


if __name__ == "__main__":
    main()
