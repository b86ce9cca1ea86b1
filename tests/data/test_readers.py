"""Every kind of file, compressed or not, gives the same records; a file that is damaged is one line."""

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
def csv_limit_of_this_process() -> Iterator[None]:
    """Restore the longest field of a CSV file, which also holds for the files of other readers."""
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
    rows = [
        delimiter.join('"' + value.replace('"', '""') + '"' for value in record.values())
        for record in RECORDS
    ]
    return "\r\n".join([delimiter.join(RECORDS[0]), *rows, ""])


def zstd(raw: bytes) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(raw)
    return buffer.getvalue().to_pybytes()


def arrow(make_writer: Callable[..., Any]) -> bytes:
    table = pyarrow.Table.from_pylist(RECORDS)
    buffer = pyarrow.BufferOutputStream()
    with make_writer(buffer, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return buffer.getvalue().to_pybytes()


def parquet() -> bytes:
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), buffer)
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
BINARY_FILES = {
    "table.parquet": parquet(),
    "file.arrow": arrow(pyarrow.ipc.new_file),
    "stream.arrow": arrow(pyarrow.ipc.new_stream),
}
COMPRESSIONS = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def records(path: Path, field: str | None = None) -> list[dict]:
    return [record.fields for record in open_source(str(path)).records(field)]


