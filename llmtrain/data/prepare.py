"""Turn text, conversations or preference data into rows of tokens on disk, and cache them."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol

import filelock
import numpy as np

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.data_log import describe
from llmtrain.data.lengths import OverlongLengths, summarize_lengths
from llmtrain.data.metadata import DataMetadata, metadata_of
from llmtrain.data.packing import Split, SplitStats, TokenRows
from llmtrain.data.preference import PairAudit, Pairs
from llmtrain.data.pretraining import Texts
from llmtrain.data.prompt_completion import make_renderer
from llmtrain.data.request import DataRequest, make_request
from llmtrain.data.sft import Audit, Conversations
from llmtrain.data.shuffle import Mixture
from llmtrain.data.sources import PythonRecords, Source
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.files import cache_folder, new_folder, write_json


def tokenize(
    config: DataConfig,
    max_length: int | Literal["auto"],
    chat: RowConfig | None = None,
    trust_remote_code: bool = False,
    records: PythonRecords | None = None,
    unpaired: bool = False,
    max_positions: int | None = None,
) -> Tokenized:
    """Return the rows of a data set, from the cache if they were made before.

    Every process calls this before the process group exists. One of them makes the rows, while the
    others wait for its lock. If anything fails, the cache stays as it was.

    Args:
        config: the data sets and the tokenizer.
        max_length: the length of the rows; see :meth:`Texts.write`,
            :meth:`EncodedConversations.write` and :meth:`EncodedPairs.write`. ``auto`` chooses a
            length that holds 99.5 % of the conversations. ``metadata.block_size`` of the result is
            the length.
        chat: how conversations become rows. With a :class:`PairConfig` the records are preference
            data. ``None``: the records are plain text.
        trust_remote_code: run code that comes with the tokenizer.
        records: the records of a recipe that has its own data: a ``datasets.Dataset``, a list of
            texts or of dictionaries of fields, or a function that yields them, always the same
            records in the same order. Then ``config.dataset`` is not read.
        unpaired: the loss takes single answers with a label, not only pairs.
        max_positions: the number of positions of the model. ``auto`` chooses no larger length, and
            no message suggests one. ``None`` if there is no limit.

    Raises:
        UserError: if the data, the tokenizer or the flags are wrong.
    """
    request = make_request(
        config,
        max_length,
        chat=chat,
        trust_remote_code=trust_remote_code,
        records=records,
        unpaired=unpaired,
        max_positions=max_positions,
    )
    folder = cache_folder() / request.digest()
    rows = _open(folder, request.spec)
    is_cached = rows is not None
    if rows is None:
        rows = _make_once(folder, request)

    # The cache entry may have been made from other files with the same content.
    rows.metadata.dataset = " ".join(config.dataset)
    rows.metadata.tokenizer = request.spec
    rows.metadata.cache_entry = folder.name
    rows.new_tokens = request.new_tokens
    rows.eval_names = [source.name for source in request.eval or request.train]
    if config.mixture:
        rows.mixture = Mixture(rows.metadata.source_rows, config.mixture)
    describe(request, rows, is_cached)
    config.fit_micro_batch(rows.positions)
    return rows


# --- the data of each source


class Corpus(Protocol):
    """The training and eval data of one source.

    Attributes:
        source: the records.
        only_split: the split of all records; ``None`` if they are divided.
    """

    source: Source
    only_split: Split | None

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield the texts of one split, or of both, to train a tokenizer on."""

    def encode(self, tokenizer: tok.FastTokenizer, folder: Path) -> "EncodedCorpus":
        """Render what does not depend on the length of rows, into a folder for temporary files."""


class EncodedCorpus(Protocol):
    """The data of one source, ready to be written as rows of any length."""

    def lengths(self, split: Split) -> np.ndarray:
        """Return the smallest row length that holds each conversation; empty for text."""

    def write(self, path: Path, split: Split, max_length: int) -> SplitStats:
        """Write the rows of a split."""

    def close(self) -> None:
        """Delete all temporary files."""


