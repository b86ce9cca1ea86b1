"""What a GPU computes, tried without one, under a torch that was built for GPUs."""

import os
import sys
import venv
from pathlib import Path

import pytest

from tests.launching import ROOT, long_form, run

WANTED = [
    "torch==2.11.0",
    "transformers==5.17.0",
    "accelerate==1.15.0",
    "peft",
    "pyarrow",
    "psutil",
    "filelock",
]
WANTED += ["jinja2", "plotille", "tqdm"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the packages of a machine with GPUs, and without datasets, wandb, trl."""
    if named := os.environ.get("LLMTRAIN_GPU_PYTHON"):  # one that is there already
        return named
    folder = tmp_path_factory.mktemp("gpu")
    venv.create(folder, with_pip=True)
    installed = run([str(folder / "bin" / "pip"), "install", "-q", *WANTED], timeout=900)
    if installed.status:
        pytest.skip(f"its packages cannot be installed here: {installed.err[-200:]}")
    return str(folder / "bin" / "python")


@long_form
@pytest.mark.skipif(sys.platform != "linux", reason="torch for GPUs is of Linux")
def test_paths_of_a_gpu_hold_on_shapes_alone_and_the_planted_faults_show(python: str) -> None:
    script = [python, str(Path("tests/system/fake_cuda.py"))]
    told = run(script, {"PYTHONPATH": str(ROOT)}).assert_ok().out.split()
    if "+cpu" in run([python, "-c", "import torch; print(torch.__version__)"]).out:
        pytest.skip("this torch is one for CPUs")
    assert len(told) == 9
    for fault, said in {"3": "same device", "7": "bytes for"}.items():
        planted = run([*script, fault], {"PYTHONPATH": str(ROOT)})
        assert planted.status
        assert said in planted.err
