"""The command `llmtrain`: its help, its errors, `llmtrain init` and `llmtrain export`."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain import __version__
from llmtrain.cli import COMMANDS, parse_command
from llmtrain.files import json_text, write_json
from tests.command_line import run_cli
from tests.launching import ROOT


def output_of(capsys: pytest.CaptureFixture, command: str) -> str:
    """Run a command that must succeed, and return its output."""
    status, out, err = run_cli(capsys, *shlex.split(command))
    assert (status, err) == (0, "")
    return out


def error_of(capsys: pytest.CaptureFixture, command: str) -> str:
    """Run a command that must fail with an error of one line, and return that line."""
    status, out, err = run_cli(capsys, *shlex.split(command))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def run_module(*argv: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run `python -m llmtrain`."""
    return subprocess.run(
        [sys.executable, "-m", "llmtrain", *argv],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


# --- help

ALL_HELP = """
import sys
from llmtrain.cli import COMMANDS, main
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert not end.code
heavy = {"torch", "transformers", "accelerate", "datasets", "numpy", "wandb"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_help_does_not_import_torch_or_transformers() -> None:
    subprocess.run([sys.executable, "-c", ALL_HELP], check=True, timeout=60)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_ends_with_examples_that_its_parser_takes(
    name: str, capsys: pytest.CaptureFixture
) -> None:
    text = output_of(capsys, f"{name} --help")

    examples = text.split("examples:\n")[1].splitlines()
    assert examples
    for example in examples:
        command = example.partition(" && ")[0].partition("llmtrain ")[2]
        assert command.startswith(name)
        parse_command(shlex.split(command))


def test_python_m_llmtrain_is_the_command_and_prints_the_version() -> None:
    process = run_module("--version")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == f"llmtrain {__version__}\n"


# --- errors


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("", "COMMAND"),
        ("generate no/such/folder", "no/such/folder"),
        ("generate x --temp 1", "--temp - did you mean --temperature? see llmtrain generate"),
        ("generate x --file=f", "unknown flag --file: name the file as the input: < FILE"),
        ("generate x --top_k -1", "top_k -1"),
        ("diff a b c", "diff compares two runs"),
        ("init mine finetune", "'finetune' is neither a flag nor the value of one; see llmtrain"),
        ("init mine --recipe bert", "does not exist; use one of "),
        ("init s3://bucket/new", "s3://bucket/new is an address"),
        ("export x --to s3://bucket/new", "s3://bucket/new is an address"),
        ("doctor --output_dir s3://bucket/new", "s3://bucket/new is an address"),
        ("runs absent", "absent is not a folder"),
        ("runs check no/such/run", "no/such/run"),
        ("runs . --sort size", "--sort"),
        ("runs --finished .", ". is not a run folder"),
        ("runs --finished . runs", "--finished"),
    ],
)
def test_a_mistake_is_an_error_of_one_line_and_nothing_is_written(
    command: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in error_of(capsys, command)
    assert not [*tmp_path.iterdir()]


def test_debugging_shows_the_traceback_of_a_recipe_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def choose():\n    return {}['depth']\n\nchoose()\n")
    command = f"plan {recipe} --gpu H100"
    assert "in choose" not in run_cli(capsys, *shlex.split(command))[2]

    monkeypatch.setenv("LLMTRAIN_DEBUG", "1")
    status, _, err = run_cli(capsys, *shlex.split(command))

    assert status == 2
    assert "in choose" in err
    assert err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("command", ["runs {runs}", "runs check {runs}/a --json"])
def test_a_closed_pipe_is_no_error(command: str, tmp_path: Path) -> None:
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "a" / "run.json").write_text("{}")

    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        process = run_module(*shlex.split(command.format(runs=tmp_path)), stdout=write_end)
    finally:
        os.close(write_end)

    assert (process.returncode, process.stderr) == (0, "")


def test_a_command_whose_output_is_closed_keeps_its_status(tmp_path: Path) -> None:
    for state in ("running", "finished"):
        folder = tmp_path / state
        folder.mkdir()
        (folder / "run.json").write_text("{}")
        (folder / "status.json").write_text(json.dumps({"state": state, "step": 1}))

    command = f"{sys.executable} -m llmtrain runs --finished {tmp_path}/$0 <&- >&- 2>&-"
    statuses = [
        subprocess.run(["sh", "-c", command, state], check=False).returncode
        for state in ("running", "finished")
    ]

    assert statuses == [1, 0]


# --- JSON


def test_a_number_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    text = json_text({"loss": math.inf, "rows": [(math.nan, 1.5)], "same": False})
    assert json.loads(text) == {"loss": None, "rows": [[None, 1.5]], "same": False}

    write_json(tmp_path / "rows.json", {"rows": [{"loss": math.nan}]})
    assert json.loads((tmp_path / "rows.json").read_text()) == {"rows": [{"loss": None}]}


# --- llmtrain init


def initialised(capsys: pytest.CaptureFixture, command: str) -> dict[str, Any]:
    """Run `llmtrain init`, and return its JSON."""
    return json.loads(output_of(capsys, f"init {command} --json"))


def test_init_copies_a_recipe_and_a_config_and_prints_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "mine"
    command = f"accelerate launch --config_file {folder}/cpu_ddp.yaml {folder}/gpt.py"

    out = output_of(capsys, f"init {folder} --config cpu_ddp")
    assert command in out
    assert (folder / "gpt.py").read_text() == (ROOT / "recipes/gpt.py").read_text()
    assert "num_processes: 2" in (folder / "cpu_ddp.yaml").read_text()

    shutil.rmtree(folder)
    files = initialised(capsys, f"{folder} --config cpu_ddp")
    assert files["start"] == shlex.split(command)
    assert files["recipe"] == f"{folder}/gpt.py"


@pytest.fixture
def own_recipe(tmp_path: Path) -> Path:
    """A recipe of the user, in a folder whose name has a space."""
    recipe = tmp_path / "my own" / "gpt.py"
    recipe.parent.mkdir()
    recipe.write_text("my recipe")
    return recipe


def test_init_does_not_overwrite_a_recipe(own_recipe: Path, capsys: pytest.CaptureFixture) -> None:
    assert "already exists" in error_of(capsys, f"init '{own_recipe.parent}'")
    assert [*own_recipe.parent.iterdir()] == [own_recipe]
    assert own_recipe.read_text() == "my recipe"


def test_init_adds_a_slurm_script_for_the_recipe_and_its_config(
    own_recipe: Path, capsys: pytest.CaptureFixture
) -> None:
    files = initialised(capsys, f"'{own_recipe.parent}' --config multi_node.slurm")

    script = own_recipe.with_name("multi_node.slurm")
    config = own_recipe.with_name("multi_node.yaml")
    assert files["kept"] == [str(own_recipe)]
    assert own_recipe.read_text() == "my recipe"
    assert files["start"] == ["sbatch", str(script)]
    assert files["config"] == str(config)
    assert config.read_text() == (ROOT / "accelerate_configs/multi_node.yaml").read_text()

    # Let bash read the variables of the script, since the folder has a space.
    assignments = re.findall(r"(?m)^(?:RECIPE|CONFIG)=.*\n", script.read_text())
    code = "".join(assignments) + 'echo "$RECIPE:$CONFIG"'
    variables = subprocess.check_output(["bash", "-c", code], text=True)
    assert variables == f"{own_recipe}:{config}\n"


@pytest.mark.parametrize(
    ("flags", "gpus", "config", "processes"),
    [
        pytest.param("", 0, "cpu", 1, id="CPU"),
        pytest.param("", 1, "single_gpu", 1, id="one GPU, or a Mac"),
        pytest.param("", 8, "multi_gpu", 8, id="eight GPUs"),
        pytest.param("--config fsdp2.yaml", 8, "fsdp2", 8, id="fsdp2 on eight GPUs"),
        pytest.param("--config cpu_ddp", 8, "cpu_ddp", 2, id="cpu_ddp on eight GPUs"),
    ],
)
def test_init_writes_a_config_with_one_process_per_gpu(
    flags: str,
    gpus: int,
    config: str,
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)

    files = initialised(capsys, f"{tmp_path}/mine {flags}")

    written = Path(files["config"])
    assert written.name == f"{config}.yaml"
    assert f"\nnum_processes: {processes}\n" in written.read_text()


def test_init_copies_a_ready_config_with_its_recipe_and_the_command_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    folder = tmp_path / "mine"

    files = initialised(capsys, f"{folder} --recipe smollm3-3b-dpo")

    command = (
        f"accelerate launch --config_file {folder}/fsdp2.yaml {folder}/preference.py"
        f" --config {folder}/smollm3-3b-dpo.yaml"
    )
    assert files["recipe"] == f"{folder}/preference.py"
    assert files["start"] == shlex.split(command)

    # The copy differs from the shipped file in the command only.
    copy = (folder / "smollm3-3b-dpo.yaml").read_text()
    shipped = (ROOT / "recipes/configs/smollm3-3b-dpo.yaml").read_text()
    assert f"#   {command}\n" in copy
    assert copy.partition("# --- ")[2] == shipped.partition("# --- ")[2]


# --- llmtrain export


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with a checkpoint and a finished model."""
    run = tmp_path / "run"
    model = run / "checkpoints" / "step-00000006" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    shutil.copytree(model, run / "model")
    return run


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("checkpoints/step-00000006", "export-step-00000006"),
        ("model", "export"),
        (".", "export"),
    ],
)
def test_an_export_goes_outside_the_model_or_checkpoint_that_it_copies(
    source: str, target: str, run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    before = files_in(run_folder)
    result = json.loads(output_of(capsys, f"export {run_folder / source} --json"))
    assert result == {"model": str(run_folder / target)}
    assert files_in(run_folder) == sorted([*before, f"{target}/config.json"])


@pytest.mark.parametrize(
    ("source", "target", "named"),
    [
        ("model", "model/new", "{run}/model,"),
        (".", "model/new", "{run}/model,"),
        ("checkpoints/step-00000006/model", "checkpoints/step-00000006/new", "step-00000006,"),
        ("model", "link", "{run}/link"),
        ("model", "file/a/exported", "{run}/file"),
    ],
)
def test_an_export_to_a_place_that_cannot_be_a_folder_of_its_own_is_refused(
    source: str, target: str, named: str, run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    (run_folder / "link").symlink_to(run_folder / "purged")
    (run_folder / "file").touch()
    before = files_in(run_folder)

    message = error_of(capsys, f"export {run_folder / source} --to {run_folder / target}")

    assert named.format(run=run_folder) in message
    assert files_in(run_folder) == before
