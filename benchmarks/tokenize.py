"""`llmtrain tokenize` beside datasets.map and litdata: megabytes per second, and memory.

Each makes packed rows on disk of the same text with the same tokenizer, on all cores. A contender
is a command, so its time includes the start of Python.

| contender | work |
|---|---|
| llmtrain | `llmtrain tokenize recipes/gpt.py`, which hashes the shards, too |
| datasets | `map` with a process per core: tokenise, group the tokens into rows; `save_to_disk` |
| litdata | `optimize` with a process per core and TokensLoader |

The text is random words, as JSON lines of about 2 kB in several files. The tokenizer is a BPE that
is trained on some of them. The memory is the peak of the largest process of a command: llmtrain has
one, and the others have one per core or more.

The table is only written if the documents have the same tokens in all three. datasets is judged
before it groups the tokens, because grouping leaves out the end of every batch.

Repeat it with `python -m benchmarks.tokenize`. litdata is no dependency of llmtrain. Without
`pip install litdata`, its rows are left out. It can also be in a folder on PYTHONPATH.
"""

import argparse
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.comparison import Figures, Table, take_turns
from benchmarks.runs import BIN, CORES, GPT_RECIPE, ROOT, environment, flags, scratch
from llmtrain.console import say

VOCABULARY = 4096
ROW_LENGTH = 1024
ROUNDS = 3

# The text.
MEGABYTES = 100
WORDS = 20_000
DOCUMENT_WORDS = 290  # about 2 kB
FILES = 4 * CORES
TOKENIZER_DOCUMENTS = 2_000

LITDATA_CHUNK_TOKENS = (ROW_LENGTH + 1) * 8_192


class Tokens(NamedTuple):
    """The documents that a contender has stored, in any order.

    Attributes:
        documents: their number.
        tokens: the number of their tokens.
        sha256: the sum of the hashes of all documents, modulo 2**256.
    """

    documents: int
    tokens: int
    sha256: int


def main() -> None:
    peers = {"datasets": prepare_with_datasets, "litdata": prepare_with_litdata}
    if sys.argv[1:2] == ["--peer"]:
        _, _, name, text, tokenizer, folder = sys.argv
        peers[name](Path(text), tokenizer, Path(folder))
        return

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="size of the text")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each contender")
    parser.add_argument("--folder", help="parent of the temporary folder")
    arguments = parser.parse_args()
    if importlib.util.find_spec("litdata") is None:
        say("skipped", "litdata, which is not installed")
        peers.pop("litdata")

    with scratch(arguments.folder) as folder:
        text = folder / "text"
        tokenizer = folder / "tokenizer"
        megabytes = write_text(text, arguments.megabytes) / 1e6
        write_tokenizer(text, tokenizer)

        recipe = [BIN / "llmtrain", "tokenize", GPT_RECIPE]
        recipe_flags = flags(
            dataset=text, tokenizer=tokenizer, block_size=ROW_LENGTH, eval_fraction=0
        )
        peer = [sys.executable, "-m", "benchmarks.tokenize", "--peer"]
        commands = {"llmtrain": [*recipe, *recipe_flags, "--to"]}
        for name in peers:
            commands[name] = [*peer, name, text, tokenizer]
        numbers = itertools.count()  # of folders: each turn has a new one
        newest: dict[str, Path] = {}

        def take_turn(name: str) -> Figures:
            newest[name] = folder / f"{name}-{next(numbers)}"
            seconds, memory = measure([*commands[name], newest[name]])
            return {"speed": megabytes / seconds, "memory": memory}

        turns = take_turns(
            {name: functools.partial(take_turn, name) for name in commands},
            rounds=arguments.rounds,
            warm_up_rounds=0,
        )
        tokens = {
            "llmtrain": tokens_of(streams_of_llmtrain(newest["llmtrain"])),
            "datasets": tokens_of(streams_of_datasets(newest["datasets"])),
        }
        if "litdata" in peers:
            tokens["litdata"] = tokens_of(streams_of_litdata(newest["litdata"]))

    if len(set(tokens.values())) > 1:
        raise SystemExit(f"the contenders have stored other tokens: {tokens}")
    work = f"tokenising {megabytes:.0f} MB on {CORES} cores"
    table = Table("tokenize")
    for name in peers:
        for figure, unit, target in (("speed", "MB/s", ">= 1"), ("memory", "MB", "")):
            table.add(
                work=work if figure == "speed" else f"{work}: peak memory",
                against=name,
                ours=turns["llmtrain"].median_of(figure),
                theirs=turns[name].median_of(figure),
                unit=unit,
                target=target,
            )
    table.write(
        documents=tokens["llmtrain"].documents,
        tokens=tokens["llmtrain"].tokens,
        turns={name: turn.results for name, turn in turns.items()},
    )


