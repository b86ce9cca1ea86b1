"""The files for clouds: two on docs/guides/clouds.md, the Dockerfile, and the packages that a recipe names for uv."""

import json
import os
import re
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.launching import (
    BIN,
    FINETUNE,
    GPT,
    PREFERENCE,
    ROOT,
    TINY,
    long_form,
    read_json,
    start_process,
    wait,
    wait_for_log_entries,
)


def test_the_files_on_the_page_are_yaml_and_their_scripts_bash() -> None:
    page = (ROOT / "docs" / "guides" / "clouds.md").read_text()
    sky, trainjob = re.findall(r"(?s)```yaml\n(.*?)```", page)
    task = yaml.safe_load(sky)
    claim, job = yaml.safe_load_all(trainjob)
    _, _, script, *_ = job["spec"]["trainer"]["command"]

    assert claim["metadata"]["name"] in trainjob.partition("---")[2]
    for text in (task["setup"], task["run"], script):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    # SkyPilot adds commands after these.
    assert re.search(r"(?m)^\s*(exit|exec|set -e)\b", task["setup"] + task["run"]) is None


# --- the Dockerfile


def instructions(keyword: str) -> list[str]:
    """Return the values of all instructions with a keyword, without line breaks."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "clouds" / "Dockerfile").read_text())
    return re.findall(rf"(?m)^{keyword} (.*)$", text)


def test_the_build_context_has_only_named_paths_and_all_that_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if not line.startswith("#")]
    context = [line.removeprefix("!") for line in patterns if line.startswith("!")]

    assert patterns[0] == "*", "the first pattern leaves everything out"
    assert [path for path in context if not (ROOT / path).exists()] == []
    assert {copied.split()[0] for copied in instructions("COPY")} <= {*context}


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


# --- uv and Hugging Face Jobs


def metadata_of(script: str) -> dict[str, Any]:
    """Return the inline metadata of a script, as PEP 723's reference implementation reads it."""
    block = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (match,) = [match for match in re.finditer(block, script) if match["type"] == "script"]
    lines = match["content"].splitlines(keepends=True)
    return tomllib.loads("".join(re.sub("^# ?", "", line) for line in lines))


@pytest.mark.parametrize(
    ("recipe", "extras"), [(GPT, set()), (FINETUNE, {"lora"}), (PREFERENCE, {"lora"})]
)
def test_a_recipe_begins_with_the_packages_that_it_needs(recipe: str, extras: set[str]) -> None:
    metadata = metadata_of((ROOT / recipe).read_text())
    (dependency,) = metadata["dependencies"]
    requirement = Requirement(dependency)

    assert requirement.name == "llmtrain"
    assert requirement.extras == extras
    assert f"python_requires = {metadata['requires-python']}" in (ROOT / "setup.cfg").read_text()
