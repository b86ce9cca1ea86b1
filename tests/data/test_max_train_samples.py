"""--max_train_samples: the first training records of each data set, and the same eval data."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.config import ChatConfig, DataConfig
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError
from tests.data.test_eval_data import TASKS, shown, text, write
from tests.data.test_prepare import documents_of

NAMES = [f"name{number:02}" for number in range(40)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))


def made_of(
    path: str, chat: Any, count: int | None, unpaired: bool = False, **settings: Any
) -> Tokenized:
    data = DataConfig(dataset=[path], **{"tokenizer": "byte", "eval_fraction": 0.3} | settings)
    data.max_train_samples = count
    return tokenize(data, 95 if chat else 4, chat and chat(), unpaired=unpaired)


def names_in(rows: Any, made: Tokenized) -> list[str]:
    content = shown(rows, made)
    return [name for name in NAMES if name in content]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
@pytest.mark.parametrize(
    ("task", "unpaired"), [("text", False), ("chats", False), ("pairs", False), ("pairs", True)]
)
def test_the_first_training_records_are_trained_on_and_the_eval_data_stay(
    tmp_path: Path, task: str, unpaired: bool, tokenizer: str
) -> None:
    chat, record = TASKS[task]
    path = write(tmp_path / "data.jsonl", [record(name) for name in NAMES])
    all_made = made_of(path, chat, None, unpaired, tokenizer=tokenizer)
    made = made_of(path, chat, 5, unpaired, tokenizer=tokenizer)

    all_train = names_in(all_made.train, all_made)
    all_eval = names_in(all_made.eval, all_made)
    assert sorted(all_train + all_eval) == NAMES
    assert names_in(made.train, made) == all_train[:5]
    assert names_in(made.eval, made) == all_eval
    assert made.metadata.records == 5 + len(all_eval)
    assert made.metadata.data_sha256 != all_made.metadata.data_sha256
    if tokenizer == "bpe:300":  # the vocabulary is made of these records alone
        assert made.metadata.tokenizer_sha256 != all_made.metadata.tokenizer_sha256
    # More than there are changes nothing.
    most = made_of(path, chat, 1000, unpaired, tokenizer=tokenizer)
    assert most.metadata.data_sha256 == all_made.metadata.data_sha256


def test_each_data_set_has_its_own_count_and_eval_files_are_read_completely(
    tmp_path: Path,
) -> None:
    names = {"a": NAMES[:10], "b": NAMES[10:20], "test": NAMES[20:]}
    paths = {}
    for key, of_file in names.items():
        paths[key] = write(tmp_path / f"{key}.jsonl", [text(name) for name in of_file])
    data = DataConfig(
        dataset=[paths["a"], paths["b"]],
        eval_dataset=[paths["test"]],
        tokenizer="byte",
        mixture=[3, 1],
        max_train_samples=4,
    )
    made = tokenize(data, 16)
    assert names_in(made.train, made) == NAMES[:4] + NAMES[10:14]
    assert names_in(made.eval, made) == NAMES[20:]


@pytest.mark.parametrize(("count", "train"), [(1, 1), (2, 2), (3, 3)])
def test_the_end_of_the_longest_document_is_the_eval_data_even_if_its_beginning_is_left_out(
    tmp_path: Path, count: int, train: int
) -> None:
    """Three documents are too few for hashes."""
    texts = ["one", "two", "a document that is much longer than the others"]
    path = write(tmp_path / "data.jsonl", [{"text": each} for each in texts])
    made = made_of(path, None, count, eval_fraction=0.1, tokenizer="byte")
    expected = [*texts[:2], texts[2][:41]][:train]
    assert documents_of(made.train, made) == expected
    assert documents_of(made.eval, made) == [texts[2][41:]]


def test_bad_records_count_and_are_left_out(tmp_path: Path) -> None:
    records = [{"prompt": "1?", "completion": None}]
    records += [{"prompt": f"{name}?", "completion": f"it is {name}"} for name in NAMES]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(dataset=[str(path)], tokenizer="byte", eval_fraction=0.0, max_train_samples=3)
    made = tokenize(data, 95, ChatConfig(on_bad_row="skip"))
    assert names_in(made.train, made) == NAMES[:2]
    assert made.metadata.audit is not None
    assert (made.metadata.audit["records"], made.metadata.audit["bad"]) == (3, 1)


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="--max_train_samples 0 is out of range"):
        DataConfig(max_train_samples=0)
