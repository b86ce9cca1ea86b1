"""--columns OURS=THEIRS reads fields of any name as those of a format."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.column_names import ColumnNames
from llmtrain.data.config import ChatConfig, PairConfig
from llmtrain.data.formats import RECORD_FIELDS
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError
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
        ({"prompt": "two", "completion": "2?"}, ["prompt=completion", "completion=prompt"]),
    ):
        path = write(tmp_path / "b.jsonl", record)
        tokenized = tokenize_chats(path, columns=columns)
        assert tokenized.metadata.data_sha256 == expected.metadata.data_sha256


def test_columns_are_part_of_the_cache_key(tmp_path, capsys):
    record = {"prompt": "a", "completion": "b", "question": "c"}
    first = write(tmp_path / "a.jsonl", record)
    second = write(tmp_path / "b.jsonl", record)
    hashes = set()
    for word in ("prompt=question", "completion=question", f"{first}:prompt=question"):
        hashes.add(tokenize_chats(first, second, columns=[word]).metadata.data_sha256)
        assert "; tokenised\n" in capsys.readouterr().out
    assert len(hashes) == 3

    tokenize_chats(first, second, columns=["prompt=question"])
    assert "; from the cache\n" in capsys.readouterr().out


# --- several data sets

RENAMED = ["prompt=question", "completion=answer"]


def test_eval_data_have_the_renamed_fields_or_those_of_the_format(tmp_path):
    renamed = write(tmp_path / "a.jsonl", {"question": "2?", "answer": "two"})
    original = write(tmp_path / "b.jsonl", RECORDS["prompt_completion"])
    for eval_path in (renamed, original):
        tokenized = tokenize_chats(renamed, columns=RENAMED, eval_dataset=[str(eval_path)])
        assert [*tokenized.eval] == [*tokenized.train]


def test_text_and_conversations_have_their_own_columns(tmp_path):
    bodies = write(tmp_path / "bodies.jsonl", {"body": "some words", "prompt": "unused"})
    contents = write(tmp_path / "contents.jsonl", {"content": "other words", "body": "unused"})
    plain = tmp_path / "plain.txt"
    plain.write_text("plain words")
    chats = write(tmp_path / "chats.jsonl", {"question": "2?", "answer": "two"})
    columns = [*RENAMED, "text=body", f"{contents}:text=content"]

    tokenized = tokenize_chats(bodies, contents, plain, chats, columns=columns)

    tokens = [token for row in tokenized.train for token in row["input_ids"]]
    text = tokenized.tokenizer.decode([token for token in tokens if token >= 0])
    for words in ("some words", "other words", "2?"):
        assert text.count(words) == 3
    assert text.count("plain words") == 1
    assert "unused" not in text


def test_a_column_can_be_for_one_data_set(tmp_path):
    first = write(tmp_path / "a.jsonl", {"question": "2?", "answer": "two"})
    second = write(tmp_path / "b.jsonl", {"question": "2?", "answer": "2", "solution": "two"})
    third = write(tmp_path / "c.jsonl", {"query": "2?", "completion": "two", "prompt": "unused"})
    columns = [
        *RENAMED,
        f"{second}:completion=solution",
        f"{third}:prompt=query",
        f"{third}:completion=completion",
    ]

    tokenized = tokenize_chats(first, columns=columns, eval_dataset=[str(second), str(third)])

    assert [*tokenized.eval] == [*tokenized.train] * 2


# --- the syntax and errors


@pytest.mark.parametrize(
    ("text", "dataset", "ours", "theirs"),
    [
        ("builtin:python-functions:text=prompt", "builtin:python-functions", "text", "prompt"),
        ("year=2026/a.jsonl:prompt=q", "year=2026/a.jsonl", "prompt", "q"),
        ("prompt=a:text=b", "", "prompt", "a:text=b"),
        ("a.csv:label=x=1", "a.csv", "label", "x=1"),
    ],
)
def test_names_of_data_sets_and_fields_may_have_colons_and_equals_signs(
    text, dataset, ours, theirs
):
    (column,) = ColumnNames.parse([text]).columns
    assert (column.dataset, column.ours, column.theirs) == (dataset, ours, theirs)
    assert str(column) == text


@pytest.mark.parametrize(
    ("format", "columns", "hint"),
    [
        ("text", "body=text", ", ".join(RECORD_FIELDS)),
        ("text", "text=body", "body"),
        ("text", "PATH:prompt=text", "--columns PATH:prompt=text"),
        ("pairs", "text=prompt", "--columns text=prompt"),
        ("prompt_completion", "prompt=", "--columns prompt="),
        ("prompt_completion", "prompt=a prompt=b", "--columns prompt=b"),
        ("prompt_completion", "prompt=a PATH:completion=a", "--columns PATH:completion=a"),
        ("prompt_completion", "b.json:prompt=q", "--columns b.json:prompt=q"),
        ("prompt_completion", "PATH:prompt=q", "PATH, line 1: no field 'q'"),
        ("prompt_completion", "PATH:text=prompt", "--columns PATH:text=prompt"),
        ("prompt_completion", ":prompt=a", "--columns :prompt=a"),
    ],
)
def test_a_wrong_column_is_an_error_that_names_it(tmp_path, format, columns, hint):
    path = write(tmp_path / "a.jsonl", RECORDS[format])

    with pytest.raises(UserError) as error:
        tokenize_file(path, format, columns.replace("PATH", str(path)).split())

    assert hint.replace("PATH", str(path)) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("records", "column"),
    [
        ([{"question": "2?", "completion": "two"}], "completion=answer"),
        ([{"question": "2?", "answer": "two"}, {"prompt": "3?", "answer": "three"}], "prompt"),
    ],
    ids=["first-record", "second-record"],
)
def test_a_record_without_one_of_the_renamed_fields_is_an_error(tmp_path, records, column):
    path = write_records(tmp_path / "a.jsonl", records)
    with pytest.raises(UserError, match=rf"line {len(records)}: .*{column}"):
        tokenize_chats(path, columns=RENAMED)


def test_columns_and_text_field_that_both_name_the_text_are_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", {"body": "some words"})
    with pytest.raises(UserError, match="--columns text=body and --text_field body"):
        tokenize_file(path, "text", ["text=body"], text_field="body")
