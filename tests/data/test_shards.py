"""Shards: which records each has, what is read of it, and what a start after a kill makes again."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmtrain.commands import tokenize as commands_tokenize
from llmtrain.data import prepare, shards
from llmtrain.data.config import ChatConfig, RowConfig
from llmtrain.data.packing import columns_of
from llmtrain.data.request import DataRequest
from llmtrain.data.shards import BLOCK_BYTES, Shard, TokenRows, create_shard, facts_of
from llmtrain.data.tokenized import MANIFEST, Tokenized, metadata_of
from llmtrain.errors import DamagedRowsError, UserError
from llmtrain.files import read_sealed, write_sealed
from llmtrain.interfaces.batches import IGNORED
from llmtrain.training.rows import tokenize
from tests.data.chat_records import CHATML_END, answers_of, chat_records
from tests.data.preparation import data_config, documents_of, write_records

pytestmark = pytest.mark.usefixtures("cache")

# --- a file


def write_shard(path: Path, rows: int, width: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Write random rows in parts, and return their columns."""
    random_numbers = np.random.default_rng(vocabulary)
    columns = {
        "input_ids": random_numbers.integers(vocabulary, size=(rows, width)),
        "labels": random_numbers.integers(vocabulary, size=(rows, width)),
        "lengths": random_numbers.integers(width, size=(rows, 2)),
    }
    columns["input_ids"][0, 0] = vocabulary - 1
    columns["labels"][:, ::3] = IGNORED
    with create_shard(
        path, columns_of(columns, width, vocabulary, extra={}, parts=2), rows
    ) as write:
        for part in (slice(0, 1), slice(1, rows)):
            write({name: column[part] for name, column in columns.items()})
    return columns


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(300, "uint16"), (65_436, "uint16"), (65_437, "uint32"), (200_000, "uint32")],
)
def test_tokens_round_trip_and_safetensors_reads_the_file(
    tmp_path: Path, vocabulary: int, dtype: str
) -> None:
    path = tmp_path / "a.safetensors"
    expected = write_shard(path, rows=9, width=5, vocabulary=vocabulary)

    order = np.array([8, 0, 3, 3])
    read = Shard(tmp_path, facts_of(path)).read(order)
    stored = load_file(path)
    assert [*read] == [*expected]
    assert stored.keys() == expected.keys()
    for name, column in expected.items():
        assert np.array_equal(read[name], column[order])
        assert np.array_equal(stored[name], column.astype(stored[name].dtype))
    assert stored["input_ids"].dtype == stored["labels"].dtype == dtype
    assert stored["lengths"].dtype == np.int32


def test_a_flipped_byte_is_noticed_when_its_block_is_read_and_no_earlier(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    width = BLOCK_BYTES // 16  # so that a block has about eight rows of a column
    expected = write_shard(path, rows=40, width=width, vocabulary=300)["input_ids"]
    facts = facts_of(path)
    content = path.read_bytes()
    first_byte = 8 + int.from_bytes(content[:8], "little")

    positions = np.random.default_rng(0).integers(first_byte, len(content), 6).tolist()
    for position in [0, first_byte, *positions, len(content) - 1]:
        shard = Shard(tmp_path, facts)
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)

        block = position // BLOCK_BYTES
        for row in range(40):  # of input_ids, labels and lengths
            starts = [first_byte + 2 * width * row, first_byte + 2 * width * (40 + row)]
            starts.append(first_byte + 2 * width * 80 + 8 * row)
            ends = [starts[0] + 2 * width - 1, starts[1] + 2 * width - 1, starts[2] + 7]
            pairs = zip(starts, ends, strict=True)
            if any(start // BLOCK_BYTES <= block <= end // BLOCK_BYTES for start, end in pairs):
                with pytest.raises(DamagedRowsError, match=rf"from byte {block * BLOCK_BYTES:,};"):
                    shard.read(np.array([row]))
            else:
                assert np.array_equal(shard.read(np.array([row]))["input_ids"][0], expected[row])


def test_a_shortened_and_a_removed_file_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, rows=9, width=5, vocabulary=300)
    facts = facts_of(path)
    shard = Shard(tmp_path, facts)
    shard.file.check()

    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="another size"):
        Shard(tmp_path, facts)
    with pytest.raises(DamagedRowsError, match="has become shorter; put the file back"):
        shard.read(np.arange(9))
    path.unlink()
    with pytest.raises(DamagedRowsError, match="No such file or directory; put the file back"):
        shard.read(np.arange(9))


# --- which records share a shard


