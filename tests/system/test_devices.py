"""The code for GPUs on tensors without values, under a torch for GPUs and without a GPU."""

import os
import sys

import pytest

from tests.environments import environment_with
from tests.launching import ROOT, Ended, long_form, run

# The packages of a machine with GPUs, without datasets, wandb and trl.
PACKAGES = [
    "torch==2.11.0",
    "transformers==5.17.0",
    "accelerate==1.15.0",
    "peft",
    "pyarrow",
    "psutil",
    "filelock",
    "jinja2",
    "plotille",
    "tqdm",
]
# The functions of fake_cuda.py that call the package, in their order there.
PATHS = "forward_of_gpt forward_of_llama losses counts optimizers restores fingerprints finite"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch for GPUs needs Linux")


@pytest.fixture(scope="module")
def python() -> str:
    """Return a Python that has a torch for GPUs.

    LLMTRAIN_GPU_PYTHON can name one. Otherwise the packages are installed into a new environment.
    """
    path = os.environ.get("LLMTRAIN_GPU_PYTHON")
    if path is None:
        path = str(environment_with("gpu", PACKAGES, is_optional=True) / "bin" / "python")
    version = run([path, "-c", "import torch; print(torch.__version__)"]).assert_ok().out
    if "+cpu" in version:
        pytest.skip(f"torch {version.strip()} is one for CPUs")
    return path


def run_fake_cuda(python: str, *arguments: str) -> Ended:
    command = [python, "tests/system/fake_cuda.py", *arguments]
    return run(command, {"PYTHONPATH": str(ROOT)})


@long_form
def test_the_code_for_gpus_runs_on_shapes_alone(python: str) -> None:
    assert run_fake_cuda(python).assert_ok().out.split() == PATHS.split()


@long_form
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("3", "same device", id="tensors of two devices"),
        pytest.param("7", "bytes for", id="too much memory"),
    ],
)
def test_a_planted_fault_is_an_error(python: str, fault: str, message: str) -> None:
    ended = run_fake_cuda(python, fault)
    assert ended.status != 0
    assert message in ended.err
