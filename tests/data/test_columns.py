"""--columns: fields of any name are read as those of a format, and a wrong name is one line."""

import csv
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
TALK = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}]
SHAREGPT = [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "two"}]

# A record of each format, and what the recipe passes as `chat`.
FORMATS: dict[str, tuple[dict[str, Any], type[RowConfig] | None]] = {
    "text": ({"text": "some words"}, None),
    "messages": ({"messages": TALK}, ChatConfig),
    "prompt_completion": ({"prompt": "2?", "completion": "two"}, ChatConfig),
    "sharegpt": ({"conversations": SHAREGPT, "system": "Be brief."}, ChatConfig),
    "alpaca": ({"instruction": "Count.", "input": "2", "output": "two"}, ChatConfig),
    "pairs": ({"prompt": "2?", "chosen": "two", "rejected": "three"}, PairConfig),
    "labelled_answers": ({"prompt": "2?", "completion": "two", "label": True}, PairConfig),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))


def write(path: Path, record: dict[str, Any], count: int = 3) -> str:
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


def tokenized(path: str, format: str, columns: list[str], **settings: Any) -> Tokenized:
    chat = FORMATS[format][1]
    data = DataConfig(
        dataset=[path], tokenizer="byte", eval_fraction=0.0, columns=columns, **settings
    )
    return tokenize(
        data, BLOCK if chat else 8, chat() if chat else None, unpaired=format == "labelled_answers"
    )