def borders_by_a_loop(sizes: list[float], most_records: int, most_bytes: int) -> list[range]:
    """Close a shard after the record with which it has so many records, or so many bytes."""
    shards = []
    start = 0
    total = 0.0
    for number, size in enumerate(sizes):
        total += size
        if number + 1 - start == most_records or total >= most_bytes or number + 1 == len(sizes):
            shards.append(range(start, number + 1))
            start = number + 1
            total = 0.0
    return shards


def test_borders_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (shards.SHARD_RECORDS, shards.SHARD_BYTES) == (100_000, 2**28)
    for count in (0, 1, 100_000, 100_001, 250_000):
        sizes = [3.0] * count
        assert shards.shards_of(np.array(sizes)) == borders_by_a_loop(sizes, 100_000, 2**28)
    large = [2.0**27, 2.0**27, 1.0, 2.0**30, 2.0**28 - 1, 1.0, 5.0]
    expected = [range(2), range(2, 4), range(4, 6), range(6, 7)]
    assert shards.shards_of(np.array(large)) == expected

    monkeypatch.setattr(shards, "SHARD_RECORDS", 5)
    monkeypatch.setattr(shards, "SHARD_BYTES", 40)
    for seed in range(50):
        sizes = np.random.default_rng(seed).integers(0, 30, size=seed).astype(float)
        assert shards.shards_of(sizes) == borders_by_a_loop(sizes.tolist(), 5, 40)


# --- sets of several shards

