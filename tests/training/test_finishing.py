"""A callback can end a run before its last step, with a finished model or to go on later."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.training.run import Run
from tests.launching import read_json, series

TrainGpt = Callable[..., Run]


class Votes(lt.Callback):
    """Votes once, before step 6."""

    def __init__(self, vote: Any, name: str = "Votes") -> None:
        self.vote = vote
        self.name = name

    def setup(self, training: Any) -> None:
        self._training = training

    def wants_to_stop(self) -> Any:
        return self._training.step == 5 and self.vote


@pytest.fixture
def finished(train_gpt: TrainGpt) -> Run:
    """A run that a callback has finished after step 6 of 12."""
    average = lt.WeightAverage(decay=0.9, folder="model-average")
    return train_gpt(callbacks=[Votes("finish"), average])


def status_of(folder: Path) -> tuple[str, int, str]:
    status = read_json(folder / "status.json")
    return status["state"], status["step"], status["reason"]


def test_a_run_that_a_callback_finishes_is_evaluated_and_has_a_model(finished: Run) -> None:
    assert status_of(finished.folder) == ("finished", 6, "Votes has finished the run")
    assert [*series(finished.folder, "eval/loss")] == [0, 4, 6]
    assert (finished.folder / "checkpoints" / "step-00000006").is_dir()
    for name in ("model", "model-average"):
        assert (finished.folder / name / "model.safetensors").exists()


def test_a_run_that_is_finished_makes_no_more_steps_unless_it_gets_more_or_other_callbacks(
    finished: Run, train_gpt: TrainGpt
) -> None:
    """Also if it was killed before it had written its model."""
    folder = finished.folder
    average = lt.WeightAverage(decay=0.9, folder="model-average")
    callbacks = [Votes("finish"), average]

    again = train_gpt(callbacks=callbacks, resume=str(folder))
    longer = train_gpt(callbacks=callbacks, resume=str(folder), max_steps=14)
    changed = train_gpt(callbacks=[Votes(False), average], resume=str(folder))
    shutil.rmtree(folder / "model")
    (folder / "status.json").unlink()
    killed = train_gpt(callbacks=callbacks)

    for run in (again, killed):
        assert status_of(run.folder) == ("finished", 6, "Votes has finished the run")
        assert (run.folder / "model" / "model.safetensors").exists()
    assert killed.folder == folder
    assert status_of(longer.folder) == ("finished", 14, "all steps are done")
    assert status_of(changed.folder) == ("finished", 12, "all steps are done")


@pytest.mark.parametrize("vote", [True, "save"])
def test_a_vote_to_save_outweighs_one_to_finish(vote: Any, train_gpt: TrainGpt) -> None:
    callbacks = [Votes("finish"), Votes(vote, name="Saves"), Votes("finish", name="Third")]

    run = train_gpt(callbacks=callbacks)

    assert status_of(run.folder) == ("preempted", 6, "asked to stop; step 6 is saved")
    assert not (run.folder / "model").exists()
    assert status_of(train_gpt(callbacks=callbacks).folder)[:2] == ("finished", 12)


def test_another_word_is_refused(train_gpt: TrainGpt) -> None:
    with pytest.raises(UserError, match=r"Votes\.wants_to_stop returned 'stop'; return False"):
        train_gpt(callbacks=[Votes("stop")])