def complaint(path: str, format: str, columns: list[str], **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        tokenized(path, format, columns, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("suffix", [".json", ".parquet", ".csv"])
def test_renamed_fields_make_the_rows_of_the_usual_ones(tmp_path, format, suffix):
    record = FORMATS[format][0]
    if suffix == ".csv" and not all(isinstance(value, str | bool) for value in record.values()):
        pytest.skip("CSV holds no lists")
    usual = write(tmp_path / f"usual{suffix}", record)
    renamed = write(
        tmp_path / f"renamed{suffix}", {f"their_{name}": value for name, value in record.items()}
    )
    columns = [f"{name}=their_{name}" for name in record]
    made = tokenized(renamed, format, columns)
    assert made.metadata.data_sha256 == tokenized(usual, format, []).metadata.data_sha256


def test_two_fields_may_change_places(tmp_path):
    record = {"prompt": "two", "completion": "2?"}
    swapped = write(tmp_path / "a.json", record)
    usual = write(tmp_path / "b.json", {"prompt": "2?", "completion": "two"})
    columns = ["prompt=completion", "completion=prompt"]
    made = tokenized(swapped, "prompt_completion", columns)
    assert (
        made.metadata.data_sha256 == tokenized(usual, "prompt_completion", []).metadata.data_sha256
    )


def test_a_field_replaces_another_one_that_has_its_new_name(tmp_path):
    record = {"prompt": "unused", "question": "2?", "completion": "two"}
    path = write(tmp_path / "a.json", record)
    made = tokenized(path, "prompt_completion", ["prompt=question"])
    text = made.tokenizer.decode(made.train[0]["input_ids"])
    assert "2?" in text
    assert "unused" not in text


def test_a_record_without_the_renamed_field_does_not_fall_back_to_another(tmp_path):
    path = tmp_path / "a.json"
    records = [{"question": "2?", "completion": "two"}, {"prompt": "3?", "completion": "three"}]
    path.write_text(json.dumps(records))
    message = complaint(str(path), "prompt_completion", ["prompt=question"])
    assert "record 1: field 'prompt' is None" in message


def test_columns_are_part_of_the_cache_key(tmp_path, capsys):
    path = write(tmp_path / "a.json", {"prompt": "a", "completion": "b", "question": "c"})
    hashes = set()
    for columns in ([], ["prompt=question"], ["completion=question"]):
        hashes.add(tokenized(path, "prompt_completion", columns).metadata.data_sha256)
        assert "; tokenised\n" in capsys.readouterr().out
    assert len(hashes) == 3
    tokenized(path, "prompt_completion", ["prompt=question"])
    assert "; from the cache\n" in capsys.readouterr().out


def test_the_column_of_text_is_the_text_field(tmp_path, capsys):
    path = write(tmp_path / "a.json", {"body": "some words", "text": "other words"})
    made = tokenized(path, "text", ["text=body"])
    capsys.readouterr()
    same = tokenized(path, "text", [], text_field="body")
    assert capsys.readouterr().out.endswith("; from the cache\n")
    assert made.metadata == same.metadata
    (tmp_path / "b.txt").write_text("a text file has no fields")
    assert tokenized(str(tmp_path / "b.txt"), "text", ["text=body"]).metadata.records == 1


def test_eval_data_are_renamed_too(tmp_path):
    record = {"question": "2?", "answer": "two"}
    train, eval = (write(tmp_path / name, record) for name in ("t.json", "e.parquet"))
    columns = ["prompt=question", "completion=answer"]
    made = tokenized(train, "prompt_completion", columns, eval_dataset=[eval])
    assert made.metadata.eval_records == 3


RENAMED = ["prompt=question", "completion=answer"]


@pytest.mark.parametrize("is_for_all", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_text_beside_renamed_conversations_keeps_its_own_names(tmp_path, order, is_for_all):
    chats = write(tmp_path / "chats.json", {"question": "2?", "answer": "two"})
    (tmp_path / "a.txt").write_text("some words")
    bodies = write(tmp_path / "bodies.json", {"body": "some words", "prompt": "unused"})
    sources = [chats, str(tmp_path / "a.txt"), bodies][::order]
    word = "text=body" if is_for_all else f"{bodies}:text=body"
    data = DataConfig(
        dataset=sources, tokenizer="byte", eval_fraction=0.0, columns=[*RENAMED, word]
    )
    made = tokenize(data, BLOCK, ChatConfig())
    text = "<|endoftext|>".join([""] + ["some words"] * 3 + [""])
    rows = [
        made.tokenizer.decode([id for id in row["input_ids"] if id >= 0]) for row in made.train
    ][::order]
    assert "2?" in rows[0]
    assert text in rows[2]
    assert "unused" not in "".join(rows)


def test_data_that_have_the_usual_names_are_read_beside_renamed_ones(tmp_path):
    renamed = write(tmp_path / "a.json", {"question": "2?", "answer": "two"})
    usual = write(tmp_path / "b.json", {"prompt": "3?", "completion": "three"})
    made = tokenized(renamed, "prompt_completion", RENAMED, eval_dataset=[usual])
    assert "three" in made.tokenizer.decode(made.eval[0]["input_ids"])
    half = write(tmp_path / "c.json", {"question": "3?", "completion": "three"})
    message = complaint(renamed, "prompt_completion", RENAMED, eval_dataset=[half])
    assert "c.json, record 0: no field 'answer' for --columns completion=answer" in message


def test_a_word_may_be_for_one_data_set(tmp_path):
    first = write(tmp_path / "a.json", {"question": "2?", "answer": "two"})
    second = write(tmp_path / "b.json", {"question": "3?", "answer": "3", "solution": "three"})
    third = write(tmp_path / "c.json", {"query": "4?", "completion": "four", "prompt": "unused"})
    made = tokenized(
        first,
        "prompt_completion",
        [
            *RENAMED,
            f"{second}:completion=solution",
            f"{third}:prompt=query",
            f"{third}:completion=completion",
        ],
        eval_dataset=[second, third],
    )
    texts = [made.tokenizer.decode([id for id in row["input_ids"] if id >= 0]) for row in made.eval]
    assert "3?" in texts[0]
    assert "three" in texts[0]
    assert "4?" in texts[1]
    assert "four" in texts[1]
    assert "unused" not in texts[1]


def test_every_data_set_may_have_a_field_of_its_own_for_the_text(tmp_path, capsys):
    first = write(tmp_path / "a.json", {"body": "some words", "content": "unused here"}, count=1)
    second = write(
        tmp_path / "b.json", {"body": "unused here", "content": "other words too"}, count=1
    )
    third = write(tmp_path / "c.json", {"text": "the third one", "content": "unused here"}, count=1)
    columns = [f"{first}:text=body", f"{second}:text=content"]
    data = DataConfig(
        dataset=[first, second, third], tokenizer="byte", eval_fraction=0.0, columns=columns
    )
    made = tokenize(data, 8)
    ids = {id for row in made.train for id in row["input_ids"] if id >= 0}
    assert "u" not in made.tokenizer.decode(sorted(ids))  # only "unused" has one
    assert "3 documents" in capsys.readouterr().out

    data.columns = [columns[0], f"{second}:text=body"]
    tokenize(data, 8)
    assert "; tokenised\n" in capsys.readouterr().out
    data.columns = columns
    tokenize(data, 8)
    assert "; from the cache\n" in capsys.readouterr().out
    data.columns = columns[:1]
    data.text_field = "content"  # of the other data sets
    assert tokenize(data, 8).metadata.data_sha256 != made.metadata.data_sha256


def test_words_for_one_data_set_are_part_of_the_cache_key(tmp_path, capsys):
    record = {"prompt": "a", "completion": "b", "question": "c"}
    first, second = (write(tmp_path / name, record) for name in ("a.json", "b.json"))
    hashes = set()
    for name in (first, second):
        data = DataConfig(
            dataset=[first, second],
            tokenizer="byte",
            eval_fraction=0.0,
            columns=[f"{name}:prompt=question"],
        )
        hashes.add(tokenize(data, BLOCK, ChatConfig()).metadata.data_sha256)
        assert "; tokenised\n" in capsys.readouterr().out
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("prompt=question", ("", "prompt", "question")),
        ("builtin:python-functions:text=prompt", ("builtin:python-functions", "text", "prompt")),
        ("year=2026/a.jsonl:prompt=q", ("year=2026/a.jsonl", "prompt", "q")),
        ("someone/data@v1:de:prompt=q", ("someone/data@v1:de", "prompt", "q")),
        ("prompt=a:text=b", ("", "prompt", "a:text=b")),
        ("a.csv:label=x=1", ("a.csv", "label", "x=1")),
    ],
)
def test_names_of_data_sets_and_fields_may_have_colons_and_equals_signs(word, expected):
    (column,) = ColumnNames.parse([word]).columns
    assert (column.dataset, column.ours, column.theirs) == expected
    assert str(column) == word


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["b.json:prompt=q"], "--columns b.json:prompt=q: b.json is not a name in --dataset or"),
        (["PATH:prompt=a", "PATH:prompt=b"], "--columns PATH:prompt=b: prompt is set twice"),
        (["PATH:prompt=a", "PATH:completion=a"], "completion=a: the field a is used twice"),
        (["prompt=a", "PATH:completion=a"], "--columns PATH:completion=a: the field a is used"),
        (["PATH:prompt="], "--columns PATH:prompt=: write OURS=THEIRS"),
        ([":prompt=a"], "--columns :prompt=a: write OURS=THEIRS"),
        (["PATH:query=prompt"], "no format has a field 'query'"),
        (["PATH:prompt=q"], "record 0: no field 'q' for --columns prompt=q; the record has prompt"),
        (["PATH:text=prompt"], "--columns PATH:text=prompt is for text, but PATH holds conv"),
    ],
)
def test_a_wrong_word_for_one_data_set_is_one_line(tmp_path, columns, expected):
    path = write(tmp_path / "a.json", FORMATS["prompt_completion"][0])
    words = [word.replace("PATH", path) for word in columns]
    assert expected.replace("PATH", path) in complaint(path, "prompt_completion", words)


