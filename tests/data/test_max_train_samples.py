"""``--max_train_samples``: the first training records of each data set, and the same eval data."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.config import ChatConfig, DataConfig
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError
from tests.data.tasks import TASKS, shown, text_record, write_dataset

pytestmark = pytest.mark.usefixtures("cache")

NAMES = [f"name{number:02}" for number in range(40)]


def names_in(rows: Any, tokenized: Tokenized) -> list[str]:
    """Return the names that the text of some rows contains."""
    content = shown(rows, tokenized)
    return [name for name in NAMES if name in content]


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
    tmp_path: Path, task: str, unpaired: bool, tokenizer: str
) -> None:
    chat_type, record_of = TASKS[task]
    path = write_dataset(tmp_path / "data.jsonl", [record_of(name) for name in NAMES])

    def tokenize_first(count: int | None) -> Tokenized:
        data = DataConfig(
            dataset=[path], tokenizer=tokenizer, eval_fraction=0.3, max_train_samples=count
        )
        if chat_type is None:
            return tokenize(data, max_length=4)
        return tokenize(data, max_length=95, chat=chat_type(), unpaired=unpaired)

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


def test_each_data_set_has_its_own_count_and_eval_files_are_read_completely(
    tmp_path: Path,
) -> None:
    first = write_dataset(tmp_path / "a.jsonl", [text_record(name) for name in NAMES[:10]])
    second = write_dataset(tmp_path / "b.jsonl", [text_record(name) for name in NAMES[10:20]])
    eval = write_dataset(tmp_path / "eval.jsonl", [text_record(name) for name in NAMES[20:]])
    data = DataConfig(
        dataset=[first, second],
        eval_dataset=[eval],
        tokenizer="byte",
        mixture=[3, 1],
        max_train_samples=4,
    )

    tokenized = tokenize(data, max_length=16)

    assert names_in(tokenized.train, tokenized) == NAMES[:4] + NAMES[10:14]
    assert names_in(tokenized.eval, tokenized) == NAMES[20:]


def test_a_bad_record_that_is_skipped_counts_as_one_of_the_first(tmp_path: Path) -> None:
    bad = {"prompt": "1?", "completion": None}
    good = [{"prompt": f"{name}?", "completion": f"it is {name}"} for name in NAMES]
    path = write_dataset(tmp_path / "data.jsonl", [bad, *good])
    data = DataConfig(dataset=[path], tokenizer="byte", eval_fraction=0.0, max_train_samples=3)

    tokenized = tokenize(data, max_length=95, chat=ChatConfig(on_bad_row="skip"))

    assert names_in(tokenized.train, tokenized) == NAMES[:2]
    assert tokenized.metadata.audit is not None
    assert tokenized.metadata.audit["records"] == 3
    assert tokenized.metadata.audit["bad"] == 1


def test_fewer_than_one_record_is_refused() -> None:
    with pytest.raises(UserError, match="--max_train_samples 0 is out of range"):
        DataConfig(max_train_samples=0)
