"""tokenize() reads records as rarely as it can, changes none of its arguments and cleans up."""

import copy
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmtrain.console import Interrupt
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.packing import TokenStore
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from tests.data.chats import make
from tests.data.preparation import left_behind

pytestmark = pytest.mark.usefixtures("cache")

TEXTS = [{"text": f"document {i} " * (i + 1)} for i in range(30)]
CHATS = [{"prompt": f"{i}?", "completion": f"{i * i}."} for i in range(30)]
PAIRS = [{"prompt": f"{i}?", "chosen": f"{i * i}.", "rejected": "no"} for i in range(30)]

KINDS = [
    pytest.param(TEXTS, None, id="text"),
    pytest.param(CHATS, ChatConfig(), id="conversations"),
    pytest.param(PAIRS, PairConfig(), id="pairs"),
]


def tokenize_records(
    records: Any, chat: RowConfig | None, tokenizer: str = "byte", unpaired: bool = False
) -> Tokenized:
    return tokenize(
        DataConfig(tokenizer=tokenizer, eval_fraction=0.3),
        16 if chat is None else 64,
        chat,
        records=records,
        unpaired=unpaired,
        records_fingerprint="1",
    )


# --- passes over the records


class CountedRecords:
    """Records that count how often they were read to the end."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self.passes = 0

    def __call__(self) -> Iterator[dict[str, Any]]:
        yield from self.records
        self.passes += 1


@pytest.mark.parametrize(
    ("records", "chat", "tokenizer", "unpaired", "passes"),
    [
        # The first pass finds the split of each record and the borders of the shards.
        pytest.param(TEXTS, None, "byte", False, 2, id="text"),
        pytest.param(TEXTS[-1:], None, "byte", False, 2, id="a document that is cut"),
        # All characters are needed first.
        pytest.param(TEXTS, None, "char", False, 3, id="char"),
        # The eval texts must not shape the vocabulary, so the split is needed before.
        pytest.param(TEXTS, None, "bpe:300", False, 3, id="bpe"),
        pytest.param(CHATS, ChatConfig(), "byte", False, 2, id="conversations"),
        pytest.param(PAIRS, PairConfig(), "byte", False, 2, id="pairs"),
        pytest.param(PAIRS, PairConfig(), "byte", True, 2, id="single answers"),
    ],
)
def test_records_are_read_as_rarely_as_possible_and_never_if_rows_are_cached(
    records, chat, tokenizer, unpaired, passes
):
    counted = CountedRecords(records)
    for _ in range(2):
        tokenize_records(counted, chat, tokenizer=tokenizer, unpaired=unpaired)
        assert counted.passes == passes


# --- errors


@pytest.mark.parametrize(("records", "chat"), KINDS)
def test_an_error_while_records_are_read_is_raised_and_leaves_no_cache_entry(cache, records, chat):
    def read() -> Iterator[dict[str, Any]]:
        for number in range(1_000):
            yield records[number % len(records)]
        raise RuntimeError("the connection was lost")

    with pytest.raises(RuntimeError, match="the connection was lost"):
        tokenize_records(read, chat, unpaired=True)
    assert left_behind(cache) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("records", "chat"), KINDS)
def test_ctrl_c_that_a_destructor_drops_ends_the_reading(cache, records, chat):
    class Drops:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def read() -> Iterator[dict[str, Any]]:
        Drops()
        yield from records

    handler_before = signal.signal(signal.SIGINT, Interrupt())
    try:
        with pytest.raises(KeyboardInterrupt):
            tokenize_records(read, chat, unpaired=True)
    finally:
        signal.signal(signal.SIGINT, handler_before)
    assert not [*cache.glob("*/*.safetensors"), *cache.glob("*/.tmp-*"), *cache.glob("*/*.json")]


@pytest.mark.parametrize("growth", [1, -1])
@pytest.mark.parametrize(
    ("records", "tokenizer", "chat"),
    [(TEXTS, "bpe:300", None), (PAIRS, "byte", PairConfig())],
    ids=["text", "single answers"],
)
def test_another_number_of_records_in_the_next_pass_is_an_error(records, tokenizer, chat, growth):
    counts = iter(range(20, 20 + 9 * growth, growth))

    def read() -> list[dict[str, Any]]:
        return records[: next(counts)]

    with pytest.raises(UserError, match="read: the number of records changed while they were"):
        tokenize_records(read, chat, tokenizer=tokenizer, unpaired=True)


def test_closing_a_store_on_a_full_disk_raises_no_second_error(tmp_path):
    path = tmp_path / "tokens"
    path.symlink_to("/dev/full")
    store = TokenStore(path)
    store.add(np.arange(9), np.ones(9, bool))
    with pytest.raises(OSError, match="No space left"):
        store.read(0, 9)
    store.close()


# --- arguments


@pytest.mark.parametrize(("records", "chat"), KINDS)
def test_tokenize_changes_none_of_its_arguments(tmp_path, records, chat):
    # tokenize() chooses a template for a tokenizer that has none, and rows of 4,096 tokens want a
    # smaller micro-batch than the default. Neither is written to the arguments.
    make(template=None).save_pretrained(tmp_path / "tokenizer")
    data = DataConfig(tokenizer=str(tmp_path / "tokenizer"), eval_fraction=0.3)
    arguments = [vars(data), vars(chat) if chat else None, records]
    before = copy.deepcopy(arguments)
    tokenize(data, 16 if chat is None else 4096, chat, records=records * 40)
    assert arguments == before