def _corpora(request: DataRequest) -> list[Corpus]:
    """Return the objects that turn the records of each source into rows."""
    corpora: list[Corpus] = []
    for number, (source, format) in enumerate(zip(request.sources, request.formats, strict=True)):
        split: Split | None = None
        if request.eval:
            split = "train" if number < len(request.train) else "eval"
        corpora.append(_corpus(request, source, format, split))
    return corpora


def _corpus(request: DataRequest, source: Source, format: str, only_split: Split | None) -> Corpus:
    """Return the object that turns the records of a source into rows.

    Args:
        request: says how.
        source: the records.
        format: their format.
        only_split: the split of all records; ``None`` to divide them.
    """
    config = request.config
    chat = request.chat
    if isinstance(chat, PairConfig):
        return Pairs(
            source,
            config,
            chat,
            stop_token_ids=request.stop_token_ids,
            unpaired=request.unpaired,
            only_split=only_split,
            max_positions=request.max_positions,
        )
    if isinstance(chat, ChatConfig) and format != "text":
        return Conversations(
            source,
            format,
            config,
            chat,
            stop_token_ids=request.stop_token_ids,
            only_split=only_split,
            max_positions=request.max_positions,
        )
    return Texts(source, config, columns=request.text_columns, only_split=only_split)


# --- cache entries


def _open(folder: Path, spec: str) -> Tokenized | None:
    """Return the rows of a cache entry, or ``None`` if it does not exist or is damaged."""
    try:
        metadata = DataMetadata(**json.loads((folder / "facts.json").read_text()))
        train_numbers = range(len(metadata.source_rows))
        eval_numbers = range(len(metadata.eval_source_rows))
        train = TokenRows.open([folder / f"train-{i}.arrow" for i in train_numbers])
        eval = TokenRows.open([folder / f"eval-{i}.arrow" for i in eval_numbers])
        tokenizer = tok.load_tokenizer(str(folder / "tokenizer"), trained=tok.is_trained(spec))
    except (OSError, ValueError, TypeError, UserError):  # pyarrow's errors are ValueErrors
        return None
    return Tokenized(train, eval if metadata.eval_rows else None, tokenizer, metadata)


def _make_once(folder: Path, request: DataRequest) -> Tokenized:
    """Make a cache entry, unless another process makes it first, and return its rows."""
    with _cache_lock(folder):
        if _open(folder, request.spec) is None:
            _make(folder, request)
    rows = _open(folder, request.spec)
    assert rows is not None, f"{folder} cannot be read back"
    return rows


@contextlib.contextmanager
def _cache_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache entry.

    Raises:
        UserError: if the cache folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{folder}.lock"):
            yield
    except OSError as error:
        raise UserError(
            f"the cache folder {folder.parent}: {error.strerror or error}; set LLMTRAIN_CACHE to "
            "another."
        ) from None


def _make(folder: Path, request: DataRequest) -> None:
    """Make a cache entry: the tokenizer, if it is trained on the data, and the rows of each source.

    Args:
        folder: the cache entry. It exists only once it is complete.
        request: the rows to make.
    """
    chat = request.chat
    corpora = _corpora(request)
    with new_folder(folder) as working:
        tokenizer = request.tokenizer
        if tokenizer is None:
            tokenizer = _trained_tokenizer(request.spec, corpora)
            if chat is not None:
                set_template(tokenizer, chat.chat_template)

        with _encoded_corpora(corpora, tokenizer, working) as encoded:
            lengths = np.concatenate([corpus.lengths("train") for corpus in encoded])
            summary = summarize_lengths(lengths)
            length = _row_length(request, summary.covering)
            if tok.is_trained(request.spec):
                tokenizer.model_max_length = length
            tokenizer.save_pretrained(working / "tokenizer")
            train, eval = _write_rows(working, request, corpora, encoded, length)

        metadata = metadata_of(
            " ".join(request.config.dataset),
            request.spec,
            tokenizer,
            length,
            train=train,
            eval=eval,
        )
        metadata.shared = isinstance(chat, PairConfig) and chat.shares_prompts
        metadata.covering_length = summary.covering
        metadata.length_histogram = list(summary.histogram)
        metadata.overlong_lengths = list(OverlongLengths.of(lengths, length) or ())
        if chat is not None:
            renderer = make_renderer(tokenizer, request.stop_token_ids)
            metadata.ends = sorted(renderer.stop_token_ids)
        write_json(working / "facts.json", asdict(metadata), durable=False)


