"""Folders in the layout of the hub: flags choose splits as in TRL."""

from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data.config import DataConfig
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from tests.data.preparation import documents_of

TWO_CONFIGURATIONS = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/*
- config_name: de
  data_files:
  - split: train
    path: de/*
---
Configured.
"""


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def _hub_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")


def write(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def write_texts(path: Path, *texts: str) -> Path:
    return write(path, [{"text": text} for text in texts])


@pytest.fixture
def chats(tmp_path) -> Path:
    """A folder with the splits ``train_sft`` and ``test_sft``; none is called ``train``."""
    folder = tmp_path / "chats"
    write_texts(folder / "data" / "train_sft-00000-of-00002.parquet", "one", "two")
    write_texts(folder / "data" / "train_sft-00001-of-00002.parquet", "three")
    write_texts(folder / "data" / "test_sft-00000-of-00001.parquet", "eval")
    return folder


@pytest.fixture
def languages(tmp_path) -> Path:
    """A folder with the configurations ``en`` and ``de``."""
    folder = tmp_path / "languages"
    write_texts(folder / "en" / "a.parquet", "a text in en")
    write_texts(folder / "de" / "a.parquet", "a text in de")
    (folder / "README.md").write_text(TWO_CONFIGURATIONS)
    return folder


def tokenize_data(*names: Path | str, **settings) -> Tokenized:
    defaults = {"tokenizer": "byte", "eval_fraction": 0.0}
    config = DataConfig(dataset=[str(name) for name in names], **defaults | settings)
    return tokenize(config, 4)


def train_documents(tokenized: Tokenized) -> list[str]:
    return documents_of(tokenized.train, tokenized)


def eval_documents(tokenized: Tokenized) -> list[str]:
    return documents_of(tokenized.eval, tokenized)


def complaint(*names: Path | str, **settings) -> str:
    with pytest.raises(UserError) as error:
        tokenize_data(*names, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- splits


def test_flags_choose_the_training_and_the_eval_split(chats):
    tokenized = tokenize_data(chats, dataset_train_split="train_sft", dataset_test_split="test_sft")
    assert train_documents(tokenized) == ["one", "two", "three"]
    assert eval_documents(tokenized) == ["eval"]


def test_another_split_of_a_cached_folder_is_another_cache_entry(chats, capsys):
    tokenize_data(chats, dataset_train_split="train_sft")
    assert capsys.readouterr().out.endswith("; tokenised\n")
    for source in ("tokenised", "from the cache"):
        tokenized = tokenize_data(chats, dataset_train_split="test_sft")
        assert train_documents(tokenized) == ["eval"]
        assert tokenized.eval is None
        assert capsys.readouterr().out.endswith(f"; {source}\n")

    write_texts(chats / "data" / "test_sft-00000-of-00001.parquet", "another")
    assert train_documents(tokenize_data(chats, dataset_train_split="test_sft")) == ["another"]


def test_an_absent_split_is_an_error_that_names_the_others(chats):
    message = complaint(chats)
    assert "test_sft, train_sft" in message
    assert message.endswith("--dataset_train_split.")
    message = complaint(chats, dataset_train_split="train_sft", dataset_test_split="eval")
    assert message.endswith("--dataset_test_split.")


def test_splits_and_files_can_be_mixed(chats, tmp_path):
    file = tmp_path / "file.txt"
    file.write_text("a file")
    both = tokenize_data(
        chats, file, dataset_train_split="train_sft", dataset_test_split="test_sft"
    )
    assert eval_documents(both) == ["eval"]
    assert both.metadata.records == 3 + 1 + 1

    of_others = tokenize_data(file, eval_dataset=[str(chats)], dataset_test_split="test_sft")
    assert eval_documents(of_others) == ["eval"]
    message = complaint(file, eval_dataset=[str(chats)])
    assert message.startswith(f"--eval_dataset {chats} has no split 'test'")


def test_a_training_split_leaves_other_eval_folders_as_they_are(chats, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("an eval text")

    tokenized = tokenize_data(chats, eval_dataset=[str(folder)], dataset_train_split="train_sft")

    assert eval_documents(tokenized) == ["an eval text"]


# --- configurations


def test_a_name_after_a_colon_chooses_the_configuration(languages):
    assert train_documents(tokenize_data(f"{languages}:de")) == ["a text in de"]
    assert train_documents(tokenize_data(f"{languages}:en")) == ["a text in en"]


def test_a_wrong_configuration_is_an_error_that_names_the_choices(languages):
    assert "['en', 'de']" in complaint(languages)
    assert "['en', 'de']" in complaint(f"{languages}:fr")
    assert "CONFIGURATION" in complaint(f"{languages}:")


# --- folders of data files


@pytest.fixture
def plain(tmp_path) -> Path:
    """A folder of two files, whose names datasets takes for splits."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(f'{{"text": "from {name}"}}\n')
    return folder


def test_a_folder_is_divided_if_a_flag_names_a_split(plain):
    assert train_documents(tokenize_data(plain)) == ["from test", "from train"]
    train_split = tokenize_data(plain, dataset_train_split="train")
    assert train_documents(train_split) == ["from train"]
    test_split = tokenize_data(plain, dataset_test_split="test")
    assert train_documents(test_split) == ["from train"]
    assert eval_documents(test_split) == ["from test"]


def test_a_damaged_file_of_a_split_is_an_error(plain):
    (plain / "train.jsonl").write_text('{"text": "fine"}\n{oops\n')
    message = complaint(plain, dataset_train_split="train")
    assert message.startswith(f"--dataset {plain} cannot be loaded: ")


@pytest.mark.parametrize("name", ["a/b@", "a/b:", "@v1", "chats@v1", "./chats:de:"])
def test_a_wrong_name_is_an_error_that_says_how_to_write_it(chats, monkeypatch, name):
    monkeypatch.chdir(chats.parent)
    message = complaint(name)
    assert message.startswith(f"--dataset {name}: ")
    assert "NAME@REVISION:CONFIGURATION" in message
