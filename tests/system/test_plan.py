"""A plan predicts what a run then needs, and itself holds no memory for the model."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import is_initialized
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.cli import main
from llmtrain.errors import UserError
from llmtrain.lab.plan.fit import changed_flags, fit_into
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import PlannedLayout, plan_without_layouts
from llmtrain.training.recipe_model import build_recipe_model
from tests.command_line import run_cli
from tests.launching import (
    FINETUNE,
    GPT,
    PYTHON,
    SMALL_LLAMA,
    TINY,
    accelerate,
    long_form,
    run,
)
from tests.memory import can_measure, measure_run, planned_step
from tests.models.small_models import byte_tokenizer
from tests.multimodal import write_checkpoint

needs_measurement = pytest.mark.skipif(
    not can_measure(), reason="proc/self/clear_refs (Linux) is not writable here"
)

DISTILL = "recipes/distill.py"
LAUNCHERS = {
    "one process": PYTHON,
    "DDP": accelerate("cpu_ddp"),
    "FSDP2": accelerate("fsdp2"),
}


def planned(capsys: pytest.CaptureFixture[str], flags: list[str]) -> dict[str, Any]:
    """Return the plan of a recipe, with its flags and those of `llmtrain plan`."""
    main(["plan", *flags, "--json"])
    return json.loads(capsys.readouterr().out)


# --- memory


@long_form
@needs_measurement
@pytest.mark.parametrize(
    ("layout_name", "processes"),
    [
        ("FSDP2", 2),
        ("DDP", 2),
    ],
)
def test_a_run_needs_the_memory_that_its_plan_predicts(
    layout_name: str,
    processes: int,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    score: Callable[[str], None],
) -> None:
    run_flags = shlex.split(
        "--n_layer 4 --n_head 4 --n_embd 256 --block_size 128 --tokenizer byte "
        "--global_batch_size 16 --per_device_train_batch_size 4 --max_steps 9 "
        "--report_to none --eval_fraction 0 --resume_from_checkpoint never "
        f"--dataset {text_file}"
    )
    plan_flags = shlex.split(f"--processes {processes} --device cpu --per_machine 2")

    plan = planned(capsys, [GPT, *run_flags, *plan_flags])
    [layout] = [layout for layout in plan["layouts"] if layout["name"] == layout_name]
    predicted = layout["bytes"]
    measured = measure_run(LAUNCHERS[layout_name], GPT, run_flags, tmp_path / "run")

    assert predicted["weights"] == measured.weights
    assert predicted["optimizer"] == measured.optimizer
    if layout_name == "FSDP2":
        # FSDP2 keeps unsharded gradients between micro-batches.
        unsharded = plan["layouts"][0]["bytes"]
        assert predicted["gradients"] == unsharded["gradients"]
    else:
        assert predicted["gradients"] == measured.gradients

    # A step adds its activations. Except for DDP, it adds the gradients as well.
    gradients = 0 if layout_name == "DDP" else predicted["gradients"]
    predicted_activations = planned_step(layout) - gradients
    activations = measured.added_by_step - gradients
    error = predicted_activations / activations - 1
    score(f"plan: {layout_name}: activations predicted {error:+.1%}")
    assert predicted_activations == pytest.approx(activations, rel=0.1)


@long_form
@pytest.mark.timeout(600)
@needs_measurement
@pytest.mark.parametrize(
    ("layout_name", "processes"),
    [
        ("one process", 1),
        ("FSDP2", 2),
    ],
)
def test_a_distillation_needs_the_memory_that_its_plan_predicts(
    layout_name: str,
    processes: int,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    score: Callable[[str], None],
) -> None:
    """The teacher is larger than the student, and its logits are a large part of the rest."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "head_dim": 64}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=8, vocab_size=32768)
    teacher = tmp_path / "teacher"
    AutoModelForCausalLM.from_config(config).save_pretrained(teacher)
    byte_tokenizer().save_pretrained(teacher)
    run_flags = shlex.split(
        "--config_overrides "
        "hidden_size=256,intermediate_size=704,vocab_size=32768,tie_word_embeddings=true "
        f"--teacher_model_name_or_path {teacher} --tokenizer {teacher} --max_steps 4 "
        f"--block_size 64 --global_batch_size {8 * processes} --per_device_train_batch_size 4 "
        "--report_to none --eval_fraction 0 --resume_from_checkpoint never "
        f"--dataset {text_file}"
    )
    plan_flags = shlex.split(f"--processes {processes} --device cpu --per_machine 2")

    layouts = planned(capsys, [DISTILL, *run_flags, *plan_flags])["layouts"]
    [predicted] = [layout["bytes"] for layout in layouts if layout["name"] == layout_name]
    measured = measure_run(LAUNCHERS[layout_name], DISTILL, run_flags, tmp_path / "run")

    error = predicted["total"] / measured.total - 1
    score(f"plan: distillation, {layout_name}: predicted {error:+.1%}")
    assert predicted["frozen"] == measured.frozen
    assert predicted["total"] == pytest.approx(measured.total, rel=0.03)


