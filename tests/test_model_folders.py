"""Every model argument takes a run, a checkpoint, a model folder or a hub name."""

from pathlib import Path

import pytest

from llmtrain.data.config import DataConfig
from llmtrain.errors import UserError
from llmtrain.files import cache_folder
from llmtrain.model_folders import model_folder, tokenizer_folder
from llmtrain.models.config import ModelConfig
from llmtrain.training.settings import RunConfig


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    make_model(tmp_path / "run" / "model")
    make_model(tmp_path / "run" / "checkpoints" / "step-00000020" / "model")
    return tmp_path / "run"


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    for step in (9, 10):
        make_model(tmp_path / "unfinished" / "checkpoints" / f"step-{step:08d}" / "model")
    return tmp_path / "unfinished"


def test_a_finished_run_stands_for_its_model(finished: Path, capsys: pytest.CaptureFixture) -> None:
    model = str(finished / "model")
    for name in (str(finished), model):
        assert ModelConfig(model_name_or_path=name).model_name_or_path == model
    assert ModelConfig(from_config=str(finished)).from_config == model
    assert DataConfig(tokenizer=str(finished)).tokenizer == model
    assert capsys.readouterr().out == ""


def test_an_unfinished_run_stands_for_its_newest_checkpoint_and_a_line_says_so(
    unfinished: Path, capsys: pytest.CaptureFixture
) -> None:
    model = str(unfinished / "checkpoints" / "step-00000010" / "model")
    assert model_folder(str(unfinished)) == model
    assert ModelConfig(model_name_or_path=str(unfinished)).model_name_or_path == model
    assert f"model     {model} " in capsys.readouterr().out

    checkpoint = unfinished / "checkpoints" / "step-00000009"
    assert model_folder(str(checkpoint)) == str(checkpoint / "model")
    assert tokenizer_folder(str(checkpoint)) == str(checkpoint / "model")
    assert capsys.readouterr().out == ""


def test_other_names_and_folders_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(str(tmp_path)) == str(tmp_path)
    for name in ("gpt2", "owner/model", "bpe:2048"):
        assert model_folder(name) == tokenizer_folder(name) == name


def test_a_model_type_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "llama" / "model")
    monkeypatch.chdir(tmp_path)
    assert ModelConfig(from_config="llama").from_config == "llama"
    assert ModelConfig(from_config="./llama").from_config == "llama/model"


def test_a_run_without_a_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"^--model_name_or_path .* holds no model yet"):
        ModelConfig(model_name_or_path=str(tmp_path))


def test_an_address_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "s3://bucket/run"
    monkeypatch.setenv("LLMTRAIN_CACHE", address)
    for use in (
        lambda: RunConfig(output_dir=address),
        lambda: ModelConfig(model_name_or_path=address),
        lambda: DataConfig(tokenizer=address),
        cache_folder,
    ):
        with pytest.raises(UserError, match=f"{address} is an address"):
            use()
