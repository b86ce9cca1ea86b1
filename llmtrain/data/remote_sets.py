"""Open a set that was prepared before, in a folder or at an address."""

import hashlib
from pathlib import Path

from llmtrain.data.config import DataConfig
from llmtrain.data.packing import LENGTHS
from llmtrain.data.shard_cache import ShardCache
from llmtrain.data.tokenized import MANIFEST, Tokenized
from llmtrain.errors import UserError, first_line
from llmtrain.files import JsonObject, cache_folder, read_sealed
from llmtrain.storage import Storage, is_address


def open_set(name: str, flag: str, config: DataConfig) -> Tokenized:
    """Return the rows of a set, given its folder or address.

    Raises:
        UserError: if there is no set, if it is damaged, or if the storage fails.
    """
    try:
        if is_address(name):
            return open_remote(name, f"{flag} ", config)
        rows = Tokenized.open(Path(name).expanduser())
    except (OSError, KeyError, TypeError, ValueError) as error:  # a manifest may have any content
        raise UserError(
            f"{flag} {name}: {first_line(error)}; copy the set again, or make it again with "
            "llmtrain tokenize."
        ) from None
    rows.metadata.cache_entry = str(Path(name).expanduser().resolve())
    return rows


def open_remote(address: str, source: str, config: DataConfig) -> Tokenized:
    """Return the rows of a set at an address. Their bytes are fetched when they are read.

    Args:
        address: the folder of the set.
        source: what names it, for error messages, such as ``--dataset`` and a space.
        config: the size of the cache, and the number of shards in a window.

    Raises:
        OSError: if a file of the set is damaged.
        UserError: if there is no set, if the storage fails, or if the cache is too small.
    """
    storage = Storage(address, source)
    try:
        manifest_hash = hashlib.sha256(storage.read(MANIFEST)).hexdigest()
    except FileNotFoundError:
        raise UserError(
            f"{source}{address}: there is no {MANIFEST}; make a set there with llmtrain tokenize "
            f"--to {address}."
        ) from None
    folder = cache_folder() / "shards" / manifest_hash[:32]
    storage.download(MANIFEST, folder / MANIFEST)
    manifest = read_sealed(folder / MANIFEST)
    if not manifest:
        raise OSError(f"{MANIFEST} differs from its hash")
    for name in manifest["tokenizer"]:
        local_name = f"tokenizer/{Path(name).name}"  # which does not lead out of the folder
        if not (folder / local_name).exists():
            storage.download(local_name, folder / local_name)

    train_bytes = _bytes_by_file(manifest, "train")
    eval_bytes = _bytes_by_file(manifest, "eval")
    window_bytes = sum(sorted(train_bytes.values(), reverse=True)[: config.shuffle_window])
    capacity = 2 * window_bytes
    if config.cache_size is not None:
        capacity = int(config.cache_size * 1e9) - sum(eval_bytes.values())
    cache = ShardCache(folder, storage, capacity, eval_names={*eval_bytes})
    rows = Tokenized.open(folder, open_file=cache.file)
    rows.metadata.cache_entry = storage.address

    # Near a border, rows that are grouped by length are of two windows.
    least = window_bytes * (2 if LENGTHS in rows.train.column_names else 1)
    if capacity < least:
        needed = least + sum(eval_bytes.values())
        raise UserError(
            f"--cache_size {config.cache_size:g} is too small: the shards of {address} that are "
            f"shuffled at a time, and its eval data, take {(needed + 999) / 1e9:.6f} GB; raise it, "
            "or lower --shuffle_window."
        )
    return rows


def _bytes_by_file(manifest: JsonObject, split: str) -> dict[str, int]:
    """Return the size of each shard of a split."""
    sizes = {}
    for entry in manifest[split]:
        for facts in entry["shards"]:
            sizes[facts["file"]] = facts["bytes"]
    return sizes
