"""The first hour of a new user: a run over epochs, with a validation file, stopped and extended."""

import math
import shlex
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launching import (
    GPT,
    PYTHON,
    Ended,
    metrics,
    read_json,
    run,
    series,
    start_process,
    wait,
    wait_for_log_entries,
)

SMALL = shlex.split(
    "--n_layer 1 --n_head 2 --n_embd 16 --block_size 32 --tokenizer byte "
    "--global_batch_size 8 --per_device_train_batch_size 8 "
    "--logging_steps 1 --eval_steps 0.25 --report_to none"
)
ROWS_PER_STEP = 8
STEPS_PER_EPOCH = 150
BYTES_PER_ROW = 33  # 32 positions and the target of the last one


class FirstHour(NamedTuple):
    """Three starts of a run.

    Attributes:
        folder: the folder of the first two starts.
        stopped: the first start, which Ctrl-C ended.
        status_after_stop: the status of `llmtrain runs --finished` after it.
        finished: the second start, which finished two epochs.
        status_after_end: the status of `llmtrain runs --finished` after it.
        extended_folder: the folder of the third start, which added a third epoch.
    """

    folder: Path
    stopped: Ended
    status_after_stop: int
    finished: Ended
    status_after_end: int
    extended_folder: Path


@pytest.fixture(scope="module")
def first_hour(tmp_path_factory: pytest.TempPathFactory) -> FirstHour:
    base = tmp_path_factory.mktemp("first_hour")
    folder = base / "run"
    command = [*PYTHON, GPT, *SMALL, *write_texts(base), "--output_dir", str(folder)]
    two_epochs = [*command, "--num_train_epochs", "2"]
    runs_finished = [*PYTHON, "-m", "llmtrain", "runs", "--finished", str(folder)]

    process = start_process(two_epochs)
    try:
        wait_for_log_entries(process, folder, 20)
        process.send_signal(signal.SIGINT)
    finally:
        stopped = wait(process)
    status_after_stop = run(runs_finished).status

    finished = run(two_epochs).assert_ok()
    status_after_end = run(runs_finished).status

    three_epochs = f"--num_train_epochs 3 --resume_from_checkpoint {folder}"
    run([*command, *three_epochs.split()]).assert_ok()

    return FirstHour(
        folder=folder,
        stopped=stopped,
        status_after_stop=status_after_stop,
        finished=finished,
        status_after_end=status_after_end,
        extended_folder=base / "run-2",
    )


def write_texts(folder: Path) -> list[str]:
    """Write a text of 150 steps and a validation file, and return their flags."""
    size = STEPS_PER_EPOCH * ROWS_PER_STEP * BYTES_PER_ROW
    text = "".join(f"{number} times {number} is {number**2}.\n" for number in range(2500))
    train = folder / "train.txt"
    train.write_text(text[:size])
    validation = folder / "validation.txt"
    validation.write_text(text[size : size + 3000])
    return ["--dataset", str(train), "--eval_dataset", str(validation)]


def test_ctrl_c_stops_a_run_and_tells_how_to_resume_it(first_hour: FirstHour) -> None:
    assert first_hour.stopped.status == 130
    assert "resume with the same command" in first_hour.stopped.out
    assert first_hour.status_after_stop == 1


def test_the_same_command_finishes_the_run(first_hour: FirstHour) -> None:
    assert len(read_json(first_hour.folder / "run.json")["starts"]) == 2
    assert first_hour.status_after_end == 0


def test_two_epochs_make_a_step_for_each_batch_of_their_rows(first_hour: FirstHour) -> None:
    rows = read_json(first_hour.folder / "run.json")["train_rows"]
    steps = 2 * math.ceil(rows / ROWS_PER_STEP)

    assert max(series(first_hour.folder, "train/loss")) == steps
    assert metrics(first_hour.folder)[-1]["epoch"] == 2
    line = f"steps     {steps} steps = 2 epochs of {rows:,} rows, 8 rows per step"
    assert line in first_hour.finished.out


def test_the_run_is_evaluated_after_each_quarter_of_its_steps(first_hour: FirstHour) -> None:
    steps = max(series(first_hour.folder, "train/loss"))
    quarter = math.ceil(steps / 4)
    expected_steps = [*range(0, steps, quarter), steps]
    assert list(series(first_hour.folder, "eval/loss")) == expected_steps


def test_an_extended_run_has_the_losses_of_the_first_one_and_another_epoch(
    first_hour: FirstHour,
) -> None:
    losses = series(first_hour.folder, "train/loss")
    extended_losses = series(first_hour.extended_folder, "train/loss")

    assert {step: extended_losses[step] for step in losses} == losses
    assert max(extended_losses) == 3 * max(losses) // 2
    assert metrics(first_hour.extended_folder)[-1]["epoch"] == 3
