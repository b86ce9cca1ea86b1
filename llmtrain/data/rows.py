"""Documents -> fixed-length token rows on disk, made once and found again by their content.

A text is a stream: end-of-text, document, end-of-text, document, ..., end-of-text. Row ``i`` of block size B holds
tokens ``i*B`` to ``i*B + B`` of it, B + 1 tokens that overlap the next row by one, so that every token but the first is
a target exactly once. Places of the last row past the end of the stream hold -100.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import numpy as np
from tqdm import tqdm

from llmtrain.console import say
from llmtrain.data import tokenizer as tok
from llmtrain.data.config import DataConfig
from llmtrain.data.loader import IGNORED
from llmtrain.data.sources import Source, open_source
from llmtrain.errors import UserError, first_line
from llmtrain.files import new_folder

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerFast

FORMAT = 1  # of the prepared folder; a change makes every cache entry anew
_ROWS_PER_BATCH = 1024
_ENCODE_CHARACTERS = 1 << 20  # per call of the tokenizer, which spreads it over the cores
_PIECE_CHARACTERS = 1 << 16


@dataclass
class Facts:
    """What was prepared, for ``run.json`` and the banner. Hashes are hex sha256."""

    dataset: str
    tokenizer: str
    tokenizer_sha256: str
    data_sha256: str  # of the tokens, training and held out
    vocabulary: int
    block_size: int
    documents: int
    eval_documents: int
    train_tokens: int
    eval_tokens: int
    train_rows: int
    eval_rows: int
    eval_bytes: int  # UTF-8 bytes of the held-out text, for bits per byte


@dataclass
class PreparedData:
    """Token rows, memory-mapped, with the tokenizer that made them."""

    train: "datasets.Dataset"
    eval: "datasets.Dataset | None"
    tokenizer: "PreTrainedTokenizerFast"
    facts: Facts


def prepare(config: DataConfig, block_size: int) -> PreparedData:
    """Find the prepared rows of this text, tokenizer and block size, or make them.

    Every process calls this before the process group exists; one makes the rows while the others wait for its lock.
    Raises :class:`UserError` for bad input, and then leaves nothing behind.
    """
    if tok.is_trained(config.tokenizer):
        tok.vocabulary_size(config.tokenizer)  # a wrong size is told before any text is read
    source = open_source(config)
    pretrained = None if tok.is_trained(config.tokenizer) else tok.load_tokenizer(config.tokenizer)
    tokenizer_key = tok.digest(pretrained) if pretrained is not None else config.tokenizer
    key = [FORMAT, source.fingerprint(), tokenizer_key, block_size, config.eval_fraction]
    folder = cache_folder() / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    prepared = _open(folder)
    found = prepared is not None
    if prepared is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{folder}.lock"):
                prepared = _open(folder)
                if prepared is None:
                    _make(folder, config, source, pretrained, block_size)
                    prepared = _open(folder)
        except OSError as error:
            raise UserError(
                f"the cache folder {folder.parent}: {error.strerror or error}; set LLMTRAIN_CACHE to another."
            ) from None
        assert prepared is not None, f"{folder} cannot be read back"
    prepared.facts.dataset, prepared.facts.tokenizer = config.dataset, config.tokenizer  # its content may have moved
    facts = prepared.facts
    say(
        "data",
        f"{facts.dataset}: {facts.documents:,} documents, {facts.train_tokens:,} tokens to train on, "
        f"{facts.eval_tokens:,} held out, vocabulary {facts.vocabulary:,} ({config.tokenizer}); "
        f"{'found in the cache' if found else 'prepared'}",
    )
    return prepared


def cache_folder() -> Path:
    """``$LLMTRAIN_CACHE``, else ``llmtrain`` in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("LLMTRAIN_CACHE") or base / "llmtrain").expanduser()


