"""Every format gives its texts in a fixed order; bad input is one line that names the file and the place in it."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data import builtin
from llmtrain.data.dataset_names import open_source
from llmtrain.data.recipe_records import records_source
from llmtrain.data.sources import Source, SplitChoice, documents
from llmtrain.errors import UserError

TEXTS = ["first text\nof two lines", 'ünï — 漢字 🙂, "quoted"', "  spaces   and\r\nan end \n"]


def read(path: object, field: str = "text") -> list[str]:
    return list(documents(open_source(str(path)), field))


def complaint(path: object, field: str = "text") -> str:
    with pytest.raises(UserError) as caught:
        read(path, field)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    return write(
        path, "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    )


def write_csv(path: Path, texts: list[str], field: str = "text") -> Path:
    rows = [f'{i},"{text.replace(chr(34), chr(34) * 2)}"\r\n' for i, text in enumerate(texts)]
    return write(path, f"id,{field}\r\n" + "".join(rows))


def write_parquet(path: Path, texts: list[str], field: str = "text") -> Path:
    pyarrow.parquet.write_table(
        pyarrow.table({"id": list(range(len(texts))), field: texts}), path, row_group_size=2
    )
    return path


RECORDS = {".jsonl": write_jsonl, ".csv": write_csv, ".parquet": write_parquet}


@pytest.mark.parametrize("suffix", [".txt", ".md"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_file_is_one_document_to_the_last_byte(tmp_path, suffix, text):
    assert read(write(tmp_path / f"a{suffix}", text)) == [text]


@pytest.mark.parametrize("suffix", RECORDS)
@pytest.mark.parametrize("field", ["text", "body"])
def test_every_record_is_a_document(tmp_path, suffix, field):
    assert read(RECORDS[suffix](tmp_path / f"a{suffix}", TEXTS, field), field) == TEXTS


def test_a_parquet_column_with_a_dot_in_its_name_is_found(tmp_path):
    assert read(write_parquet(tmp_path / "a.parquet", TEXTS, "a.b"), "a.b") == TEXTS


def test_empty_lines_of_jsonl_are_no_documents(tmp_path):
    path = write(tmp_path / "a.jsonl", '\n{"text": "a"}\r\n  \n{"text": "b"}')
    assert read(path) == ["a", "b"]


def test_an_escaped_pair_of_surrogates_is_one_character(tmp_path):
    assert read(write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude42"}\n')) == ["🙂"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "text", ["text"]),
        ("a.md", "text", ["text"]),
        ("a.jsonl", '{"text": "a"}\n{"text": "\\ufeffb"}\n', ["a", "\ufeffb"]),
        ("a.csv", "text,id\na,1\n", ["a"]),
    ],
)
def test_a_byte_order_mark_at_the_start_is_no_text(tmp_path, name, content, expected):
    assert read(write(tmp_path / name, b"\xef\xbb\xbf" + content.encode())) == expected


def test_a_byte_order_mark_inside_a_text_stays(tmp_path):
    assert read(write(tmp_path / "a.txt", "a\ufeffb")) == ["a\ufeffb"]


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


def test_a_folder_gives_its_files_in_the_order_of_their_paths(folder):
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
def test_a_glob_gives_its_files_in_the_order_of_their_paths(folder, pattern, expected):
    assert read(folder / pattern) == expected


def test_a_glob_that_reaches_a_file_twice_reads_it_once(folder):
    assert read(folder / "**" / "**" / "*.txt") == ["b", "d"]


def test_paths_are_seen_from_the_working_folder_and_from_home(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert (
        read("texts/b.txt")
        == read("./texts/b.txt")
        == read("~/texts/b.txt")
        == read("~/texts/b*")
        == ["b"]
    )


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    assert read(write(tmp_path / "a[1].txt", "bracket")) == ["bracket"]


@pytest.mark.parametrize(
    "name", ["absent.txt", "absent/", "*.parquet", "./absent", "empty", "~/absent.md"]
)
def test_a_path_without_text_is_an_error_that_says_what_was_looked_for(tmp_path, monkeypatch, name):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    target = name if name[0] in ".~" else tmp_path / name
    message = complaint(target)
    assert str(target) in message
    assert ".jsonl" in message


def test_a_home_that_nobody_has_is_an_error_of_one_line():
    assert "~nobody-of-this-name/a.txt" in complaint("~nobody-of-this-name/a.txt")


def test_a_file_of_another_kind_is_an_error_that_names_the_kinds(tmp_path):
    message = complaint(write(tmp_path / "a.docx", "text"))
    assert "'.docx'" in message
    assert ".parquet" in message


@pytest.mark.parametrize("suffix", RECORDS)
def test_a_missing_field_is_an_error_that_names_the_fields_there_are(tmp_path, suffix):
    message = complaint(RECORDS[suffix](tmp_path / f"a{suffix}", TEXTS, "body"))
    assert f"a{suffix}" in message
    assert "no field 'text'" in message
    assert "id, body" in message
    assert "--text_field" in message


def test_a_field_that_goes_missing_is_an_error_that_names_the_line(tmp_path):
    assert "a.jsonl, line 3:" in complaint(
        write(tmp_path / "a.jsonl", '{"text": "a"}\n\n{"txt": "b"}\n')
    )


BOM = b"\xef\xbb\xbf"
NOT_UTF8 = [
    ("first-line", b"\xff", 1),
    ("third-line", b"one\ntwo\nthr\xffee\nfour\n", 3),
    ("after-crlf", b"one\r\ntwo\r\n\xff\r\n", 3),
    ("cut-character", "one\ntwö".encode()[:-1], 2),
    ("latin-1", "one\n\ntwö\n".encode("latin-1"), 3),
    ("encoded-surrogate", b"one\n\xed\xa0\x80\n", 2),
    ("behind-a-bom", BOM + b"a\n\xff", 2),
]


@pytest.mark.parametrize(
    ("raw", "line"), [case[1:] for case in NOT_UTF8], ids=[case[0] for case in NOT_UTF8]
)
@pytest.mark.parametrize("suffix", [".txt", ".md"])
def test_a_byte_that_is_not_utf8_is_an_error_that_names_its_line(tmp_path, suffix, raw, line):
    message = complaint(write(tmp_path / f"a{suffix}", raw))
    assert f"a{suffix}, line {line}: byte 0x" in message
    culprit = next(b for b in raw.removeprefix(BOM) if b >= 0x80)
    assert f"0x{culprit:02x}" in message


@pytest.mark.parametrize("start", [b"", BOM], ids=["plain", "bom"])
def test_a_byte_that_is_not_utf8_in_records_is_an_error_that_names_its_line(tmp_path, start):
    path = write(tmp_path / "a.jsonl", start + b'{"text": "a"}\n{"text": "b"}\n{"text": "\xff"}\n')
    assert "a.jsonl, line 3: byte 0xff" in complaint(path)
    path = write(tmp_path / "b.jsonl", start + b'{"text": "a\xfe"}\n{"text": "b"}\n')
    assert "b.jsonl, line 1: byte 0xfe" in complaint(path)
    path = write(tmp_path / "a.csv", start + b"id,text\n1,a\n2,\xff\n")
    assert "a.csv, line 3: byte 0xff" in complaint(path)


BAD_LINES = [
    ("cut", '{"text": "b', "not JSON"),
    ("plain-text", "b", "not JSON"),
    ("two-objects", '{"text": "b"} {"text": "c"}', "not JSON"),
    ("endless-nesting", "[" * 100_000, "not JSON"),
    ("list", '["b"]', "not a JSON object"),
    ("string", '"text"', "not a JSON object"),
    ("number", "3", "not a JSON object"),
    ("null", "null", "not a JSON object"),
    ("field-null", '{"text": null}', "'text' is null, not text"),
    ("field-number", '{"text": 3}', "'text' is 3, not text"),
    ("field-list", '{"text": ["b"]}', "not text"),
    ("field-object", '{"text": {"b": 1}}', "not text"),
    ("high-surrogate", '{"text": "b\\ud800"}', "surrogate"),
    ("low-surrogate", '{"text": "\\udc00b"}', "surrogate"),
    ("surrogates-the-wrong-way-round", '{"text": "\\udc00\\ud800"}', "surrogate"),
]


@pytest.mark.parametrize(
    ("line", "said"), [case[1:] for case in BAD_LINES], ids=[case[0] for case in BAD_LINES]
)
@pytest.mark.parametrize("before", [0, 2])
def test_a_line_that_holds_no_text_is_an_error_that_names_it(tmp_path, before, line, said):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n' * before + line + '\n{"text": "c"}\n')
    message = complaint(path)
    assert f"a.jsonl, line {before + 1}: " in message
    assert said in message
    assert len(message) < 300 + len(str(path))


def test_a_number_too_long_for_python_is_no_traceback(tmp_path):
    path = write(tmp_path / "a.jsonl", f'{{"text": "a"}}\n{{"text": "b", "n": {"1" * 5000}}}\n')
    assert "a.jsonl, line 2: " in complaint(path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('id,text\n1,a\n2,"b" c\n3,d\n', 3),
        ('id,text\n1,a\n2,b\n3,"c', 4),
        ("id,text\n1,a\n2\n", 3),
        ("id,text\n1,a\n2,hello, world\n", 3),
    ],
    ids=["quote-inside-a-field", "quote-that-never-ends", "too-few-fields", "too-many-fields"],
)
def test_a_csv_record_that_is_broken_is_an_error_that_names_its_line(tmp_path, content, line):
    assert f"a.csv, line {line}: " in complaint(write(tmp_path / "a.csv", content))


def test_a_csv_field_may_be_longer_than_python_s_limit(tmp_path):
    long = "x" * 200_000
    assert read(write_csv(tmp_path / "a.csv", [long])) == [long]


def test_a_parquet_file_that_is_none_is_an_error_that_names_it(tmp_path):
    for name, content in [("junk", b"PAR1 junk"), ("empty", b""), ("text", b'{"text": "a"}\n' * 9)]:
        assert f"{name}.parquet" in complaint(write(tmp_path / f"{name}.parquet", content))


def test_a_damaged_parquet_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["abc" * 1000]}), path)
    raw = bytearray(path.read_bytes())
    raw[20:40] = b"\x99" * 20
    path.write_bytes(raw)
    assert "a.parquet" in complaint(path)


@pytest.mark.parametrize(
    "column",
    [["a", None], [[], ["a"]], [1, 2], [b"a", b"b"]],
    ids=["null", "list", "number", "bytes"],
)
def test_a_parquet_value_that_is_no_text_is_an_error_that_names_its_row(tmp_path, column):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    assert f"a.parquet, row {1 if column[0] == 'a' else 0}: field 'text'" in complaint(path)


def test_a_parquet_text_that_is_not_utf8_is_an_error_that_names_the_file(tmp_path):
    offsets = pyarrow.array([0, 1, 3], pyarrow.int32()).buffers()[1]
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"a\xff\xfe")]
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    assert "a.parquet" in complaint(tmp_path / "a.parquet")


def fingerprint(path: object) -> str:
    return open_source(str(path)).fingerprint()


def test_the_fingerprint_follows_the_content_and_not_the_place(folder):
    before = fingerprint(folder)
    moved = folder.rename(folder.parent / "elsewhere")
    assert fingerprint(moved) == before
    (moved / "ignored.py").write_text("still no text")
    assert fingerprint(moved) == before
    (moved / "b.txt").write_text("B")
    assert fingerprint(moved) != before


def test_the_fingerprint_follows_the_order_of_the_files(tmp_path):
    for folder, texts in [("1", ("one", "two")), ("2", ("two", "one"))]:
        for name, text in zip(("a.txt", "b.txt"), texts, strict=True):
            write(tmp_path / folder / name, text)
    assert fingerprint(tmp_path / "1") != fingerprint(tmp_path / "2")


def test_the_same_bytes_as_text_and_as_records_have_different_fingerprints(tmp_path):
    text, records = (write(tmp_path / name, '{"text": "a"}') for name in ("a.txt", "a.jsonl"))
    assert fingerprint(text) != fingerprint(records)


@pytest.fixture
def hub_folder(tmp_path, monkeypatch) -> Path:
    """A dataset that ``datasets.load_dataset`` finds without a network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    write_jsonl(tmp_path / "corpus" / "train.jsonl", TEXTS)
    write_jsonl(tmp_path / "corpus" / "test.jsonl", ["of the test split"])
    return tmp_path / "corpus"


