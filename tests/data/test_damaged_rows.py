"""Rows in the cache that a disk has changed are noticed, and made again as they were."""

import itertools
import json
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from llmtrain.data import prepare
from llmtrain.data.config import ChatConfig, PairConfig
from llmtrain.data.loader import train_loader
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from tests.data.chat_records import chat_records
from tests.data.preparation import (
    TEXTS,
    data_config,
    left_behind,
    write_records,
    write_texts,
)
from tests.failing_calls import failing, needs_failing_calls
from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY, long_form

pytestmark = pytest.mark.usefixtures("cache")

ROWS = "train-0-00000.safetensors"
EVAL_ROWS = "eval-0-00000.safetensors"
PAIRS = [{"prompt": f"{i}?", "chosen": f"{i * i}", "rejected": f"{i} no"} for i in range(30)]


def text(folder: Path) -> Tokenized:
    path = write_texts(folder / "texts.jsonl", [f"{i} words {i * i}" for i in range(30)])
    return tokenize(data_config(path, isolate_documents=True, eval_fraction=0.3), 16)


def packed(folder: Path, packing: bool = True) -> Tokenized:
    path = write_records(folder / "chats.jsonl", chat_records(30))
    return tokenize(data_config(path, eval_fraction=0.3), 64, ChatConfig(packing=packing))


def padded(folder: Path) -> Tokenized:
    return packed(folder, packing=False)


def pairs(folder: Path) -> Tokenized:
    path = write_records(folder / "pairs.jsonl", PAIRS)
    return tokenize(data_config(path, eval_fraction=0.3), 64, PairConfig())


