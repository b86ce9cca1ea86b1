"""llmtrain works with the lowest versions that setup.cfg allows."""

import re
from importlib.metadata import version

import pytest

from tests.environments import environment_with
from tests.launching import long_form, run
from tests.lowest_versions import lowest, requirements

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
    "tests/models/test_lora.py::test_exported_and_merged_models_compute_the_trained_logits",
    "tests/system/test_resume.py::test_a_terminated_run_saves_and_resumes_with_the_same_bits",
]


def test_every_package_that_a_user_needs_has_a_lowest_version() -> None:
    for requirement in requirements("lora", "lab"):
        assert re.fullmatch(r"[\w-]+==[\d.]+", lowest(requirement))


@long_form
@pytest.mark.timeout(1200)
def test_the_lowest_versions_work() -> None:
    # Older builds of torch for CPUs are not in every index. CI tests the lowest torch; this test
    # takes the version of this environment.
    packages = [lowest(package) for package in requirements("lora", "lab")]
    packages = [package for package in packages if not package.startswith("torch==")]
    torch = f"torch=={version('torch').partition('+')[0]}"
    tools = [str(package) for package in requirements("test") if package not in requirements()]
    folder = environment_with("lowest", [torch, *packages, *tools])
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
