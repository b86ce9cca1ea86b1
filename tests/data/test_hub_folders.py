"""Folders in the layouts of the hub and of ``save_to_disk``: flags choose splits as in TRL."""

import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data.config import ChatConfig, DataConfig
from llmtrain.data.dataset_names import open_source
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.sources import Source, SplitChoice
from llmtrain.errors import UserError
from tests.data.preparation import documents_of

TWO_CONFIGURATIONS = """---
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


@pytest.fixture(params=["hub", "saved"])
def splits(request, chats, tmp_path) -> Path:
    """The splits of ``chats``, in the layout of the hub and as a saved ``DatasetDict``."""
    if request.param == "hub":
        return chats
    loaded = datasets.load_dataset(str(chats))
    loaded["train_sft"] = loaded["train_sft"].select([0, 1, 2])
    loaded.save_to_disk(tmp_path / "saved", num_shards={"train_sft": 2, "test_sft": 1})
    return tmp_path / "saved"


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


def open_split(name: Path | str, split: str) -> Source:
    return open_source(str(name), SplitChoice(split, is_named=True))


# --- splits


def test_flags_choose_the_training_and_the_eval_split(splits, capsys):
    tokenized = tokenize_data(
        splits, dataset_train_split="train_sft", dataset_test_split="test_sft"
    )
    assert train_documents(tokenized) == ["one", "two", "three"]
    assert eval_documents(tokenized) == ["eval"]
    assert f"eval      the eval data are split test_sft of {splits}\n" in capsys.readouterr().out


def test_another_split_of_a_cached_folder_is_another_cache_entry(splits, capsys):
    tokenize_data(splits, dataset_train_split="train_sft")
    capsys.readouterr()
    for source in ("tokenised", "from the cache"):
        tokenized = tokenize_data(splits, dataset_train_split="test_sft")
        assert train_documents(tokenized) == ["eval"]
        assert tokenized.eval is None
        assert capsys.readouterr().out.endswith(f"; {source}\n")


def test_the_log_names_a_test_split_that_is_not_read(splits, capsys):
    tokenize_data(splits, dataset_train_split="train_sft")
    line = f"split test_sft of {splits} is not read; --dataset_test_split test_sft evaluates on it"
    assert f"eval      {line}\n" in capsys.readouterr().out


def test_an_absent_training_split_is_an_error_that_names_the_others(splits):
    message = complaint(splits)
    assert message.startswith(f"--dataset {splits} has no split 'train', but test_sft, train_sft;")
    assert message.endswith("choose one with --dataset_train_split train_sft.")


def test_an_absent_test_split_is_an_error_that_names_the_others(splits):
    message = complaint(splits, dataset_train_split="train_sft", dataset_test_split="eval")
    assert "no split 'eval'" in message
    assert message.endswith("choose one with --dataset_test_split test_sft.")


def test_an_absent_split_of_eval_data_is_an_error_with_the_flag_of_both(splits, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("words")
    message = complaint(file, eval_dataset=[str(splits)])
    assert message.startswith(f"--eval_dataset {splits} has no split 'test'")
    assert message.endswith("choose one with --dataset_test_split test_sft.")


def test_a_split_can_be_the_eval_data_of_other_training_data(splits, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("words")
    tokenized = tokenize_data(file, eval_dataset=[str(splits)], dataset_test_split="test_sft")
    assert eval_documents(tokenized) == ["eval"]


def test_a_file_beside_a_folder_with_splits_has_no_eval_data(splits, tmp_path):
    file = tmp_path / "file.txt"
    file.write_text("a file")
    tokenized = tokenize_data(
        splits, file, dataset_train_split="train_sft", dataset_test_split="test_sft"
    )
    assert eval_documents(tokenized) == ["eval"]
    assert tokenized.metadata.records == 3 + 1 + 1
    rows_of_folder, rows_of_file = tokenized.metadata.source_rows
    assert rows_of_folder > 0
    assert rows_of_file > 0


@pytest.mark.parametrize("split", ["train_sft", "test_sft"])
def test_sources_of_arrow_tables_may_have_artificial_nulls(splits, split):
    source = open_split(splits, split)
    assert source.has_artificial_nulls
    assert source.has_splits


def test_the_place_of_a_record_names_its_split(splits):
    first = next(open_split(splits, "test_sft").records(None))
    assert "test_sft" in first.place
    assert first.place.endswith("row 0")


def test_shards_of_a_split_are_joined(tmp_path):
    write_texts(tmp_path / "shards" / "train-00000-of-00002.parquet", "a", "b")
    write_texts(tmp_path / "shards" / "train-00001-of-00002.parquet", "c")
    assert train_documents(tokenize_data(tmp_path / "shards")) == ["a", "b", "c"]


def test_conversations_can_be_read_from_splits(tmp_path):
    for split, count in (("train", 9), ("test", 3)):
        write(
            tmp_path / "chats" / "data" / f"{split}-00000-of-00001.parquet",
            [{"prompt": f"{split} {i}?", "completion": f"it is {i}"} for i in range(count)],
        )
    config = DataConfig(
        dataset=[str(tmp_path / "chats")], tokenizer="byte", dataset_test_split="test"
    )
    metadata = tokenize(config, 95, ChatConfig()).metadata
    assert metadata.task == "conversations"
    assert metadata.records == 12
    assert metadata.eval_records == 3


def test_the_fingerprint_depends_on_the_content_and_the_split(chats, tmp_path):
    original = open_split(chats, "train_sft").fingerprint()
    assert open_split(chats, "test_sft").fingerprint() != original

    copy = shutil.copytree(chats, tmp_path / "copy")
    assert open_split(copy, "train_sft").fingerprint() == original
    write_texts(copy / "data" / "test_sft-00000-of-00001.parquet", "another")
    assert open_split(copy, "train_sft").fingerprint() != original


# --- configurations


def test_a_name_after_a_colon_chooses_the_configuration(languages):
    assert train_documents(tokenize_data(f"{languages}:de")) == ["a text in de"]
    german = open_split(f"{languages}:de", "train")
    english = open_split(f"{languages}:en", "train")
    assert german.fingerprint() != english.fingerprint()


def test_a_wrong_configuration_is_an_error_that_names_the_choices(languages):
    assert complaint(languages).endswith(
        f"it has several configurations; choose one of en, de, as {languages}:en."
    )
    assert "it has no configuration 'fr'; choose one of en, de" in complaint(f"{languages}:fr")
    assert "write FOLDER or FOLDER:CONFIGURATION" in complaint(f"{languages}:")


# --- folders of save_to_disk


@pytest.fixture
def saved(tmp_path) -> Path:
    """A ``Dataset``, saved with a selection and an order of its rows."""
    dataset = datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).select([2, 0])
    dataset.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_data_set_keeps_its_selection_and_order(saved):
    assert train_documents(tokenize_data(saved)) == ["c", "a"]
    assert "has no splits" in complaint(saved, dataset_train_split="train")


def test_a_moved_data_set_keeps_its_fingerprint(saved, tmp_path):
    original = open_source(str(saved)).fingerprint()
    moved = saved.rename(tmp_path / "moved")
    assert open_source(str(moved)).fingerprint() == original


def test_a_damaged_or_absent_arrow_file_is_an_error(saved):
    (file,) = saved.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-200])
    assert "is not an Arrow file, or it is damaged" in complaint(saved)
    file.unlink()
    assert f"{file}: No such file" in complaint(saved)


@pytest.mark.parametrize("content", ["{}", "oops", '{"_data_files": 3}'])
def test_a_damaged_state_file_is_an_error(saved, content):
    (saved / "state.json").write_text(content)
    assert "save the data set again" in complaint(saved)


# --- folders of data files


@pytest.fixture
def plain(tmp_path) -> Path:
    """A folder of two files, whose names datasets takes for splits."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(f'{{"text": "from {name}"}}\n')
    return folder


