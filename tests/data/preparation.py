"""Small data sets: their files, their settings, and the rows and messages that come of them."""

import csv
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtrain.data.config import DataConfig
from llmtrain.data.loader import IGNORED
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize

BLOCK = 8  # the size of blocks, if a test does not choose one

# White space, letters outside ASCII, a special token as text, and an empty document.
TEXTS = [
    "plain words, and some more.",
    "ünï 漢字 🙂👩‍👩‍👧 e\u0301",
    "lines\nof\r\na text\n\n\t  with   runs of    spaces \n",
    "a literal <|endoftext|> is text",
    "",
    "x",
]


def write_texts(path: Path, texts: list[str]) -> Path:
    """Write a JSON Lines file with a document in each line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write records in the format of the file's suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0].keys())
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def data_config(*paths: Path, **settings: Any) -> DataConfig:
    """Return the settings of files that are tokenised by bytes, without an eval split."""
    dataset = [str(path) for path in paths]
    defaults = {"dataset": dataset, "tokenizer": "byte", "eval_fraction": 0.0}
    return DataConfig(**defaults | settings)


def tokenize_texts(
    folder: Path, texts: list[str], block_size: int = BLOCK, **settings: Any
) -> Tokenized:
    """Write the texts into the file ``corpus.jsonl`` of a folder, and tokenize it."""
    path = write_texts(folder / "corpus.jsonl", texts)
    return tokenize(data_config(path, **settings), block_size)


def stream_of(rows: Iterable[dict]) -> list[int]:
    """Join rows to the stream that they were cut from. Checks the overlap and the padding."""
    table = np.array([row["input_ids"] for row in rows])
    assert np.array_equal(table[:-1, -1], table[1:, 0]), "rows overlap by one token"

    joined = np.append(table[0, 0], table[:, 1:])
    tokens = joined[joined != IGNORED]
    padding = len(joined) - len(tokens)
    assert np.array_equal(joined[: len(tokens)], tokens), "padding only at the end"
    assert padding < table.shape[1] - 1, "every row has a target"
    return tokens.tolist()


def documents_of(rows: Iterable[dict] | None, tokenized: Tokenized) -> list[str]:
    """Decode the documents between the end-of-text tokens."""
    if rows is None:
        return []
    tokens = stream_of(rows)
    end = tokenized.tokenizer.eos_token_id
    assert tokens[0] == tokens[-1] == end
    ends = [i for i, token in enumerate(tokens) if token == end]
    return [tokenized.tokenizer.decode(tokens[a + 1 : b]) for a, b in pairwise(ends)]


def complaint(*arguments: Any, **options: Any) -> str:
    """Return the message of the error that these arguments of ``tokenize`` cause: one line."""
    with pytest.raises(UserError) as error:
        tokenize(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def left_behind(cache: Path) -> list[str]:
    """Return the files and folders in a cache, except its locks."""
    return [path.name for path in cache.rglob("*") if path.suffix != ".lock"]


def log_lines(capsys: pytest.CaptureFixture[str], name: str) -> list[str]:
    """Return the lines of the start-up log with a name, without that name."""
    lines = capsys.readouterr().out.splitlines()
    return [line.removeprefix(name).strip() for line in lines if line.startswith(f"{name} ")]