def _open(folder: Path) -> PreparedData | None:
    """What was prepared, or ``None`` where it was not, or where somebody has damaged it."""
    if not folder.exists():
        return None
    import datasets  # heavy; `--help` must not wait for it

    try:
        facts = Facts(**json.loads((folder / "facts.json").read_text()))
        return PreparedData(
            train=datasets.Dataset.from_file(str(folder / "train.arrow")),
            eval=datasets.Dataset.from_file(str(folder / "eval.arrow")) if facts.eval_rows else None,
            tokenizer=tok.load_tokenizer(str(folder / "tokenizer")),
            facts=facts,
        )
    except (OSError, ValueError, TypeError, UserError):  # pyarrow's errors are ValueErrors
        return None


def _make(
    folder: Path,
    config: DataConfig,
    source: Source,
    pretrained: "PreTrainedTokenizerFast | None",
    block_size: int,
) -> None:
    with new_folder(folder) as working:
        split = _Split.of(source, config)

        if pretrained is None:
            trained = tok.train_tokenizer(config.tokenizer, split.train(), split.everything)
            tokenizer = tok.as_pretrained(trained, block_size)
        else:
            tokenizer = pretrained
        tokenizer.save_pretrained(working / "tokenizer")

        encode = _Encoder(tokenizer, any_cut=pretrained is None)
        with tqdm(total=split.bytes, unit="B", unit_scale=True, desc="tokenising", leave=False) as bar:
            train = _write_rows(working / "train.arrow", encode(split.train(), bar), block_size)
            held_out = _write_rows(working / "eval.arrow", encode(split.held_out(), bar), block_size)
        if train.tokens <= block_size:
            raise UserError(
                f"--block_size {block_size} is larger than the text to train on ({train.tokens} tokens of "
                f"{config.dataset}); use at most {max(train.tokens - 1, 1)} or more text."
            )
        facts = Facts(
            dataset=config.dataset,
            tokenizer=config.tokenizer,
            tokenizer_sha256=tok.digest(tokenizer),
            data_sha256=hashlib.sha256((train.sha256 + held_out.sha256).encode()).hexdigest(),
            vocabulary=max(tokenizer.get_vocab().values()) + 1,  # ids may have gaps
            block_size=block_size,
            documents=split.documents,
            eval_documents=split.eval_documents,
            train_tokens=train.tokens - 1,
            eval_tokens=max(held_out.tokens - 1, 0),
            train_rows=train.rows,
            eval_rows=held_out.rows,
            eval_bytes=split.eval_bytes,
        )
        (working / "facts.json").write_text(json.dumps(asdict(facts), indent=2))


@dataclass
class _Split:
    """Which documents are held out: those whose hash falls below the fraction, so that they never move.

    Where that leaves one side almost empty, as with a handful of documents, the last part of the longest is held out.
    """

    source: Source
    fraction: float
    documents: int = 0
    eval_documents: int = 0
    bytes: int = 0
    eval_bytes: int = 0
    cut: tuple[int, int] | None = None  # a document's number, and the character at which its held-out part begins

    @classmethod
    def of(cls, source: Source, config: DataConfig) -> "_Split":
        split = cls(source, config.eval_fraction)
        longest = (0, 0)  # characters, and minus the document's number
        for number, text in enumerate(source.documents()):
            size = len(text.encode())
            split.documents += 1
            split.bytes += size
            longest = max(longest, (len(text), -number))
            if split._is_held_out(text):
                split.eval_documents += 1
                split.eval_bytes += size
        if not split.bytes:
            raise UserError(f"--dataset {config.dataset} holds no text.")
        if split.fraction and not 0 < split.eval_bytes <= split.bytes * max(0.5, 2 * split.fraction):
            split.cut = (-longest[1], int(longest[0] * (1 - split.fraction)))
            split.eval_documents, split.eval_bytes = 1, sum(len(text.encode()) for text in split.held_out())
        if split.eval_bytes == split.bytes:
            raise UserError(f"--eval_fraction {split.fraction} leaves no text to train on; lower it, to 0 if need be.")
        return split

    def everything(self) -> Iterator[str]:
        return self.source.documents()

    def train(self) -> Iterator[str]:
        return self._side(held_out=False)

    def held_out(self) -> Iterator[str]:
        return self._side(held_out=True) if self.fraction else iter(())

    def _side(self, held_out: bool) -> Iterator[str]:
        for number, text in enumerate(self.source.documents()):
            if self.cut is None:
                if self._is_held_out(text) == held_out:
                    yield text
            elif number == self.cut[0]:
                yield text[self.cut[1] :] if held_out else text[: self.cut[1]]
            elif not held_out:
                yield text

    def _is_held_out(self, text: str) -> bool:
        return _hash_place(text) < self.fraction


