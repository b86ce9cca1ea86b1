"""Sources yield texts in a fixed order; bad input is an error of one line that names the place."""

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data import builtin
from llmtrain.data.config import ChatConfig
from llmtrain.data.readers import Source
from llmtrain.data.sources import open_source, records_source, requested_sources
from llmtrain.errors import UserError
from tests.data.preparation import data_config

TEXTS = ["first text\nof two lines", 'ünï — 漢字 🙂, "quoted"', "  spaces   and\r\nan end \n"]


def texts_of(source: Source, field: str = "text") -> list[str]:
    return [record.fields[field] for record in source.records(field)]


def read(path: Path | str, field: str = "text") -> list[str]:
    return texts_of(open_source(str(path), data_config()), field)


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


def test_the_name_of_a_parquet_column_may_have_a_dot(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"a.b": TEXTS}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", "a.b") == TEXTS


# --- folders and patterns


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "texts"
    write(root / "b.txt", "b")
    write(root / "a.md", "a")
    write(root / "deep" / "er" / "d.txt", "d")
    write_jsonl(root / "c.jsonl", ["c1", "c2"])
    write(root / "ignored.py", "no text")
    return root


def test_a_folder_is_read_in_the_order_of_its_paths(folder):
    assert read(folder) == ["a", "b", "c1", "c2", "d"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["b"]),
        ("*", ["a", "b", "c1", "c2"]),
        ("**/**/*.txt", ["b", "d"]),
        ("[ab].*", ["a", "b"]),
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


@pytest.mark.parametrize("path", ["./texts/b.txt", "~/texts/b*"])
def test_paths_are_relative_to_the_working_folder_or_to_home(folder, monkeypatch, path):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read(path) == ["b"]


def test_a_file_name_with_brackets_or_a_colon_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a[1].txt", "bracket")
    write(tmp_path / "a:b.txt", "colon")
    write(tmp_path / "c:d" / "e.txt", "folder")
    assert read("a[1].txt") == ["bracket"]
    assert read("a:b.txt") == ["colon"]
    assert read("a:*.txt") == ["colon"]
    assert read("c:d") == ["folder"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [("a.jsonl", '{"text": "x"}\n', ["x"]), ("a.md", "x", ["# Data", "x"])],
)
def test_a_readme_is_text_unless_it_describes_records(tmp_path, name, content, expected):
    write(tmp_path / "README.md", "# Data")
    write(tmp_path / name, content)
    assert sorted(read(tmp_path)) == expected


@pytest.mark.parametrize(
    "name",
    ["absent/", "*.parquet", "./absent", "empty", "~/absent.md", "~nobody-of-this-name/a.txt"],
)
def test_a_path_without_files_is_an_error_that_names_it(tmp_path, monkeypatch, name):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = name if name[0] in ".~" else str(tmp_path / name)
    assert f"--dataset {path.rstrip('/')}" in complaint(path)


# --- fingerprints


def fingerprint(path: Path) -> str:
    return open_source(str(path), data_config()).fingerprint()


def test_a_fingerprint_depends_on_the_content_but_not_on_the_folder(folder):
    original = fingerprint(folder)
    moved = folder.rename(folder.parent / "elsewhere")
    assert fingerprint(moved) == original

    (moved / "ignored.py").write_text("still no text")
    assert fingerprint(moved) == original

    (moved / "b.txt").write_text("B")
    assert fingerprint(moved) != original


def test_a_fingerprint_depends_on_the_order_of_the_files(tmp_path):
    a = write(tmp_path / "a.txt", "one")
    b = write(tmp_path / "b.txt", "two")
    original = fingerprint(tmp_path)
    a.write_text("two")
    b.write_text("one")
    assert fingerprint(tmp_path) != original


def test_a_fingerprint_depends_on_how_a_file_is_read(tmp_path):
    as_text = write(tmp_path / "a.txt", '{"text": "a"}')
    as_records = write(tmp_path / "a.jsonl", '{"text": "a"}')
    assert fingerprint(as_text) != fingerprint(as_records)

    config = data_config(text_suffixes=[".jsonl"])
    assert open_source(str(as_records), config).fingerprint() == fingerprint(as_text)


# --- the hub


