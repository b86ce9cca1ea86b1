"""What a plan predicts is what a run then holds; and a plan holds nothing."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import is_initialized

from llmtrain.cli import main
from llmtrain.errors import UserError
from llmtrain.lab.plan.fit import Candidate, fit_into
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import plan_without_layouts
from llmtrain.training.recipe_model import build_recipe_model
from tests.launching import (
    FINETUNE,
    GPT,
    PYTHON,
    SMALL_LLAMA,
    TINY,
    accelerate,
    long_form,
    read_json,
    run,
)
from tests.memory import can_measure, measured, predicted_most

SIZES = [
    "--n_layer",
    "4",
    "--n_head",
    "4",
    "--n_embd",
    "256",
    "--block_size",
    "128",
    "--tokenizer",
    "byte",
]
RUN = [
    "--global_batch_size",
    "16",
    "--per_device_train_batch_size",
    "4",
    "--max_steps",
    "9",  # seven are measured
    "--report_to",
    "none",
]
RUN += ["--eval_fraction", "0", "--resume_from_checkpoint", "never"]
LAUNCHERS = {
    "one process": PYTHON,
    "DDP": accelerate("cpu_ddp"),
    "FSDP2": accelerate("fsdp2", "--mixed_precision", "no"),
}
SPEAKS = """
import sys
from llmtrain.cli import main
from tests.memory import resident
main(sys.argv[1:])
print("resident", resident("VmHWM"))
"""


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["plan", *words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.skipif(not can_measure(), reason="proc/self/clear_refs (Linux) is not writable here")
@pytest.mark.parametrize(
    "name",
    [
        "one process",
        *(pytest.param(name, marks=long_form) for name in ("FSDP2", "DDP")),
    ],
)
def test_a_run_holds_what_was_predicted(
    name: str,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    score: Callable[[str], None],
) -> None:
    flags = [*SIZES, *RUN, "--dataset", str(text_file)]
    processes = ["--processes", "1" if name == "one process" else "2"]
    found = planned(capsys, GPT, *flags, *processes, "--device", "cpu", "--per_machine", "2")
    [layout] = [layout for layout in found["layouts"] if layout["name"] == name]
    seen = measured(LAUNCHERS[name], GPT, flags, tmp_path / "run")
    assert layout["bytes"]["weights"] == seen["weights"]
    assert layout["bytes"]["optimizer"] == seen["optimizer"]
    whole = found["layouts"][0]["bytes"][
        "gradients"
    ]  # between micro-batches FSDP has all, then its part
    assert layout["bytes"]["gradients"] == (whole if name == "FSDP2" else seen["gradients"])
    gradients = 0 if name == "DDP" else layout["bytes"]["gradients"]
    predicted, most = predicted_most(layout) - gradients, seen["most"] - gradients
    score(f"plan: {name}: activations predicted {predicted / most - 1:+.1%}")
    assert predicted == pytest.approx(most, rel=0.1)


@long_form
@pytest.mark.timeout(600)
@pytest.mark.skipif(not can_measure(), reason="proc/self/clear_refs (Linux) is not writable here")
def test_the_flags_that_fit_do_so_and_the_next_cheaper_ones_do_not(
    text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    model = ["--n_layer", "16", "--n_head", "4", "--n_embd", "192", "--block_size", "192"]
    flags = [*model, "--tokenizer", "byte", "--dtype", "float32", "--global_batch_size", "16"]
    flags += ["--max_steps", "3", *RUN[6:], "--dataset", str(text_file)]
    request = PlanRequest(GPT, flags, device="cpu")
    plan = plan_without_layouts(request)

    @functools.cache
    def held(*changed: str) -> float:
        """Return the bytes that a run with some changed flags adds to a process."""
        seen = measured(PYTHON, GPT, [*flags, *changed], tmp_path / "-".join(["run", *changed]))
        return seen["weights"] + seen["optimizer"] + seen["most"]

    def held_by(choice: Candidate) -> float:
        words = " ".join(f"--{name} {value}" for name, value in choice.flags.items()).split()
        score(f"fit: {words}: predicted {choice.total / held(*words) - 1:+.1%}")
        return held(*words)

    for limit in (800e6, 400e6, 200e6):
        found = fit_into(limit, plan, request)
        assert found.fits
        assert held_by(found.chosen) <= limit < held_by(found.too_large)


@pytest.mark.skipif(not can_measure(), reason="proc/self/clear_refs (Linux) is not writable here")
def test_a_large_model_is_planned_without_memory_for_it() -> None:
    words = [GPT, "--n_layer", "48", "--n_head", "20", "--n_embd", "1600", "--block_size", "1024"]
    words += [
        "--global_batch_size",
        "16",
        "--per_device_train_batch_size",
        "1",
        "--tokenizer",
        "byte",
    ]
    words += ["--processes", "16", "--device", "h100-80gb", "--link", "400Gbit", "--json"]
    ended = run([*PYTHON, "-c", SPEAKS, "plan", *words]).assert_ok()
    found, _, resident = ended.out.rpartition("resident")
    layouts = {layout["name"]: layout for layout in json.loads(found)["layouts"]}
    assert {name.split()[0] for name in layouts} == {"DDP", "FSDP2", "HSDP"}
    weights = layouts["DDP"]["bytes"]["weights"]
    assert weights > 5.5e9
    assert int(resident) < weights / 3
    for name, layout in layouts.items():
        assert layout["largest"] > 0, name
        assert layout["hours"] > 0, name
        assert layout["efficiency"]["4096"] > 0, name
        assert max(layout["efficiency"].values()) <= 1, name


def test_a_plan_is_printed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "plan",
            GPT,
            *TINY,
            "--global_batch_size",
            "2",
            "--processes",
            "2",
            "--device",
            "h100-80gb",
        ]
    )
    out = capsys.readouterr().out
    for heading in ("memory per process", "time per step", "efficiency at"):
        assert heading in out
    lines = [line for line in out.splitlines() if line.startswith(("DDP", "FSDP2"))]
    assert [line.split()[0] for line in lines] == 3 * ["DDP", "FSDP2"]


def test_a_model_of_transformers_is_planned_from_its_configuration(
    text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        FINETUNE,
        *SMALL_LLAMA,
        "--dataset",
        str(text_file),
        "--processes",
        "2",
        "--device",
        "a100-40gb",
    ]
    found = planned(capsys, *words)
    assert [layout["name"] for layout in found["layouts"]] == ["DDP", "FSDP2"]
    whole, half = found["layouts"][0]["bytes"], found["layouts"][1]["bytes"]
    assert half["weights"] == pytest.approx(whole["weights"] / 2, rel=0.01)


@long_form
def test_a_few_real_updates_correct_a_plan(
    text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(
        capsys,
        GPT,
        *TINY,
        "--dataset",
        str(text_file),
        "--processes",
        "2",
        "--device",
        "cpu",
        "--per_machine",
        "2",
        "--calibrate",
    )
    guessed = planned(
        capsys, GPT, *TINY, "--processes", "2", "--device", "cpu", "--per_machine", "2"
    )
    for measured_layout, layout in zip(found["layouts"], guessed["layouts"], strict=True):
        assert measured_layout["bytes"] == layout["bytes"]
        assert measured_layout["step"]["compute"] != layout["step"]["compute"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "16", "--device", "h100-80gb"], "--link 400Gbit"),
        (["--processes", "0"], "at least one"),
        (["--per_machine", "0"], "--per_machine 0: a machine has at least one process"),
        (["--per_machine", "-1"], "--per_machine -1: a machine has at least one process"),
        (["--mfu", "2"], "write a fraction"),
        (["--device", "abacus"], "abacus is not known"),
        (["--fit", "80"], "80 is no size of memory; write a number and a unit, such as 80gb"),
        (["--device", "h100-80gb", "--calibrate"], "which has no h100-80gb"),
        (["--n_lyer", "2"], "did you mean --n_layer"),
        (
            ["--processes", "3", "--device", "h100-80gb"],
            "cannot be divided among 3 processes; use",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", GPT, *TINY, *words])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    line = err.splitlines()[-1]  # a bar may have stood there while text was tokenised
    assert line.startswith("error: ")
    assert said in line


# --- recipes of a user

RECIPE = """
import argparse
import datasets
import sizes
import torch
import llmtrain as lt