def complaint(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        records(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert len(message) < 350 + len(str(path))
    return message.removeprefix(str(path.parent) + "/")


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", TEXT_FILES)
def test_every_kind_of_file_gives_the_same_records(tmp_path, name, compression):
    content = COMPRESSIONS[compression](TEXT_FILES[name].encode())
    path = write(tmp_path / f"{name}{compression}".upper(), content)
    assert records(path) == records(path, "text") == RECORDS
    assert not open_source(str(path)).has_artificial_nulls


@pytest.mark.parametrize("name", BINARY_FILES)
def test_arrow_files_give_the_same_records_and_say_that_their_nulls_may_be_artificial(
    tmp_path, name
):
    path = write(tmp_path / name, BINARY_FILES[name])
    assert records(path) == RECORDS
    assert records(path, "id") == [{"id": record["id"]} for record in RECORDS]
    assert open_source(str(path)).has_artificial_nulls


@pytest.mark.parametrize("suffix", [".txt", ".md"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_compressed_text_is_the_text(tmp_path, suffix, compression):
    content = COMPRESSIONS[compression](LINES.encode())
    path = write(tmp_path / f"a{suffix}{compression}", content)
    assert records(path, "body") == [{"body": LINES}]


def test_texts_in_a_json_array_are_records(tmp_path):
    path = write(tmp_path / "a.json", '["one", "two"]')
    assert records(path) == [{"text": "one"}, {"text": "two"}]
    assert records(path, "body") == [{"body": "one"}, {"body": "two"}]


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_parts_compressed_one_by_one_are_one_file(tmp_path, compression):
    lines = LINES.encode().splitlines(keepends=True)
    content = b"".join(map(COMPRESSIONS[compression], lines))
    assert records(write(tmp_path / f"a.jsonl{compression}", content)) == RECORDS


def test_json_lines_are_named_once_for_a_large_array(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readers, "_LARGE_JSON", len(TEXT_FILES["one-line-array.json"]) - 1)
    large = write(tmp_path / "large.json", TEXT_FILES["one-line-array.json"])
    assert records(large) == records(large) == RECORDS
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"data      {large} is one large array, which is parsed whole")
    assert "a .jsonl file, with a record on each line" in line

    records(write(tmp_path / "small.json", "[1]".replace("1", '"text"')))
    records(write(tmp_path / "lines.json", TEXT_FILES["lines.json"]))
    assert capsys.readouterr().out == ""


def source_in(folder: Path, *names: str) -> Source:
    folder.mkdir()
    for name in names:
        write(folder / name, TEXT_FILES.get(name) or BINARY_FILES[name])
    return open_source(str(folder))


def test_one_arrow_file_among_others_makes_the_nulls_of_a_folder_artificial(tmp_path):
    assert source_in(tmp_path / "a", "table.csv", "file.arrow").has_artificial_nulls
    assert not source_in(tmp_path / "b", "table.csv", "array.json").has_artificial_nulls


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
    "cut-file.arrow": (BINARY_FILES["file.arrow"][:-20], "is not an Arrow file, or it is"),
    "cut-stream.arrow": (BINARY_FILES["stream.arrow"][:-100], "is not an Arrow file, or it is"),
    "cut.parquet": (BINARY_FILES["table.parquet"][:-20], "is not a parquet file, or it is"),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_content_that_cannot_be_read_is_one_line(tmp_path, name):
    content, expected = BAD_CONTENT[name]
    assert expected in complaint(write(tmp_path / name, content))


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".tsv", ".txt", ".md", ".ndjson"])
def test_a_damaged_archive_is_one_line(tmp_path, kind, compression):
    content = "a\n" * 50_000 if kind in (".csv", ".tsv") else LINES * 1000
    archive = COMPRESSIONS[compression](content.encode())
    for damaged in (archive[:-1], archive[: len(archive) // 2], b"no archive " * 9, b""):
        message = complaint(write(tmp_path / f"a{kind}{compression}", damaged))
        assert "copy or download it again" in message


@pytest.mark.parametrize("compression", ["", ".gz", ".xz"])
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": "' + "x" * 100, "line 2: the line is longer than 64 bytes"),
        ("a.jsonl", '{"a": "' + "x" * 100 + '"}\n', "line 1: the line is longer than 64 bytes"),
        ("a.csv", "a,b\n1," + "x" * 100, "line 2: the line is longer than 64 bytes"),
        ("a.tsv", 'a\n"' + "x\n" * 100, "not TSV (field larger than field limit (64))"),
    ],
)
def test_a_line_without_end_is_an_error_before_it_is_read(
    tmp_path, monkeypatch, name, content, expected, compression
):
    monkeypatch.setattr(text_files, "MAX_LINE_LENGTH", 64)
    path = write(tmp_path / f"{name}{compression}", COMPRESSIONS[compression](content.encode()))
    assert expected in complaint(path)


def test_a_line_of_the_largest_length_is_read(tmp_path, monkeypatch):
    line = '{"text": "abc"}\n'
    monkeypatch.setattr(text_files, "MAX_LINE_LENGTH", len(line))
    assert records(write(tmp_path / "a.jsonl", line * 3)) == [{"text": "abc"}] * 3


@pytest.mark.parametrize("name", ["a.docx.gz", "a.parquet.gz", "a.tar.gz", "a.gz"])
def test_a_compressed_file_of_another_kind_is_an_error_that_names_the_kinds(tmp_path, name):
    path = write(tmp_path / name, gzip.compress(b"words"))
    with pytest.raises(UserError, match=r"cannot read '.*\.gz' files.* \.json .*\.zst"):
        open_source(str(path))


def test_a_compressed_file_has_a_fingerprint_of_its_own(tmp_path):
    paths = [write(tmp_path / f"a.jsonl{suffix}", LINES) for suffix in ("", ".gz")]
    first, second = (open_source(str(path)).fingerprint() for path in paths)
    assert first != second


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.jsonl", 3), ("a.csv", 4), ("a.parquet", 3), ("a.jsonl.gz", None), ("a.json", None)],
)
def test_records_are_counted_unless_that_takes_as_long_as_reading(tmp_path, name, expected):
    records = [{"text": str(i)} for i in range(3)]
    path = tmp_path / name
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif name.endswith("csv"):
        path.write_text("text\n0\n1\n2\n")  # the header counts, too
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert readers.count_records(path) == expected
    (tmp_path / "bad.parquet").write_bytes(b"not a parquet file")
    assert readers.count_records(tmp_path / "bad.parquet") is None
