"""Sets in a bucket: the same batches as from a copy on disk, with few bytes and little disk."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from llmtrain import storage
from llmtrain.data import shard_cache
from llmtrain.data.config import DataConfig
from llmtrain.data.loader import train_loader
from llmtrain.data.prepare import SetMaker
from llmtrain.data.remote_sets import open_remote
from llmtrain.data.request import DataRequest
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import DamagedRowsError, UserError
from llmtrain.files import cache_folder, json_text, read_sealed, write_sealed
from tests.buckets import Proxy, bucket_server

ADDRESS = "s3://bucket/set"
SHARDS = 12
BATCH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 12 shards of about 45 kB."""
    base = tmp_path_factory.mktemp("set")
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice([*"abcdef "], 700)) for _ in range(360)]
    (base / "t.jsonl").write_text("\n".join(json_text({"text": text}) for text in texts))
    config = DataConfig(dataset=[str(base / "t.jsonl")], tokenizer="byte", eval_fraction=0.1)
    request = DataRequest(config, 64, None, None, False, None, False, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmtrain.data.shards.SHARD_RECORDS", 30)
        maker = SetMaker(base / "set", request)
        maker.make()
        maker.finish()
    return base / "set"


@pytest.fixture
def proxy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A bucket with the set, an empty cache, and little patience."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.01)
    with bucket_server() as proxy:
        upload(folder, tmp_path)
        proxy.requests.clear()
        yield proxy


def upload(folder: Path, tmp_path: Path) -> None:
    """Upload a set by hand: shards under their hash, and the manifest that names them so."""
    target = storage.Storage(ADDRESS, writable=True)
    manifest = read_sealed(folder / "manifest.json")
    for split in ("train", "eval"):
        for facts in manifest[split][0]["shards"]:
            name = f"{facts['sha256']}.safetensors"
            target.upload(name, folder / facts["file"])
            facts["file"] = name
    for name in manifest["tokenizer"]:
        target.upload(name, folder / name)
    write_sealed(tmp_path / "manifest.json", manifest)
    target.upload("manifest.json", tmp_path / "manifest.json")


def batches_of(rows: Tokenized, steps: range, window: int) -> list[int]:
    """Return the token fingerprint of each step."""
    return [sum(step) for step in batches_of_ranks([rows], steps, window)]


def batches_of_ranks(rows: list[Tokenized], steps: range, window: int) -> list[list[int]]:
    """Return the token fingerprints of each step on each rank.

    Each rank reads on a thread, at most two steps ahead of the others, as in a run.
    """
    ranks = len(rows)
    fingerprints: list[list[int]] = [[] for _ in rows]
    has_read = threading.Condition()

    def read(rank: int) -> None:
        loader = train_loader(rows[rank].train, BATCH, 4, steps, seed=3, window=window)
        sampler = BatchSamplerShard(loader.batch_sampler, ranks, rank, split_batches=True)
        for slots in sampler:
            with has_read:
                has_read.wait_for(
                    lambda: len(fingerprints[rank]) <= min(map(len, fingerprints)) + 1
                )
            fingerprint = loader.dataset.__getitems__(slots).token_fingerprint
            with has_read:
                fingerprints[rank].append(fingerprint)
                has_read.notify_all()

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(read, range(ranks)))
    return [*zip(*fingerprints, strict=True)]


def config(**flags: object) -> DataConfig:
    return DataConfig(dataset=[ADDRESS], **flags)


