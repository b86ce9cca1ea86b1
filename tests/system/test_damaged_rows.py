"""Damaged rows that one of two processes finds end the run of both after the last good step."""

import shlex
from pathlib import Path

import pytest

from llmtrain.record.history import read_lines
from tests.forked import run_forked
from tests.launching import TINY, Ended, read_json, torchrun
from tests.system.digits import tensors_digest

DAMAGE = "shard 7: block 3 differs from its hash; copy it again"
WEIGHTS = "model/model.safetensors"


def run(text_file: Path, folder: Path, damaged_row: int = -1, votes: str = "none none") -> Ended:
    # Eval rows have the same numbers as training rows.
    flags = shlex.split(
        f"--dataset {text_file} --output_dir {folder} --max_steps 8 --eval_steps 0 --log_rows"
    )
    command = [*torchrun(2), "tests/system/damaged_gpt.py", *TINY, *flags]
    return run_forked(command, {"DAMAGED_ROW": str(damaged_row), "VOTES": votes})


@pytest.fixture(scope="module")
def undisturbed(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(text_file, folder).assert_ok()
    return folder


def row_of(folder: Path, step: int, rank: int) -> int:
    """Return a row that a rank reads in a step; each has half of them."""
    row: int = read_lines(folder / "rows.jsonl")[step - 1]["rows"][-rank]
    return row


def status_of(folder: Path) -> tuple[str, int]:
    status = read_json(folder / "status.json")
    return status["state"], status["step"]


@pytest.mark.parametrize(("step", "rank"), [(3, 1), (6, 0), (8, 1)])
def test_both_ranks_save_after_the_last_good_step_and_go_on_when_the_rows_are_mended(
    step: int, rank: int, undisturbed: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    ended = run(text_file, folder, row_of(undisturbed, step, rank))

    saved = f"step {step - 1} is saved in {folder}; resume with the same command."
    assert ended.status == 2
    assert ended.err.count(f"{DAMAGE}; {saved}\n") == 1
    assert "Traceback" not in ended.err
    assert status_of(folder) == ("failed", step - 1)

    run(text_file, folder).assert_ok()
    assert [start["step"] for start in read_json(folder / "run.json")["starts"]] == [0, step - 1]
    assert tensors_digest(folder / WEIGHTS) == tensors_digest(undisturbed / WEIGHTS)


@pytest.mark.parametrize("step", [1, 2])
def test_a_start_that_has_no_step_to_agree_in_ends_with_the_same_line(
    step: int, undisturbed: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    ended = run(text_file, folder, row_of(undisturbed, step, rank=1))

    assert ended.status == 2
    assert ended.err.count(f"{DAMAGE}.\n") == 1
    assert "Traceback" not in ended.err
    assert status_of(folder)[0] == "failed"
    assert not [*folder.glob("checkpoints/step-*")]


@pytest.mark.parametrize(
    ("votes", "damaged_step", "state"),
    [
        ("none save", 6, "preempted"),
        ("finish none", 6, "finished"),
        ("finish finish", 5, "finished"),
        ("save none", 5, "failed"),
    ],
)
def test_a_run_that_ends_after_step_4_without_the_damaged_rows_ends_as_usual(
    votes: str, damaged_step: int, state: str, undisturbed: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    ended = run(text_file, folder, row_of(undisturbed, damaged_step, rank=1), votes)

    assert status_of(folder) == (state, 4)
    assert ended.status == (2 if state == "failed" else 0)
    assert (DAMAGE in ended.err) == (state == "failed")