def measure(command: Sequence[object]) -> tuple[float, float]:
    """Run a command; return its seconds, and the peak memory in MB of its largest process."""
    words = [str(word) for word in command]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)  # of the process and all its children
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            output.seek(0)
            raise SystemExit(f"{' '.join(words)}\n{output.read().decode()}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


# The text


def write_text(folder: Path, megabytes: int) -> int:
    """Write files of JSON lines with random words, as frequent as in a language.

    Returns:
        The bytes of all files.
    """
    generator = random.Random(0)
    words = [
        "".join(generator.choices(string.ascii_lowercase, k=generator.randint(2, 11)))
        for _ in range(WORDS)
    ]
    frequencies = list(itertools.accumulate(1 / (rank + 10) for rank in range(WORDS)))
    folder.mkdir()
    size = 0
    for number in range(FILES):
        path = folder / f"part-{number:03}.jsonl"
        with path.open("w") as file:
            while file.tell() < megabytes * 10**6 / FILES:
                drawn = generator.choices(words, cum_weights=frequencies, k=DOCUMENT_WORDS)
                file.write(json.dumps({"text": " ".join(drawn)}) + "\n")
        size += path.stat().st_size
    return size


def write_tokenizer(text: Path, folder: Path) -> None:
    """Train a tokenizer on the first documents of the text."""
    from llmtrain.data.tokenizer import as_pretrained, train_tokenizer

    first_file = min(text.iterdir())
    with first_file.open() as file:
        lines = itertools.islice(file, TOKENIZER_DOCUMENTS)
        texts = [json.loads(line)["text"] for line in lines]
    trained = train_tokenizer(f"bpe:{VOCABULARY}", texts, lambda: iter(texts))
    as_pretrained(trained, ROW_LENGTH).save_pretrained(folder)


# The other contenders


def prepare_with_datasets(text: Path, tokenizer_folder: str, folder: Path) -> None:
    """Make rows as run_clm.py of transformers does, and save them."""
    import datasets
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process per core
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    end = [tokenizer.eos_token_id]

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        return {"input_ids": [ids + end for ids in encoded]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, Any]:
        stream = list(itertools.chain.from_iterable(batch["input_ids"]))
        starts = range(0, len(stream) - ROW_LENGTH + 1, ROW_LENGTH)
        rows = [stream[start : start + ROW_LENGTH] for start in starts]
        return {"input_ids": rows, "labels": rows}

    records = datasets.load_dataset(
        "json",
        data_files=[str(path) for path in sorted(text.iterdir())],
        split="train",
        cache_dir=str(folder / "cache"),
    )
    documents = records.map(
        encode,
        batched=True,
        num_proc=CORES,
        remove_columns=records.column_names,
        cache_file_name=str(folder / "documents.arrow"),
    )
    documents.map(group, batched=True, num_proc=CORES).save_to_disk(
        str(folder / "rows"), num_proc=CORES
    )


def prepare_with_litdata(text: Path, tokenizer_folder: str, folder: Path) -> None:
    """Make the chunks that litdata's readme makes of a text."""
    from litdata import TokensLoader, optimize

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    optimize(
        fn=functools.partial(encode_for_litdata, tokenizer_folder),
        inputs=[str(path) for path in sorted(text.iterdir())],
        output_dir=str(folder),
        num_workers=CORES,
        chunk_size=LITDATA_CHUNK_TOKENS,
        item_loader=TokensLoader(),
    )


def encode_for_litdata(tokenizer_folder: str, path: str) -> Iterator[Any]:
    """Yield the tokens of each document of a file."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    with Path(path).open() as file:
        for line in file:
            ids = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
            yield torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int32)


# The tokens that they have stored


def tokens_of(streams: Iterator[np.ndarray]) -> Tokens:
    """Count and hash the documents of streams, which end-of-text (0) ends or divides."""
    documents = 0
    tokens = 0
    hashes = 0
    for stream in streams:
        borders = np.flatnonzero(stream == 0)
        for document in np.split(stream, borders):
            content = document[document != 0].astype("<i4")
            if len(content):
                documents += 1
                tokens += len(content)
                hashes += int.from_bytes(hashlib.sha256(content.tobytes()).digest())
    return Tokens(documents, tokens, hashes % (1 << 256))


def streams_of_llmtrain(folder: Path) -> Iterator[np.ndarray]:
    from llmtrain.data.tokenized import Tokenized

    tokenized = Tokenized.open(folder)
    for shard in tokenized.train.shards:
        # The last token of a row is the first of the next row. The last row is padded.
        ids = shard.read(np.arange(len(shard)))["input_ids"]
        stream = np.append(ids[:, :-1], ids[-1:, -1:])
        yield stream[stream >= 0]


def streams_of_datasets(folder: Path) -> Iterator[np.ndarray]:
    import datasets

    for path in sorted(folder.glob("documents*.arrow")):
        for batch in datasets.Dataset.from_file(str(path)).with_format("numpy").iter(1_000):
            yield np.concatenate(batch["input_ids"])


def streams_of_litdata(folder: Path) -> Iterator[np.ndarray]:
    for path in sorted(folder.glob("*.bin")):
        # The number of documents, and where each begins and the last one ends.
        count = int(np.fromfile(path, np.uint32, count=1)[0])
        offsets = np.fromfile(path, np.uint32, count=count + 1, offset=4)
        yield np.fromfile(path, np.int32, offset=int(offsets[0]))


if __name__ == "__main__":
    main()
