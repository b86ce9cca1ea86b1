"""Sources yield texts in a fixed order; bad input is an error of one line that names the place."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data import builtin
from llmtrain.data.dataset_names import open_source
from llmtrain.data.recipe_records import records_source
from llmtrain.data.sources import Source, SplitChoice, documents
from llmtrain.errors import UserError
from tests.launching import long_form

TEXTS = ["first text\nof two lines", 'ünï — 漢字 🙂, "quoted"', "  spaces   and\r\nan end \n"]


def read(path: Path | str, field: str = "text") -> list[str]:
    return list(documents(open_source(str(path)), field))


def complaint(path: Path | str, field: str = "text") -> str:
    with pytest.raises(UserError) as error:
        read(path, field)
    assert "\n" not in str(error.value)
    return str(error.value)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    records = [{"id": i, field: text} for i, text in enumerate(texts)]
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def write_csv(path: Path, texts: list[str], field: str = "text") -> Path:
    lines = [f"id,{field}\r\n"]
    for i, text in enumerate(texts):
        escaped = text.replace('"', '""')
        lines.append(f'{i},"{escaped}"\r\n')
    return write(path, "".join(lines))


def write_parquet(path: Path, texts: list[str], field: str = "text") -> Path:
    table = pyarrow.table({"id": list(range(len(texts))), field: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


WRITERS = {".jsonl": write_jsonl, ".csv": write_csv, ".parquet": write_parquet}


# --- files


@pytest.mark.parametrize("suffix", [".txt", ".md"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_file_is_one_document_to_the_last_byte(tmp_path, suffix, text):
    assert read(write(tmp_path / f"a{suffix}", text)) == [text]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("field", ["text", "body"])
def test_every_record_is_a_document(tmp_path, suffix, field):
    path = WRITERS[suffix](tmp_path / f"a{suffix}", TEXTS, field)
    assert read(path, field) == TEXTS


def test_the_name_of_a_parquet_column_may_have_a_dot(tmp_path):
    assert read(write_parquet(tmp_path / "a.parquet", TEXTS, "a.b"), "a.b") == TEXTS


def test_empty_lines_of_jsonl_are_no_documents(tmp_path):
    path = write(tmp_path / "a.jsonl", '\n{"text": "a"}\r\n  \n{"text": "b"}')
    assert read(path) == ["a", "b"]


def test_an_escaped_pair_of_surrogates_is_one_character(tmp_path):
    assert read(write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude42"}\n')) == ["🙂"]


def test_a_csv_field_may_be_longer_than_python_s_limit(tmp_path):
    long = "x" * 200_000
    assert read(write_csv(tmp_path / "a.csv", [long])) == [long]


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "text", ["text"]),
        ("a.md", "text", ["text"]),
        ("a.jsonl", '{"text": "a"}\n{"text": "\\ufeffb"}\n', ["a", "\ufeffb"]),
        ("a.csv", "text,id\na,1\n", ["a"]),
    ],
)
def test_a_byte_order_mark_at_the_start_is_not_part_of_the_text(tmp_path, name, content, expected):
    assert read(write(tmp_path / name, BOM + content.encode())) == expected


def test_a_byte_order_mark_inside_a_text_stays(tmp_path):
    assert read(write(tmp_path / "a.txt", "a\ufeffb")) == ["a\ufeffb"]


# --- folders and patterns


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "texts"
    write(root / "b.txt", "b")
    write(root / "a.md", "a")
    write(root / "deep" / "er" / "d.txt", "d")
    write_jsonl(root / "c.jsonl", ["c1", "c2"])
    write(root / "ignored.py", "no text")
    write(root / "ignored.docx.gz", gzip.compress(b"no text"))
    return root


def test_a_folder_is_read_in_the_order_of_its_paths(folder):
    assert read(folder) == ["a", "b", "c1", "c2", "d"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["b"]),
        ("*", ["a", "b", "c1", "c2"]),
        ("**/*.txt", ["b", "d"]),
        ("[ab].*", ["a", "b"]),
        ("deep/*/?.txt", ["d"]),
    ],
)
def test_a_glob_is_read_in_the_order_of_its_paths(folder, pattern, expected):
    assert read(folder / pattern) == expected


def test_hidden_files_and_folders_are_no_data_as_in_a_glob(folder):
    write(folder / ".ipynb_checkpoints" / "b-checkpoint.txt", "hidden")
    write(folder / "deep" / ".git" / "c.jsonl", "no JSON")
    write(folder / ".b.txt", "hidden")
    root = folder.rename(folder.parent / ".texts")  # a folder that the user names is read

    assert read(root) == read(root / "**" / "*") == ["a", "b", "c1", "c2", "d"]
    assert read(root / ".b.txt") == ["hidden"]


@pytest.mark.parametrize("pattern", ["", "*", "**/*"])
def test_files_of_other_kinds_are_counted_by_suffix_or_read_as_text(folder, pattern):
    (folder / "deep" / "ignored.PY").write_text("print()")
    (folder / "Makefile").write_text("all:")
    suffixes = [".py", ".docx", ".jsonl"]

    without_flag = open_source(str(folder / pattern))
    with_flag = open_source(str(folder / pattern), SplitChoice(text_suffixes=suffixes))

    python_files = 1 if pattern == "*" else 2
    assert without_flag.unread_files == {".py": python_files, ".docx.gz": 1, "": 1}
    assert with_flag.unread_files == {"": 1}
    lines = (folder / "c.jsonl").read_text()
    expected = ["a", "b", lines, "d", "print()", "no text", "no text"]
    if pattern == "*":
        expected = ["a", "b", lines, "no text", "no text"]
    assert list(documents(with_flag, "text")) == expected


def test_a_file_of_another_kind_is_read_as_text_if_its_suffix_is_named(tmp_path):
    path = write(tmp_path / "a.PY.gz", gzip.compress(b"print()"))
    source = open_source(str(path), SplitChoice(text_suffixes=[".py"]))
    assert list(documents(source, "text")) == ["print()"]


def test_a_glob_that_matches_a_file_twice_reads_it_once(folder):
    assert read(folder / "**" / "**" / "*.txt") == ["b", "d"]


@pytest.mark.parametrize("path", ["texts/b.txt", "./texts/b.txt", "~/texts/b.txt", "~/texts/b*"])
def test_paths_are_relative_to_the_working_folder_or_to_home(folder, monkeypatch, path):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read(path) == ["b"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    assert read(write(tmp_path / "a[1].txt", "bracket")) == ["bracket"]


def test_a_file_whose_name_has_a_colon_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a:b.txt", "colon")
    write(tmp_path / "c:d" / "e.txt", "folder")
    assert read("a:b.txt") == ["colon"]
    assert read("a:*.txt") == ["colon"]
    assert read("c:d") == ["folder"]


def test_a_readme_beside_files_of_records_is_not_read(tmp_path):
    write(tmp_path / "README.md", "# Data")
    write(tmp_path / "dataset_infos.json", '{"default": {}}')
    write(tmp_path / "a.jsonl", '{"text": "x"}\n')
    assert read(tmp_path) == ["x"]


def test_a_readme_beside_text_files_is_text(tmp_path):
    write(tmp_path / "README.md", "# Data")
    write(tmp_path / "dataset_infos.json", '{"default": {}}')
    write(tmp_path / "a.md", "x")
    assert sorted(read(tmp_path)) == ["# Data", "x"]


@pytest.mark.parametrize(
    "name", ["absent.txt", "absent/", "*.parquet", "./absent", "empty", "~/absent.md"]
)
def test_a_path_without_files_is_an_error_that_names_the_kinds(tmp_path, monkeypatch, name):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = name if name[0] in ".~" else str(tmp_path / name)
    message = complaint(path)
    assert path.rstrip("/") in message
    assert ".jsonl" in message


def test_a_home_folder_that_does_not_exist_is_an_error():
    assert "~nobody-of-this-name/a.txt" in complaint("~nobody-of-this-name/a.txt")


def test_a_file_of_another_kind_is_an_error_that_names_the_kinds(tmp_path):
    message = complaint(write(tmp_path / "a.docx", "text"))
    assert "'.docx'" in message
    assert ".parquet" in message
    assert "--text_suffixes" in message


# --- errors in records


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_missing_field_is_an_error_that_names_the_fields_of_the_record(tmp_path, suffix):
    message = complaint(WRITERS[suffix](tmp_path / f"a{suffix}", TEXTS, "body"))
    assert f"a{suffix}" in message
    assert "no field 'text'" in message
    assert "id, body" in message
    assert "--text_field" in message


def test_a_field_that_is_missing_later_is_an_error_that_names_the_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n\n{"txt": "b"}\n')
    assert "a.jsonl, line 3:" in complaint(path)


@pytest.mark.parametrize("suffix", [".txt", ".md"])
@pytest.mark.parametrize(
    ("content", "line", "byte"),
    [
        pytest.param(b"\xff", 1, "0xff", id="first line"),
        pytest.param(b"one\ntwo\nthr\xffee\nfour\n", 3, "0xff", id="third line"),
        pytest.param(b"one\r\ntwo\r\n\xff\r\n", 3, "0xff", id="after CRLF"),
        pytest.param("one\ntwö".encode()[:-1], 2, "0xc3", id="cut character"),
        pytest.param("one\n\ntwö\n".encode("latin-1"), 3, "0xf6", id="latin-1"),
        pytest.param(b"one\n\xed\xa0\x80\n", 2, "0xed", id="encoded surrogate"),
        pytest.param(BOM + b"a\n\xff", 2, "0xff", id="after a byte order mark"),
    ],
)
def test_a_text_that_is_not_utf8_is_an_error_that_names_the_line(
    tmp_path, suffix, content, line, byte
):
    message = complaint(write(tmp_path / f"a{suffix}", content))
    assert f"a{suffix}, line {line}: byte {byte}" in message


@pytest.mark.parametrize("start", [b"", BOM], ids=["plain", "bom"])
@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": "\xff"}\n', "line 3: byte 0xff"),
        ("a.jsonl", b'{"text": "a\xfe"}\n{"text": "b"}\n', "line 1: byte 0xfe"),
        ("a.csv", b"id,text\n1,a\n2,\xff\n", "line 3: byte 0xff"),
    ],
)
def test_a_record_that_is_not_utf8_is_an_error_that_names_the_line(
    tmp_path, start, name, content, error
):
    assert f"{name}, {error}" in complaint(write(tmp_path / name, start + content))


@pytest.mark.parametrize("lines_before", [0, 2])
@pytest.mark.parametrize(
    ("line", "error"),
    [
        pytest.param('{"text": "b', "not JSON", id="cut"),
        pytest.param("b", "not JSON", id="plain text"),
        pytest.param('{"text": "b"} {"text": "c"}', "not JSON", id="two objects"),
        pytest.param("[" * 100_000, "not JSON", id="endless nesting"),
        pytest.param('["b"]', "not a JSON object", id="list"),
        pytest.param('"text"', "not a JSON object", id="string"),
        pytest.param("3", "not a JSON object", id="number"),
        pytest.param("null", "not a JSON object", id="null"),
        pytest.param('{"text": null}', "'text' is null, not text", id="null field"),
        pytest.param('{"text": 3}', "'text' is 3, not text", id="number in the field"),
        pytest.param('{"text": ["b"]}', "not text", id="list in the field"),
        pytest.param('{"text": {"b": 1}}', "not text", id="object in the field"),
        pytest.param('{"text": "b\\ud800"}', "surrogate", id="high surrogate"),
        pytest.param('{"text": "\\udc00b"}', "surrogate", id="low surrogate"),
        pytest.param('{"text": "\\udc00\\ud800"}', "surrogate", id="surrogates in reverse"),
    ],
)
def test_a_bad_line_of_jsonl_is_an_error_that_names_it(tmp_path, lines_before, line, error):
    content = '{"text": "a"}\n' * lines_before + line + '\n{"text": "c"}\n'
    path = write(tmp_path / "a.jsonl", content)
    message = complaint(path)
    assert f"a.jsonl, line {lines_before + 1}: " in message
    assert error in message
    assert len(message) < 300 + len(str(path))


def test_a_number_that_is_too_long_for_python_is_an_error_that_names_the_line(tmp_path):
    path = write(tmp_path / "a.jsonl", f'{{"text": "a"}}\n{{"text": "b", "n": {"1" * 5000}}}\n')
    assert "a.jsonl, line 2: " in complaint(path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param('id,text\n1,a\n2,"b" c\n3,d\n', 3, id="text after a quote"),
        pytest.param('id,text\n1,a\n2,b\n3,"c', 4, id="unclosed quote"),
        pytest.param("id,text\n1,a\n2\n", 3, id="too few fields"),
        pytest.param("id,text\n1,a\n2,hello, world\n", 3, id="too many fields"),
    ],
)
def test_a_bad_line_of_csv_is_an_error_that_names_it(tmp_path, content, line):
    assert f"a.csv, line {line}: " in complaint(write(tmp_path / "a.csv", content))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"PAR1 junk", id="junk"),
        pytest.param(b"", id="empty"),
        pytest.param(b'{"text": "a"}\n' * 9, id="jsonl"),
    ],
)
def test_a_file_that_is_not_parquet_is_an_error_that_names_it(tmp_path, content):
    assert "a.parquet" in complaint(write(tmp_path / "a.parquet", content))


def test_a_damaged_parquet_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["abc" * 1000]}), path)
    content = bytearray(path.read_bytes())
    content[20:40] = b"\x99" * 20
    path.write_bytes(content)
    assert "a.parquet" in complaint(path)


@pytest.mark.parametrize(
    ("column", "row"),
    [
        pytest.param(["a", None], 1, id="null"),
        pytest.param([[], ["a"]], 0, id="list"),
        pytest.param([1, 2], 0, id="number"),
        pytest.param([b"a", b"b"], 0, id="bytes"),
    ],
)
def test_a_parquet_value_that_is_not_text_is_an_error_that_names_its_row(tmp_path, column, row):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    assert f"a.parquet, row {row}: field 'text'" in complaint(path)


def test_a_parquet_text_that_is_not_utf8_is_an_error_that_names_the_file(tmp_path):
    offsets = pyarrow.array([0, 1, 3], pyarrow.int32()).buffers()[1]
    content = pyarrow.py_buffer(b"a\xff\xfe")
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, content])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert "a.parquet" in complaint(tmp_path / "a.parquet")


# --- fingerprints


def fingerprint(path: Path) -> str:
    return open_source(str(path)).fingerprint()


def test_a_fingerprint_depends_on_the_content_but_not_on_the_folder(folder):
    original = fingerprint(folder)
    moved = folder.rename(folder.parent / "elsewhere")
    assert fingerprint(moved) == original

    (moved / "ignored.py").write_text("still no text")
    assert fingerprint(moved) == original

    (moved / "b.txt").write_text("B")
    assert fingerprint(moved) != original


def test_a_fingerprint_depends_on_the_order_of_the_files(tmp_path):
    write(tmp_path / "1" / "a.txt", "one")
    write(tmp_path / "1" / "b.txt", "two")
    write(tmp_path / "2" / "a.txt", "two")
    write(tmp_path / "2" / "b.txt", "one")
    assert fingerprint(tmp_path / "1") != fingerprint(tmp_path / "2")


def test_a_fingerprint_depends_on_how_a_file_is_read(tmp_path):
    as_text = write(tmp_path / "a.txt", '{"text": "a"}')
    as_records = write(tmp_path / "a.jsonl", '{"text": "a"}')
    assert fingerprint(as_text) != fingerprint(as_records)

    choice = SplitChoice(text_suffixes=[".jsonl"])
    assert open_source(str(as_records), choice).fingerprint() == fingerprint(as_text)


# --- the hub


@pytest.fixture
def hub_folder(tmp_path, monkeypatch) -> Path:
    """A dataset that ``datasets.load_dataset`` loads without a network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    write_jsonl(tmp_path / "corpus" / "train.jsonl", TEXTS)
    write_jsonl(tmp_path / "corpus" / "test.jsonl", ["in the test split"])
    return tmp_path / "corpus"