RECORDS = 40
SHARDS = 6  # of seven records each; the last one has five
TEXTS = [{"text": f"document {i} says {i * i} " * (i % 5 + 1)} for i in range(RECORDS)]
CHATS = chat_records(RECORDS)
KINDS = [
    pytest.param(TEXTS, None, id="text"),
    pytest.param(CHATS, ChatConfig(packing=True), id="conversations"),
]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shard have at most seven records."""
    monkeypatch.setattr(shards, "SHARD_RECORDS", 7)


def make_set(path: Path, chat: RowConfig | None, eval_fraction: float = 0.0) -> Tokenized:
    return tokenize(data_config(path, eval_fraction=eval_fraction), 32 if chat else 16, chat)


def files_of(cache: Path) -> dict[str, bytes]:
    """Return the content of all files of the entries in a cache."""
    paths = [path for path in cache.glob("*/**/*") if path.is_file()]
    return {str(path.relative_to(cache)): path.read_bytes() for path in paths}


def made_in_another_cache(folder: Path, make: Callable[[], Tokenized]) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMTRAIN_CACHE", str(folder))
        make()
    return files_of(folder)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("examples", "chat"), KINDS)
def test_a_shard_has_the_rows_of_a_set_of_its_records_only(
    tmp_path: Path, examples: list[dict[str, Any]], chat: RowConfig | None
) -> None:
    rows = make_set(write_records(tmp_path / "all.jsonl", examples), chat)
    assert len(rows.train.shards) == SHARDS
    assert rows.metadata.records == RECORDS
    assert rows.metadata.train_rows == len(rows.train) == sum(rows.train.shard_rows)

    targets = 0
    texts = []
    for number, shard in enumerate(rows.train.shards):
        part = write_records(tmp_path / f"{number}.jsonl", examples[7 * number : 7 * number + 7])
        alone = make_set(part, chat)
        assert [*TokenRows([shard])] == [*alone.train]
        targets += alone.metadata.train_tokens
        if chat is None:
            texts += documents_of(TokenRows([shard]), rows)
        else:
            texts += answers_of(TokenRows([shard]), rows)
    assert rows.metadata.train_tokens == targets
    if chat is None:
        assert texts == [example["text"] for example in examples]
    else:
        answers = [example["messages"][-1]["content"] + CHATML_END for example in examples]
        assert sorted(texts) == sorted(answers)


def test_the_hash_of_the_data_depends_on_the_borders_and_on_all_shards(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def data_hash(most_records: int, texts: list[dict[str, Any]] = TEXTS) -> str:
        monkeypatch.setattr(shards, "SHARD_RECORDS", most_records)
        monkeypatch.setenv("LLMTRAIN_CACHE", str(cache / str(most_records)))
        path = write_records(tmp_path / "all.jsonl", texts)
        return make_set(path, None).metadata.data_sha256

    assert data_hash(RECORDS) == data_hash(RECORDS + 1)  # one shard
    with_other_end = [*TEXTS[:-1], TEXTS[0]]
    hashes = {data_hash(RECORDS), data_hash(20), data_hash(7), data_hash(20, with_other_end)}
    assert len(hashes) == 4


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda manifest: manifest["train"][0]["shards"][1].update(rows=1), "another size than"),
        (
            lambda manifest: manifest["train"][0]["shards"].pop(),
            "counts other rows than its shards",
        ),
        (lambda manifest: manifest["metadata"].update(vocabulary=9), "another vocabulary than"),
    ],
    ids=["rows", "shards", "vocabulary"],
)
def test_a_manifest_that_contradicts_its_set_is_refused(
    lie: Callable[[Any], Any], message: str, tmp_path: Path, cache: Path
) -> None:
    rows = make_set(write_records(tmp_path / "all.jsonl", TEXTS), None)
    folder = cache / rows.metadata.cache_entry
    manifest = read_sealed(folder / MANIFEST)
    lie(manifest)
    write_sealed(folder / MANIFEST, manifest)
    with pytest.raises(OSError, match=message):
        Tokenized.open(folder)


def text_request(path: Path, cache: Path) -> DataRequest:
    """Return a request for rows of texts, with a tokenizer that was trained on other ones."""
    trained_on = write_records(path.with_name("first.jsonl"), TEXTS)
    entry = make_set(trained_on, None).metadata.cache_entry
    return DataRequest(
        data_config(path, tokenizer=str(cache / entry / "tokenizer")),
        16,
        chat=None,
        support=None,
        trust_remote_code=False,
        own_source=None,
        unpaired=False,
        max_positions=None,
    )


@pytest.mark.usefixtures("small_shards")
def test_an_estimate_leaves_the_tokens_of_another_process_alone(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_tokenize, "_ESTIMATED_RECORDS", 1)
    request = text_request(write_records(tmp_path / "all.jsonl", TEXTS), cache)
    makers = [prepare.SetMaker(tmp_path / "set", request) for _ in range(2)]
    reader = makers[0].readers[0]
    reader.divide()
    shard = makers[0].encoder(0, 0)
    with contextlib.closing(shard.store) as store:
        shard.encode(reader.read([0]))
        tokens = store.read(0, int(store.bounds[-1])).tolist()
        commands_tokenize._estimate(makers[1])
        assert store.read(0, int(store.bounds[-1])).tolist() == tokens


@pytest.mark.usefixtures("small_shards")
def test_a_part_of_another_set_is_refused_before_it_is_made(tmp_path: Path, cache: Path) -> None:
    paths = [write_records(tmp_path / f"{number}.jsonl", TEXTS[number:]) for number in range(2)]
    requests = [text_request(path, cache) for path in paths]
    folder = tmp_path / "set"
    prepare.SetMaker(folder, requests[0]).make(1, 2)
    files = sorted(folder.iterdir())
    with pytest.raises(UserError, match="has shards of another set"):
        prepare.SetMaker(folder, requests[1]).make(2, 2)
    assert sorted(folder.iterdir()) == files


@pytest.mark.usefixtures("small_shards")
def test_any_number_of_processes_makes_the_same_bytes(tmp_path: Path) -> None:
    path = write_records(tmp_path / "all.jsonl", CHATS)
    sets = [
        made_in_another_cache(
            tmp_path / str(count),
            lambda count=count: make_set(path, ChatConfig(dataset_num_proc=count), 0.3),
        )
        for count in (1, 2, 3)
    ]
    assert len([name for name in sets[0] if name.endswith(".safetensors")]) == 2 * SHARDS
    assert sets[0] == sets[1] == sets[2]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("call", [1, 2, 7, 12, 13])
@pytest.mark.parametrize(("examples", "chat"), KINDS)
def test_a_start_after_a_kill_makes_only_the_shards_that_are_missing(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    examples: list[dict[str, Any]],
    chat: RowConfig | None,
    call: int,
) -> None:
    path = write_records(tmp_path / "all.jsonl", examples)
    expected = made_in_another_cache(tmp_path / "undisturbed", lambda: make_set(path, chat, 0.3))

    # Two files of each shard are hashed. After the last of them, the manifest is made.
    hashed: list[str] = []

    def interrupt() -> None:
        if len(hashed) == call:
            raise KeyboardInterrupt

    def hash_and_count(file: Path) -> dict[str, Any]:
        hashed.append(file.name)
        interrupt()
        return facts_of(file)

    def refuse(*arguments: Any, **options: Any) -> Any:
        hashed.append("the manifest")
        interrupt()
        return metadata_of(*arguments, **options)

    monkeypatch.setattr(prepare, "facts_of", hash_and_count)
    monkeypatch.setattr(prepare, "metadata_of", refuse)
    with pytest.raises(KeyboardInterrupt):
        make_set(path, chat, 0.3)
    assert not [*cache.glob("*/manifest.json")]

    complete = (call - 1) // 2
    hashed = ["killed"] * call
    make_set(path, chat, 0.3)
    names = [
        f"{split}-0-{number:05}.safetensors"
        for number in range(complete, SHARDS)
        for split in ("train", "eval")
    ]
    assert hashed[call:] == [*names, "the manifest"]
    assert files_of(cache) == expected