def _row_length(request: DataRequest, covering: int) -> int:
    """Return the length of the rows.

    Args:
        request: holds the length, or ``auto``.
        covering: the length that ``auto`` chooses, unless the model has fewer positions; 0 if no
            conversation has a target. Writing the rows then reports that, whatever their length.
    """
    if request.max_length != "auto":
        return request.max_length
    covering = max(covering, 1)
    if request.max_positions is None:
        return covering
    return min(covering, request.max_positions)


def _write_rows(
    working: Path,
    request: DataRequest,
    corpora: Sequence[Corpus],
    encoded: Sequence[EncodedCorpus],
    length: int,
) -> tuple[list[SplitStats], list[SplitStats]]:
    """Write the rows of all sources, and return the counts of both splits, one for each source.

    Raises:
        UserError: if there is too little to train or to evaluate on.
    """
    train: list[SplitStats] = []
    eval: list[SplitStats] = []
    for corpus, encoded_corpus in zip(corpora, encoded, strict=True):
        if corpus.only_split != "eval":
            path = working / f"train-{len(train)}.arrow"
            train.append(encoded_corpus.write(path, "train", length))
        if corpus.only_split != "train":
            path = working / f"eval-{len(eval)}.arrow"
            eval.append(encoded_corpus.write(path, "eval", length))
        if corpus.only_split == "eval":
            overlong = OverlongLengths.of(encoded_corpus.lengths("eval"), length)
            _check_eval_data(corpus.source, eval[-1], request, overlong)

    if request.chat is None:
        sizes = [stats.targets for stats in train]
        smallest = min(sizes)
        if smallest < length:
            name = request.train[sizes.index(smallest)].name
            raise UserError(
                f"{request.length_flag} {length} is larger than the training text "
                f"({smallest + 1} tokens of {name}); use at most {max(smallest, 1)}, or more text."
            )
    return train, eval


@contextlib.contextmanager
def _encoded_corpora(
    corpora: Sequence[Corpus], tokenizer: tok.FastTokenizer, working: Path
) -> Iterator[list[EncodedCorpus]]:
    """Encode the data of all sources, and delete their temporary files at the end."""
    with contextlib.ExitStack() as stack:
        encoded = []
        for i, corpus in enumerate(corpora):
            folder = working / f"encoded-{i}"
            folder.mkdir()
            corpus_of_tokens = corpus.encode(tokenizer, folder)
            stack.callback(folder.rmdir)
            stack.callback(corpus_of_tokens.close)
            encoded.append(corpus_of_tokens)
        yield encoded


def _check_eval_data(
    source: Source, stats: SplitStats, request: DataRequest, overlong: OverlongLengths | None
) -> None:
    """Raise :class:`UserError` if a data set that the user chose for evaluation has no targets.

    Args:
        source: the data set.
        stats: the counts of its rows.
        request: the rows to make.
        overlong: the lengths of the records that do not fit in a row; ``None`` if all fit.
    """
    if stats.targets:
        return
    reason = ""
    if request.chat is not None and isinstance(stats.audit, Audit | PairAudit):
        reason = f" ({stats.audit.left_out(request.chat.overlong)})"
    advice = "check --columns and the chat template"
    if overlong is not None:
        advice = f"the overlong ones have {overlong.describe(request.max_positions)}"
    raise UserError(
        f"{source.flag} {source.name}: no record can be used for evaluation{reason}; {advice}."
    )


def _trained_tokenizer(spec: str, corpora: Sequence[Corpus]) -> tok.FastTokenizer:
    """Train the tokenizer ``char``, ``byte`` or ``bpe:N`` on the data."""
    trained = tok.train_tokenizer(
        spec,
        train=chain.from_iterable(corpus.texts("train") for corpus in corpora),
        all_texts=lambda: chain.from_iterable(corpus.texts() for corpus in corpora),
    )
    return tok.as_pretrained(trained)
