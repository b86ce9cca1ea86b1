"""docs/guides/migrate.md: its four files have the same losses, and it names our defaults.

LLMTRAIN_WRITE_DOCS=1 writes the losses into the page.
"""

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import TrainingArguments

from recipes import finetune
from tests.launching import (
    BIN,
    PYTHON,
    ROOT,
    WRITE_DOCS,
    long_form,
    series,
    start_process,
    torchrun,
    wait,
)

PAGE = ROOT / "docs" / "guides" / "migrate.md"
CPU_DDP = ROOT / "accelerate_configs" / "cpu_ddp.yaml"
ACCELERATE = [str(BIN / "accelerate"), "launch", "--config_file", str(CPU_DDP)]


class Printed(NamedTuple):
    """The output of one of the page's files, and the losses in it by step."""

    text: str
    losses: dict[int, float]


def losses_in(text: str) -> dict[int, float]:
    lines = re.findall(r"step +(\d+)  loss ([\d.]+)", text)
    return {int(step): float(loss) for step, loss in lines}


def start(launcher: list[str], name: str, folder: Path, flags: str = "") -> Printed:
    """Start a file of docs/migrate in a folder. All files of a folder share one base model."""
    script = ROOT / "docs" / "migrate" / f"{name}.py"
    command = [*launcher, str(script), *flags.split()]
    process = start_process(command, {"ACCELERATE_USE_CPU": "true"}, tree=folder)
    ended = wait(process).assert_ok()
    assert "failed" not in ended.err
    return Printed(ended.out, losses_in(ended.out))


# --- the four files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("migrate")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Printed:
    return start(PYTHON, "1_plain", folder)


@pytest.fixture(scope="module")
def run_folder(folder: Path) -> Path:
    """Start the file with llmtrain, and return its run folder."""
    path = folder / "run"
    start(ACCELERATE, "4_llmtrain", folder, f"--report_to none --output_dir {path}")
    return path


@long_form
def test_the_plain_loop_learns(plain: Printed) -> None:
    assert list(plain.losses) == [5, 10, 15, 20]
    assert plain.losses[20] < plain.losses[5]


@long_form
@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        pytest.param(torchrun(2), "2_ddp", id="DDP"),
        pytest.param(ACCELERATE, "3_accelerate", id="Accelerate"),
    ],
)
def test_a_loop_on_two_processes_has_the_losses_of_the_plain_loop(
    launcher: list[str], name: str, plain: Printed, folder: Path
) -> None:
    printed = start(launcher, name, folder)
    assert printed.losses == pytest.approx(plain.losses, abs=2e-4)


@long_form
def test_llmtrain_has_the_losses_of_the_plain_loop(plain: Printed, run_folder: Path) -> None:
    assert series(run_folder, "train/loss") == pytest.approx(plain.losses, abs=2e-4)


@long_form
def test_a_longer_run_says_that_the_learning_rate_stays_the_same(
    run_folder: Path, folder: Path
) -> None:
    flags = (
        f"--max_steps 24 --resume_from_checkpoint {run_folder} --report_to none "
        f"--output_dir {folder}/longer"
    )
    printed = start(PYTHON, "4_llmtrain", folder, flags)
    assert (
        "max_steps 20 -> 24; the learning rate goes from 0.003 in step 20 to 0.003 in step 21"
    ) in printed.text


@long_form
def test_the_page_has_the_losses_of_the_plain_loop(plain: Printed) -> None:
    page = PAGE.read_text()
    block = re.search(r"```\n(.*?)```", page, re.DOTALL)
    assert block is not None
    if WRITE_DOCS:
        PAGE.write_text(page[: block.start(1)] + plain.text + page[block.end(1) :])
        return

    # The documentation of another Python differs in some words, and so do the losses.
    assert losses_in(block[1]) == pytest.approx(plain.losses, abs=0.1)


# --- scripts with the Trainer


def test_the_page_names_each_default_that_changes_numbers_of_a_script() -> None:
    """The script on the page sets the epochs and the learning rate itself."""
    trainer = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    ours = vars(finetune.DEFAULTS.optim)
    set_by_script = {"max_steps", "num_train_epochs", "learning_rate"}
    named_differently = {"optim"}
    compared = (ours.keys() & trainer.keys()) - set_by_script - named_differently
    different = {name for name in compared if ours[name] != trainer[name]}

    assert {"lr_scheduler_type", "adam_beta2"} <= different
    page = PAGE.read_text()
    for name in different:
        assert f"`--{name} " in page or f" --{name} " in page, name
