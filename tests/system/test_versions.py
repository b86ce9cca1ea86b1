"""llmtrain works with the lowest versions that setup.cfg allows."""

import configparser
import re
from importlib.metadata import version

import pytest
import yaml
from packaging.requirements import Requirement

from tests.environments import environment_with
from tests.launching import ROOT, long_form, run
from tests.lowest_versions import lowest, requirements

PAGE = ROOT / "docs" / "reference" / "versions.md"
# One module is left out: __main__ would start the command.
IMPORT_EVERYTHING = """
import importlib, pkgutil
import llmtrain, recipes

for package in (llmtrain, recipes):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name != "llmtrain.__main__":
            importlib.import_module(module.name)
"""
# They read data, make steps, save checkpoints, train and merge an adapter, and resume a stopped run.
SUBSET = [
    "tests/data/test_readers.py",
    "tests/training/test_step.py",
    "tests/record/test_checkpoint.py",
    "tests/models/test_lora.py",
    "tests/system/test_resume.py::test_a_terminated_run_saves_and_resumes_with_the_same_bits",
]


# --- setup.cfg


def test_every_package_that_a_user_needs_has_a_lowest_version() -> None:
    for requirement in requirements("lora", "lab"):
        assert re.fullmatch(r"[\w-]+==[\d.]+", lowest(requirement))


def test_a_package_without_a_lowest_version_is_noticed() -> None:
    with pytest.raises(ValueError, match="tqdm needs a lower bound"):
        lowest(Requirement("tqdm"))


# --- the page of versions


def test_the_page_of_versions_has_those_of_setup_cfg() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE)
    versions_on_page = dict(rows)

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lowest_versions = {"Python": setup["options"]["python_requires"].removeprefix(">=")}
    for requirement in requirements("lora", "lab"):
        lowest_versions[requirement.name] = lowest(requirement).partition("==")[2]

    assert {"Python", "torch", "transformers", "accelerate", "datasets", "peft"} <= {
        *versions_on_page
    }
    assert versions_on_page.items() <= lowest_versions.items()


def test_the_page_of_versions_has_the_pythons_of_the_workflow() -> None:
    (row,) = re.findall(r"^\| Python .*", PAGE.read_text(), re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    tested_pythons = set()
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        tested_pythons.update(matrix.get("python", []))

    assert tested_pythons
    assert set(re.findall(r"3\.\d+", row)) == tested_pythons


# --- an environment with the lowest versions


@long_form
@pytest.mark.timeout(1200)
def test_the_lowest_versions_work() -> None:
    # Older builds of torch for CPUs are not in every index. CI tests the lowest torch; this test
    # takes the version of this environment.
    torch = f"torch=={version('torch').partition('+')[0]}"
    others = [
        lowest(requirement)
        for requirement in requirements("lora", "lab")
        if requirement.name != "torch"
    ]
    without_extras = requirements()
    tools = [
        str(requirement)
        for requirement in requirements("test")
        if requirement not in without_extras
    ]
    folder = environment_with("lowest", [torch, *others, *tools])
    python = str(folder / "bin" / "python")

    # The packages are not compiled. Their bytecode is kept beside them for the next process.
    environment = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "PYTHONWARNINGS": "",  # older packages warn of each other
        "LLMTRAIN_LONG": "",
    }
    run([python, "-c", IMPORT_EVERYTHING], environment, timeout=300).assert_ok()

    options = "-p no:cacheprovider -n 2 -W default -rp"
    command = [python, "-m", "pytest", *options.split(), *SUBSET]
    tests = run(command, environment, timeout=600).assert_ok()
    for path in SUBSET:
        assert f"PASSED {path}" in tests.out, f"{path} was skipped"