def shard_bytes(folder: Path, split: str = "train") -> list[int]:
    return [path.stat().st_size for path in folder.glob(f"{split}-*.safetensors")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_cache_of_one_window_gives_the_same_batches_and_fetches_each_byte_once(
    folder: Path, proxy: Proxy, ranks: int
) -> None:
    local = Tokenized.open(folder)
    steps = range(-(-len(local.train) // BATCH))
    expected = batches_of(local, steps, window=3)

    sizes = sorted(shard_bytes(folder), reverse=True)
    capacity = sum(sizes[:3]) + sum(shard_bytes(folder, "eval")) + 1
    flags = config(shuffle_window=3, cache_size=capacity / 1e9)
    rows = [open_remote(ADDRESS, "", flags) for _ in range(ranks)]
    held = []
    cache = cache_folder() / "shards"
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            held.append(len([*cache.glob("*/*.safetensors")]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = batches_of_ranks(rows, steps, window=3)
    is_over.set()
    watcher.join()

    assert [sum(step) for step in found] == expected
    assert max(held) <= 3
    assert proxy.bytes_of(".safetensors") == sum(sizes)


def test_a_larger_cache_is_filled_ahead_of_the_steps(folder: Path, proxy: Proxy) -> None:
    rows = open_remote(ADDRESS, "", config(shuffle_window=3))
    loader = train_loader(rows.train, BATCH, 4, range(200), seed=3, window=3)
    slots = iter(loader.batch_sampler)
    loader.dataset.__getitems__(next(slots))
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.startswith("read-ahead"):
            thread.join()

    # The window of the first step, and the next one; then the run needs no bucket.
    assert len([*(cache_folder() / "shards").glob("*/*.safetensors")]) == 6
    count = len(proxy.requests)
    steps_per_window = len(rows.train) * 3 // SHARDS // BATCH
    for _ in range(steps_per_window - 2):
        loader.dataset.__getitems__(next(slots))
    assert len(proxy.requests) == count


def test_rows_are_read_in_any_order_with_the_room_of_a_window(folder: Path, proxy: Proxy) -> None:
    rows = open_remote(ADDRESS, "", config(shuffle_window=1))
    local = Tokenized.open(folder)
    numbers = np.random.default_rng(1).permutation(len(local.train))[:100]

    for number in numbers.tolist():
        assert rows.train[number] == local.train[number]
    assert np.array_equal(rows.eval.column("input_ids"), local.eval.column("input_ids"))


@pytest.mark.parametrize("fault", ["500", "503", "reset", "truncated", "flipped"])
def test_faults_of_the_network_change_nothing(folder: Path, proxy: Proxy, fault: str) -> None:
    expected = batches_of(Tokenized.open(folder), range(40), window=3)
    count = iter(range(10**6))
    proxy.fault = lambda method, path: fault if next(count) % 3 == 0 else ""
    rows = open_remote(ADDRESS, "", config(shuffle_window=3))

    assert batches_of(rows, range(40), window=3) == expected


def remove(proxy: Proxy, path: Path) -> None:
    storage.Storage(ADDRESS, writable=True).delete([path.name])


def change(proxy: Proxy, path: Path) -> None:
    storage.Storage(ADDRESS, writable=True).write(path.name, b"0" * path.stat().st_size)


def forbid(proxy: Proxy, path: Path) -> None:
    proxy.fault = lambda method, path: "expired"


def fail(proxy: Proxy, path: Path) -> None:
    proxy.fault = lambda method, path: "500"


@pytest.mark.parametrize(
    ("accident", "message"),
    [
        (remove, "is gone; put the file back"),
        (change, "the bytes differ from their hash"),
        (forbid, "the storage refuses"),
        (fail, "the storage does not answer"),
    ],
)
def test_a_shard_that_cannot_be_had_ends_the_run_with_a_line(
    folder: Path,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    accident: object,
    message: str,
) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 1.0)
    rows = open_remote(ADDRESS, "", config(shuffle_window=1))
    shard = rows.train.shards[5]
    shard.file.cache.hold(shard.file, should_wait=True)
    accident(proxy, shard.file.path)

    with pytest.raises(DamagedRowsError, match=message) as caught:
        shard.read(np.array([0]))
    assert "\n" not in str(caught.value)


def test_a_full_disk_ends_the_run_with_a_line(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    rows = open_remote(ADDRESS, "", config())
    monkeypatch.setattr(shard_cache.os, "pwrite", full)
    with pytest.raises(DamagedRowsError, match=r"No space left.*lower --cache_size"):
        rows.train[0]


def test_a_damaged_cache_is_fetched_again(folder: Path, proxy: Proxy) -> None:
    open_remote(ADDRESS, "", config()).train[0]
    for path in (cache_folder() / "shards").glob("*/*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))

    rows = open_remote(ADDRESS, "", config())
    assert rows.train[0] == Tokenized.open(folder).train[0]


@pytest.mark.parametrize(
    ("address", "flags", "message"),
    [
        (ADDRESS, {"shuffle_window": 3, "cache_size": 0.0001}, "--cache_size 0.0001 is too small"),
        ("s3://bucket/nothing", {}, r"there is no manifest.json; make a set there"),
        ("s3://nobody/set", {}, "there is no such bucket"),
    ],
)
def test_what_is_no_set_is_a_line(
    proxy: Proxy, address: str, flags: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        open_remote(address, "", config(**flags))


def test_what_a_manifest_names_stays_in_the_cache(proxy: Proxy, tmp_path: Path) -> None:
    target = storage.Storage("s3://bucket/foreign", writable=True)
    outside = tmp_path / "outside.json"
    write_sealed(tmp_path / "m.json", {"tokenizer": {str(outside): {}, "../../../x": {}}})
    for name in ("manifest.json", f"tokenizer/{outside.name}", "tokenizer/x"):
        target.upload(name, tmp_path / "m.json")

    with pytest.raises((KeyError, OSError)):
        open_remote("s3://bucket/foreign", "", config())
    assert not outside.exists()
    assert {path.parent.name for path in tmp_path.glob("cache/**/x")} == {"tokenizer"}


def test_a_short_write_is_a_full_disk_and_a_new_copy_is_checked_again(
    folder: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = open_remote(ADDRESS, "", config(shuffle_window=1))
    expected = rows.train[0]
    (first,) = (cache_folder() / "shards").glob("*/*.safetensors")
    first.unlink()
    write = os.pwrite
    monkeypatch.setattr(
        shard_cache.os,
        "pwrite",
        lambda file, data, start: write(file, data[: len(data) // 2], start),
    )
    with pytest.raises(DamagedRowsError, match="No space left"):
        rows.train[0]
    monkeypatch.undo()
    monkeypatch.setenv("LLMTRAIN_CACHE", str(cache_folder()))
    assert rows.train[0] == expected


def test_a_hole_in_a_new_copy_is_never_read_as_tokens(folder: Path, proxy: Proxy) -> None:
    rows = open_remote(ADDRESS, "", config())
    expected = rows.train[0]  # from now on, the block counts as checked
    file = rows.train.shards[0].file
    file.path.unlink()
    file.cache.hold(file, should_wait=True)
    file.marks_path.write_bytes(b"\1" * len(file.blocks))  # as a failing disk may leave it

    assert rows.train[0] == expected


def test_lengths_are_read_alone(folder: Path, proxy: Proxy) -> None:
    rows = open_remote(ADDRESS, "", config())
    rows.train.column("input_ids")
    assert "input_ids" in rows.train.column_names
    assert rows.train.shards[0].read(np.array([0]), only="labels") == {}