@long_form
@pytest.mark.timeout(600)
@needs_measurement
def test_the_flags_that_fit_do_so_and_the_next_cheaper_ones_do_not(
    text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    run_flags = shlex.split(
        "--n_layer 16 --n_head 4 --n_embd 192 --block_size 192 --tokenizer byte --dtype float32 "
        "--global_batch_size 16 --max_steps 3 "
        "--report_to none --eval_fraction 0 --resume_from_checkpoint never "
        f"--dataset {text_file}"
    )
    request = PlanRequest(GPT, run_flags, device="cpu")
    plan = plan_without_layouts(request)

    def bytes_needed(layout: PlannedLayout) -> float:
        """Return the bytes that a run with the flags of a layout adds to a process."""
        flags = " ".join(f"--{name} {value}" for name, value in changed_flags(layout).items())
        folder = tmp_path / f"run {flags}"
        measured = measure_run(PYTHON, GPT, [*run_flags, *shlex.split(flags)], folder).total
        score(f"fit: {flags}: predicted {layout.bytes.total / measured - 1:+.1%}")
        return measured

    limit = 200e6
    fit = fit_into(limit, plan, request)
    assert fit.fits
    assert bytes_needed(fit.chosen) <= limit
    assert bytes_needed(fit.too_large) > limit


PLAN_AND_PEAK = """
import sys
from llmtrain.cli import main
from tests.memory import resident
main(sys.argv[1:])
print("peak", resident("VmHWM"))
"""


@long_form
@needs_measurement
def test_a_large_model_is_planned_without_memory_for_it() -> None:
    plan_flags = shlex.split(
        "--n_layer 48 --n_head 20 --n_embd 1600 --block_size 1024 --tokenizer byte "
        "--global_batch_size 16 --per_device_train_batch_size 1 "
        "--processes 16 --device h100-80gb --link 400Gbit --json"
    )

    ended = run([*PYTHON, "-c", PLAN_AND_PEAK, "plan", GPT, *plan_flags]).assert_ok()

    plan, _, peak = ended.out.rpartition("peak")
    layouts = {layout["name"]: layout for layout in json.loads(plan)["layouts"]}
    methods = {name.split()[0] for name in layouts}
    assert methods == {"DDP", "FSDP2", "HSDP"}

    weights = layouts["DDP"]["bytes"]["weights"]
    assert weights > 5.5e9
    assert int(peak) < weights / 3

    for name, layout in layouts.items():
        assert layout["largest"] > 0, name
        assert layout["hours"] > 0, name


# --- the command


def test_a_plan_is_printed_as_tables(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = shlex.split(
        f"--global_batch_size 2 --processes 2 --device h100-80gb --dataset {text_file}"
    )

    main(["plan", GPT, *TINY, *flags])

    out = capsys.readouterr().out
    for heading in ("memory per process", "time per step"):
        assert heading in out
    first_words = [line.split(" ")[0] for line in out.splitlines()]
    layouts = [word for word in first_words if word in ("DDP", "FSDP2")]
    assert layouts == 2 * ["DDP", "FSDP2"]


def test_a_base_in_4_bits_is_planned_without_its_weights_and_without_a_gpu(
    text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every linear layer but the head has half a byte for a weight, and scales (bitsandbytes)."""
    flags = shlex.split(f"--dataset {text_file} --lora_r 4 --device h100-80gb --processes 2")

    [full, _] = planned(capsys, [FINETUNE, *SMALL_LLAMA, *flags])["layouts"]
    plan = planned(capsys, [FINETUNE, *SMALL_LLAMA, *flags, "--load_in_4bit"])

    [in_4_bits] = plan["layouts"]
    assert plan["left_out"] == ["FSDP2: --load_in_4bit weights cannot be sharded"]
    recipe = build_recipe_model(FINETUNE, [*SMALL_LLAMA, *flags[:4]], "bf16")
    linear = [
        module.base_layer
        for module in recipe.model.modules()
        if isinstance(getattr(module, "base_layer", None), torch.nn.Linear)
    ]
    count = sum(layer.weight.numel() for layer in linear)
    assert len(linear) == 2 * 7
    saved = full["bytes"]["weights"] - in_4_bits["bytes"]["weights"]
    assert saved == pytest.approx(count * (4 - 0.5 - 1 / 64 - 4 / (64 * 256)))


def test_a_plan_without_the_weights_of_a_model_is_the_same(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 4 has stored buffers, and a frozen base has the dtype of its files."""
    folder = write_checkpoint("Gemma4", tmp_path / "model", torch.bfloat16)
    flags = f"--model_name_or_path {folder} --dataset {text_file} --max_length 64 --lora_r 2"
    [layout] = planned(capsys, [FINETUNE, *shlex.split(flags)])["layouts"]

    (folder / "model.safetensors").unlink()
    [without_weights] = planned(capsys, [FINETUNE, *shlex.split(flags)])["layouts"]

    assert without_weights["bytes"] == layout["bytes"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--processes 16 --device h100-80gb", "--link 400Gbit"),
        ("--processes 0", "--processes 0"),
        ("--per_machine 0", "--per_machine 0"),
        ("--mfu 2", "--mfu 2"),
        ("--device abacus", "abacus"),
        ("--fit 80", "80gb"),
        ("--processes 3 --device h100-80gb", "--global_batch_size 8"),
    ],
)
def test_an_impossible_plan_is_an_error_of_one_line(
    flags: str, named: str, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--dataset", str(text_file)]
    status, _, err = run_cli(capsys, "plan", GPT, *TINY, *data, *flags.split())

    assert status == 2
    *progress, line = err.splitlines()  # the progress bar of the tokenizer ends in \r
    assert all(before.startswith(("recipe  ", "data  ")) for before in progress)
    assert line.startswith("error: ")
    assert named in line


# --- recipes of a user

RECIPE = """
import datasets
import sizes
import torch
import llmtrain as lt

class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Embedding(sizes.VOCABULARY, sizes.VOCABULARY)

    def forward(self, input_ids, labels):
        return lt.summed_nll(self.logits(input_ids[:, :-1]), labels[:, 1:])

def main():
    print("a plan does not show this line")
    rows = lt.Tokenized.of(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8}), None)
    try:
        defaults = lt.Settings(data=lt.BatchConfig(global_batch_size=8))
        lt.fit(lt.parse(defaults), rows, lambda *_: Bigram())
    except Exception:
        print("a plan is not caught here")
    raise AssertionError("the model of a plan is not trained")
"""


def test_a_recipe_needs_only_a_main_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "sizes.py").write_text("VOCABULARY = 1000\n")
    (folder / "own.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)

    recipe = build_recipe_model("recipes/own.py", ["--max_steps", "3"], "bf16")

    [weights] = recipe.model.parameters()
    assert weights.shape == (1000, 1000)
    assert weights.is_meta
    assert recipe.settings.optim.max_steps == 3

    # Nothing is left behind.
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["recipes"]
    assert str(folder) not in sys.path
    assert not torch.distributed.is_initialized()
    assert not is_initialized()


def test_the_output_of_a_flag_that_ends_the_recipe_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        build_recipe_model(GPT, ["--print_config"], "no")
    assert "#max_steps: 120" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("print('trains at once')", "no function main"),
        ("def main(argv): pass", "builds no model"),
        ("def main(argv): return 1 / 0", "ZeroDivisionError"),
        (
            "import llmtrain as lt\n"
            "def main():\n"
            "    with lt.open_run(None, None, None, None, None): pass",
            "not placed by llmtrain.place",
        ),
    ],
)
def test_a_recipe_that_builds_no_model_is_an_error_that_names_the_requirement(
    code: str, named: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "own.py"
    recipe.write_text(code)

    with pytest.raises(UserError, match=named):
        build_recipe_model(str(recipe), [], "no")


def test_a_plan_is_made_by_a_single_process(
    text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE is 2"):
        build_recipe_model(GPT, [*TINY, "--dataset", str(text_file)], "no")
