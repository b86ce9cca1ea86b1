"""Preference training without a model continues from the newest fine-tuned one next to its run."""

import json
import os
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.model_folders import newest_model


def make_run(
    folder: Path, *, finished: int, task: str, state: str = "finished", **settings: object
) -> Path:
    """Make a run folder.

    Args:
        folder: the folder.
        finished: the day on which the model was written.
        task: the task that the run's record names.
        state: the state in status.json.
        settings: the settings in the run's record.
    """
    (folder / "model").mkdir(parents=True)
    settings_of_record = {name: {"value": value} for name, value in settings.items()}
    record = {"task": task, "settings": settings_of_record}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "status.json").write_text(json.dumps({"state": state}))

    seconds = finished * 86_400
    os.utime(folder / "model", (seconds, seconds))
    return folder


def test_the_model_of_the_newest_finished_fine_tuning_run_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    make_run(tmp_path / "older", finished=1, task="conversations")
    newest = make_run(tmp_path / "my-chats", finished=2, task="conversations")
    make_run(tmp_path / "pretrained", finished=3, task="text", n_layer=2)
    make_run(tmp_path / "pref", finished=4, task="preferences", model_name_or_path="m")
    make_run(tmp_path / "stopped", finished=5, task="conversations", state="preempted")
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").write_text("")

    model = newest_model(str(tmp_path / "pref"), "fine-tune")

    assert model == str(newest / "model")
    assert capsys.readouterr().out == (
        f"model     {newest}/model (of the newest finished fine-tuning run in {tmp_path})\n"
    )

    # It pretrained an existing model further.
    newest = make_run(tmp_path / "books", finished=6, task="text", model_name_or_path="m")
    assert newest_model(str(tmp_path / "pref"), "fine-tune") == str(newest / "model")


def test_the_error_without_a_fine_tuned_model_names_the_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "pref", finished=1, task="preferences")

    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=f"no fine-tuning run in {folder} has finished: run x"):
            newest_model(str(folder / "pref"), "x")