def open_train_split(folder: Path) -> Source:
    return open_source(str(folder), SplitChoice("train", is_named=True))


def test_a_hub_dataset_yields_the_rows_of_its_train_split(hub_folder):
    source = open_train_split(hub_folder)
    assert list(documents(source, "text")) == TEXTS
    assert [record.fields["id"] for record in source.records(None)] == [0, 1, 2]


def test_the_fingerprint_of_a_hub_dataset_depends_on_its_content(hub_folder):
    original = open_train_split(hub_folder).fingerprint()
    assert open_train_split(hub_folder).fingerprint() == original
    write_jsonl(hub_folder / "train.jsonl", TEXTS[1:])
    assert open_train_split(hub_folder).fingerprint() != original


def test_bad_rows_of_a_hub_dataset_are_errors_that_name_the_row(hub_folder):
    source = open_train_split(hub_folder)
    with pytest.raises(UserError, match=r"corpus, row 0: field 'id' is 0, not text"):
        list(documents(source, "id"))
    with pytest.raises(UserError, match=r"corpus, row 0: no field 'body'; the record has id, text"):
        list(documents(source, "body"))


@pytest.mark.parametrize(
    ("name", "path", "configuration", "revision"),
    [
        ("someone/something", "someone/something", None, None),
        ("someone/something:first-half", "someone/something", "first-half", None),
        ("something:20231101.en", "something", "20231101.en", None),
        ("someone/something@v1.0", "someone/something", None, "v1.0"),
        ("something@refs/pr/3:20231101.en", "something", "20231101.en", "refs/pr/3"),
    ],
)
def test_a_hub_name_may_have_a_revision_and_a_configuration(
    monkeypatch, name, path, configuration, revision
):
    calls = []

    def load_dataset(*arguments, revision):
        calls.append((*arguments, revision))
        return datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": TEXTS}))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert read(name) == TEXTS
    assert calls == [(path, configuration, revision)]
    assert open_source(name).name == name