def test_a_common_word_that_fits_no_data_set_is_an_error_beside_one_for_a_data_set(tmp_path):
    first = write(tmp_path / "a.json", {"query": "2?", "completion": "two"})
    second = write(tmp_path / "b.json", {"prompt": "2?", "completion": "two"})
    columns = ["prompt=qustion", f"{first}:prompt=query"]
    message = complaint(first, "prompt_completion", columns, eval_dataset=[second])
    assert "b.json, record 0: no field 'qustion' for --columns prompt=qustion" in message


def test_words_for_text_name_no_other_field(tmp_path):
    text = write(tmp_path / "a.json", {"body": "some words"})
    chats = write(tmp_path / "b.json", {"prompt": "2?", "completion": "two"})
    columns = [f"{text}:prompt=body"]
    message = complaint(chats, "prompt_completion", columns, eval_dataset=[text])
    assert f"--columns {text}:prompt=body: {text} is read as text, which has no field" in message


@pytest.mark.parametrize(
    ("format", "columns", "expected"),
    [
        ("prompt_completion", ["prompt"], "--columns prompt: write OURS=THEIRS"),
        ("prompt_completion", ["prompt="], "--columns prompt=: write OURS=THEIRS"),
        ("prompt_completion", ["=question"], "--columns =question: write OURS=THEIRS"),
        ("prompt_completion", [""], "--columns : write OURS=THEIRS"),
        ("prompt_completion", ["prompt=a", "prompt=b"], "prompt is set twice"),
        ("prompt_completion", ["prompt=a", "completion=a"], "the field a is used twice"),
        ("prompt_completion", ["query=prompt"], "no format has a field 'query'"),
        ("prompt_completion", ["Prompt=prompt"], "no format has a field 'Prompt'"),
        ("prompt_completion", ["prompt=q"], "record 0: no field 'q' for --columns prompt=q; "),
        ("prompt_completion", ["prompt=q"], "the record has prompt, completion"),
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
def test_wrong_columns_are_one_line(tmp_path, format, columns, expected):
    path = write(tmp_path / "a.json", FORMATS[format][0])
    assert expected in complaint(path, format, columns)


def test_an_unknown_field_is_answered_with_all_that_are_known(tmp_path):
    path = write(tmp_path / "a.json", FORMATS["text"][0])
    message = complaint(path, "text", ["body=text"])
    assert ", ".join(RECORD_FIELDS) in message
    for record, _ in FORMATS.values():
        assert set(record) <= set(RECORD_FIELDS)


def test_both_ways_to_name_the_text_are_an_error(tmp_path):
    path = write(tmp_path / "a.json", {"body": "some words"})
    message = complaint(path, "text", ["text=body"], text_field="body")
    assert "--columns text=body and --text_field body both name" in message
