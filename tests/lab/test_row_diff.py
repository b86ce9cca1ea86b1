"""`llmtrain diff` of runs on different data shows the first row that differs, and its file."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from llmtrain.data.config import DataConfig
from llmtrain.data.prepare import tokenize
from llmtrain.errors import UserError
from llmtrain.lab.diff import metadata_differences
from llmtrain.model_folders import tokenizer_of
from llmtrain.record.history import History
from tests.lab.seed_runs import write_run
from tests.launching import read_json

LINES = [f"document {number}: the kernel waits for {number * number}\n" for number in range(40)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("LLMTRAIN_CACHE", str(cache))
    return cache


def run_on(dataset: list[Path], folder: Path) -> History:
    """Tokenize files, and write a run folder that describes their rows."""
    paths = [str(path) for path in dataset]
    config = DataConfig(dataset=paths, tokenizer="byte", eval_fraction=0.0)
    rows = tokenize(config, max_length=32)

    write_run(folder, seed=0, losses={1: 2.0}, dataset=paths)
    record = read_json(folder / "run.json") | asdict(rows.metadata)
    (folder / "run.json").write_text(json.dumps(record))
    return History.of_run(folder)


@pytest.fixture
def runs(cache: Path, tmp_path: Path) -> tuple[History, History]:
    """Two runs on two files. In between, a word of the second file was changed."""
    first_file = tmp_path / "first.txt"
    second_file = tmp_path / "second.txt"
    first_file.write_text("".join(LINES))
    second_file.write_text("".join(LINES[::-1]))
    before = run_on([first_file, second_file], folder=tmp_path / "before")

    text = second_file.read_text()
    second_file.write_text(text.replace("kernel", "bucket", 1))
    after = run_on([first_file, second_file], folder=tmp_path / "after")
    return before, after


def test_the_first_row_that_differs_is_shown_with_its_file(
    runs: tuple[History, History], tmp_path: Path
) -> None:
    before, after = runs
    (difference,) = metadata_differences(before, after)

    assert difference.groups == ("data",)
    assert difference.text.startswith("rows: 1 of ")
    first_row_of_second_file = before.record["source_rows"][0]
    position = f"row {first_row_of_second_file} (of {tmp_path}/second.txt)"
    assert f"train rows differ; the first is {position}" in difference.text

    _, _, texts = difference.text.partition("second.txt): ")
    text_before, text_after = texts.split(" and ")
    assert text_before.startswith('"kernel')
    assert text_after.startswith('"bucket')


def test_hashes_are_compared_if_the_rows_are_not_in_the_cache(
    runs: tuple[History, History], cache: Path
) -> None:
    cache.rename(cache.with_name("elsewhere"))

    (difference,) = metadata_differences(*runs)

    assert difference.text.startswith("content of the data: ")


def test_hashes_are_compared_if_the_rows_in_the_cache_are_damaged(
    runs: tuple[History, History], cache: Path
) -> None:
    before, _ = runs
    path = cache / before.record["cache_entry"] / "train-0.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    (difference,) = metadata_differences(*runs)

    assert difference.text.startswith("content of the data: ")


@pytest.mark.parametrize(
    "content", [pytest.param(None, id="absent"), pytest.param("{", id="damaged")]
)
def test_a_tokenizer_that_cannot_be_loaded_is_a_user_error(
    content: str | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')

    with pytest.raises(UserError, match="tokenizer"):
        tokenizer_of(str(tmp_path))
