"""A user's own loss, optimizer, average and metric keep the promises of the package's own parts.

tests/system/own_everything.py is the recipe that has them.
"""

import shlex
import shutil
from pathlib import Path

import pytest
import torch

from llmtrain.record.tensor_files import read_tensors
from tests.forked import run_forked
from tests.launching import PYTHON, accelerate, long_form, run, series

RECIPE = "tests/system/own_everything.py"
VERIFY_RESUME = [*PYTHON, "-m", "llmtrain", "verify", "resume"]


@pytest.fixture(scope="module")
def flags(text_file: Path) -> list[str]:
    return shlex.split(f"--report_to none --per_device_train_batch_size 2 --dataset {text_file}")


@pytest.fixture(scope="module")
def finished(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on one process."""
    folder = tmp_path_factory.mktemp("own") / "run"
    run_forked([*PYTHON, RECIPE, *flags, "--output_dir", str(folder)]).assert_ok()
    return folder


@long_form
def test_a_run_has_the_same_bits_after_five_kills_on_changing_layouts(flags: list[str]) -> None:
    verify_flags = shlex.split("--steps 36 --layouts 1,2,4,1,2,4")
    command = [*VERIFY_RESUME, *verify_flags, RECIPE, *flags, "--bitwise"]

    ended = run(command, timeout=600).assert_ok()

    assert ended.out.count("killed after step") == 5
    assert ended.out.splitlines()[-1] == "passed: the same run"


@long_form
def test_an_average_that_is_not_restored_fails_the_verification(flags: list[str]) -> None:
    verify_flags = shlex.split("--steps 6 --layouts 1")

    ended = run([*VERIFY_RESUME, *verify_flags, "tests/system/forgetful_average.py", *flags])

    assert ended.status == 1, ended.out + ended.err
    assert "killed, resumed: the state of ForgetfulAverage differs in some bits\n" in ended.out


def test_another_coefficient_of_the_loss_makes_another_run(
    flags: list[str], finished: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "run"
    shutil.copytree(finished, killed)
    (killed / "status.json").unlink()  # as if it had been killed before it wrote its end

    command = [*PYTHON, RECIPE, *flags, "--output_dir", str(killed), "--z_loss", "0.1"]
    ended = run_forked(command).assert_ok()

    reason = "is taken by a run with a different objective: weight 0.001 there, 0.1 here"
    assert f"run       {killed}-2 (new; {killed} {reason})\n" in ended.out


def test_fsdp2_makes_the_average_and_the_eval_metrics_of_one_process(
    flags: list[str], finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sharded"
    launcher = accelerate("fsdp2", "--mixed_precision", "no")
    run_forked([*launcher, RECIPE, *flags, "--output_dir", str(folder)]).assert_ok()

    expected = dict(read_tensors(finished / "model-average"))
    averages = dict(read_tensors(folder / "model-average"))
    # The weights are 100 times as large as the tolerance.
    torch.testing.assert_close(averages, expected, rtol=1e-4, atol=1e-4)

    for name in ("eval/accuracy", "eval/average/loss", "eval/average/accuracy"):
        assert series(folder, name) == pytest.approx(series(finished, name), rel=1e-4)
