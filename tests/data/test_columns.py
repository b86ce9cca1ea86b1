"""--columns OURS=THEIRS reads fields of any name as those of a format."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.config import ChatConfig, PairConfig
from llmtrain.data.formats import RECORD_FIELDS
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from tests.data.preparation import data_config, write_records

pytestmark = pytest.mark.usefixtures("cache")

LENGTH = 127

# A record of each format.
RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": "some words"},
    "messages": {
        "messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}]
    },
    "prompt_completion": {"prompt": "2?", "completion": "two"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "two"}],
        "system": "Be brief.",
    },
    "alpaca": {"instruction": "Count.", "input": "2", "output": "two"},
    "pairs": {"prompt": "2?", "chosen": "two", "rejected": "three"},
    "labelled_answers": {"prompt": "2?", "completion": "two", "label": True},
}


def write(path: Path, record: dict[str, Any]) -> Path:
    """Write a record three times."""
    return write_records(path, [record] * 3)


def tokenize_file(path: Path, format: str, columns: list[str], **settings: Any) -> Tokenized:
    chat: ChatConfig | PairConfig | None = ChatConfig()
    if format in ("pairs", "labelled_answers"):
        chat = PairConfig()
    return tokenize(
        data_config(path, columns=columns, **settings),
        8 if format == "text" else LENGTH,
        None if format == "text" else chat,
        unpaired=format == "labelled_answers",
    )


def tokenize_chats(*paths: Path, columns: list[str], **settings: Any) -> Tokenized:
    return tokenize(data_config(*paths, columns=columns, **settings), LENGTH, ChatConfig())


# --- one data set


@pytest.mark.parametrize(
    ("format", "suffix"),
    [*((format, "jsonl") for format in RECORDS), ("sharegpt", "parquet"), ("alpaca", "csv")],
)
def test_renamed_fields_make_the_rows_of_the_original_ones(tmp_path, format, suffix):
    record = RECORDS[format]
    renamed_record = {f"their_{name}": value for name, value in record.items()}
    original = write(tmp_path / f"original.{suffix}", record)
    renamed = write(tmp_path / f"renamed.{suffix}", renamed_record)
    columns = [f"{name}=their_{name}" for name in record]

    expected = tokenize_file(original, format, columns=[])
    tokenized = tokenize_file(renamed, format, columns=columns)
    assert tokenized.metadata.data_sha256 == expected.metadata.data_sha256


def test_a_renamed_field_replaces_the_one_of_its_new_name(tmp_path):
    original = write(tmp_path / "a.jsonl", RECORDS["prompt_completion"])
    expected = tokenize_chats(original, columns=[])
    for record, columns in (
        ({"prompt": "unused", "question": "2?", "completion": "two"}, ["prompt=question"]),
        ({"a:b=c": "2?", "completion": "two"}, ["prompt=a:b=c"]),
        ({"prompt": "two", "completion": "2?"}, ["prompt=completion", "completion=prompt"]),
        ({"instruction": "2?", "output": "two"}, ["prompt=instruction", "completion=output"]),
    ):
        path = write(tmp_path / "b.jsonl", record)
        tokenized = tokenize_chats(path, columns=columns)
        assert tokenized.metadata.data_sha256 == expected.metadata.data_sha256


def test_a_record_without_a_renamed_field_does_not_fall_back_to_its_new_name(tmp_path):
    complete = {"question": "2?", "completion": "two"}
    path = write_records(tmp_path / "a.jsonl", [complete, RECORDS["prompt_completion"]])
    with pytest.raises(UserError, match=r"line 2: .*prompt"):
        tokenize_chats(path, columns=["prompt=question"])


def test_columns_are_part_of_the_cache_key(tmp_path, capsys):
    record = {"prompt": "a", "completion": "b", "question": "c"}
    path = write(tmp_path / "a.jsonl", record)
    for word in ("prompt=question", "completion=question"):
        tokenize_chats(path, columns=[word])
        assert "; tokenised\n" in capsys.readouterr().out


# --- several data sets

RENAMED = ["prompt=question", "completion=answer"]


def test_eval_data_have_the_renamed_fields_or_those_of_the_format(tmp_path):
    renamed = write(tmp_path / "a.jsonl", {"question": "2?", "answer": "two"})
    original = write(tmp_path / "b.jsonl", RECORDS["prompt_completion"])
    for eval_path in (renamed, original):
        tokenized = tokenize_chats(renamed, columns=RENAMED, eval_dataset=[str(eval_path)])
        assert [*tokenized.eval] == [*tokenized.train]


def test_eval_data_with_some_of_the_renamed_fields_are_an_error_with_their_place(tmp_path):
    train = write(tmp_path / "a.jsonl", {"question": "2?", "answer": "two"})
    eval = write(tmp_path / "b.jsonl", {"question": "2?", "completion": "two"})
    with pytest.raises(UserError, match=r"b\.jsonl, line 1: no field 'answer' for --columns"):
        tokenize_chats(train, columns=RENAMED, eval_dataset=[str(eval)])


# --- errors


@pytest.mark.parametrize(
    ("format", "columns", "hint"),
    [
        ("text", "body=text", ", ".join(RECORD_FIELDS)),
        ("text", "text=body", "body"),
        ("pairs", "text=prompt", "--columns text=prompt"),
        ("prompt_completion", "prompt=", "--columns prompt="),
        ("prompt_completion", "prompt=a prompt=b", "--columns prompt=b"),
        ("prompt_completion", "prompt=a completion=a", "--columns completion=a"),
        ("prompt_completion", "prompt=q", "PATH, line 1: no field 'q'"),
    ],
)
def test_a_wrong_column_is_an_error_that_names_it(tmp_path, format, columns, hint):
    path = write(tmp_path / "a.jsonl", RECORDS[format])

    with pytest.raises(UserError) as error:
        tokenize_file(path, format, columns.split())

    assert hint.replace("PATH", str(path)) in str(error.value)
    assert "\n" not in str(error.value)
