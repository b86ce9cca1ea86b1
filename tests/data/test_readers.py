"""Every kind of file, compressed or not, yields the same records; a damaged file is an error."""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data.sources import open_source
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from tests.data.preparation import data_config


@pytest.fixture(autouse=True)
def _csv_limit() -> Iterator[None]:
    """Restore the longest field of a CSV file, which is a global setting of Python."""
    limit = csv.field_size_limit()
    yield
    csv.field_size_limit(limit)


RECORDS = [
    {"id": "001", "text": "first text\nof two lines"},
    {"id": "NA", "text": 'ünï — 漢字 🙂, "quoted"\tand a tab'},
    {"id": "1.50", "text": "  spaces  \ufeff"},  # and a byte order mark
]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
BOM = b"\xef\xbb\xbf"


def csv_text() -> str:
    """Write the records as CSV, with all values in quotes."""
    lines = [",".join(RECORDS[0])]
    for record in RECORDS:
        escaped = [value.replace('"', '""') for value in record.values()]
        lines.append(",".join(f'"{value}"' for value in escaped))
    return "\r\n".join([*lines, ""])


def gz(content: str) -> bytes:
    return gzip.compress(content.encode(), mtime=0)  # a part of names of tests


def zstd(content: str) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(content.encode())
    return buffer.getvalue().to_pybytes()


def parquet(table: pyarrow.Table) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer, row_group_size=2)
    return buffer.getvalue().to_pybytes()


PARQUET = parquet(pyarrow.Table.from_pylist(RECORDS))
FILES = {
    "array.json": json.dumps(RECORDS, indent=1),
    "data.json": json.dumps({"version": 1, "data": RECORDS}),
    "lines.json": LINES,
    "LINES.NDJSON": LINES,
    "empty-lines.jsonl": LINES.replace("\n", "\r\n  \n"),
    "escaped.jsonl": "".join(json.dumps(record) + "\n" for record in RECORDS),
    "begins-with-a-byte-order-mark.jsonl": BOM + LINES.encode(),
    "lines.jsonl.gz": gz(LINES),
    "parts.jsonl.gz": b"".join(gz(line) for line in LINES.splitlines(keepends=True)),
    "parts.jsonl.zst": b"".join(zstd(line) for line in LINES.splitlines(keepends=True)),
    "table.csv": csv_text(),
    "begins-with-a-byte-order-mark.csv": BOM + csv_text().encode(),
    "table.parquet": PARQUET,
}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, field: str | None = None) -> list[dict]:
    return [record.fields for record in open_source(str(path), data_config()).records(field)]


def complaint(path: Path) -> str:
    """Return the error for a file, which is one short line."""
    with pytest.raises(UserError) as error:
        read(path)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 350 + len(str(path))
    return message


# --- records


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_yields_the_same_records(tmp_path, name):
    path = write(tmp_path / name, FILES[name])
    assert read(path) == RECORDS
    assert [record["text"] for record in read(path, "text")] == [
        record["text"] for record in RECORDS
    ]


TEXT_FILES = {
    "a.md": BOM + LINES.encode(),
    "a.txt.gz": gz(LINES),
}


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_text_file_is_one_document_to_the_last_byte(tmp_path, name):
    assert read(write(tmp_path / name, TEXT_FILES[name]), "body") == [{"body": LINES}]


def test_strings_in_a_json_array_are_records(tmp_path):
    path = write(tmp_path / "a.json", '["one", "two"]')
    assert read(path) == [{"text": "one"}, {"text": "two"}]
    assert read(path, "body") == [{"body": "one"}, {"body": "two"}]


def test_a_csv_file_may_have_long_fields_and_columns_without_names(tmp_path):
    long = "x" * 200_000  # more than Python's limit
    path = write(tmp_path / "a.csv", f"text,,,\n{long},,,\n")
    assert [record["text"] for record in read(path)] == [long]


def test_a_folder_with_a_parquet_file_has_artificial_nulls(tmp_path):
    write(tmp_path / "table.csv", FILES["table.csv"])
    assert not open_source(str(tmp_path), data_config()).has_artificial_nulls
    write(tmp_path / "table.parquet", FILES["table.parquet"])
    assert open_source(str(tmp_path), data_config()).has_artificial_nulls


# --- errors