def of_split(folder: Path, split: str = "train") -> Source:
    return open_source(str(folder), SplitChoice(split, is_named=True))


def test_a_hub_dataset_gives_the_rows_of_its_train_split(hub_folder):
    source = of_split(hub_folder)
    assert list(documents(source, "text")) == TEXTS
    assert [record.fields["id"] for record in source.records(None)] == list(range(len(TEXTS)))
    before = source.fingerprint()
    assert before == of_split(hub_folder).fingerprint()
    write_jsonl(hub_folder / "train.jsonl", TEXTS[1:])
    assert of_split(hub_folder).fingerprint() != before


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("someone/something", ("someone/something", None, None)),
        ("someone/something:first-half", ("someone/something", "first-half", None)),
        ("something:20231101.en", ("something", "20231101.en", None)),
        ("someone/something@v1.0", ("someone/something", None, "v1.0")),
        ("something@refs/pr/3:20231101.en", ("something", "20231101.en", "refs/pr/3")),
    ],
)
def test_a_hub_dataset_may_have_a_revision_and_a_configuration(monkeypatch, name, asked):
    datasets = pytest.importorskip("datasets")
    loaded = []

    def load(path, configuration, revision):
        loaded.append((path, configuration, revision))
        return datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": TEXTS}))

    monkeypatch.setattr("datasets.load_dataset", load)
    assert read(name) == TEXTS
    assert loaded == [asked]
    assert open_source(name).name == name