def test_a_hub_name_may_have_a_revision_and_a_configuration(monkeypatch):
    calls = []

    def load_dataset(path, configuration, revision):
        calls.append((path, configuration, revision))
        return datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": TEXTS}))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    names = ["someone/something", "something@refs/pr/3:20231101.en"]
    for name in names:
        assert read(name) == TEXTS
        assert open_source(name, data_config()).name == name
    assert calls == [
        ("someone/something", None, None),
        ("something", "20231101.en", "refs/pr/3"),
    ]


# --- builtin corpora


def test_an_unknown_builtin_is_an_error_that_names_the_others():
    assert "builtin:python-docs" in complaint("builtin:PYTHON-DOCS")


def test_builtin_functions_are_not_those_of_tests_and_installed_packages(tmp_path, monkeypatch):
    for name in ("a/c.py", "a.py", "test/d.py", "a/tests/e.py", "site-packages/f.py"):
        write(tmp_path / name, f'def f():\n    """From {name}."""\n    return 1\n')
    monkeypatch.setattr(builtin, "_ROOT", tmp_path)
    texts = [f"def f():\n    return 1\n\nFrom {name}.\n" for name in ("a/c.py", "a.py")]
    assert read("builtin:python-functions") == texts


def test_the_first_function_is_found_without_reading_all_files(tmp_path, monkeypatch):
    """The first record decides the format, also if the rows are in the cache."""
    first = write(tmp_path / "a.py", 'def f():\n    """F."""\n    return 1\n')
    monkeypatch.setattr(builtin, "_files", lambda: [first, tmp_path / "missing.py"])
    assert next(builtin.function_pairs()) == ("def f():\n    return 1", "F.")


# --- records of a recipe


def test_a_dataset_of_a_recipe_is_read_like_a_hub_dataset():
    dataset = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": TEXTS})
    source = records_source(dataset)
    assert texts_of(source) == TEXTS
    places = [record.place for record in source.records(None)]
    assert places == ["records, row 0", "records, row 1", "records, row 2"]
    assert source.has_artificial_nulls
    assert not source.has_splits


def test_the_fingerprint_of_records_depends_on_their_content_and_order():
    dataset = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": TEXTS})
    equal = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": TEXTS})
    fingerprint = records_source(dataset).fingerprint()
    assert records_source(equal).fingerprint() == fingerprint
    assert records_source(dataset.select([1, 0])).fingerprint() != fingerprint
    assert records_source(["a"]).fingerprint() == records_source(["a"]).fingerprint()
    assert records_source(["a"]).fingerprint() != records_source(["b"]).fingerprint()


def test_records_of_a_recipe_can_be_read_several_times():
    dictionaries = [{"text": text} for text in TEXTS]
    for records in (TEXTS, dictionaries, lambda: TEXTS):
        source = records_source(records)
        for _ in range(2):
            assert texts_of(source) == TEXTS
        assert source.first.fields == {"text": TEXTS[0]}
        assert source.fingerprint() == source.fingerprint()
        assert not source.has_artificial_nulls
    assert records_source([]).first is None


@pytest.mark.parametrize(
    ("records", "kind"),
    [
        pytest.param((text for text in TEXTS), "a generator", id="generator"),
        pytest.param({"train": TEXTS}, "a dict", id="dict"),
        pytest.param("some text", "a str", id="str"),
        pytest.param({"a", "b"}, "a set", id="set"),
    ],
)
def test_records_without_a_repeatable_order_are_an_error(records, kind):
    with pytest.raises(UserError, match=kind):
        records_source(records)


def test_a_bad_record_of_a_list_is_an_error_that_names_its_number():
    with pytest.raises(UserError, match=r"records, record 1 is 3, neither text nor a dictionary"):
        texts_of(records_source(["a", 3]))


def test_conversations_need_a_template_even_if_they_have_the_text_of_a_prompt():
    for format, needs_template in (("messages", True), ("prompt_completion", False)):
        source = records_source([{"prompt": "a", "messages": [], "completion": "b"}])
        [requested] = requested_sources(
            data_config(), ChatConfig(format=format), source, unpaired=False
        )
        assert requested.needs_template == needs_template


def test_a_name_stands_for_the_records() -> None:
    unread = lambda: 1 // 0  # noqa: E731
    first = records_source(unread, "v1").fingerprint()
    assert first == records_source(unread, "v1").fingerprint()
    assert first != records_source(unread, "v2").fingerprint()
    # Recipes share the cache, and may use the same name for other records.
    assert first != records_source(lambda: ["a"], "v1").fingerprint()
