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

import pytest

from llmtrain import __version__
from llmtrain.cli import COMMANDS, GROUPS, Command, build_parser, main
from llmtrain.files import json_text, write_json
from llmtrain.lessons import LESSONS
from tests.launching import ROOT


def ended(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    status = 0
    try:
        main(list(argv))
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_comes_without_torch_or_transformers(argv: list[str]) -> None:
    code = (
        "import sys\nfrom llmtrain.cli import main\n"
        f"try: main({argv})\nexcept SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'numpy', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: llmtrain" in done.stdout


def test_help_names_every_command_and_its_defaults(capsys: pytest.CaptureFixture) -> None:
    status, out, _ = ended(capsys, "--help")
    assert status == 0
    assert all(name in out for name in COMMANDS)
    _, out, _ = ended(capsys, "generate", "--help")
    assert "--max_new_tokens N" in out
    assert "(default: 200)" in out


def test_help_lists_each_command_once_under_its_group(capsys: pytest.CaptureFixture) -> None:
    _, out, _ = ended(capsys, "--help")
    for name in COMMANDS:
        assert len(re.findall(rf"(?m)^  {name} +[A-Z]", out)) == 1, name
    places = [out.index(f"\n{group}:\n") for group in GROUPS]
    assert places == sorted(places)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_lists_a_command_by_the_first_line_of_its_description(command: Command) -> None:
    description = importlib.import_module(command.module).__doc__
    assert description.splitlines()[0] == command.summary


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_ends_with_examples_that_its_parser_takes(
    name: str, capsys: pytest.CaptureFixture
) -> None:
    _, out, _ = ended(capsys, name, "--help")
    examples = out.split("examples:\n")[1].splitlines()
    assert examples
    for example in examples:
        words = shlex.split(example.split(" && ")[0])
        start = words.index("llmtrain") + 1
        assert words[start] == name
        build_parser().parse_args(words[start:])


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert ended(capsys, "--version") == (0, f"llmtrain {__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["generate"], "RUN_OR_MODEL"),
        (["generate", "no/such/folder"], "no model could be loaded"),
        (
            ["generate", "x", "--temp", "1"],
            "unknown flag --temp: use --temperature T; see llmtrain generate --help.",
        ),
        (["diff", "a", "b", "c"], "diff compares two runs"),
        (["diff", "a"], "diff compares two runs"),
        (
            ["init", "mine", "finetune"],
            "'finetune' is neither a flag nor the value of one; see llmtrain init --help",
        ),
        (["generate", "x", "--debug"], "unknown flag --debug; see llmtrain generate --help"),
        (["generate", "x", "--prompt-fil", "f"], "--prompt-fil - did you mean --prompt_file? see"),
        (["generate", "x", "--file=f"], "unknown flag --file: use --prompt_file FILE"),
        (["generate", "x", "--prompt_file", "no/such"], "no/such: No such file or directory."),
        (["chat", "x", "--system_prompt", "Hi"], "--system_prompt: use --system TEXT"),
        (["export", "x", "--output_dir", "y"], "--output_dir: use --to FOLDER"),
        (["eval", "x", "--task", "y"], "--task: use --tasks TASK"),
        (["generate", "x", "--top_k", "many"], "invalid int value"),
        (["generate", "x", "--top_k", "-1"], "top_k -1 is out of range"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture
) -> None:
    status, out, err = ended(capsys, *argv)
    assert status == 2
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1
    assert not out


@pytest.mark.parametrize("words", [["runs", "{runs}"], ["runs", "check", "{runs}/a"]])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_pipe_that_is_closed_is_no_error(
    words: list[str], options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "a" / "run.json").write_text("{}")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "llmtrain", *(w.format(runs=tmp_path) for w in words), *options],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_python_m_llmtrain_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"llmtrain {__version__}\n"


def test_a_recipe_and_its_config_are_copied_and_nothing_is_overwritten(
    tmp_path: Path, capsys
) -> None:
    status, out, err = ended(capsys, "init", str(tmp_path / "mine"), "--config", "cpu_ddp")
    assert (status, err) == (0, "")
    assert (tmp_path / "mine" / "gpt.py").read_text() == (ROOT / "recipes" / "gpt.py").read_text()
    assert "num_processes: 2" in (tmp_path / "mine" / "cpu_ddp.yaml").read_text()
    assert (
        f"accelerate launch --config_file {tmp_path}/mine/cpu_ddp.yaml {tmp_path}/mine/gpt.py"
        in out
    )
    (tmp_path / "mine" / "cpu_ddp.yaml").unlink()
    (tmp_path / "mine" / "gpt.py").write_text("mine")
    status, _, err = ended(capsys, "init", str(tmp_path / "mine"))
    assert (status, err.count("\n")) == (2, 1)
    assert "already exists" in err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["gpt.py"]
    assert (tmp_path / "mine" / "gpt.py").read_text() == "mine"


def test_a_config_is_copied_beside_what_is_there(tmp_path: Path, capsys) -> None:
    mine = tmp_path / "my own"
    ended(capsys, "init", str(mine), "--config", "cpu_ddp")
    (mine / "gpt.py").write_text("mine")
    status, out, err = ended(capsys, "init", str(mine), "--config", "fsdp2")
    assert (status, err) == (0, "")
    assert f"{mine}/gpt.py (already existed, and was kept)\nconfig    {mine}/fsdp2.yaml\n" in out
    assert (mine / "gpt.py").read_text() == "mine"
    assert "fsdp_version: 2" in (mine / "fsdp2.yaml").read_text()
    found = json.loads(
        ended(capsys, "init", str(mine), "--config", "multi_node.slurm", "--json")[1]
    )
    assert found["kept"] == [str(mine / "gpt.py")]
    assert found["start"] == ["sbatch", str(mine / "multi_node.slurm")]
    assert (
        Path(found["config"]).read_text()
        == (ROOT / "accelerate_configs" / "multi_node.yaml").read_text()
    )
    said = "".join(
        re.findall(r"(?m)^(?:RECIPE|CONFIG)=.*\n", (mine / "multi_node.slurm").read_text())
    )
    words = ["bash", "-c", f'{said} echo "$RECIPE:$CONFIG"']
    assert (
        subprocess.check_output(words, text=True).strip() == f"{mine}/gpt.py:{mine}/multi_node.yaml"
    )


@pytest.mark.parametrize(
    ("words", "gpus", "config", "processes"),
    [
        ([], 0, "cpu", 1),
        ([], 1, "single_gpu", 1),  # a Mac's, too
        ([], 8, "multi_gpu", 8),
        (["--config", "multi_gpu"], 8, "multi_gpu", 8),
        (["--config", "fsdp2.yaml"], 8, "fsdp2", 8),
        (["--config", "multi_gpu"], 0, "multi_gpu", 2),
        (["--config", "cpu_ddp"], 8, "cpu_ddp", 2),
    ],
)
def test_a_config_has_as_many_processes_as_there_are_gpus(
    words, gpus, config, processes, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    found = json.loads(ended(capsys, "init", str(tmp_path / "mine"), *words, "--json")[1])
    assert Path(found["config"]).name == f"{config}.yaml"
    assert f"\nnum_processes: {processes}\n" in Path(found["config"]).read_text()


@pytest.mark.parametrize(("gpus", "config"), [(0, "cpu"), (1, "single_gpu"), (8, "fsdp2")])
def test_a_ready_file_is_copied_with_its_recipe_and_the_command_that_runs_it(
    gpus: int, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    mine = tmp_path / "mine"
    found = json.loads(ended(capsys, "init", str(mine), "--recipe", "zephyr-7b-dpo", "--json")[1])
    assert found["recipe"] == str(mine / "preference.py")
    command = f"accelerate launch --config_file {mine}/{config}.yaml {mine}/preference.py"
    command += f" --config {mine}/zephyr-7b-dpo.yaml"
    assert " ".join(found["start"]) == command
    text = (mine / "zephyr-7b-dpo.yaml").read_text()
    assert f"#   {command}\n" in text
    shipped = (ROOT / "recipes" / "configs" / "zephyr-7b-dpo.yaml").read_text()
    assert text.partition("# --- ")[2] == shipped.partition("# --- ")[2]


@pytest.mark.parametrize("words", [["--recipe", "bert"], ["--config", "tpu"]])
def test_what_is_not_shipped_is_answered_with_what_is(
    words: list[str], tmp_path: Path, capsys
) -> None:
    status, _, err = ended(capsys, "init", str(tmp_path / "mine"), *words)
    assert (status, err.count("\n")) == (2, 1)
    assert " does not exist; use one of " in err
    assert not (tmp_path / "mine").exists()


def test_debugging_shows_where_an_error_arose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("LLMTRAIN_DEBUG", "1")
    status, out, err = ended(capsys, "runs", str(tmp_path / "nowhere"))
    assert (status, out) == (2, "")
    assert "Traceback" in err
    assert (
        err.splitlines()[-1]
        == f"error: {tmp_path}/nowhere is not a folder; name the folder that holds the runs."
    )


def test_debugging_shows_the_error_that_a_line_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def choose():\n    return {}['depth']\n\nchoose()\n")
    words = ["plan", str(recipe), "--gpu", "H100"]
    status, _, err = ended(capsys, *words)
    assert (status, err.count("\n")) == (2, 1)

    monkeypatch.setenv("LLMTRAIN_DEBUG", "1")
    status, _, err = ended(capsys, *words)
    assert status == 2
    assert "in choose" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_a_disk_that_refuses_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "merged")

    monkeypatch.setattr("shutil.copytree", refuse)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    status, _, err = ended(capsys, "export", str(tmp_path / "model"), "--to", str(tmp_path / "to"))
    assert (status, err.count("\n")) == (2, 1)
    assert "No space left on device; free some space" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reads_the_flag_for_json(name: str) -> None:
    """Every parser takes --json, so a command that forgets it would print text for programs."""
    path = ROOT / f"{COMMANDS[name].module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text())
    reads = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "json"
        and isinstance(node.value, ast.Name)
        and node.value.id == "arguments"
    ]
    assert reads


def test_json_of_what_is_written_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = json.loads(
        ended(capsys, "init", str(tmp_path / "mine"), "--config", "cpu_ddp", "--json")[1]
    )
    assert Path(found["recipe"]).is_file()
    assert found["start"] == [
        "accelerate",
        "launch",
        "--config_file",
        found["config"],
        found["recipe"],
    ]
    lessons = json.loads(ended(capsys, "learn", "--json")[1])
    assert [one["lesson"] for one in lessons] == list(LESSONS)
    assert all(one["title"] for one in lessons)


def test_json_of_an_export_says_where_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    status, out, err = ended(
        capsys, "export", str(tmp_path / "model"), "--to", str(tmp_path / "to"), "--json"
    )
    assert (status, err) == (0, "")
    assert json.loads(out) == {"model": str(tmp_path / "to")}
    assert (tmp_path / "to" / "config.json").is_file()


def test_an_export_is_no_part_of_the_model_or_checkpoint_that_it_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000006"
    model = checkpoint / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    finished = shutil.copytree(model, tmp_path / "run" / "model")

    def exported(*words: object) -> Path:
        status, out, err = ended(capsys, "export", *map(str, words), "--json")
        assert (status, err) == (0, "")
        folder = Path(json.loads(out)["model"])
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        return folder

    assert exported(checkpoint) == tmp_path / "run" / "export-step-00000006"
    assert exported(finished) == tmp_path / "run" / "model-export"
    assert exported(tmp_path / "run") == tmp_path / "run" / "export"
    for source, target in (
        (checkpoint, checkpoint / "new"),
        (model, checkpoint / "new"),
        (finished, finished / "new"),
        (tmp_path / "run", finished / "new"),
    ):
        status, _, err = ended(capsys, "export", str(source), "--to", str(target))
        assert status == 2
        assert f"is inside {target.parent}, which must stay as it is" in err
    assert [path.name for path in checkpoint.iterdir()] == ["model"]
    assert [path.name for path in model.iterdir()] == ["config.json"]


def test_json_has_a_word_for_what_is_not_finite(tmp_path: Path) -> None:
    text = json_text({"loss": math.inf, "rows": [(math.nan, 1.5)], "same": False})
    assert json.loads(text) == {"loss": None, "rows": [[None, 1.5]], "same": False}
    write_json(tmp_path / "replay.json", {"rows": [{"loss": math.nan}]})
    assert json.loads((tmp_path / "replay.json").read_text()) == {"rows": [{"loss": None}]}
