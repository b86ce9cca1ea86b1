"""Make the rows that a recipe would train on, as a set for runs on any machine.

Another recipe takes the set with --dataset FOLDER. A start after a kill makes what is missing.
Several processes or machines that see the folder can make a part each, with --shard. The folder may
be in a bucket, such as s3://bucket/set.
"""

import argparse
import contextlib
import fnmatch
import functools
import re
import shutil
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.console import pluralize, say
from llmtrain.errors import UserError
from llmtrain.files import JsonObject, cache_folder, json_text, local_path, names_in, read_sealed
from llmtrain.locks import file_lock
from llmtrain.recipe_arguments import add_recipe_arguments, check_recipe
from llmtrain.storage import Storage, is_address

if TYPE_CHECKING:
    from llmtrain.data.prepare import EncodedShard, SetMaker
    from llmtrain.data.request import DataRequest, Scorer

_ESTIMATED_RECORDS = 1_000
_ESTIMATED_PASSES = 4  # of the teacher
# In a folder or at an address, while a set is made.
_OWN_FILES = re.compile(r"(shard|train|eval|\.tmp)-.*|tokenizer(/.*)?|[0-9a-f]{64}\.safetensors")

EXAMPLES = (
    "llmtrain tokenize recipes/gpt.py --dataset texts.jsonl --to sets/texts",
    "llmtrain tokenize recipes/gpt.py --dataset texts --tokenizer gpt2 --to sets/texts --shard 3/8",
    "llmtrain tokenize recipes/gpt.py --dataset texts --tokenizer gpt2 --to sets/texts --finish",
    "llmtrain tokenize recipes/gpt.py --dataset texts.jsonl --to s3://bucket/sets/texts",
    "llmtrain tokenize recipes/distill.py --dataset chats.jsonl --model_name_or_path student "
    "--teacher_model_name_or_path teacher --loss_top_k 64 --to sets/scored",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        required=True,
        help="folder of the set, or its address at s3://, gs:// or hf://buckets/",
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="make only part I of N, such as 1/8 to 8/8 in the 8 tasks of a Slurm array; start "
        "once more with --finish when all parts are made",
    )
    parser.add_argument(
        "--finish", action="store_true", help="write the manifest of a set whose parts are made"
    )


def run(arguments: argparse.Namespace) -> None:
    check_recipe(arguments.recipe)
    place: Path | Storage
    if is_address(arguments.to):
        place = Storage(arguments.to, "--to ", writable=True)
    else:
        place = Path(local_path(arguments.to, "--to ")).expanduser()
    part = parts = 1
    if arguments.shard is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", arguments.shard)
        part, parts = map(int, match.groups()) if match else (0, 0)
        if not 1 <= part <= parts:
            raise UserError(
                f"--shard {arguments.shard}: give the number of a part and the number of all "
                "parts, from 1/N to N/N."
            )
        if arguments.finish:
            raise UserError("--shard makes a part, and --finish needs all; leave one of them out.")

    from llmtrain.planning import RowsAreMade
    from llmtrain.training.recipe_model import build_recipe_model

    make = functools.partial(_make, place, part=part, parts=parts, only_finish=arguments.finish)
    try:
        build_recipe_model(arguments.recipe, arguments.flags, "no", take_rows=make)
    except RowsAreMade:
        pass
    else:
        raise UserError(
            f"{arguments.recipe} makes its rows itself, with Tokenized.of, so there is nothing to "
            "tokenise; train with it as it is."
        )
    manifest = _manifest(place)
    if not manifest:
        print(f"part {part} of {parts} is made; when all are, start once more with --finish")
        return

    sizes: dict[str, int] = {}
    for source in (*manifest["train"], *manifest["eval"]):
        sizes |= {shard["file"]: shard["bytes"] for shard in source["shards"]}
    metadata = manifest["metadata"]
    facts = {
        "folder": str(place),
        "files": len(sizes),
        "rows": metadata["train_rows"] + metadata["eval_rows"],
        "tokens": metadata["train_tokens"] + metadata["eval_tokens"],
        "bytes": sum(sizes.values()),
    }
    if arguments.json:
        print(json_text(facts))
        return
    temperature = (manifest["made_from"].get("teacher") or {}).get("temperature", 1)
    scored_at = f" --temperature {temperature:g}" if temperature != 1 else ""
    print(
        f"{place}: {facts['rows']:,} rows of {metadata['block_size']:,} tokens, "
        f"{facts['tokens']:,} target tokens, {pluralize(len(sizes), 'file')} of "
        f"{facts['bytes'] / 1e6:,.1f} MB\n"
        f"to train on it: accelerate launch {arguments.recipe} --dataset {place}{scored_at}"
    )


def _manifest(place: Path | Storage) -> JsonObject:
    """Return the manifest of a set, which is empty if the set is not complete."""
    from llmtrain.data.tokenized import MANIFEST

    if isinstance(place, Path):
        return read_sealed(place / MANIFEST)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FileNotFoundError):
        path = Path(folder, MANIFEST)
        place.download(MANIFEST, path)
        return read_sealed(path)
    return {}


