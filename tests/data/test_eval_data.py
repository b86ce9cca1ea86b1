"""Which records are trained on, and which are eval data: all of one, or the first of another."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from llmtrain.data.config import ChatConfig, DataConfig, PairConfig
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from tests.data.chat_records import chat_record
from tests.data.preparation import complaint, documents_of, left_behind, write_records

pytestmark = pytest.mark.usefixtures("cache")

BLOCK = 95
NAMES = [f"name{number:02}" for number in range(40)]


def text_record(name: str) -> dict:
    return {"text": f"a document about {name}, and more words"}


def completion_record(name: str) -> dict:
    return {"prompt": f"{name}?", "completion": f"it is {name}"}


def pair_record(name: str) -> dict:
    return {"prompt": f"{name}?", "chosen": f"it is {name}", "rejected": f"not {name}"}


# What a data set can be for: the `chat` argument of tokenize(), and a record with a name in it.
TASKS = {
    "text": (None, text_record),
    "chats": (ChatConfig(on_bad_row="skip"), completion_record),
    "pairs": (PairConfig(on_bad_row="skip"), pair_record),
}


def write(path: Path, records: list[dict]) -> str:
    """Write records as JSON Lines, and return the value of ``--dataset``."""
    return str(write_records(path, records))


def config(*dataset: str, **settings: Any) -> DataConfig:
    return DataConfig(dataset=list(dataset), **{"tokenizer": "byte", **settings})


def names_in(rows: Any, tokenized: Tokenized) -> list[str]:
    """Return the names that the text of some rows contains."""
    # A row of text ends with the token that the next row begins with.
    overlap = 1 if tokenized.metadata.task == "text" else 0
    text = ""
    for row in rows:
        tokens = row["input_ids"][: len(row["input_ids"]) - overlap]
        text += tokenized.tokenizer.decode([token for token in tokens if token >= 0])
    return [name for name in NAMES if name in text]


# --- eval data of their own


@pytest.mark.parametrize("task", TASKS)
def test_training_data_are_trained_on_and_eval_data_evaluated_on(tmp_path, capsys, task):
    chat, record = TASKS[task]
    bad_records = [] if task == "text" else [{**record("bad"), "prompt": 3}]
    train = write(tmp_path / "t.jsonl", [record(name) for name in NAMES[:27]])
    a = write(tmp_path / "a.jsonl", [record(name) for name in NAMES[27:31]] + bad_records)
    b = write(tmp_path / "b.jsonl", [record(name) for name in NAMES[31:]])
    tokenized = tokenize(config(train, eval_dataset=[a, b]), BLOCK, chat)
    metadata = tokenized.metadata

    assert names_in(tokenized.train, tokenized) == NAMES[:27]
    assert metadata.records - metadata.eval_records == 27
    assert metadata.eval_records == 4 + 9
    assert metadata.source_rows == [metadata.train_rows]

    rows_of_a, rows_of_b = metadata.eval_source_rows
    assert tokenized.eval_sources == {"a": rows_of_a, "b": rows_of_b}
    assert rows_of_a + rows_of_b == metadata.eval_rows == len(tokenized.eval)
    rows = [tokenized.eval[i] for i in range(len(tokenized.eval))]
    assert names_in(rows[:rows_of_a], tokenized) == NAMES[27:31]
    assert names_in(rows[rows_of_a:], tokenized) == NAMES[31:]

    if bad_records:
        assert metadata.audit.bad == 0
        assert metadata.eval_audit.bad == 1
        assert "and 1 bad one left out" in capsys.readouterr().out


def test_one_eval_file_of_two_training_files_has_no_loss_of_its_own(tmp_path):
    a, b, c = (write(tmp_path / f"{name}.jsonl", [text_record(name)]) for name in "abc")
    tokenized = tokenize(config(a, b, eval_dataset=[c], mixture=[3, 1]), 8)
    assert documents_of(tokenized.eval, tokenized) == [text_record("c")["text"]]
    assert tokenized.eval_sources == {}
    assert tokenized.mixture.sizes == tokenized.metadata.source_rows


def test_the_hashes_depend_on_the_choice_and_content_of_training_and_eval_files(tmp_path):
    a, b, c = (write(tmp_path / f"{name}.jsonl", [text_record(name)]) for name in "abc")

    eval_hashes = set()

    def data_hash(train: list[str], eval: list[str]) -> str:
        metadata = tokenize(config(*train, eval_dataset=eval), 8).metadata
        eval_hashes.add(metadata.eval_sha256)
        return metadata.data_sha256

    hashes = {
        data_hash([a], [b]),
        data_hash([a], [c]),
        data_hash([a], [b, c]),
        data_hash([a, b], [c]),
        data_hash([b], [a]),
        data_hash([a, b, c], []),
    }
    write(tmp_path / "b.jsonl", [text_record("another")])
    hashes.add(data_hash([a], [b]))
    assert len(hashes) == 7
    assert len(eval_hashes) == 6, "one eval file is used with two sets of training files"


def test_records_of_a_recipe_can_be_evaluated_on_files(tmp_path):
    records = datasets.Dataset.from_list([completion_record(name) for name in NAMES[1:]])
    eval = write(tmp_path / "e.jsonl", [completion_record(NAMES[0])])
    tokenized = tokenize(
        DataConfig(tokenizer="byte", eval_dataset=[eval]), BLOCK, ChatConfig(), records=records
    )
    assert names_in(tokenized.train, tokenized) == NAMES[1:]
    assert names_in(tokenized.eval, tokenized) == NAMES[:1]


# --- the first training records


@pytest.mark.parametrize(
    ("task", "unpaired", "tokenizer"),
    [
        ("text", False, "bpe:300"),
        ("chats", False, "byte"),
        ("chats", False, "bpe:300"),
        ("pairs", False, "byte"),
        ("pairs", True, "byte"),
    ],
)
def test_the_first_training_records_are_used_and_the_eval_data_stay(
    tmp_path, task, unpaired, tokenizer
):
    chat, record = TASKS[task]
    path = write(tmp_path / "data.jsonl", [record(name) for name in NAMES])

    def tokenize_first(count: int | None) -> Tokenized:
        data = config(path, tokenizer=tokenizer, eval_fraction=0.3, max_train_samples=count)
        return tokenize(data, 4 if chat is None else BLOCK, chat, unpaired=unpaired)

    complete = tokenize_first(None)
    limited = tokenize_first(5)
    more_than_there_are = tokenize_first(1000)

    train_names = names_in(complete.train, complete)
    eval_names = names_in(complete.eval, complete)
    assert sorted(train_names + eval_names) == NAMES
    assert names_in(limited.train, limited) == train_names[:5]
    assert names_in(limited.eval, limited) == eval_names
    assert limited.metadata.records == 5 + len(eval_names)
    assert limited.metadata.data_sha256 != complete.metadata.data_sha256
    assert more_than_there_are.metadata.data_sha256 == complete.metadata.data_sha256
    if tokenizer == "bpe:300":
        # The tokenizer is trained on the same records as the model.
        assert limited.metadata.tokenizer_sha256 != complete.metadata.tokenizer_sha256
    else:
        assert limited.metadata.eval_sha256 == complete.metadata.eval_sha256


def test_each_data_set_has_its_own_count_without_bad_records(tmp_path):
    bad = {"prompt": "1?", "completion": None}
    first = write(tmp_path / "a.jsonl", [bad, *map(completion_record, NAMES[:10])])
    second = write(tmp_path / "b.jsonl", list(map(completion_record, NAMES[10:20])))
    eval = write(tmp_path / "eval.jsonl", list(map(completion_record, NAMES[20:])))
    data = config(first, second, eval_dataset=[eval], mixture=[3, 1], max_train_samples=4)

    tokenized = tokenize(data, BLOCK, ChatConfig(on_bad_row="skip"))

    assert names_in(tokenized.train, tokenized) == NAMES[:4] + NAMES[10:14]
    assert names_in(tokenized.eval, tokenized) == NAMES[20:]
    assert tokenized.metadata.audit.records == 9
    assert tokenized.metadata.audit.bad == 1


def test_eval_data_alone_say_the_task_and_the_length(tmp_path: Path) -> None:
    chats = write_records(tmp_path / "chats.jsonl", [chat_record(f"q{i}", "a") for i in range(5)])
    data = DataConfig(dataset=[], tokenizer="byte", eval_dataset=[str(chats)])

    metadata = tokenize(data, "auto", ChatConfig()).metadata

    assert (metadata.task, metadata.block_size) == ("conversations", 64)


def test_lists_of_records_with_the_same_name_have_their_own_rows() -> None:
    data = DataConfig(tokenizer="byte", eval_fraction=0.0)
    for texts in (["one text"], ["another text"]):
        rows = tokenize(data, 4, records=texts, records_fingerprint="v1")
        assert rows.metadata.train_tokens == len(texts[0]) + 1


# --- errors


@pytest.mark.parametrize(
    ("task", "records"),
    [
        ("text", []),
        ("chats", [{"prompt": "a", "completion": "b" * 500}]),
        ("pairs", [{"prompt": "a", "chosen": "b", "rejected": "b"}]),
    ],
)
def test_eval_data_without_a_usable_record_are_an_error(tmp_path, cache, task, records):
    chat, record = TASKS[task]
    train = write(tmp_path / "t.jsonl", [record(name) for name in NAMES])
    eval = write(tmp_path / "e.jsonl", records)
    message = complaint(config(train, eval_dataset=[eval]), BLOCK, chat)
    assert message.startswith(f"--eval_dataset {eval}")
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("eval_dataset", {"eval_dataset": ["./absent.jsonl"]}),
        ("eval_dataset", {"eval_dataset": [""]}),
        ("dataset_test_split", {"dataset_test_split": "test"}),
        ("dataset_train_split", {"dataset_train_split": "train_sft"}),
        ("eval_fraction", {"eval_dataset": ["builtin:python-docs"], "eval_fraction": 0.1}),
        ("eval_fraction", {"dataset_test_split": "test", "eval_fraction": 0.1}),
        ("max_train_samples", {"max_train_samples": 0}),
    ],
)
def test_a_wrong_choice_of_data_is_an_error_that_names_the_flag(tmp_path, cache, flag, settings):
    train = write(tmp_path / "t.jsonl", [text_record("t")])

    def tokenize_chosen() -> None:
        data = config(train, **settings)
        data.origins = dict.fromkeys(settings, "command line")
        tokenize(data, BLOCK)

    with pytest.raises(UserError, match=f"^--{flag} "):
        tokenize_chosen()
    assert left_behind(cache) == []


@pytest.mark.parametrize("flag", ["dataset", "dataset_train_split", "dataset_test_split"])
def test_a_recipe_with_its_own_records_accepts_no_flag_for_others(flag):
    data = DataConfig(tokenizer="byte", **{flag: ["a.txt"] if flag == "dataset" else "test"})
    data.origins = {flag: "command line"}
    assert complaint(data, BLOCK, records=["a text"]).startswith(f"--{flag}")
