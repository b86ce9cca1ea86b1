"""Rows that turn out to be damaged in the middle of a run end it after the last good step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmtrain as lt
from llmtrain.data.loader import LocalBatches
from llmtrain.data.order import Slot
from llmtrain.errors import DamagedRowsError
from llmtrain.record.history import read_lines
from llmtrain.training.run import Run
from tests.launching import read_json
from tests.system.digits import tensors_digest

TrainGpt = Callable[..., Run]
NO_EVALUATION: dict[str, Any] = {
    "log": lt.LogConfig(logging_steps=1, log_rows=True),
    "evaluation": {"eval_steps": 0},  # eval rows have the same numbers
}


@pytest.fixture
def undisturbed(train_gpt: TrainGpt) -> Path:
    return train_gpt("undisturbed", **NO_EVALUATION).folder


@pytest.fixture
def damaged_rows(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The rows that cannot be read."""
    damaged: set[int] = set()
    read = LocalBatches.read

    def read_or_fail(batches: LocalBatches, slots: list[Slot]) -> dict[str, np.ndarray]:
        if damaged & {slot.row for slot in slots}:
            raise DamagedRowsError("shard 7: block 3 differs from its hash; copy it again.")
        return read(batches, slots)

    monkeypatch.setattr(LocalBatches, "read", read_or_fail)
    return damaged


def row_of(folder: Path, step: int) -> int:
    """Return a row that a run reads in a step."""
    row: int = read_lines(folder / "rows.jsonl")[step - 1]["rows"][-1]
    return row


def status_of(folder: Path) -> tuple[str, int, str]:
    status = read_json(folder / "status.json")
    return status["state"], status["step"], status["reason"]


@pytest.mark.parametrize("step", [2, 7, 12])
@pytest.mark.parametrize("async_save", [False, True])
def test_the_run_is_saved_after_the_last_good_step_and_goes_on_when_the_rows_are_mended(
    step: int,
    async_save: bool,
    undisturbed: Path,
    damaged_rows: set[int],
    train_gpt: TrainGpt,
    tmp_path: Path,
) -> None:
    damaged_rows.add(row_of(undisturbed, step))
    folder = tmp_path / "run"

    with pytest.raises(DamagedRowsError) as error:
        train_gpt(async_save=async_save, **NO_EVALUATION)
    with pytest.raises(DamagedRowsError, match=r"^shard 7: block 3 differs"):
        train_gpt(async_save=async_save, **NO_EVALUATION)  # it cannot make a step

    line = (
        "shard 7: block 3 differs from its hash; copy it again; "
        f"step {step - 1} is saved in {folder}; resume with the same command."
    )
    assert str(error.value) == line
    assert line in [event["text"] for event in read_lines(folder / "events.jsonl")]
    assert status_of(folder)[:2] == ("failed", step - 1)
    assert len(read_lines(folder / "rows.jsonl")) == step - 1

    damaged_rows.clear()
    resumed = train_gpt(**NO_EVALUATION)

    assert resumed.folder == folder
    assert [start["step"] for start in read_json(folder / "run.json")["starts"]][-1] == step - 1
    weights = "model/model.safetensors"
    assert tensors_digest(folder / weights) == tensors_digest(undisturbed / weights)


class Ends(lt.Callback):
    """Ends a run after step 6."""

    settings = None

    def __init__(self, end: str) -> None:
        self.end = end

    def setup(self, training: Any) -> None:
        self._training = training

    def wants_to_stop(self) -> Any:
        is_due = self._training.step == 5
        if is_due and self.end == "save":
            self._training.run.status.ask_to_stop("asked to stop by SIGTERM")
        return is_due and self.end


@pytest.mark.parametrize("damaged_step", [7, 8])
def test_a_run_that_ends_before_the_damaged_step_ends_as_usual(
    damaged_step: int, undisturbed: Path, damaged_rows: set[int], train_gpt: TrainGpt
) -> None:
    damaged_rows.add(row_of(undisturbed, damaged_step))

    stopped = train_gpt("stopped", callbacks=[Ends("save")], **NO_EVALUATION)
    finished = train_gpt("finished", callbacks=[Ends("finish")], **NO_EVALUATION)

    assert status_of(stopped.folder) == (
        "preempted",
        6,
        "asked to stop by SIGTERM; step 6 is saved",
    )
    assert status_of(finished.folder) == ("finished", 6, "Ends has finished the run")
