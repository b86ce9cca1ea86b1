"""`llmtrain diff` of two data sets shows the first row that differs, and its file."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from llmtrain.data.config import DataConfig
from llmtrain.data.prepare import tokenize
from llmtrain.errors import UserError
from llmtrain.lab.diff import metadata_differences
from llmtrain.lab.row_diff import load_tokenizer
from llmtrain.record.history import History
from tests.lab.seed_runs import write_run
from tests.launching import read_json

WORDS = [f"document {number}: the kernel waits for {number * number}\n" for number in range(40)]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[History, History]:
    """Two runs on two files; one word of the second file was changed in between."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    names = [str(tmp_path / "first.txt"), str(tmp_path / "second.txt")]
    (tmp_path / "first.txt").write_text("".join(WORDS))
    histories = []
    for word in ("kernel", "bucket"):
        (tmp_path / "second.txt").write_text("".join(WORDS[::-1]).replace("kernel", word, 1))
        config = DataConfig(dataset=names, tokenizer="byte", eval_fraction=0.0)
        rows = tokenize(config, max_length=32)
        folder = write_run(tmp_path / word, 0, {1: 2.0}, dataset=names)
        record = read_json(folder / "run.json") | asdict(rows.metadata)
        (folder / "run.json").write_text(json.dumps(record))
        histories.append(History.of_run(folder))
    return histories[0], histories[1]


def test_the_first_row_that_differs_is_shown_with_its_file(
    runs: tuple[History, History], tmp_path: Path
) -> None:
    (difference,) = metadata_differences(*runs)
    first_rows = runs[0].record["source_rows"][0]
    assert difference.groups == ("data",)
    assert difference.text.startswith("rows: 1 of ")
    assert f"train rows differ; the first is row {first_rows} (of {tmp_path}/second.txt)" in (
        difference.text
    )
    _, _, texts = difference.text.partition("second.txt): ")
    text_a, text_b = texts.split(" and ")
    assert text_a.startswith('"kernel')
    assert text_b.startswith('"bucket')


def test_without_the_cache_the_hashes_are_compared(
    runs: tuple[History, History], tmp_path: Path
) -> None:
    (tmp_path / "cache").rename(tmp_path / "gone")
    (difference,) = metadata_differences(*runs)
    assert difference.text.startswith("content of the data: ")


@pytest.mark.parametrize("content", [None, "{"], ids=["absent", "damaged"])
def test_a_tokenizer_that_cannot_be_loaded_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(tmp_path)
