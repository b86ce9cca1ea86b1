"""Every kind of file, compressed or not, yields the same records; a damaged file is an error."""

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data import readers, text_files
from llmtrain.data.dataset_names import open_source
from llmtrain.data.sources import Source
from llmtrain.errors import UserError


@pytest.fixture(autouse=True)
def _csv_limit() -> Iterator[None]:
    """Restore the longest field of a CSV file, which is a global setting of Python."""
    limit = csv.field_size_limit()
    yield
    csv.field_size_limit(limit)


RECORDS = [
    {"id": "0", "text": "first text\nof two lines"},
    {"id": "1", "text": 'ünï — 漢字 🙂, "quoted"\tand a tab'},
    {"id": "2", "text": "  spaces  "},
]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)


def table_text(delimiter: str) -> str:
    """Write the records as CSV or TSV, with all values in quotes."""
    lines = [delimiter.join(RECORDS[0])]
    for record in RECORDS:
        escaped = [value.replace('"', '""') for value in record.values()]
        lines.append(delimiter.join(f'"{value}"' for value in escaped))
    return "\r\n".join([*lines, ""])


def zstd(content: bytes) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(content)
    return buffer.getvalue().to_pybytes()


TABLE = pyarrow.Table.from_pylist(RECORDS)
TWICE = pyarrow.Table.from_arrays([["a"], ["b"]], names=["text", "text"])


def arrow(make_writer: Callable[..., Any], table: pyarrow.Table = TABLE) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    with make_writer(buffer, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return buffer.getvalue().to_pybytes()


def parquet(table: pyarrow.Table = TABLE) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()


TEXT_FILES = {
    "array.json": json.dumps(RECORDS, indent=1),
    "one-line-array.json": json.dumps(RECORDS),
    "data.json": json.dumps({"version": 1, "data": RECORDS}),
    "lines.json": LINES,
    "lines.jsonl": LINES,
    "lines.ndjson": LINES,
    "table.csv": table_text(","),
    "table.tsv": table_text("\t"),
}
ARROW_FILES = {
    "table.parquet": parquet(),
    "file.arrow": arrow(pyarrow.ipc.new_file),
    "stream.arrow": arrow(pyarrow.ipc.new_stream),
}
COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def compress(content: str | bytes, suffix: str) -> bytes:
    """Compress the content of a file as its suffix says; without a suffix it stays as it is."""
    raw = content.encode() if isinstance(content, str) else content
    return COMPRESSORS[suffix](raw) if suffix else raw


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(compress(content, suffix=""))
    return path


def read(path: Path, field: str | None = None) -> list[dict]:
    return [record.fields for record in open_source(str(path)).records(field)]


def complaint(path: Path) -> str:
    """Return the error for a file without its folder. It is one line, and not too long."""
    with pytest.raises(UserError) as error:
        read(path)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert len(message) < 350 + len(str(path))
    return message.removeprefix(f"{path.parent}/")


# --- records


@pytest.mark.parametrize("compression", ["", *COMPRESSORS])
@pytest.mark.parametrize("name", TEXT_FILES)
def test_every_kind_of_text_file_yields_the_same_records(tmp_path, name, compression):
    content = compress(TEXT_FILES[name], compression)
    path = write(tmp_path / f"{name}{compression}".upper(), content)
    assert read(path) == RECORDS
    assert read(path, "text") == RECORDS
    assert not open_source(str(path)).has_artificial_nulls


@pytest.mark.parametrize("name", ARROW_FILES)
def test_every_kind_of_arrow_file_yields_the_same_records(tmp_path, name):
    path = write(tmp_path / name, ARROW_FILES[name])
    assert read(path) == RECORDS
    assert read(path, "id") == [{"id": "0"}, {"id": "1"}, {"id": "2"}]
    assert open_source(str(path)).has_artificial_nulls


@pytest.mark.parametrize("suffix", [".txt", ".md"])
@pytest.mark.parametrize("compression", ["", *COMPRESSORS])
def test_a_compressed_text_file_is_one_document(tmp_path, suffix, compression):
    path = write(tmp_path / f"a{suffix}{compression}", compress(LINES, compression))
    assert read(path, "body") == [{"body": LINES}]


def test_strings_in_a_json_array_are_records(tmp_path):
    path = write(tmp_path / "a.json", '["one", "two"]')
    assert read(path) == [{"text": "one"}, {"text": "two"}]
    assert read(path, "body") == [{"body": "one"}, {"body": "two"}]


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_parts_that_were_compressed_one_by_one_are_one_file(tmp_path, compression):
    parts = [compress(line, compression) for line in LINES.splitlines(keepends=True)]
    assert read(write(tmp_path / f"a.jsonl{compression}", b"".join(parts))) == RECORDS


def test_a_line_of_the_largest_length_is_read(tmp_path, monkeypatch):
    line = '{"text": "abc"}\n'
    monkeypatch.setattr(text_files, "MAX_LINE_LENGTH", len(line))
    assert read(write(tmp_path / "a.jsonl", line * 3)) == [{"text": "abc"}] * 3


def test_the_log_suggests_json_lines_once_for_a_large_array(tmp_path, monkeypatch, capsys):
    array = TEXT_FILES["one-line-array.json"]
    monkeypatch.setattr(readers, "_LARGE_JSON", len(array) - 1)
    path = write(tmp_path / "large.json", array)
    for _ in range(2):
        assert read(path) == RECORDS
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"data      {path} is one large array, which is parsed whole")
    assert "a .jsonl file, with a record on each line" in line


