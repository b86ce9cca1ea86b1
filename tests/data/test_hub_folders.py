"""Folders in the layout of the hub and of save_to_disk: every split and configuration, by the flags of TRL."""

import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data.config import ChatConfig, DataConfig
from llmtrain.data.dataset_names import open_source
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.sources import SplitChoice
from llmtrain.errors import UserError
from tests.data.test_prepare import documents_of

CONFIGURATIONS = """---
license: mit
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


@pytest.fixture(autouse=True)
def _caches(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")


def write(path: Path, texts: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({field: texts}), path)
    return path


@pytest.fixture
def chats(tmp_path) -> Path:
    """Two splits, neither of which is called train, below data/."""
    write(tmp_path / "chats" / "data" / "train_sft-00000-of-00002.parquet", ["one", "two"])
    write(tmp_path / "chats" / "data" / "train_sft-00001-of-00002.parquet", ["three"])
    write(tmp_path / "chats" / "data" / "test_sft-00000-of-00001.parquet", ["eval"])
    return tmp_path / "chats"


@pytest.fixture
def languages(tmp_path) -> Path:
    for language in ("en", "de"):
        write(tmp_path / "languages" / language / "a.parquet", [f"a text in {language}"])
    (tmp_path / "languages" / "README.md").write_text(CONFIGURATIONS)
    return tmp_path / "languages"


@pytest.fixture(params=["hub", "saved"])
def splits(request, chats, tmp_path) -> Path:
    """The same splits, in the layout of the hub and as a DatasetDict that was saved."""
    if request.param == "hub":
        return chats
    saved = datasets.load_dataset(str(chats))
    saved["train_sft"] = saved["train_sft"].select([0, 1, 2])
    saved.save_to_disk(tmp_path / "saved", num_shards={"train_sft": 2, "test_sft": 1})
    return tmp_path / "saved"


def tokenized(*names: object, block_size: int = 4, **settings) -> Tokenized:
    settings = {"tokenizer": "byte", "eval_fraction": 0.0} | settings
    return tokenize(DataConfig(dataset=list(map(str, names)), **settings), block_size)


def complaint(*names: object, **settings) -> str:
    with pytest.raises(UserError) as caught:
        tokenized(*names, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_splits_are_chosen_by_flags(splits, capsys):
    made = tokenized(splits, dataset_train_split="train_sft", dataset_test_split="test_sft")
    assert documents_of(made.train, made) == ["one", "two", "three"]
    assert documents_of(made.eval, made) == ["eval"]
    assert f"eval      the eval data are split test_sft of {splits}\n" in capsys.readouterr().out

    other = tokenized(splits, dataset_train_split="test_sft")
    assert documents_of(other.train, other) == ["eval"]
    assert other.eval is None
    assert capsys.readouterr().out.endswith("; tokenised\n")
    again = tokenized(splits, dataset_train_split="test_sft")
    assert documents_of(again.train, again) == ["eval"]
    assert capsys.readouterr().out.endswith("; from the cache\n")


def test_a_test_split_that_is_not_read_is_named(splits, capsys):
    tokenized(splits, dataset_train_split="train_sft")
    line = f"split test_sft of {splits} is not read; --dataset_test_split test_sft evaluates on it"
    assert f"eval      {line}\n" in capsys.readouterr().out


def test_a_split_that_is_absent_is_an_error_that_names_those_there_are_and_the_flag(splits):
    message = complaint(splits)
    assert message.startswith(f"--dataset {splits} has no split 'train', but test_sft, train_sft;")
    assert message.endswith("choose one with --dataset_train_split train_sft.")
    message = complaint(splits, dataset_train_split="train_sft", dataset_test_split="eval")
    assert "no split 'eval'" in message
    assert message.endswith("choose one with --dataset_test_split test_sft.")
    (splits.parent / "a.txt").write_text("words")
    message = complaint(splits.parent / "a.txt", eval_dataset=[str(splits)])
    assert message.startswith(f"--eval_dataset {splits} has no split 'test'")
    assert message.endswith("choose one with --dataset_test_split test_sft.")


def test_a_split_may_be_the_eval_data_of_other_training_data(splits):
    file = splits.parent / "a.txt"
    file.write_text("words")
    made = tokenized(file, eval_dataset=[str(splits)], dataset_test_split="test_sft")
    assert documents_of(made.eval, made) == ["eval"]


def test_only_data_sets_with_splits_give_eval_data(splits, tmp_path):
    (tmp_path / "file.txt").write_text("a file")
    made = tokenized(
        splits,
        tmp_path / "file.txt",
        dataset_train_split="train_sft",
        dataset_test_split="test_sft",
    )
    assert made.metadata.records == 3 + 1 + 1
    assert made.metadata.source_rows[1] > 0
    assert documents_of(made.eval, made) == ["eval"]


def test_arrow_tables_have_artificial_nulls_wherever_they_come_from(splits):
    for split in ("train_sft", "test_sft"):
        source = open_source(str(splits), SplitChoice(split, is_named=True))
        assert source.has_artificial_nulls
        assert source.has_splits


def test_shards_beside_each_other_are_one_split(tmp_path):
    for number, texts in enumerate([["a", "b"], ["c"]]):
        write(tmp_path / "shards" / f"train-0000{number}-of-00002.parquet", texts)
    made = tokenized(tmp_path / "shards")
    assert documents_of(made.train, made) == ["a", "b", "c"]


def test_the_configurations_of_a_folder_stand_behind_a_colon(languages):
    made = tokenized(f"{languages}:de")
    assert documents_of(made.train, made) == ["a text in de"]
    assert complaint(languages).endswith(
        f"it has several configurations; choose one of en, de, as {languages}:en."
    )
    assert "it has no configuration 'fr'; choose one of en, de" in complaint(f"{languages}:fr")
    assert "write FOLDER or FOLDER:CONFIGURATION" in complaint(f"{languages}:")


def test_a_saved_data_set_is_read_whole_in_its_order(tmp_path):
    saved = datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).select([2, 0])
    saved.save_to_disk(tmp_path / "saved")
    made = tokenized(tmp_path / "saved")
    assert documents_of(made.train, made) == ["c", "a"]
    assert "has no splits" in complaint(tmp_path / "saved", dataset_train_split="train")

    moved = shutil.copytree(tmp_path / "saved", tmp_path / "moved")
    fingerprints = [open_source(str(tmp_path / name)).fingerprint() for name in ("saved", "moved")]
    assert fingerprints[0] == fingerprints[1]
    (data,) = moved.glob("*.arrow")
    data.write_bytes(data.read_bytes()[:-200])
    assert "is not an Arrow file, or it is damaged" in complaint(moved)
    data.unlink()
    assert f"{data}: No such file" in complaint(moved)
    for content in ("{}", "oops", '{"_data_files": 3}'):
        (moved / "state.json").write_text(content)
        assert "save the data set again" in complaint(moved)


def test_a_plain_folder_has_splits_if_a_flag_names_one(tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(f'{{"text": "of {name}"}}\n')
    made = tokenized(folder)
    assert documents_of(made.train, made) == ["of test", "of train"]
    made = tokenized(folder, dataset_train_split="train")
    assert documents_of(made.train, made) == ["of train"]
    for settings in ({}, {"dataset_train_split": "train"}):
        made = tokenized(folder, dataset_test_split="test", **settings)
        assert documents_of(made.train, made) == ["of train"]
        assert documents_of(made.eval, made) == ["of test"]

    (folder / "train.jsonl").write_text('{"text": "fine"}\n{oops\n')
    message = complaint(folder, dataset_train_split="train")
    assert message.startswith(f"--dataset {folder} cannot be loaded: ")


def test_the_fingerprint_of_a_folder_follows_its_content_and_the_split(chats, languages, tmp_path):
    def fingerprint(name: object, split: str = "train_sft") -> str:
        return open_source(str(name), SplitChoice(split, is_named=True)).fingerprint()

    before = fingerprint(chats)
    assert fingerprint(chats, "test_sft") != before
    assert fingerprint(shutil.copytree(chats, tmp_path / "copy")) == before
    write(tmp_path / "copy" / "data" / "test_sft-00000-of-00001.parquet", ["another"])
    assert fingerprint(tmp_path / "copy") != before
    assert fingerprint(f"{languages}:de") != fingerprint(f"{languages}:en")


def test_rows_of_another_split_are_named_with_it(splits):
    source = open_source(str(splits), SplitChoice("test_sft", is_named=True))
    first = next(source.records(None))
    assert "test_sft" in first.place
    assert first.place.endswith("row 0")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("someone/nothing", "is not a file or folder, and the hub answered"),
        ("someone/nothing@v1:de", "is not a file or folder, and the hub answered"),
        ("someone/nothing@", "write NAME, NAME:CONFIGURATION, NAME@REVISION or"),
        ("someone/nothing:", "write NAME, NAME:CONFIGURATION, NAME@REVISION or"),
        ("@v1", "write NAME, NAME:CONFIGURATION, NAME@REVISION or"),
        ("chats@v1", "chats is a folder here, which has no revisions; leave @v1 out"),
        ("./chats:absent:de", "no file ending in"),
    ],
)
def test_wrong_names_are_one_line(chats, monkeypatch, name, expected):
    monkeypatch.chdir(chats.parent)
    message = complaint(name)
    assert message.startswith(f"--dataset {name}")
    assert expected in message


def test_a_damaged_shard_is_one_line(chats):
    shard = chats / "data" / "test_sft-00000-of-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-9])
    message = complaint(chats, dataset_train_split="train_sft")
    assert message.startswith(f"--dataset {chats} cannot be loaded: ")


def test_conversations_of_a_split_are_trained(tmp_path):
    folder = tmp_path / "chats"
    for split, count in (("train", 9), ("test", 3)):
        records = [{"prompt": f"{split} {i}?", "completion": f"it is {i}"} for i in range(count)]
        table = pyarrow.Table.from_pylist(records)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
    config = DataConfig(dataset=[str(folder)], tokenizer="byte", dataset_test_split="test")
    made = tokenize(config, 95, ChatConfig())
    assert (made.metadata.records, made.metadata.eval_records) == (12, 3)
    assert made.metadata.task == "conversations"