class Doubled(lt.Objective):
    def loss(self, model, batch, extra):
        return lt.LossSums(2 * model.nll(**batch))

class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Embedding(sizes.VOCABULARY, sizes.VOCABULARY)

    def forward(self, input_ids, labels):
        return lt.summed_nll(self.logits(input_ids[:, :-1]), labels[:, 1:])

def sgd(model):
    raise AssertionError("a plan needs no optimizer")

def main({parameter}):
    print("the recipe says this")
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4)
    options, others = parser.parse_known_args({argument})
    settings = lt.parse(lt.Settings(data=lt.BatchConfig(global_batch_size=options.rows)), others)
    rows = lt.Tokenized.of(datasets.Dataset.from_dict({{"input_ids": [[1, 2, 3, 4]] * 8}}), None)
    try:
        lt.fit(settings, rows, lambda *_: Bigram(), objective=Doubled(), optimizer=sgd)
    except Exception:
        print("the recipe goes on")
    raise AssertionError("the model of a plan is not trained")
"""


@pytest.mark.parametrize(("parameter", "argument"), [("argv=None", "argv"), ("", "")])
def test_a_recipe_needs_no_more_than_main(
    parameter: str,
    argument: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "sizes.py").write_text("VOCABULARY = 1000\n")
    (folder / "own.py").write_text(RECIPE.format(parameter=parameter, argument=argument))
    monkeypatch.chdir(tmp_path)

    recipe = build_recipe_model("recipes/own.py", ["--rows", "16", "--max_steps", "3"], "bf16")

    assert recipe.class_name == "Bigram"
    assert [p.numel() for p in recipe.model.parameters()] == [1_000_000]
    assert all(p.is_meta for p in recipe.model.parameters())
    assert type(recipe.objective).__name__ == "Doubled"
    assert (recipe.settings.data.global_batch_size, recipe.settings.optim.max_steps) == (16, 3)
    assert (recipe.positions, recipe.precision) == (3, "bf16")

    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["recipes"]
    assert str(folder) not in sys.path
    assert not torch.distributed.is_initialized()
    assert not is_initialized()


def test_options_that_end_a_recipe_print_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_recipe_model(GPT, ["--print_config"], "no")
    assert "#max_steps: 120" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('trains at once')", r"own\.py has no function main, which llmtrain plan calls"),
        ("main = 3", r"own\.py has no function main"),
        ("def main(argv): pass", r"own\.py: main\(\) builds no model with llmtrain\.fit or"),
        ("def main(argv): return 1 / 0", "failed before its model was built: ZeroDivisionError: d"),
        ("import absent", r"failed before its model was built: ModuleNotFoundError: No module"),
        (
            "import llmtrain as lt\n"
            "def main():\n"
            "    with lt.open_run(None, None, None, None, None): pass",
            "it opens a run whose model was not placed by llmtrain.place or llmtrain.fit",
        ),
    ],
)
def test_a_recipe_that_builds_no_model_is_told_what_a_plan_needs(
    code: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(UserError, match=message):
        build_recipe_model(str(tmp_path / "own.py"), [], "no")


def test_a_plan_is_of_one_process_and_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"absent\.py: there is no such file"):
        build_recipe_model("absent.py", [], "no")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="llmtrain plan is one process, but WORLD_SIZE is 2"):
        build_recipe_model(GPT, [*TINY], "no")


@pytest.mark.parametrize("how", [pytest.param(name, marks=long_form) for name in ("FSDP2", "DDP")])
def test_set_up_and_memory_do_not_grow_with_the_number_of_processes(
    how: str, tmp_path: Path, score: Callable[[str], None]
) -> None:
    found = {}
    for world in (8, 1024):
        env = {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
        env |= {"ACCELERATE_MIXED_PRECISION": "no"}
        env |= {} if how == "DDP" else {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        path = tmp_path / f"{world}.json"
        run([*PYTHON, "tests/system/dry_ranks.py", str(path)], env).assert_ok()
        found[world] = read_json(path)
        resident, seconds = found[world]["resident"] / 2**20, found[world]["seconds"]
        score(f"dry run: {how}: {world} processes: set up in {seconds:.2f} s, {resident:.0f} MiB")
    few, many = found[8], found[1024]
    assert (
        many["resident"] < 2 * few["resident"]
    )  # what torch touches as it starts differs by a quarter
    if how == "DDP":
        assert (many["weights"], many["states"]) == (few["weights"], few["states"])
    else:
        assert many["weights"] < few["weights"] / 50
        assert many["states"] < few["states"] / 50