@pytest.mark.parametrize(
    "content",
    [
        pytest.param('["text"]', id="a small array"),
        pytest.param(LINES, id="lines"),
    ],
)
def test_the_log_suggests_nothing_for_a_small_array_or_lines(
    tmp_path, monkeypatch, capsys, content
):
    monkeypatch.setattr(readers, "_LARGE_JSON", len(TEXT_FILES["one-line-array.json"]) - 1)
    read(write(tmp_path / "a.json", content))
    assert capsys.readouterr().out == ""


def open_folder(folder: Path, *names: str) -> Source:
    for name in names:
        write(folder / name, TEXT_FILES.get(name) or ARROW_FILES[name])
    return open_source(str(folder))


def test_a_folder_with_an_arrow_file_has_artificial_nulls(tmp_path):
    assert open_folder(tmp_path, "table.csv", "file.arrow").has_artificial_nulls


def test_a_folder_of_text_files_has_no_artificial_nulls(tmp_path):
    assert not open_folder(tmp_path, "table.csv", "array.json").has_artificial_nulls


def test_the_fingerprint_depends_on_the_suffix_of_a_compressed_file(tmp_path):
    plain = write(tmp_path / "a.jsonl", LINES)
    compressed = write(tmp_path / "a.jsonl.gz", LINES)
    assert open_source(str(plain)).fingerprint() != open_source(str(compressed)).fingerprint()


# --- counts of records


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        pytest.param("a.jsonl", LINES, 3, id="jsonl"),
        pytest.param("a.csv", "text\n0\n1\n2\n", 4, id="csv with its header"),
        pytest.param("a.parquet", ARROW_FILES["table.parquet"], 3, id="parquet"),
        pytest.param("a.jsonl.gz", compress(LINES, ".gz"), None, id="compressed"),
        pytest.param("a.json", TEXT_FILES["array.json"], None, id="json"),
        pytest.param("a.parquet", b"not a parquet file", None, id="damaged"),
    ],
)
def test_records_are_counted_unless_that_takes_as_long_as_reading(tmp_path, name, content, count):
    assert readers.count_records(write(tmp_path / name, content)) == count


# --- errors

