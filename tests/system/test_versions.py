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

IMPORT_EVERYTHING = """
import importlib, pkgutil
import llmtrain, recipes

for package in (llmtrain, recipes):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name not in ("llmtrain.__main__", "llmtrain.models.lm_eval"):  # which needs an extra
            importlib.import_module(module.name)
"""
# Data is read, a step is right, checkpoints hold, an adapter is trained and merged, a stopped run resumes.
SUBSET = [
    "tests/data/test_readers.py",
    "tests/training/test_step.py",
    "tests/record/test_checkpoint.py",
    "tests/models/test_lora.py",
    "tests/system/test_resume.py::test_a_killed_run_resumes_with_the_same_bits",
]


def test_every_package_that_a_user_needs_has_a_lowest_version() -> None:
    for needed in requirements("lora", "lab"):
        assert re.fullmatch(r"[\w-]+==[\d.]+", lowest(needed))


def test_a_package_without_a_lowest_version_is_noticed() -> None:
    with pytest.raises(ValueError, match="tqdm needs a lower bound"):
        lowest(Requirement("tqdm"))


def test_the_page_of_versions_has_those_of_setup_cfg() -> None:
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    on_page = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", page, re.MULTILINE))

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    allowed = {"Python": setup["options"]["python_requires"].removeprefix(">=")}
    for needed in requirements("lora", "lab"):
        allowed[needed.name] = lowest(needed).partition("==")[2]

    assert on_page == {name: allowed[name] for name in on_page}
    assert {"Python", "torch", "transformers", "accelerate", "datasets", "peft"} <= on_page.keys()


def test_the_page_of_versions_has_the_pythons_of_the_workflow() -> None:
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    (row,) = re.findall(r"^\| Python .*", page, re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in workflow["jobs"].values()]
    pythons = {python for matrix in matrices for python in matrix.get("python", [])}
    assert pythons
    assert set(re.findall(r"3\.\d+", row)) == pythons


@long_form
@pytest.mark.timeout(1200)
def test_the_lowest_versions_work() -> None:
    wanted = [lowest(needed) for needed in requirements("lora", "lab") if needed.name != "torch"]
    # Older builds of torch for CPUs are not in every index. CI tests the lowest one; here it is this one.
    torch = f"torch=={version('torch').partition('+')[0]}"
    tools = [str(needed) for needed in requirements("test") if needed not in requirements()]
    folder = environment_with("lowest", [torch, *wanted, *tools])
    python = str(folder / "bin" / "python")

    # The packages are not compiled. Their bytecode is kept beside them for the next process.
    environment = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "PYTHONWARNINGS": "",  # which would be those of older packages among themselves
        "LLMTRAIN_LONG": "",
    }
    run([python, "-c", IMPORT_EVERYTHING], environment, timeout=300).assert_ok()
    pytest_command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "-W", "default"]
    tests = run([*pytest_command, *SUBSET], environment, timeout=600).assert_ok()
    assert re.search(r"\d+ passed", tests.out)