def undisturbed(make: Callable[[Path], Tokenized], folder: Path) -> Tokenized:
    """Return rows in a cache of their own: maps of a file show what happens to it later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMTRAIN_CACHE", str(folder / "undisturbed"))
        return make(folder)


def entry_of(rows: Tokenized, cache: Path) -> Path:
    return cache / rows.metadata.cache_entry


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of a file, as a bad disk does: in the file itself."""
    with path.open("r+b") as file:
        file.seek(position + bit // 8)
        [value] = file.read(1)
        file.seek(position + bit // 8)
        file.write(bytes([value ^ 1 << bit % 8]))


def position_of(path: Path, column: str) -> int:
    """Return the first byte of a column in a file, by the header of the safetensors format."""
    content = path.read_bytes()
    columns_start = 8 + int.from_bytes(content[:8], "little")
    return columns_start + json.loads(content[8:columns_start])[column]["data_offsets"][0]


def assert_equal(rows: Tokenized, expected: Tokenized) -> None:
    assert rows.metadata == expected.metadata
    for split, expected_split in ((rows.train, expected.train), (rows.eval, expected.eval)):
        assert split.column_names == expected_split.column_names
        for name in split.column_names:
            assert np.array_equal(split.column(name), expected_split.column(name))
    assert rows.tokenizer.get_vocab() == expected.tokenizer.get_vocab()


@pytest.mark.parametrize("make", [text, packed, padded, pairs])
def test_a_flipped_bit_in_any_column_is_noticed_and_the_rows_are_made_again(
    make, tmp_path, cache, capsys
):
    expected = undisturbed(make, tmp_path)
    entry = entry_of(make(tmp_path), cache)

    columns = [(name, 0) for name in expected.train.column_names]
    splits = itertools.cycle(("train", "eval"))
    for column, bit in [("input_ids", 6), ("input_ids", 31), *columns]:
        path = entry / f"{next(splits)}-0-00000.safetensors"
        flip(path, position_of(path, column), bit)
        capsys.readouterr()
        assert_equal(make(tmp_path), expected)

        [line, _] = capsys.readouterr().err.splitlines()
        assert line == (
            f"note: {entry}: {path.name} differs from its hash; its rows are made again"
        )

    assert "from the cache" not in capsys.readouterr().out
    assert_equal(make(tmp_path), expected)
    assert "from the cache" in capsys.readouterr().out


def test_a_flipped_bit_anywhere_and_an_absent_file_are_noticed(tmp_path, cache, capsys):
    expected = undisturbed(packed, tmp_path)
    entry = entry_of(packed(tmp_path), cache)
    draw = random.Random(0)
    names = sorted(path.relative_to(entry) for path in entry.rglob("*") if path.is_file())
    assert len(names) > 4
    for name in names * 3:
        content = (entry / name).read_bytes()
        flip(entry / name, draw.randrange(len(content)), draw.randrange(8))
        assert_equal(packed(tmp_path), expected)
        assert f": {name} differs from its hash; " in capsys.readouterr().err
        assert (entry / name).read_bytes() == content
    for name in names:
        (entry / name).unlink()
        assert_equal(packed(tmp_path), expected)
        if str(name) == "manifest.json":  # the folder is that of a set that was not finished
            continue
        assert f"No such file or directory: '{entry / name}'; " in capsys.readouterr().err


def test_if_damaged_rows_cannot_be_made_again_one_line_says_so(tmp_path, cache, monkeypatch):
    path = entry_of(text(tmp_path), cache) / ROWS
    flip(path, position_of(path, "input_ids"))

    def refuse(*arguments: object) -> None:
        raise UserError("the hub cannot be reached")

    monkeypatch.setattr(prepare, "records_of", refuse)
    with pytest.raises(UserError, match="the hub cannot be reached"):
        text(tmp_path)
    assert left_behind(cache) == []


DRY_RUN = [*PYTHON, GPT, *TINY, "--dry_run", "--output_dir", "none", "--dataset"]


@needs_failing_calls
def test_an_entry_that_cannot_be_read_for_a_moment_is_not_made_again(tmp_path, cache):
    command = [*DRY_RUN, str(write_texts(tmp_path / "texts.jsonl", TEXTS * 20))]
    expected = run_forked(command).assert_ok().out.splitlines()[1:]
    [entry] = [path for path in cache.iterdir() if path.is_dir()]
    inode = entry.stat().st_ino
    for name in ("manifest.json", ROWS, "tokenizer.json"):
        ended = run_forked(command, failing("read", "ESTALE", f"{entry.name}/{name}")).assert_ok()
        assert ended.out.splitlines()[1:] == expected
        assert (ended.err, entry.stat().st_ino) == ("", inode)


@needs_failing_calls
@pytest.mark.parametrize("kind", ["read", pytest.param("open", marks=long_form)])
def test_a_cache_that_cannot_be_read_is_one_line(kind, tmp_path, cache):
    command = [*DRY_RUN, str(write_texts(tmp_path / "texts.jsonl", TEXTS * 20))]
    for name in ("manifest.json", ROWS, "tokenizer.json"):
        shutil.rmtree(cache, ignore_errors=True)
        ended = run_forked(command, failing(kind, "EIO", name, times=1000))
        assert ended.status == 2
        *_, line = ended.err.splitlines()
        assert re.match(f"error: .*{cache}.*: ", line)


# --- several processes


def test_rows_are_read_on_while_their_entry_is_made_again(tmp_path, cache):
    def batches(rows: Tokenized) -> Iterator[list[list[int]]]:
        for batch in train_loader(rows.train, 4, 4, range(8), seed=0):
            yield batch.columns["input_ids"].tolist()

    expected = undisturbed(text, tmp_path)
    rows = text(tmp_path)
    reading = batches(rows)
    read = [next(reading) for _ in range(4)]

    (entry_of(rows, cache) / ROWS).unlink()
    assert_equal(text(tmp_path), expected)
    assert [*read, *reading] == [*batches(expected)]


def test_all_that_open_an_entry_while_it_is_made_again_get_the_same_rows(tmp_path, cache):
    # Threads stand for the processes: a file lock of another object excludes both.
    expected = undisturbed(text, tmp_path)
    config = data_config(tmp_path / "texts.jsonl", isolate_documents=True, eval_fraction=0.3)
    entry = entry_of(expected, cache)

    everyone = threading.Barrier(4)

    def open_often(number: int) -> None:
        for _ in range(10):
            assert_equal(tokenize(config, 16), expected)
            everyone.wait(timeout=60)  # nobody opens or makes it now
            if number == 0:
                (entry / EVAL_ROWS).unlink()
            everyone.wait(timeout=60)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(open_often, range(4)))
    assert not [*entry.parent.glob(".tmp-*")]
