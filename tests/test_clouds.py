"""The Dockerfile for clouds, and the packages that a recipe names for uv."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.launching import FINETUNE, GPT, PREFERENCE, ROOT


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
