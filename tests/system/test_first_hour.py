"""The first hour of a new user: epochs over a text with a validation file, stopped and extended."""

import signal
from pathlib import Path

from tests.launching import (
    GPT,
    PYTHON,
    begin,
    metrics,
    read_json,
    run,
    series,
    wait,
    wait_for_readings,
)

SMALL = [
    *("--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "32"),
    *("--tokenizer", "byte", "--global_batch_size", "8", "--per_device_train_batch_size", "8"),
    *("--logging_steps", "1", "--eval_steps", "0.25", "--report_to", "none"),
]
EPOCH = 150  # steps


def write_texts(folder: Path) -> list[str]:
    """Write a text of 150 steps of 8 rows of 33 bytes, and a validation file; return their flags."""
    size = EPOCH * 8 * 33
    lines = "".join(f"{number} times {number} is {number**2}.\n" for number in range(2500))
    train, validation = folder / "train.txt", folder / "validation.txt"
    train.write_text(lines[:size])
    validation.write_text(lines[size : size + 3000])
    return ["--dataset", str(train), "--eval_dataset", str(validation)]


def test_two_epochs_with_a_validation_file_are_stopped_finished_and_extended(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    data = write_texts(tmp_path)
    command = [*PYTHON, GPT, *SMALL, *data, "--output_dir", str(folder)]
    two_epochs = [*command, "--num_train_epochs", "2"]

    process = begin(two_epochs)
    try:
        wait_for_readings(process, folder, 20)
        process.send_signal(signal.SIGINT)
    finally:
        stopped = wait(process)
    assert stopped.status == 130
    assert "resume with the same command" in stopped.out
    assert run([*PYTHON, "-m", "llmtrain", "runs", "--finished", str(folder)]).status == 1

    finished = run(two_epochs).assert_ok()
    steps = max(series(folder, "train/loss"))
    rows = read_json(folder / "run.json")["train_rows"]
    assert steps == 2 * -(-rows // 8)
    assert f"steps     {steps} steps = 2 epochs of {rows:,} rows, 8 rows per step" in finished.out
    assert len(read_json(folder / "run.json")["starts"]) == 2
    assert metrics(folder)[-1]["epoch"] == 2
    quarter = -(-steps // 4)
    assert list(series(folder, "eval/loss")) == [*range(0, steps, quarter), steps]
    assert run([*PYTHON, "-m", "llmtrain", "runs", "--finished", str(folder)]).status == 0

    longer = ["--num_train_epochs", "3", "--resume_from_checkpoint", str(folder)]
    run([*command, *longer]).assert_ok()
    extended = tmp_path / "run-2"
    losses = series(folder, "train/loss")
    assert {step: series(extended, "train/loss")[step] for step in losses} == losses
    assert max(series(extended, "train/loss")) == 3 * steps // 2
    assert metrics(extended)[-1]["epoch"] == 3
