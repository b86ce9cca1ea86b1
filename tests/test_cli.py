"""The command `llmtrain`: its help, its errors, `llmtrain init` and `llmtrain export`."""

import ast
import errno
import importlib
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
from llmtrain.cli import COMMANDS, GROUPS, Command, build_parser
from llmtrain.files import json_text, write_json
from llmtrain.lessons import LESSONS
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

HELP_WITHOUT_HEAVY_IMPORTS = """
import sys
from llmtrain.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
heavy = {"torch", "transformers", "accelerate", "datasets", "numpy", "wandb"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_does_not_import_torch_or_transformers(argv: list[str]) -> None:
    process = subprocess.run(
        [sys.executable, "-c", HELP_WITHOUT_HEAVY_IMPORTS, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "usage: llmtrain" in process.stdout


def test_help_lists_each_command_once_under_its_group(capsys: pytest.CaptureFixture) -> None:
    text = output_of(capsys, "--help")

    for name in COMMANDS:
        assert len(re.findall(rf"(?m)^  {name} +[A-Z]", text)) == 1, name
    positions = [text.index(f"\n{group}:\n") for group in GROUPS]
    assert positions == sorted(positions)


def test_help_of_a_command_shows_the_defaults_of_its_flags(capsys: pytest.CaptureFixture) -> None:
    text = output_of(capsys, "generate --help")
    assert "--max_new_tokens N" in text
    assert "(default: 200)" in text


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_lists_a_command_by_the_first_line_of_its_description(command: Command) -> None:
    description = importlib.import_module(command.module).__doc__
    assert description.splitlines()[0] == command.summary


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_ends_with_examples_that_its_parser_takes(
    name: str, capsys: pytest.CaptureFixture
) -> None:
    text = output_of(capsys, f"{name} --help")

    examples = text.split("examples:\n")[1].splitlines()
    assert examples
    for example in examples:
        first_command, *_ = example.split(" && ")
        _, llmtrain_and_arguments = first_command.split("llmtrain", maxsplit=1)
        arguments = shlex.split(llmtrain_and_arguments)
        assert arguments[0] == name
        build_parser().parse_args(arguments)


def test_the_version_is_printed(capsys: pytest.CaptureFixture) -> None:
    assert output_of(capsys, "--version") == f"llmtrain {__version__}\n"


def test_python_m_llmtrain_is_the_command() -> None:
    process = run_module("--version")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == f"llmtrain {__version__}\n"


# --- errors


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "COMMAND"),
        ("fly", "invalid choice: 'fly'"),
        ("generate", "RUN_OR_MODEL"),
        ("generate no/such/folder", "no model with a tokenizer could be loaded"),
        (
            "generate x --temp 1",
            "unknown flag --temp - did you mean --temperature? see llmtrain generate --help.",
        ),
        ("diff a b c", "diff compares two runs"),
        ("diff a", "diff compares two runs"),
        (
            "init mine finetune",
            "'finetune' is neither a flag nor the value of one; see llmtrain init --help",
        ),
        ("generate x --debug", "unknown flag --debug; see llmtrain generate --help"),
        ("generate x --prompt-fil f", "--prompt-fil - did you mean --prompt_file? see"),
        ("generate x --file=f", "unknown flag --file: use --prompt_file FILE"),
        ("generate x --prompt_file no/such", "no/such: No such file or directory."),
        ("chat x --system_prompt Hi", "--system_prompt: use --system TEXT"),
        ("export x --output_dir y", "--output_dir: use --to FOLDER"),
        ("eval x --task y", "--task: for tasks, use lm_eval --model hf"),
        ("generate x --top_k many", "invalid int value"),
        ("generate x --top_k -1", "top_k -1 is out of range"),
    ],
)
def test_a_mistake_is_an_error_of_one_line(
    command: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert message in error_of(capsys, command)


def test_debugging_shows_the_traceback_before_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "absent"
    monkeypatch.setenv("LLMTRAIN_DEBUG", "1")

    status, out, err = run_cli(capsys, "runs", str(folder))

    assert (status, out) == (2, "")
    assert "Traceback" in err
    last_line = err.splitlines()[-1]
    assert last_line == (f"error: {folder} is not a folder; name the folder that holds the runs.")


def test_debugging_shows_the_traceback_of_a_recipe_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def choose():\n    return {}['depth']\n\nchoose()\n")
    command = f"plan {recipe} --gpu H100"
    assert "in choose" not in error_of(capsys, command)

    monkeypatch.setenv("LLMTRAIN_DEBUG", "1")
    status, _, err = run_cli(capsys, *shlex.split(command))

    assert status == 2
    assert "in choose" in err
    assert err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("command", ["runs {runs}", "runs check {runs}/a"])
@pytest.mark.parametrize("flags", ["", "--json"], ids=["text", "json"])
def test_a_closed_pipe_is_no_error(command: str, flags: str, tmp_path: Path) -> None:
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "a" / "run.json").write_text("{}")
    argv = shlex.split(f"{command.format(runs=tmp_path)} {flags}")

    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        process = run_module(*argv, stdout=write_end)
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


# --- llmtrain init


def initialised(capsys: pytest.CaptureFixture, command: str) -> dict[str, Any]:
    """Run `llmtrain init`, and return its JSON."""
    return json.loads(output_of(capsys, f"init {command} --json"))


def test_init_copies_a_recipe_and_a_config_and_prints_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "mine"

    out = output_of(capsys, f"init {folder} --config cpu_ddp")

    assert (folder / "gpt.py").read_text() == (ROOT / "recipes/gpt.py").read_text()
    assert "num_processes: 2" in (folder / "cpu_ddp.yaml").read_text()
    assert f"accelerate launch --config_file {folder}/cpu_ddp.yaml {folder}/gpt.py" in out


def test_init_does_not_overwrite_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    recipe = folder / "gpt.py"
    recipe.write_text("my recipe")

    assert "already exists" in error_of(capsys, f"init {folder}")

    assert [*folder.iterdir()] == [recipe]
    assert recipe.read_text() == "my recipe"


def test_init_adds_a_config_to_a_folder_that_has_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "my own"
    folder.mkdir()
    recipe = folder / "gpt.py"
    recipe.write_text("my recipe")

    out = output_of(capsys, f"init '{folder}' --config fsdp2")

    assert f"{recipe} (already existed, and was kept)\nconfig    {folder}/fsdp2.yaml\n" in out
    assert recipe.read_text() == "my recipe"
    assert "fsdp_version: 2" in (folder / "fsdp2.yaml").read_text()


def test_init_with_a_slurm_script_points_it_to_the_recipe_and_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "my own"
    folder.mkdir()
    recipe = folder / "gpt.py"
    recipe.write_text("my recipe")

    files = initialised(capsys, f"'{folder}' --config multi_node.slurm")

    script = folder / "multi_node.slurm"
    config = folder / "multi_node.yaml"
    assert files["kept"] == [str(recipe)]
    assert files["start"] == ["sbatch", str(script)]
    assert files["config"] == str(config)
    assert config.read_text() == (ROOT / "accelerate_configs/multi_node.yaml").read_text()

    # Let bash read the variables of the script, since the folder has a space.
    assignments = re.findall(r"(?m)^(?:RECIPE|CONFIG)=.*\n", script.read_text())
    code = "".join(assignments) + 'echo "$RECIPE:$CONFIG"'
    variables = subprocess.check_output(["bash", "-c", code], text=True)
    assert variables == f"{recipe}:{config}\n"


@pytest.mark.parametrize(
    ("flags", "gpus", "config", "processes"),
    [
        pytest.param("", 0, "cpu", 1, id="CPU"),
        pytest.param("", 1, "single_gpu", 1, id="one GPU, or a Mac"),
        pytest.param("", 8, "multi_gpu", 8, id="eight GPUs"),
        pytest.param("--config multi_gpu", 8, "multi_gpu", 8, id="multi_gpu on eight GPUs"),
        pytest.param("--config fsdp2.yaml", 8, "fsdp2", 8, id="fsdp2 on eight GPUs"),
        pytest.param("--config multi_gpu", 0, "multi_gpu", 2, id="multi_gpu without GPUs"),
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


@pytest.mark.parametrize(
    ("gpus", "config"),
    [
        pytest.param(0, "cpu", id="CPU"),
        pytest.param(1, "single_gpu", id="one GPU"),
        pytest.param(8, "fsdp2", id="eight GPUs"),
    ],
)
def test_init_copies_a_ready_config_with_its_recipe_and_the_command_that_runs_it(
    gpus: int,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    folder = tmp_path / "mine"

    files = initialised(capsys, f"{folder} --recipe zephyr-7b-dpo")

    command = (
        f"accelerate launch --config_file {folder}/{config}.yaml {folder}/preference.py"
        f" --config {folder}/zephyr-7b-dpo.yaml"
    )
    assert files["recipe"] == f"{folder}/preference.py"
    assert files["start"] == shlex.split(command)

    # The copy differs from the shipped file in the command only.
    copy = (folder / "zephyr-7b-dpo.yaml").read_text()
    shipped = (ROOT / "recipes/configs/zephyr-7b-dpo.yaml").read_text()
    assert f"#   {command}\n" in copy
    assert copy.partition("# --- ")[2] == shipped.partition("# --- ")[2]


@pytest.mark.parametrize("flags", ["--recipe bert", "--config tpu"])
def test_init_names_the_shipped_files_if_it_does_not_have_the_requested_one(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "mine"
    assert " does not exist; use one of " in error_of(capsys, f"init {folder} {flags}")
    assert not folder.exists()


# --- JSON


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reads_the_flag_for_json(name: str) -> None:
    """Every parser takes --json, so a command that forgets it would print text for programs."""
    path = ROOT / f"{COMMANDS[name].module.replace('.', '/')}.py"
    attributes = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert "arguments.json" in attributes


def test_init_with_json_prints_the_files_and_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    files = initialised(capsys, f"{tmp_path}/mine --config cpu_ddp")

    assert Path(files["recipe"]).is_file()
    assert files["start"] == shlex.split(
        f"accelerate launch --config_file {files['config']} {files['recipe']}"
    )


def test_learn_with_json_lists_the_lessons_with_their_titles(
    capsys: pytest.CaptureFixture,
) -> None:
    lessons = json.loads(output_of(capsys, "learn --json"))

    assert [lesson["lesson"] for lesson in lessons] == list(LESSONS)
    assert all(lesson["title"] for lesson in lessons)


def test_a_number_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    text = json_text({"loss": math.inf, "rows": [(math.nan, 1.5)], "same": False})
    assert json.loads(text) == {"loss": None, "rows": [[None, 1.5]], "same": False}

    write_json(tmp_path / "rows.json", {"rows": [{"loss": math.nan}]})
    assert json.loads((tmp_path / "rows.json").read_text()) == {"rows": [{"loss": None}]}


# --- llmtrain export


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def file_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def exported(capsys: pytest.CaptureFixture, flags: str) -> Path:
    """Run `llmtrain export`, and return the folder of the exported model."""
    result = json.loads(output_of(capsys, f"export {flags} --json"))
    assert result.keys() == {"model"}
    return Path(result["model"])


def test_export_with_json_prints_the_folder_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = make_model(tmp_path / "model")

    folder = exported(capsys, f"{model} --to {tmp_path}/exported")

    assert folder == tmp_path / "exported"
    assert file_names(folder) == ["config.json"]


def test_a_full_disk_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "merged")

    monkeypatch.setattr("shutil.copytree", fail)
    model = make_model(tmp_path / "model")

    message = error_of(capsys, f"export {model} --to {tmp_path}/exported")

    assert "No space left on device; free some space" in message


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        pytest.param("link", "use another name", id="link to nothing"),
        pytest.param("file/exported", "use another file or folder", id="below a file"),
        pytest.param("file/a/exported", "use another file or folder", id="far below a file"),
    ],
)
def test_an_export_to_a_place_that_cannot_be_a_folder_is_refused(
    target: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = make_model(tmp_path / "model")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "purged")

    message = error_of(capsys, f"export {model} --to {tmp_path / target}")

    assert f"{tmp_path}/{target.partition('/')[0]}" in message
    assert remedy in message
    assert sorted(file_names(tmp_path)) == ["file", "link", "model"]


def test_a_run_whose_name_is_not_utf_8_has_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / os.fsdecode(b"run\xff")
    run.mkdir()
    write_json(run / "status.json", {"state": "finished", "step": 3})

    output_of(capsys, f"report {run} --output {tmp_path}/report.html")

    assert (tmp_path / "report.html").is_file()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with a checkpoint and a finished model."""
    run = tmp_path / "run"
    model = make_model(run / "checkpoints" / "step-00000006" / "model")
    shutil.copytree(model, run / "model")
    return run


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("run/checkpoints/step-00000006", "run/export-step-00000006"),
        ("run/model", "run/model-export"),
        ("run", "run/export"),
    ],
)
def test_an_export_goes_outside_the_model_or_checkpoint_that_it_copies(
    source: str,
    target: str,
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    folder = exported(capsys, str(tmp_path / source))

    assert folder == tmp_path / target
    assert file_names(folder) == ["config.json"]
    assert file_names(run_folder / "checkpoints/step-00000006") == ["model"]
    assert file_names(run_folder / "checkpoints/step-00000006/model") == ["config.json"]
    assert file_names(run_folder / "model") == ["config.json"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("run/checkpoints/step-00000006", "run/checkpoints/step-00000006/new"),
        ("run/checkpoints/step-00000006/model", "run/checkpoints/step-00000006/new"),
        ("run/model", "run/model/new"),
        ("run", "run/model/new"),
    ],
)
@pytest.mark.usefixtures("run_folder")
def test_an_export_into_a_model_or_checkpoint_is_refused(
    source: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    new = tmp_path / target

    message = error_of(capsys, f"export {tmp_path / source} --to {new}")

    assert f"is inside {new.parent}, which must stay as it is" in message
    assert not new.exists()