def test_all_files_of_a_folder_are_training_data_if_no_flag_names_a_split(plain):
    assert train_documents(tokenize_data(plain)) == ["from test", "from train"]


def test_a_flag_that_names_the_training_split_divides_a_folder(plain):
    tokenized = tokenize_data(plain, dataset_train_split="train")
    assert train_documents(tokenized) == ["from train"]


@pytest.mark.parametrize("settings", [{}, {"dataset_train_split": "train"}])
def test_a_flag_that_names_the_test_split_divides_a_folder(plain, settings):
    tokenized = tokenize_data(plain, dataset_test_split="test", **settings)
    assert train_documents(tokenized) == ["from train"]
    assert eval_documents(tokenized) == ["from test"]


def test_a_damaged_file_of_a_split_is_an_error(plain):
    (plain / "train.jsonl").write_text('{"text": "fine"}\n{oops\n')
    message = complaint(plain, dataset_train_split="train")
    assert message.startswith(f"--dataset {plain} cannot be loaded: ")


def test_a_damaged_shard_is_an_error(chats):
    shard = chats / "data" / "test_sft-00000-of-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-9])
    message = complaint(chats, dataset_train_split="train_sft")
    assert message.startswith(f"--dataset {chats} cannot be loaded: ")


@pytest.mark.parametrize(
    ("name", "reason"),
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
def test_a_wrong_name_is_an_error_with_the_reason(chats, monkeypatch, name, reason):
    monkeypatch.chdir(chats.parent)
    message = complaint(name)
    assert message.startswith(f"--dataset {name}")
    assert reason in message