@pytest.mark.parametrize(
    "error", [ValueError("no such dataset\nand an essay"), ValueError(""), KeyError("x")]
)
def test_any_error_of_the_hub_becomes_one_line(monkeypatch, error):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    message = complaint("someone/something")
    assert "someone/something" in message
    assert "essay" not in message


# --- builtin corpora


@pytest.mark.parametrize("name", ["builtin:python", "builtin:", "builtin:PYTHON-DOCS"])
def test_an_unknown_builtin_is_an_error_that_names_the_others(name):
    message = complaint(name)
    assert f"{name} does not exist" in message
    assert "builtin:python-docs" in message


@long_form
def test_the_documentation_of_python_is_more_than_a_megabyte():
    source = open_source("builtin:python-docs")
    texts = list(documents(source, "text"))
    assert sum(map(len, texts)) > 1_000_000
    assert len(texts) > 300
    assert all(texts)

    fingerprint = source.fingerprint()
    assert open_source("builtin:python-docs").fingerprint() == fingerprint
    assert open_source("builtin:python-functions").fingerprint() != fingerprint


@pytest.mark.parametrize("name", list(builtin.CORPORA))
def test_a_builtin_corpus_is_parsed_once_and_only_as_far_as_it_is_read(name, monkeypatch):
    files = builtin._files()[:40]
    parsed = []
    parse = builtin._parse

    def parse_and_count(path):
        parsed.append(path)
        return parse(path)

    monkeypatch.setattr(builtin, "_files", lambda: files)
    monkeypatch.setattr(builtin, "_parse", parse_and_count)
    builtin._documentation.cache_clear()
    builtin._pairs.cache_clear()
    records = builtin.CORPORA[name]

    assert next(records())
    assert len(parsed) < 10

    all_records = list(records())
    assert list(records()) == all_records
    assert sorted(parsed) == files


