"""A set as a data set of a run, beside others: the rows and hashes are those of its records."""

from pathlib import Path

import pytest

from llmtrain.data import tokenizer as tok
from llmtrain.data.config import ChatConfig
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from tests.data.chat_records import chat_records
from tests.data.preparation import data_config, write_records, write_texts

pytestmark = pytest.mark.usefixtures("cache")

BLOCK = 16


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    texts = ["some words", "and others"]
    trained = tok.as_pretrained(tok.train_tokenizer("byte", texts, lambda: iter(texts)), 8)
    trained.save_pretrained(tmp_path / "tokenizer")
    return {"tokenizer": str(tmp_path / "tokenizer"), "eval_fraction": 0.3}


def texts_file(folder: Path, name: str) -> Path:
    return write_texts(folder / f"{name}.jsonl", [f"{name} number {i * i}" for i in range(30)])


def set_of(path: Path, cache: Path, settings: dict[str, object]) -> Path:
    """Return the folder of the cache entry of a file, which is a set."""
    return cache / tokenize(data_config(path, **settings), BLOCK).metadata.cache_entry


def assert_same_rows(rows: Tokenized, expected: Tokenized) -> None:
    assert rows.metadata.data_sha256 == expected.metadata.data_sha256
    assert rows.metadata.source_rows == expected.metadata.source_rows
    for split in ("train", "eval"):
        values, others = (getattr(each, split) for each in (rows, expected))
        assert values.column("input_ids").tolist() == others.column("input_ids").tolist()


def test_a_set_beside_records_has_the_rows_of_its_records(tmp_path, cache, settings):
    first, second, third = (texts_file(tmp_path, name) for name in ("first", "second", "third"))
    made = set_of(second, cache, settings)
    mixed = settings | {"mixture": [1, 2, 1]}

    rows = tokenize(data_config(first, made, third, **mixed), BLOCK)

    expected = tokenize(data_config(first, second, third, **mixed), BLOCK)
    assert_same_rows(rows, expected)
    assert rows.order == expected.order
    other = set_of(texts_file(tmp_path, "fourth"), cache, settings)
    others = tokenize(data_config(first, other, third, **mixed), BLOCK)
    assert others.metadata.data_sha256 != rows.metadata.data_sha256


def test_a_set_alone_has_the_rows_of_its_records_and_its_own_tokenizer(tmp_path, cache):
    path = texts_file(tmp_path, "texts")
    expected = tokenize(data_config(path, tokenizer="bpe:300", eval_fraction=0.3), BLOCK)
    made = cache / expected.metadata.cache_entry

    config = data_config()
    config.set(dataset=[str(made)])
    rows = tokenize(config, BLOCK)

    assert_same_rows(rows, expected)
    assert rows.tokenizer.get_vocab() == expected.tokenizer.get_vocab()


def test_a_set_of_training_rows_can_be_eval_data(tmp_path, cache, settings):
    train = texts_file(tmp_path, "train")
    settings = settings | {"eval_fraction": 0.0}
    made = set_of(texts_file(tmp_path, "held-out"), cache, settings)
    del settings["eval_fraction"]

    rows = tokenize(data_config(train, eval_dataset=[str(made)], **settings), BLOCK)

    held_out = Tokenized.open(made)
    assert rows.eval.column("input_ids").tolist() == held_out.train.column("input_ids").tolist()


@pytest.mark.parametrize(
    ("changes", "block", "error"),
    [
        ({"tokenizer": "byte"}, BLOCK, "--tokenizer byte is trained on the data"),
        ({"tokenizer": "other"}, BLOCK, "tokenised with another tokenizer or chat template"),
        ({"eval_fraction": 0.1}, BLOCK, "made with --eval_fraction 0.3, and this run wants 0.1"),
        ({"isolate_documents": True}, BLOCK, "made with --isolate_documents False"),
        ({}, 32, "has rows of 16 tokens; set --block_size 16, not 32"),
    ],
)
def test_a_run_that_wants_other_rows_is_one_line(changes, block, error, tmp_path, cache, settings):
    made = set_of(texts_file(tmp_path, "texts"), cache, settings)
    other = tok.as_pretrained(tok.train_tokenizer("bpe:300", ["ab" * 9] * 9, lambda: iter(())), 8)
    other.save_pretrained(tmp_path / "other")
    if changes.get("tokenizer") == "other":
        changes = {"tokenizer": str(tmp_path / "other")}
    config = data_config()
    config.set(dataset=[str(made)], **changes)
    with pytest.raises(UserError, match=error):
        tokenize(config, block)


def test_a_set_of_conversations_is_no_text(tmp_path, cache, settings):
    chats = write_records(tmp_path / "chats.jsonl", chat_records(30))
    rows = tokenize(data_config(chats, **settings), 64, ChatConfig(packing=True))
    made = cache / rows.metadata.cache_entry
    config = data_config(**settings)
    config.set(dataset=[str(made)])
    with pytest.raises(UserError, match="a set of conversations, which this recipe does not"):
        tokenize(config, 64)
    again = tokenize(config, 64, ChatConfig())
    assert again.train.column("labels").tolist() == rows.train.column("labels").tolist()
    unpacked = ChatConfig()
    unpacked.set(packing=False)
    with pytest.raises(UserError, match="made with --packing True, and this run wants False"):
        tokenize(config, 64, unpacked)


def test_a_damaged_set_is_one_line(tmp_path, cache, settings):
    made = set_of(texts_file(tmp_path, "texts"), cache, settings)
    manifest = made / "manifest.json"
    content = manifest.read_text()
    config = data_config(made, **settings)
    for changed in (content.replace('"rows"', '"row"', 1), "{}", content[:-9]):
        manifest.write_text(changed)
        with pytest.raises(UserError, match="differs from its hash; copy the set"):
            tokenize(config, BLOCK)
    manifest.unlink()
    (made / "shard-0-00000.json").touch()
    with pytest.raises(UserError, match="is not complete; see llmtrain tokenize --finish"):
        tokenize(config, BLOCK)