def _make(
    place: Path | Storage, request: "DataRequest", part: int, parts: int, only_finish: bool
) -> None:
    """Make a part of a set, and the manifest unless there are other parts.

    Raises:
        UserError: if the rows are a set already, or if the folder has other files.
    """
    from llmtrain.data.prepare import SetMaker
    from llmtrain.data.tokenized import MANIFEST

    if len(request.recorded) < len(request.sources):
        raise UserError("--dataset names a set, which is tokenised already; name its records.")
    if manifest := _manifest(place):
        if manifest["made_from"] != request.content:
            raise UserError(
                f"{place} is another set: its data, tokenizer or flags differ; name another "
                "folder, or delete this one."
            )
        say("set", f"{place} is complete already", sys.stderr)
        return
    storage = place if isinstance(place, Storage) else None
    names = names_in(place) or () if isinstance(place, Path) else place.sizes()
    if not all(map(_OWN_FILES.fullmatch, names)):
        raise UserError(f"{place} has other files; name a new folder with --to.")

    folder = place if isinstance(place, Path) else cache_folder() / "making" / request.digest()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            file_lock(folder / f".tmp-lock-{part}-{parts}", timeout=0),
            contextlib.ExitStack() as stack,
        ):
            if storage is not None:
                # What a process that was killed has left here does not count.
                folder = folder / f"{part}-{parts}"
                shutil.rmtree(folder, ignore_errors=True)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                for name in fnmatch.filter(names, "shard-*.json"):
                    storage.download(name, folder / name)
            maker = SetMaker(folder, request, storage)
            if parts > 1 or only_finish:
                maker.check_parts()
            if not only_finish:
                _estimate(maker)
                maker.make(part, parts)
            if parts == 1:
                maker.finish()
                if storage is not None:
                    for path in (*folder.glob("tokenizer/*"), folder / MANIFEST):
                        storage.upload(path.relative_to(folder).as_posix(), path)
                    storage.delete(fnmatch.filter(storage.sizes(), "shard-*.json"))
    except BlockingIOError:
        raise UserError(f"{place}: another process makes this part; wait for it.") from None


def _estimate(maker: "SetMaker") -> None:
    """Say how many tokens there will be, and how long it will take, by the first records.

    Raises:
        UserError: if the disk has no room for rows that a teacher scores.
    """
    import numpy as np

    from llmtrain.data.shards import token_dtype

    all_bytes = 0
    for each in maker.readers:
        each.divide()
        all_bytes += each.text_bytes.sum()
    reader = maker.readers[0]
    first_records = reader.text_bytes[reader.shards[0].start : reader.shards[0].stop]
    scale = all_bytes / max(first_records[:_ESTIMATED_RECORDS].sum(), 1)

    shard = maker.encoder(0, 0)
    start = time.monotonic()
    with contextlib.closing(shard.store):
        shard.encode(islice(reader.read([0]), _ESTIMATED_RECORDS))
        seconds = (time.monotonic() - start) * scale
        tokens = int(shard.store.bounds[-1]) * scale
        columns = 3 if maker.renderer is not None else len(maker.request.text_columns)
        megabytes = tokens * columns * np.dtype(token_dtype(maker.vocabulary)).itemsize / 1e6
        if maker.request.scorer is not None:
            megabytes, score_seconds = _estimate_scores(maker, maker.request.scorer, shard, scale)
            seconds += score_seconds
    shards = sum(len(each.shards) for each in maker.readers)
    say(
        "estimate",
        f"{pluralize(shards, 'shard')}, {all_bytes / 1e6:,.1f} MB of source text; by the first "
        f"{_ESTIMATED_RECORDS:,} records about {tokens:,.0f} tokens, "
        f"{megabytes:,.1f} MB on disk, {seconds / 60:,.1f} minutes",
        sys.stderr,
    )


def _estimate_scores(
    maker: "SetMaker", scorer: "Scorer", shard: "EncodedShard", scale: float
) -> tuple[float, float]:
    """Return the megabytes of all rows with their scores, and the seconds that scoring takes.

    Args:
        maker: makes the rows.
        scorer: scores them.
        shard: the first records, encoded.
        scale: the size of all records, divided by that of these.

    Raises:
        UserError: if the disk has no room for the rows.
    """
    from llmtrain.data.prepare import row_length

    length = maker.length or row_length(maker.request, [shard])
    with tempfile.TemporaryDirectory() as folder:
        samples = []
        for split in maker.request.recorded[0].splits:
            _, rows = maker.unscored(Path(folder, split), split, shard, length)
            samples.append(rows)
        count = sum(len(rows.train) for rows in samples) * scale
        columns = {**samples[0].train.columns, **scorer.columns(length + 1, maker.vocabulary)}
        megabytes = count * sum(column.row_bytes for column in columns.values()) / 1e6

        # The estimate includes shards that are there. A set at an address needs less room.
        free = shutil.disk_usage(maker.folder).free
        free += sum(path.stat().st_size for path in maker.folder.glob("*.safetensors"))
        if maker.storage is None and megabytes > free / 1e6:
            raise UserError(
                f"{maker.folder} has no room: the rows with their scores take about "
                f"{megabytes:,.0f} MB, and {free / 1e6:,.0f} MB are free; make room, name a folder "
                "on another disk, or lower --loss_top_k."
            )

        passes = scorer.score(max(samples, key=lambda rows: len(rows.train)))
        next(passes, None)  # loads the teacher
        start = time.monotonic()
        timed = sum(len(scores["teacher_logp"]) for scores in islice(passes, _ESTIMATED_PASSES))
        return megabytes, (time.monotonic() - start) / max(timed, 1) * count
