"""The memory that `llmtrain plan` predicts for two processes, against the memory of real runs.

The models are a GPT, also with AdamW and recomputation, and with one micro-batch, and a Llama. Each
is planned and trained with each layout: DDP and FSDP2. The bytes of the weights and the optimizer
have to be the same. The rest of the peak without the planned gradients, the activations, may differ
by a tenth.

Repeat it with `python -m benchmarks.plan memory`.
"""

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.comparison import Table
from benchmarks.memory import measure_run, predicted_rise
from benchmarks.runs import FINETUNE_RECIPE, GPT_RECIPE, flags, launcher, scratch
from llmtrain.lab.commands.plan import as_json
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import make_plan

MIB = 2**20
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
GPT_FLAGS = [*RUN_FLAGS, *flags(n_layer=4, n_head=4, n_embd=256, architecture="gpt2")]
LLAMA_SIZES = "hidden_size=256,intermediate_size=704,head_dim=64,tie_word_embeddings=false"
LLAMA_FLAGS = [*RUN_FLAGS, *flags(from_config="llama", config_overrides=LLAMA_SIZES)]


class Case(NamedTuple):
    """A recipe and its flags, which are planned and trained."""

    name: str
    recipe: str
    recipe_flags: list[str]


CASES = [
    Case("GPT", GPT_RECIPE, [*GPT_FLAGS, *flags(global_batch_size=16)]),
    Case(
        "GPT, AdamW, recomputed",
        GPT_RECIPE,
        [*GPT_FLAGS, *flags(global_batch_size=16, optim="adamw", gradient_checkpointing=True)],
    ),
    Case(
        "GPT, AdamW, one micro-batch",
        GPT_RECIPE,
        [*GPT_FLAGS, *flags(global_batch_size=8, optim="adamw")],
    ),
    Case("Llama", FINETUNE_RECIPE, [*LLAMA_FLAGS, *flags(global_batch_size=8)]),
]


def main() -> None:
    table = Table("plan_memory")
    with scratch() as folder:
        for case in CASES:
            request = PlanRequest(
                case.recipe,
                case.recipe_flags,
                processes=2,
                device="cpu",
                per_machine=2,
                mixed_precision="no",
            )
            for layout in as_json(make_plan(request))["layouts"]:
                compare(table, case, layout, folder)
    table.write()


def compare(table: Table, case: Case, layout: dict[str, Any], folder: Path) -> None:
    """Add the rows of a case and a layout."""
    sizes = layout["bytes"]
    name = f"{case.name}, {layout['name']}"
    launch = launcher(CONFIG_OF_LAYOUT[layout["name"]], mixed_precision="no")
    measured = measure_run(launch, case.recipe, case.recipe_flags, folder / name.replace(" ", "-"))

    for part in ("weights", "optimizer"):
        table.add(
            work=f"{name}: {part}",
            against="measured",
            ours=sizes[part],
            theirs=measured[part],
            unit="bytes",
            target="+- 0",
        )

    # The rise includes the gradients of FSDP2, which are known exactly.
    gradients = 0.0 if layout["name"] == "DDP" else sizes["gradients"]
    table.add(
        work=f"{name}: activations",
        against="measured",
        ours=(predicted_rise(layout) - gradients) / MIB,
        theirs=(measured["rise"] - gradients) / MIB,
        unit="MiB",
        target="+- 0.1",
    )


if __name__ == "__main__":
    main()
