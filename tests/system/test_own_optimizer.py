"""docs/guides/optimizers.md: a recipe with its own optimizer, a learning rate per group, and a schedule."""

import re
import shlex
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import BIN, PYTHON, ROOT, long_form, run, series, torchrun, write_text

# The peak learning rate of each group, by the end of its key in metrics.jsonl.
PEAKS = {"": 0.02, "/embedding": 0.06, "/head": 0.006}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The recipe of the page, with flags."""
    page = (ROOT / "docs" / "guides" / "optimizers.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    folder = tmp_path_factory.mktemp("own")
    (folder / "three_rates.py").write_text(code)
    text = write_text(folder / "text.txt")
    flags = shlex.split(
        f"--dataset {text} --tokenizer byte --max_steps 6 --save_steps 3 --eval_steps 0 "
        "--logging_steps 1 --report_to none"
    )
    return [str(folder / "three_rates.py"), *flags]


@pytest.fixture(scope="module")
def trained(recipe: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_forked([*torchrun(2), *recipe, "--output_dir", str(folder)]).assert_ok()
    return folder


def test_each_group_has_its_peak_and_the_schedule_of_the_recipe(trained: Path) -> None:
    # Up in five steps. In the last 40 % of the run, 2.4 steps, down with the square root of the rest.
    schedule = [0.2, 0.4, 0.6, 0.8, (2 / 2.4) ** 0.5, (1 / 2.4) ** 0.5]
    for group, peak in PEAKS.items():
        rates = series(trained, f"train/learning_rate{group}")
        expected = [peak * share for share in schedule]
        assert [rates[step] for step in range(1, 7)] == pytest.approx(expected), group


def test_a_resumed_run_has_the_same_losses_and_learning_rates(
    recipe: list[str], trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "resumed"
    checkpoint = trained / "checkpoints" / "step-00000003"
    flags = shlex.split(f"--resume_from_checkpoint {checkpoint} --output_dir {folder}")

    run_forked([*torchrun(2), *recipe, *flags]).assert_ok()

    assert [*series(folder, "train/loss")] == [*range(1, 7)]
    for key in ("train/loss", *(f"train/learning_rate{group}" for group in PEAKS)):
        assert series(folder, key) == series(trained, key)


def test_a_flag_that_the_recipe_does_not_read_is_refused(recipe: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = shlex.split(f"--adam_beta2 0.99 --warmup_steps 2 --output_dir {folder}")

    ended = run_forked([*PYTHON, *recipe, *flags])

    assert ended.status == 2
    assert "--adam_beta2 0.99" in ended.err
    assert "--warmup_steps" in ended.err
    assert ended.err.count("error: ") == 1
    assert not folder.exists()


@long_form
def test_a_recipe_with_its_own_schedule_can_be_verified(recipe: list[str]) -> None:
    """No flag is added that the schedule would leave without an effect."""
    path, *flags = recipe
    command = [str(BIN / "llmtrain"), "verify", "resume", path, "--layouts", "1", "--steps", "6"]
    verified = run([*command, *flags, "--threads", "1"])
    assert verified.assert_ok().out.splitlines()[-1].startswith("passed")