# The content of a file, and a part of the error.
BAD_CONTENT = {
    # JSON arrays and objects.
    "no-json.json": ("oops", "line 1: not JSON (Expecting value)"),
    "cut-array.json": ('[{"a": 1}, {"a"', "line 1: not JSON (Expecting ':' delimiter)"),
    "no-comma.json": ('[{"a": 1}\n{"a": 2}]', "line 2: not JSON (Expecting ',' delimiter)"),
    "trailing-comma.json": ('[{"a": 1},\n]', "trailing-comma.json, line "),
    "unclosed.json": ('[{"a": 1}', "line 1: not JSON (Expecting ',' delimiter)"),
    "text-after.json": ('[{"a": 1}]\n\n[]', "line 3: not JSON (Extra data)"),
    "empty-array.json": ("[]", "the array is empty"),
    "empty-data.json": ('{"data": []}', "the array is empty"),
    "numbers.json": ("[1, 2]", "record 0 is 1, neither text nor a dictionary"),
    "mixed.json": ('[{"a": 1}, [2]]', "record 1 is [2], neither text nor a dictionary"),
    "data-of-numbers.json": ('{"data": [{"a": 1}, null]}', "record 1 is null, neither text"),
    "other-key.json": ('{"rows": [{"a": 1}], "n": 3}', "lists under 'rows'; records are read"),
    "two-keys.json": ('{"train": [{}], "test": []}', "lists under 'train', 'test'; records"),
    "one-object.json": ('{\n"text": "a"\n}', "is one object, not an array of records"),
    "one-line.json": ('{"text": "a"}', "is one object, not an array of records"),
    "number.json": ("3", "holds 3, not an array of records"),
    "deep.json": ("[" * 100_000, "deep.json: not JSON (maximum recursion"),
    "long-number.json": (
        f'[{{"n": {"1" * 5000}}}]',
        "long-number.json: not JSON (Exceeds the limit",
    ),
    "half-lines.json": ('{"a": 1}\n{"a": 2}\noops\n', "line 3: not JSON (Expecting value)"),
    # Tables.
    "long.tsv": ("a\tb\n1\t2\n1\t2\t3\n", "line 3: the line has more fields than the header; "),
    "quote.tsv": ('a\tb\n1\t"2" 3\n', "line 2: not TSV ("),
    "quote.csv": ('a,b\n1,"2" 3\n', "line 2: not CSV ("),
    # Names that are there twice. Spreadsheets write empty columns without names.
    "twice.csv": ("text,id,text\na,1,b\n", "twice.csv: the column 'text' is there twice"),
    "twice.tsv": ("text\t\t\ttext\n", "twice.tsv: the column 'text' is there twice"),
    "twice.jsonl": (
        '{"text": "a"}\n{"text": "b", "text": "c"}\n',
        "twice.jsonl, line 2: not JSON (the key 'text' is there twice",
    ),
    "twice.json": (
        '[{"messages": [{"role": "user", "content": "a", "role": "b"}]}]',
        "twice.json: not JSON (the key 'role' is there twice",
    ),
    "twice.parquet": (parquet(TWICE), "twice.parquet: the column 'text' is there twice"),
    "twice.arrow": (arrow(pyarrow.ipc.new_file, TWICE), "twice.arrow: the column 'text' is there"),
    # Encodings. The second is Latin-1 after UTF-8.
    "utf16.json": (json.dumps(RECORDS).encode("utf-16"), "is UTF-16, not UTF-8"),
    "two-encodings.json": ('[\n"é",\n'.encode() + '"é"]'.encode("latin-1"), "line 3: byte 0xe9"),
    "utf16.jsonl": (LINES.encode("utf-16"), "is UTF-16, not UTF-8; convert it with iconv"),
    "utf16.csv": (table_text(",").encode("utf-16"), "is UTF-16, not UTF-8"),
    "utf16.txt": (LINES.encode("utf-16"), "is UTF-16, not UTF-8"),
    "two-encodings.jsonl": (LINES.encode() + '{"a": "é"}'.encode("latin-1"), "line 4: byte 0xe9"),
    "two-encodings.tsv": ("a\né\n".encode() + "é\n".encode("latin-1"), "line 3: byte 0xe9"),
    "two-encodings.md": ("é\n".encode() + "é\n".encode("latin-1"), "line 2: byte 0xe9"),
    # Arrow.
    "junk.arrow": (b"junk", "is not an Arrow file, or it is damaged ("),
    "empty.arrow": (b"", "is not an Arrow file, or it is damaged ("),
    "cut-file.arrow": (ARROW_FILES["file.arrow"][:-20], "is not an Arrow file, or it is"),
    "cut-stream.arrow": (ARROW_FILES["stream.arrow"][:-100], "is not an Arrow file, or it is"),
    "cut.parquet": (ARROW_FILES["table.parquet"][:-20], "is not a parquet file, or it is"),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_bad_content_is_an_error_that_names_the_place(tmp_path, name):
    content, error = BAD_CONTENT[name]
    assert error in complaint(write(tmp_path / name, content))


def test_columns_without_a_name_may_be_there_twice(tmp_path):
    path = write(tmp_path / "sheet.csv", "text,,,\na,,,\n")
    assert [record["text"] for record in read(path)] == ["a"]


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".tsv", ".txt", ".md", ".ndjson"])
def test_a_damaged_archive_is_an_error(tmp_path, kind, compression):
    content = "a\n" * 50_000 if kind in (".csv", ".tsv") else LINES * 1000
    archive = compress(content, compression)
    half = archive[: len(archive) // 2]
    for damaged in (archive[:-1], half, b"no archive " * 9, b""):
        message = complaint(write(tmp_path / f"a{kind}{compression}", damaged))
        assert "copy or download it again" in message


@pytest.mark.parametrize("compression", ["", ".gz", ".xz"])
@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": "' + "x" * 100, "line 2: the line is longer than 64 bytes"),
        ("a.jsonl", '{"a": "' + "x" * 100 + '"}\n', "line 1: the line is longer than 64 bytes"),
        ("a.csv", "a,b\n1," + "x" * 100, "line 2: the line is longer than 64 bytes"),
        ("a.tsv", 'a\n"' + "x\n" * 100, "not TSV (field larger than field limit (64))"),
    ],
)
def test_a_line_that_is_too_long_is_an_error(
    tmp_path, monkeypatch, name, content, error, compression
):
    monkeypatch.setattr(text_files, "MAX_LINE_LENGTH", 64)
    path = write(tmp_path / f"{name}{compression}", compress(content, compression))
    assert error in complaint(path)


@pytest.mark.parametrize("name", ["a.docx.gz", "a.parquet.gz", "a.tar.gz", "a.gz"])
def test_a_compressed_file_of_another_kind_is_an_error_that_names_the_kinds(tmp_path, name):
    path = write(tmp_path / name, compress("words", ".gz"))
    with pytest.raises(UserError, match=r"cannot read '.*\.gz' files.* \.json .*\.zst"):
        open_source(str(path))