def test_builtin_corpora_leave_out_tests_and_installed_packages(tmp_path, monkeypatch):
    sources = ["a/c.py", "a.py", "b.py"]
    other_files = ["test/d.py", "a/tests/e.py", "site-packages/f.py", "a/notes.txt"]
    for name in sources + other_files:
        write(tmp_path / name, "x = 1\n")
    monkeypatch.setattr(builtin, "_root", lambda: tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in builtin._files()] == sources


# --- records of a recipe


def test_a_dataset_of_a_recipe_is_read_like_a_hub_dataset():
    dataset = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": TEXTS})
    source = records_source(dataset)
    assert list(documents(source, "text")) == TEXTS
    places = [record.place for record in source.records(None)]
    assert places == ["records, row 0", "records, row 1", "records, row 2"]
    assert source.has_artificial_nulls
    assert not source.has_splits


def test_the_fingerprint_of_a_dataset_depends_on_its_rows_and_their_order():
    dataset = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": TEXTS})
    equal = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": TEXTS})
    fingerprint = records_source(dataset).fingerprint()
    assert records_source(equal).fingerprint() == fingerprint
    assert records_source(dataset.select([1, 0])).fingerprint() != fingerprint


def test_streamed_records_have_artificial_nulls_and_another_fingerprint_than_a_list():
    records = [{"text": "a", "tools": None}]
    stream = datasets.IterableDataset.from_generator(lambda: iter(records))
    assert records_source(stream).has_artificial_nulls
    assert records_source(stream).fingerprint() != records_source(records).fingerprint()


