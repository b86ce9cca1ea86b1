"""llmtrain works with the lowest versions that setup.cfg allows."""

import configparser
import os
import re
import subprocess
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from tests.environments import environment_with
from tests.launching import ROOT, long_form
from tests.lowest_versions import lowest, requirements

# Every module is imported, a recipe learns, a killed run resumes, an adapter is trained and merged.
SUBSET = [
    "tests/test_package.py",
    "tests/data/test_readers.py",
    "tests/models/test_lora.py",
    "tests/record/test_checkpoint.py",
    "tests/training/test_step.py",
    "tests/system/test_resume.py",
]


def test_every_package_that_training_needs_has_a_lowest_version() -> None:
    for needed in requirements("lora"):
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
    for needed in requirements("lora"):
        allowed[needed.name] = lowest(needed).partition("==")[2]

    assert on_page == {name: allowed[name] for name in on_page}
    assert {"Python", "torch", "transformers", "accelerate", "datasets", "peft"} <= on_page.keys()


@long_form
@pytest.mark.timeout(900)
def test_the_lowest_versions_work() -> None:
    wanted = [lowest(needed) for needed in requirements("lora") if needed.name != "torch"]
    # Older builds of torch for CPUs are not in every index. CI tests the lowest one; here it is this one.
    torch = f"torch=={version('torch').partition('+')[0]}"
    tools = [str(needed) for needed in requirements("test")[len(requirements()) :]]
    folder = environment_with("lowest", [torch, *wanted, *tools])

    # The packages are not compiled. Their bytecode is kept beside them for the next process.
    bytecode = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
    }
    ended = subprocess.run(
        [folder / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", *SUBSET],
        cwd=ROOT,
        env={**os.environ, **bytecode, "PYTHONPATH": str(ROOT), "LLMTRAIN_LONG": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"\d+ passed", ended.stdout)
