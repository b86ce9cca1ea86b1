"""Without a model, preference training takes that of the newest fine-tuning run next to its own."""

import json
import os
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.record.resume import newest_model


def make_run(
    folder: Path, age: float, task: str, state: str = "finished", **settings: object
) -> Path:
    (folder / "model").mkdir(parents=True)
    record = {"task": task, "settings": {name: {"value": settings[name]} for name in settings}}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "status.json").write_text(json.dumps({"state": state}))
    os.utime(folder / "model", (1e9 - age, 1e9 - age))
    return folder


def test_the_newest_finished_fine_tuning_run_is_taken(tmp_path: Path, capsys) -> None:
    make_run(tmp_path / "older", 30, "conversations")
    newest = make_run(tmp_path / "my-chats", 20, "conversations")
    make_run(tmp_path / "pretrained", 10, "text", n_layer=2)
    make_run(tmp_path / "pref", 9, "preferences", model_name_or_path="m")
    make_run(tmp_path / "stopped", 8, "conversations", state="preempted")
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").write_text("")

    assert newest_model(str(tmp_path / "pref"), "fine-tune") == str(newest / "model")
    line = f"model     {newest}/model (of the newest finished fine-tuning run in {tmp_path})\n"
    assert capsys.readouterr().out == line


def test_further_pretraining_of_a_given_model_counts(tmp_path: Path) -> None:
    make_run(tmp_path / "chats", 30, "conversations")
    newest = make_run(tmp_path / "books", 20, "text", model_name_or_path="m")
    assert newest_model(str(tmp_path / "pref"), "fine-tune") == str(newest / "model")


def test_a_relative_folder_gives_a_relative_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "chats", 30, "conversations")
    monkeypatch.chdir(tmp_path)
    assert newest_model("pref", "fine-tune") == "chats/model"


def test_without_such_a_run_there_is_one_line(tmp_path: Path) -> None:
    make_run(tmp_path / "pref", 9, "preferences")
    with pytest.raises(UserError, match=rf"no fine-tuning run in {tmp_path} has finished: run x"):
        newest_model(str(tmp_path / "pref"), "x")
    with pytest.raises(UserError, match="no fine-tuning run"):
        newest_model(str(tmp_path / "absent" / "pref"), "x")
