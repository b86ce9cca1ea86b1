"""What tokenize reads and changes: records once, unless all must be known before, and no argument."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.prepare import tokenize
from llmtrain.data.store import TokenStore
from llmtrain.errors import UserError
from tests.data.chats import make
from tests.data.test_prepare import left_behind

TEXTS = [{"text": f"document {i} " * (i + 1)} for i in range(30)]
CHATS = [{"prompt": f"{i}?", "completion": f"{i * i}."} for i in range(30)]
PAIRS = [{"prompt": f"{i}?", "chosen": f"{i * i}.", "rejected": "no"} for i in range(30)]

KINDS = [
    pytest.param(TEXTS, None, id="text"),
    pytest.param(CHATS, ChatConfig(), id="conversations"),
    pytest.param(PAIRS, PairConfig(), id="pairs"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("records", "tokenizer", "chat", "unpaired", "passes"),
    [
        pytest.param(TEXTS, "byte", None, False, 1, id="text"),
        pytest.param(TEXTS[-1:], "byte", None, False, 1, id="a document that is cut"),
        pytest.param(TEXTS, "char", None, False, 2, id="characters first"),
        # the split first, because the eval data must not shape the vocabulary
        pytest.param(TEXTS, "bpe:300", None, False, 3, id="a vocabulary first"),
        pytest.param(CHATS, "byte", ChatConfig(), False, 1, id="conversations"),
        pytest.param(CHATS[:3], "byte", ChatConfig(), False, 1, id="few conversations"),
        pytest.param(PAIRS, "byte", PairConfig(), False, 1, id="pairs"),
        # the split first, because an answer is compared with one of its own split
        pytest.param(PAIRS, "byte", PairConfig(), True, 2, id="single answers"),
    ],
)
def test_records_are_read_as_often_as_they_must_be(
    records: list[dict[str, Any]],
    tokenizer: str,
    chat: RowConfig | None,
    unpaired: bool,
    passes: int,
) -> None:
    complete = []

    def read() -> Iterator[dict[str, Any]]:
        yield from records
        complete.append("a pass")

    data = DataConfig(tokenizer=tokenizer, eval_fraction=0.3)
    for expected in (passes, 0):  # the second time the rows are in the cache
        tokenize(
            data,
            16 if chat is None else 64,
            chat,
            records=read,
            unpaired=unpaired,
            records_fingerprint="of these records",
        )
        assert len(complete) == expected
        complete.clear()


@pytest.mark.parametrize(("records", "chat"), KINDS)
def test_an_error_at_record_1000_is_raised_and_leaves_nothing_behind(
    tmp_path: Path, records: list[dict[str, Any]], chat: RowConfig | None
) -> None:
    def read() -> Iterator[dict[str, Any]]:
        for number in range(1_000):
            yield records[number % len(records)]
        raise RuntimeError("the connection was lost")

    data = DataConfig(tokenizer="byte", eval_fraction=0.3)
    length = 16 if chat is None else 64
    with pytest.raises(RuntimeError, match="the connection was lost"):
        tokenize(data, length, chat, records=read, unpaired=True, records_fingerprint="1")
    assert left_behind(tmp_path / "cache") == []


@pytest.mark.parametrize(("records", "chat"), KINDS)
def test_tokenize_changes_nothing_that_its_caller_owns(
    tmp_path: Path, records: list[dict[str, Any]], chat: RowConfig | None
) -> None:
    """Not even for data of the recipe, a tokenizer without a template and rows of 4,096 tokens."""
    make(None).save_pretrained(tmp_path / "tokenizer")
    data = DataConfig(tokenizer=str(tmp_path / "tokenizer"), eval_fraction=0.3)
    before = copy.deepcopy([vars(data), chat and vars(chat)])
    tokenize(data, 4096 if chat else 16, chat, records=records * 40)
    assert [vars(data), chat and vars(chat)] == before


@pytest.mark.parametrize("growth", [1, -1])
@pytest.mark.parametrize(
    ("records", "tokenizer", "chat"),
    [
        pytest.param(TEXTS, "bpe:300", None, id="text"),
        pytest.param(PAIRS, "byte", PairConfig(), id="single answers"),
    ],
)
def test_data_that_change_while_they_are_read_are_one_line(
    records: list[dict[str, Any]], tokenizer: str, chat: RowConfig | None, growth: int
) -> None:
    counts = iter(range(20, 20 + 9 * growth, growth))

    def read() -> list[dict[str, Any]]:
        return records[: next(counts)]

    data = DataConfig(tokenizer=tokenizer, eval_fraction=0.3)
    length = 16 if chat is None else 64
    with pytest.raises(UserError, match="read: the number of records changed while they were"):
        tokenize(data, length, chat, records=read, unpaired=True, records_fingerprint="1")


def test_a_store_on_a_full_disk_is_closed_without_another_error(tmp_path: Path) -> None:
    """The error of the write says what is wrong, and the next one must not hide it."""
    path = tmp_path / "tokens"
    path.symlink_to("/dev/full")
    store = TokenStore(path)
    store.add(np.arange(9), np.ones(9, bool))
    with pytest.raises(OSError, match="No space left"):
        store.read(0)
    store.close()
    assert not path.is_symlink()


def test_what_a_killed_preparation_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """A process that is killed cannot clean up; the next one holds the same lock."""
    data = DataConfig(tokenizer="byte", eval_fraction=0.3)
    made = tokenize(data, 16, records=TEXTS)
    entry = tmp_path / "cache" / made.metadata.cache_entry
    shutil.rmtree(entry)
    left = tmp_path / "cache" / f".tmp-{entry.name}-0123"
    of_another = tmp_path / "cache" / ".tmp-of-another-entry"
    for folder in (left, of_another):
        folder.mkdir()
        (folder / "tokens").write_bytes(b"of a killed process")

    tokenize(data, 16, records=TEXTS)
    assert entry.is_dir()
    assert not left.exists()
    assert of_another.exists()