def _hash_place(text: str) -> float:
    """Where a text falls in [0, 1), by its content alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


class _Encoder:
    """Documents -> arrays of token ids, each document followed by end-of-text; the first is also preceded by it.

    A long document is cut into pieces for the tokenizer's threads where that changes no token: the tokenizers trained
    here begin a new word wherever white space follows something else.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", any_cut: bool) -> None:
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        self.end = tokenizer.eos_token_id
        self.any_cut = any_cut

    def __call__(self, documents: Iterable[str], bar: tqdm) -> Iterator[np.ndarray]:
        empty = True
        for texts in _batched(documents):
            if empty:
                yield np.array([self.end], np.int32)
                empty = False
            pieces = [_pieces(text) if self.any_cut else [text] for text in texts]
            try:
                encoded = iter(self.backend.encode_batch_fast([*itertools.chain(*pieces)], add_special_tokens=False))
            except Exception as error:  # the tokenizers library raises nothing narrower
                raise UserError(f"the tokenizer cannot encode this text: {first_line(error)}.") from None
            for parts in pieces:
                for _ in parts:
                    yield np.array(next(encoded).ids, np.int32)
                yield np.array([self.end], np.int32)
            bar.update(sum(len(text.encode()) for text in texts))


def _batched(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _ENCODE_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _is_space(character: str) -> bool:
    return character.isspace() and character not in "\x1c\x1d\x1e\x1f"  # white space to Python, not to Unicode


def _pieces(text: str) -> list[str]:
    """Cut where white space follows something else, about every ``_PIECE_CHARACTERS``."""
    pieces, start = [], 0
    while start + _PIECE_CHARACTERS < len(text):
        end = start + _PIECE_CHARACTERS
        while end < len(text) and not (_is_space(text[end]) and not text[end - 1].isspace()):
            end += 1
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


@dataclass
class _Written:
    tokens: int
    rows: int
    sha256: str


def _write_rows(path: Path, arrays: Iterator[np.ndarray], block_size: int) -> _Written:
    """Write the stream as an Arrow file that ``datasets.Dataset.from_file`` memory-maps."""
    import datasets
    import pyarrow

    column = datasets.Sequence(datasets.Value("int32"), length=block_size + 1)
    schema = datasets.Features({"input_ids": column}).arrow_schema
    tokens = rows = 0
    digest = hashlib.sha256()
    waiting: list[np.ndarray] = []
    held = 0

    def flush(writer: "pyarrow.RecordBatchStreamWriter", last: bool) -> tuple[int, list[np.ndarray]]:
        stream = np.concatenate(waiting) if waiting else np.empty(0, np.int32)
        count = max(len(stream) - 1, 0) // block_size
        if last and (rest := len(stream) - 1 - count * block_size) > 0:
            stream = np.append(stream, np.full(block_size - rest, IGNORED, np.int32))
            count += 1
        if count:
            view = np.lib.stride_tricks.sliding_window_view(stream, block_size + 1)[::block_size][:count]
            values = pyarrow.array(np.ascontiguousarray(view).ravel(), pyarrow.int32())
            array = pyarrow.FixedSizeListArray.from_arrays(values, type=schema.field("input_ids").type)
            writer.write_table(pyarrow.Table.from_arrays([array], schema=schema), _ROWS_PER_BATCH)
        return count, [stream[count * block_size :]]

    with path.open("wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        for array in arrays:
            digest.update(array.astype("<i4").tobytes())
            tokens += len(array)
            waiting.append(array)
            held += len(array)
            if held > _ROWS_PER_BATCH * block_size:
                written, waiting = flush(writer, last=False)
                rows, held = rows + written, len(waiting[0])
        rows += flush(writer, last=True)[0]
    return _Written(tokens, rows, digest.hexdigest())