class Reiterable:
    """An object that can be iterated several times."""

    def __init__(self, records: list) -> None:
        self.records = records

    def __iter__(self) -> Iterator:
        return iter(self.records)


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(TEXTS, id="list"),
        pytest.param(tuple(TEXTS), id="tuple"),
        pytest.param([{"text": text} for text in TEXTS], id="dictionaries"),
        pytest.param(Reiterable(TEXTS), id="iterable"),
        pytest.param(lambda: TEXTS, id="function"),
    ],
)
def test_records_of_a_recipe_can_be_read_several_times(records):
    source = records_source(records)
    for _ in range(2):
        assert list(documents(source, "text")) == TEXTS
    assert source.fingerprint() == source.fingerprint()
    assert not source.has_artificial_nulls


def test_the_first_record_is_read_only_once():
    calls = 0

    def texts() -> Iterator[str]:
        nonlocal calls
        calls += 1
        yield from TEXTS

    source = records_source(texts)
    for _ in range(2):
        assert source.first == ("texts(), record 0", {"text": TEXTS[0]})
    assert calls == 1


def test_there_is_no_first_record_of_an_empty_list():
    assert records_source([]).first is None


def test_the_fingerprint_of_a_list_depends_on_its_content():
    assert records_source(["a"]).fingerprint() == records_source(["a"]).fingerprint()
    assert records_source(["a"]).fingerprint() != records_source(["b"]).fingerprint()


@pytest.mark.parametrize(
    ("records", "error"),
    [
        pytest.param(
            iter(TEXTS), "can be read only once; pass a list, or a function", id="iterator"
        ),
        pytest.param((text for text in TEXTS), "a generator can be read only once", id="generator"),
        pytest.param(
            {"train": TEXTS}, "cannot read a dict; pass a datasets.Dataset, a list", id="dict"
        ),
        pytest.param("some text", "cannot read a str; pass", id="str"),
        pytest.param({"a", "b"}, "cannot read a set; pass", id="set"),
        pytest.param(3, "cannot read a int; pass", id="int"),
    ],
)
def test_records_without_a_repeatable_order_are_an_error(records, error):
    with pytest.raises(UserError) as raised:
        records_source(records)
    assert error in str(raised.value)


def test_a_bad_record_of_a_list_is_an_error_that_names_its_number():
    with pytest.raises(UserError, match=r"records, record 1 is 3, neither text nor a dictionary"):
        list(documents(records_source(["a", 3]), "text"))