# The content of a file, and the place that the error names.
BAD_CONTENT = {
    # JSON arrays and objects.
    "no-comma.json": ('[{"a": 1}\n{"a": 2}]', "line 2"),
    "text-after.json": ('[{"a": 1}]\n\n[]', "line 3"),
    "mixed.json": ('[{"a": 1}, [2]]', "record 1"),
    "other-key.json": ('{"rows": [{"a": 1}], "n": 3}', "not an array with records"),
    "half-lines.json": ('{"a": 1}\n{"a": 2}\noops\n', "line 3"),
    # Lines.
    "cut.jsonl": ('{"text": "a"}\n\n{"text": "b', "line 3"),
    "null.jsonl": ('{"text": "a"}\nnull\n', "line 2"),
    # Tables.
    "quote.csv": ('id,text\n1,a\n2,"b" c\n3,d\n', "line 3"),
    "unclosed.csv": ('id,text\n1,a\n2,b\n3,"c', "line 4"),
    "long.csv": ("id,text\n1,a\n2,hello, world\n", "line 3"),
    # Encodings. The second is Latin-1 after UTF-8.
    "two-encodings.json": ('[\n"é",\n'.encode() + '"é"]'.encode("latin-1"), "line 3: byte 0xe9"),
    "utf16.jsonl": (LINES.encode("utf-16"), "line 1: byte 0xff"),
    "two-encodings.csv": ("a\né\n".encode() + "é\n".encode("latin-1"), "line 3: byte 0xe9"),
    "two-encodings.md": (BOM + b"one\r\n\r\n\xe9\r\n", "line 3: byte 0xe9"),
    "cut-character.txt": ("one\ntwö".encode()[:-1], "line 2: byte 0xc3"),
    # Parquet.
    "cut.parquet": (PARQUET[:-20], "not Parquet, or damaged"),
    "damaged.parquet": (PARQUET[:20] + b"\x99" * 20 + PARQUET[40:], "damaged"),
    # Compressed files.
    "cut.jsonl.gz": (gz(LINES * 1000)[:-1], "damaged"),
    "no-archive.json.zst": (b"no archive " * 9, "damaged"),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_bad_content_is_an_error_that_names_the_place(tmp_path, name):
    content, place = BAD_CONTENT[name]
    path = write(tmp_path / name, content)
    message = complaint(path)
    assert message.startswith(str(path))
    assert place in message


# The records of a file, and the place that the error for the field `text` names.
BAD_FIELDS = {
    "absent.jsonl": ('{"text": "a"}\n\n{"txt": "b"}\n', "line 3"),
    "null.jsonl": ('{"text": null}\n', "line 1"),
    "surrogate.jsonl": ('{"text": "a"}\n{"text": "b\\ud800"}\n', "line 2"),
    "short.csv": ("id,text\n1,a\n2\n", "line 3"),
    "null.parquet": (parquet(pyarrow.table({"text": ["a", None]})), "row 1"),
    "bytes.parquet": (parquet(pyarrow.table({"text": [b"a"]})), "row 0"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_field_without_text_is_an_error_that_names_the_place(tmp_path, cache, name):
    content, place = BAD_FIELDS[name]
    with pytest.raises(UserError) as error:
        tokenize(data_config(write(tmp_path / name, content)), 8)
    assert f"{tmp_path / name}, {place}: " in str(error.value)
    assert "'text'" in str(error.value)


def test_a_parquet_text_that_is_not_utf8_is_an_error(tmp_path):
    offsets = pyarrow.array([0, 1, 3], pyarrow.int32()).buffers()[1]
    content = pyarrow.py_buffer(b"a\xff\xfe")
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, content])
    path = write(tmp_path / "a.parquet", parquet(pyarrow.table({"text": column})))
    assert f"{path}, row 0" in complaint(path)


# --- files of other kinds


@pytest.mark.parametrize("name", ["a.docx", "a.docx.gz", "a.gz", "a.tsv", "a.arrow", "a.jsonl.bz2"])
def test_a_file_of_another_kind_is_an_error_that_names_the_kinds(tmp_path, name):
    message = complaint(write(tmp_path / name, gz("words")))
    assert name.partition(".")[2] in message
    assert ".parquet" in message
    assert "--text_suffixes" in message
