"""The files for clouds: two on docs/guides/clouds.md, the Dockerfile, and the packages that a recipe names for uv."""

import re
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from tests.launching import FINETUNE, GPT, PREFERENCE, ROOT


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


def test_the_build_context_has_only_named_paths_and_all_that_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if not line.startswith("#")]
    context = [line.removeprefix("!") for line in patterns if line.startswith("!")]

    assert patterns[0] == "*", "the first pattern leaves everything out"
    assert [path for path in context if not (ROOT / path).exists()] == []
    dockerfile = (ROOT / "clouds" / "Dockerfile").read_text()
    assert {*re.findall(r"(?m)^COPY (\S+)", dockerfile)} <= {*context}


@pytest.mark.parametrize(
    ("recipe", "extras"), [(GPT, set()), (FINETUNE, {"lora"}), (PREFERENCE, {"lora"})]
)
def test_a_recipe_begins_with_the_packages_that_it_needs(recipe: str, extras: set[str]) -> None:
    [block] = re.findall(r"(?ms)^# /// script\n(.*?)^# ///$", (ROOT / recipe).read_text())
    metadata = tomllib.loads(re.sub("(?m)^# ?", "", block))
    [dependency] = metadata["dependencies"]
    requirement = Requirement(dependency)

    assert requirement.name == "llmtrain"
    assert requirement.extras == extras
    assert f"python_requires = {metadata['requires-python']}" in (ROOT / "setup.cfg").read_text()
