"""--columns OURS=THEIRS reads fields of any name as those of a format."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data.column_names import ColumnNames
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.formats import RECORD_FIELDS
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError

BLOCK = 127
MESSAGES = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}]
SHAREGPT = [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "two"}]

# A record of each format.
RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": "some words"},
    "messages": {"messages": MESSAGES},
    "prompt_completion": {"prompt": "2?", "completion": "two"},
    "sharegpt": {"conversations": SHAREGPT, "system": "Be brief."},
    "alpaca": {"instruction": "Count.", "input": "2", "output": "two"},
    "pairs": {"prompt": "2?", "chosen": "two", "rejected": "three"},
    "labelled_answers": {"prompt": "2?", "completion": "two", "label": True},
}
WITHOUT_LISTS = ["text", "prompt_completion", "alpaca", "pairs", "labelled_answers"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))


def write(path: Path, record: dict[str, Any], count: int = 3) -> str:
    """Write a record several times, in the format of the suffix."""
    records = [record] * count
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, record)
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_text(json.dumps(records))
    return str(path)


def chat_config(format: str) -> RowConfig | None:
    """Return the ``chat`` argument of :func:`tokenize` for a format."""
    if format == "text":
        return None
    return PairConfig() if format in ("pairs", "labelled_answers") else ChatConfig()


def config(*dataset: str, columns: list[str], **settings: Any) -> DataConfig:
    return DataConfig(
        dataset=list(dataset), tokenizer="byte", eval_fraction=0.0, columns=columns, **settings
    )


def tokenize_file(path: str, format: str, columns: list[str], **settings: Any) -> Tokenized:
    return tokenize(
        config(path, columns=columns, **settings),
        8 if format == "text" else BLOCK,
        chat_config(format),
        unpaired=format == "labelled_answers",
    )


def tokenize_chats(*paths: str, columns: list[str], **settings: Any) -> Tokenized:
    return tokenize(config(*paths, columns=columns, **settings), BLOCK, ChatConfig())


def complaint(path: str, format: str, columns: list[str], **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        tokenize_file(path, format, columns, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def first_rows(tokenized: Tokenized) -> list[dict]:
    """Return the first training row of each data set."""
    starts = itertools.accumulate([0, *tokenized.metadata.source_rows[:-1]])
    return [tokenized.train[start] for start in starts]


def decode(row: dict, tokenized: Tokenized) -> str:
    return tokenized.tokenizer.decode([token for token in row["input_ids"] if token >= 0])


# --- one data set


def check_renamed_fields(folder: Path, format: str, suffix: str) -> None:
    """Check that a renamed copy of a file makes the rows of the file."""
    record = RECORDS[format]
    renamed_record = {f"their_{name}": value for name, value in record.items()}
    original = write(folder / f"original{suffix}", record)
    renamed = write(folder / f"renamed{suffix}", renamed_record)
    columns = [f"{name}=their_{name}" for name in record]

    expected = tokenize_file(original, format, columns=[])
    tokenized = tokenize_file(renamed, format, columns=columns)
    assert tokenized.metadata.data_sha256 == expected.metadata.data_sha256


@pytest.mark.parametrize("format", RECORDS)
@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_renamed_fields_make_the_rows_of_the_original_ones(tmp_path, format, suffix):
    check_renamed_fields(tmp_path, format, suffix)


@pytest.mark.parametrize("format", WITHOUT_LISTS)
def test_fields_of_csv_can_be_renamed(tmp_path, format):
    check_renamed_fields(tmp_path, format, ".csv")


def test_two_fields_can_be_exchanged(tmp_path):
    exchanged = write(tmp_path / "a.json", {"prompt": "two", "completion": "2?"})
    original = write(tmp_path / "b.json", {"prompt": "2?", "completion": "two"})
    expected = tokenize_chats(original, columns=[])
    tokenized = tokenize_chats(exchanged, columns=["prompt=completion", "completion=prompt"])
    assert tokenized.metadata.data_sha256 == expected.metadata.data_sha256


def test_a_renamed_field_replaces_the_one_of_its_new_name(tmp_path):
    record = {"prompt": "unused", "question": "2?", "completion": "two"}
    path = write(tmp_path / "a.json", record)
    tokenized = tokenize_chats(path, columns=["prompt=question"])
    text = decode(tokenized.train[0], tokenized)
    assert "2?" in text
    assert "unused" not in text


def test_a_record_without_the_renamed_field_does_not_use_another(tmp_path):
    path = tmp_path / "a.json"
    records = [{"question": "2?", "completion": "two"}, {"prompt": "3?", "completion": "three"}]
    path.write_text(json.dumps(records))
    message = complaint(str(path), "prompt_completion", ["prompt=question"])
    assert "record 1: field 'prompt' is None" in message


def test_columns_are_part_of_the_cache_key(tmp_path, capsys):
    path = write(tmp_path / "a.json", {"prompt": "a", "completion": "b", "question": "c"})
    hashes = set()
    for columns in ([], ["prompt=question"], ["completion=question"]):
        hashes.add(tokenize_chats(path, columns=columns).metadata.data_sha256)
        assert "; tokenised\n" in capsys.readouterr().out
    assert len(hashes) == 3

    tokenize_chats(path, columns=["prompt=question"])
    assert "; from the cache\n" in capsys.readouterr().out


def test_the_column_text_is_the_text_field(tmp_path, capsys):
    path = write(tmp_path / "a.json", {"body": "some words", "text": "other words"})
    with_columns = tokenize_file(path, "text", ["text=body"])
    capsys.readouterr()
    with_text_field = tokenize_file(path, "text", [], text_field="body")
    assert capsys.readouterr().out.endswith("; from the cache\n")
    assert with_columns.metadata == with_text_field.metadata


def test_the_column_text_does_not_apply_to_text_files(tmp_path):
    path = tmp_path / "b.txt"
    path.write_text("a text file has no fields")
    assert tokenize_file(str(path), "text", ["text=body"]).metadata.records == 1


# --- several data sets

RENAMED = ["prompt=question", "completion=answer"]


def test_columns_rename_eval_data_too(tmp_path):
    record = {"question": "2?", "answer": "two"}
    train = write(tmp_path / "t.json", record)
    eval = write(tmp_path / "e.parquet", record)
    tokenized = tokenize_chats(train, columns=RENAMED, eval_dataset=[eval])
    assert tokenized.metadata.eval_records == 3


def test_data_with_the_names_of_the_format_are_read_beside_renamed_ones(tmp_path):
    renamed = write(tmp_path / "a.json", {"question": "2?", "answer": "two"})
    original = write(tmp_path / "b.json", {"prompt": "3?", "completion": "three"})
    tokenized = tokenize_chats(renamed, columns=RENAMED, eval_dataset=[original])
    assert "three" in decode(tokenized.eval[0], tokenized)


def test_data_with_only_some_of_the_renamed_fields_are_an_error(tmp_path):
    renamed = write(tmp_path / "a.json", {"question": "2?", "answer": "two"})
    half = write(tmp_path / "c.json", {"question": "3?", "completion": "three"})
    message = complaint(renamed, "prompt_completion", RENAMED, eval_dataset=[half])
    assert "c.json, record 0: no field 'answer' for --columns completion=answer" in message


@pytest.mark.parametrize("is_text_first", [True, False])
@pytest.mark.parametrize("is_for_one_file", [True, False])
def test_columns_of_conversations_do_not_apply_to_text(tmp_path, is_text_first, is_for_one_file):
    chats = write(tmp_path / "chats.json", {"question": "2?", "answer": "two"})
    plain = tmp_path / "plain.txt"
    plain.write_text("plain words")
    bodies = write(tmp_path / "bodies.json", {"body": "some words", "prompt": "unused"})
    sources = [bodies, str(plain), chats] if is_text_first else [chats, str(plain), bodies]
    text_column = f"{bodies}:text=body" if is_for_one_file else "text=body"

    tokenized = tokenize_chats(*sources, columns=[*RENAMED, text_column])
    rows = [decode(row, tokenized) for row in tokenized.train]
    text_row, plain_row, chat_row = rows if is_text_first else rows[::-1]
    assert "2?" in chat_row
    assert "plain words" in plain_row
    assert "<|endoftext|>".join(["", *["some words"] * 3, ""]) in text_row
    assert "unused" not in text_row


def test_a_column_can_be_for_one_data_set(tmp_path):
    first = write(tmp_path / "a.json", {"question": "2?", "answer": "two"})
    second = write(tmp_path / "b.json", {"question": "3?", "answer": "3", "solution": "three"})
    third = write(tmp_path / "c.json", {"query": "4?", "completion": "four", "prompt": "unused"})
    columns = [
        *RENAMED,
        f"{second}:completion=solution",
        f"{third}:prompt=query",
        f"{third}:completion=completion",
    ]
    tokenized = tokenize_chats(first, columns=columns, eval_dataset=[second, third])
    row_of_second, row_of_third = (decode(row, tokenized) for row in tokenized.eval)
    assert "3?" in row_of_second
    assert "three" in row_of_second
    assert "4?" in row_of_third
    assert "four" in row_of_third
    assert "unused" not in row_of_third


def test_each_data_set_can_have_its_own_text_field(tmp_path, capsys):
    body = write(tmp_path / "a.json", {"body": "some words", "content": "unused"}, count=1)
    content = write(tmp_path / "b.json", {"body": "unused", "content": "other words"}, count=1)
    text = write(tmp_path / "c.json", {"text": "the third one", "content": "unused"}, count=1)
    columns = [f"{body}:text=body", f"{content}:text=content"]

    tokenized = tokenize(config(body, content, text, columns=columns), 9)
    first, second, third = (decode(row, tokenized) for row in first_rows(tokenized))
    assert first == "<|endoftext|>some word"
    assert second == "<|endoftext|>other wor"
    assert third == "<|endoftext|>the third"
    assert "3 documents" in capsys.readouterr().out


def test_text_fields_of_data_sets_are_part_of_the_cache_key(tmp_path, capsys):
    record = {"body": "some words", "content": "other words"}
    first = write(tmp_path / "a.json", record)
    second = write(tmp_path / "b.json", record)

    def data_hash(*columns: str, **settings: Any) -> str:
        data = config(first, second, columns=list(columns), **settings)
        return tokenize(data, 8).metadata.data_sha256

    both = data_hash(f"{first}:text=body", f"{second}:text=content")
    assert data_hash(f"{first}:text=body", f"{second}:text=body") != both
    assert "from the cache" not in capsys.readouterr().out
    data_hash(f"{first}:text=body", f"{second}:text=content")
    assert "; from the cache\n" in capsys.readouterr().out

    # --text_field is for the data sets that --columns does not name.
    assert data_hash(f"{first}:text=body", text_field="content") == both


def test_columns_for_one_data_set_are_part_of_the_cache_key(tmp_path, capsys):
    record = {"prompt": "a", "completion": "b", "question": "c"}
    first = write(tmp_path / "a.json", record)
    second = write(tmp_path / "b.json", record)
    hashes = set()
    for path in (first, second):
        tokenized = tokenize_chats(first, second, columns=[f"{path}:prompt=question"])
        hashes.add(tokenized.metadata.data_sha256)
        assert "; tokenised\n" in capsys.readouterr().out
    assert len(hashes) == 2


# --- the syntax


@pytest.mark.parametrize(
    ("text", "dataset", "ours", "theirs"),
    [
        ("prompt=question", "", "prompt", "question"),
        ("builtin:python-functions:text=prompt", "builtin:python-functions", "text", "prompt"),
        ("year=2026/a.jsonl:prompt=q", "year=2026/a.jsonl", "prompt", "q"),
        ("someone/data@v1:de:prompt=q", "someone/data@v1:de", "prompt", "q"),
        ("prompt=a:text=b", "", "prompt", "a:text=b"),
        ("a.csv:label=x=1", "a.csv", "label", "x=1"),
    ],
)
def test_names_of_data_sets_and_fields_may_have_colons_and_equals_signs(
    text, dataset, ours, theirs
):
    (column,) = ColumnNames.parse([text]).columns
    assert column.dataset == dataset
    assert column.ours == ours
    assert column.theirs == theirs
    assert str(column) == text


# --- errors


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ("b.json:prompt=q", "--columns b.json:prompt=q: b.json is not a name in --dataset or"),
        ("PATH:prompt=a PATH:prompt=b", "--columns PATH:prompt=b: prompt is set twice"),
        ("PATH:prompt=a PATH:completion=a", "completion=a: the field a is used twice"),
        ("prompt=a PATH:completion=a", "--columns PATH:completion=a: the field a is used"),
        ("PATH:prompt=", "--columns PATH:prompt=: write OURS=THEIRS"),
        (":prompt=a", "--columns :prompt=a: write OURS=THEIRS"),
        ("PATH:query=prompt", "no format has a field 'query'"),
        ("PATH:prompt=q", "record 0: no field 'q' for --columns prompt=q; the record has prompt"),
        ("PATH:text=prompt", "--columns PATH:text=prompt is for text, but PATH holds conv"),
    ],
)
def test_a_wrong_column_for_one_data_set_is_an_error(tmp_path, columns, error):
    path = write(tmp_path / "a.json", RECORDS["prompt_completion"])
    message = complaint(path, "prompt_completion", columns.replace("PATH", path).split())
    assert error.replace("PATH", path) in message


def test_a_wrong_column_for_all_is_an_error_beside_one_for_a_data_set(tmp_path):
    first = write(tmp_path / "a.json", {"query": "2?", "completion": "two"})
    second = write(tmp_path / "b.json", {"prompt": "2?", "completion": "two"})
    columns = ["prompt=qustion", f"{first}:prompt=query"]
    message = complaint(first, "prompt_completion", columns, eval_dataset=[second])
    assert "b.json, record 0: no field 'qustion' for --columns prompt=qustion" in message


def test_a_column_for_text_names_only_the_text(tmp_path):
    text = write(tmp_path / "a.json", {"body": "some words"})
    chats = write(tmp_path / "b.json", {"prompt": "2?", "completion": "two"})
    message = complaint(chats, "prompt_completion", [f"{text}:prompt=body"], eval_dataset=[text])
    assert f"--columns {text}:prompt=body: {text} is read as text, which has no field" in message


@pytest.mark.parametrize(
    ("format", "columns", "error"),
    [
        ("prompt_completion", ["prompt"], "--columns prompt: write OURS=THEIRS"),
        ("prompt_completion", ["prompt="], "--columns prompt=: write OURS=THEIRS"),
        ("prompt_completion", ["=question"], "--columns =question: write OURS=THEIRS"),
        ("prompt_completion", [""], "--columns : write OURS=THEIRS"),
        ("prompt_completion", ["prompt=a", "prompt=b"], "prompt is set twice"),
        ("prompt_completion", ["prompt=a", "completion=a"], "the field a is used twice"),
        ("prompt_completion", ["query=prompt"], "no format has a field 'query'"),
        ("prompt_completion", ["Prompt=prompt"], "no format has a field 'Prompt'"),
        (
            "prompt_completion",
            ["prompt=q"],
            "record 0: no field 'q' for --columns prompt=q; the record has prompt, completion",
        ),
        ("pairs", ["chosen=best"], "no field 'best' for --columns chosen=best; the record has"),
        ("pairs", ["text=prompt"], "--columns text=prompt is for text, but"),
        ("prompt_completion", ["text=prompt"], "--columns text=prompt is for text, but"),
        (
            "text",
            ["prompt=text"],
            "is read as text, which has no field 'prompt'; rename all fields",
        ),
        ("text", ["text=body"], "no field 'body'; the record has text"),
    ],
)
def test_a_wrong_column_is_an_error(tmp_path, format, columns, error):
    path = write(tmp_path / "a.json", RECORDS[format])
    assert error in complaint(path, format, columns)


def test_the_error_for_an_unknown_field_names_all_fields(tmp_path):
    path = write(tmp_path / "a.json", RECORDS["text"])
    assert ", ".join(RECORD_FIELDS) in complaint(path, "text", ["body=text"])
    for record in RECORDS.values():
        assert set(record) <= set(RECORD_FIELDS)


def test_columns_and_text_field_that_both_name_the_text_are_an_error(tmp_path):
    path = write(tmp_path / "a.json", {"body": "some words"})
    message = complaint(path, "text", ["text=body"], text_field="body")
    assert "--columns text=body and --text_field body both name" in message