def test_a_file_whose_name_holds_a_colon_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a:b.txt", "colon")
    write(tmp_path / "c:d" / "e.txt", "folder")
    assert read("a:b.txt") == read("a:*.txt") == ["colon"]
    assert read("c:d") == ["folder"]


def test_bad_rows_of_a_hub_dataset_are_errors_that_name_the_row(hub_folder):
    with pytest.raises(UserError, match=r"corpus, row 0: field 'id' is 0, not text"):
        list(documents(of_split(hub_folder), "id"))
    with pytest.raises(UserError, match=r"corpus, row 0: no field 'body'; the record has id, text"):
        list(documents(of_split(hub_folder), "body"))


@pytest.mark.parametrize(
    "error", [ValueError("no such dataset\nand an essay"), ValueError(""), KeyError("x")]
)
def test_whatever_the_hub_answers_the_user_reads_one_line(monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("datasets.load_dataset", refuse)
    message = complaint("someone/something")
    assert "someone/something" in message
    assert "essay" not in message


@pytest.mark.parametrize("name", ["builtin:python", "builtin:", "builtin:PYTHON-DOCS"])
def test_an_unknown_builtin_is_an_error_that_names_those_there_are(name):
    message = complaint(name)
    assert f"{name} does not exist" in message
    assert "builtin:python-docs" in message


def test_the_documentation_of_python_is_a_corpus_of_more_than_a_megabyte():
    source = open_source("builtin:python-docs")
    texts = list(documents(source, "text"))
    assert sum(map(len, texts)) > 1_000_000
    assert len(texts) > 300
    assert all(texts)
    assert (
        source.fingerprint()
        == open_source("builtin:python-docs").fingerprint()
        != open_source("builtin:python-functions").fingerprint()
    )


@pytest.mark.parametrize("name", list(builtin.CORPORA))
def test_a_builtin_corpus_is_parsed_only_as_far_as_it_is_read_and_once(name, monkeypatch):
    some_files = builtin._files()[:40]
    parsed = []
    parse = builtin._parse
    monkeypatch.setattr(builtin, "_files", lambda: some_files)
    monkeypatch.setattr(builtin, "_parse", lambda path: parsed.append(path) or parse(path))
    builtin._documentation.cache_clear()
    builtin._pairs.cache_clear()
    records = builtin.CORPORA[name]
    assert next(records())
    assert len(parsed) < 10  # to recognise a format takes the first record, not seconds
    whole = list(records())
    assert sorted(parsed) == some_files
    assert list(records()) == whole
    assert sorted(parsed) == some_files


def test_the_builtin_corpora_are_the_library_without_tests_and_without_what_was_installed(
    tmp_path, monkeypatch
):
    for name in (
        "b.py",
        "a/c.py",
        "a.py",
        "test/d.py",
        "a/tests/e.py",
        "site-packages/f.py",
        "a/notes.txt",
    ):
        write(tmp_path / name, "x = 1\n")
    monkeypatch.setattr(builtin, "_root", lambda: tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in builtin._files()] == [
        "a/c.py",
        "a.py",
        "b.py",
    ]


# --- records in Python ---


def test_a_data_set_in_python_is_read_like_one_of_the_hub():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": TEXTS})
    source = records_source(data)
    assert list(documents(source, "text")) == TEXTS
    assert [record.place for record in source.records(None)] == [
        f"records, row {i}" for i in range(3)
    ]
    assert source.has_artificial_nulls
    assert not source.has_splits
    same = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": TEXTS})
    assert records_source(same).fingerprint() == source.fingerprint()
    assert records_source(data.select([1, 0])).fingerprint() != source.fingerprint()


def test_streamed_records_are_other_records_than_a_list_of_the_same():
    datasets = pytest.importorskip("datasets")
    records = [{"text": "a", "tools": None}]
    streamed = records_source(datasets.IterableDataset.from_generator(lambda: iter(records)))
    assert streamed.has_artificial_nulls  # so null has another meaning
    assert streamed.fingerprint() != records_source(records).fingerprint()


class Reiterable:
    def __init__(self, records: list) -> None:
        self.records = records

    def __iter__(self) -> Iterator:
        return iter(self.records)


@pytest.mark.parametrize(
    "records",
    [TEXTS, tuple(TEXTS), [{"text": text} for text in TEXTS], Reiterable(TEXTS), lambda: TEXTS],
    ids=["list", "tuple", "dictionaries", "iterable", "function"],
)
def test_records_in_python_are_read_as_often_as_they_are_needed(records):
    source = records_source(records)
    assert list(documents(source, "text")) == TEXTS
    assert list(documents(source, "text")) == TEXTS
    assert source.fingerprint() == source.fingerprint()
    assert not source.has_artificial_nulls


def test_the_first_record_is_read_once():
    started = []

    def texts() -> Iterator[str]:
        started.append("once")
        yield from TEXTS

    source = records_source(texts)
    assert source.first() == source.first() == ("texts(), record 0", {"text": TEXTS[0]})
    assert started == ["once"]
    assert records_source([]).first() is None


def test_the_fingerprint_of_a_list_follows_its_content():
    assert records_source(["a"]).fingerprint() == records_source(["a"]).fingerprint()
    assert records_source(["a"]).fingerprint() != records_source(["b"]).fingerprint()


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (iter(TEXTS), "can be read only once; pass a list, or a function"),
        ((text for text in TEXTS), "a generator can be read only once"),
        ({"train": TEXTS}, "cannot read a dict; pass a datasets.Dataset, a list"),
        ("some text", "cannot read a str; pass"),
        ({"a", "b"}, "cannot read a set; pass"),
        (3, "cannot read a int; pass"),
    ],
    ids=["iterator", "generator", "dict", "str", "set", "int"],
)
def test_what_cannot_be_read_several_times_in_one_order_is_an_error(records, expected):
    with pytest.raises(UserError) as caught:
        records_source(records)
    assert expected in str(caught.value)


def test_a_bad_record_in_a_list_is_named_by_its_number():
    with pytest.raises(UserError, match=r"records, record 1 is 3, neither text nor a dictionary"):
        list(documents(records_source(["a", 3]), "text"))


@pytest.mark.parametrize(("other", "expected"), [("a.jsonl", ["x"]), ("a.md", ["# Data", "x"])])
def test_a_readme_is_no_record_beside_files_of_records(tmp_path, other, expected):
    (tmp_path / "README.md").write_text("# Data")
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    text = '{"text": "x"}\n' if other == "a.jsonl" else "x"
    (tmp_path / other).write_text(text)
    assert sorted(documents(open_source(str(tmp_path)), "text")) == expected
