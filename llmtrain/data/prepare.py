"""Turn text, conversations or preference data into rows of tokens on disk, and cache them.

The stages that a record passes are listed in :mod:`llmtrain.data`.
"""

import contextlib
import copy
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from llmtrain.console import note, say
from llmtrain.data import tokenizer as tok
from llmtrain.data.audit import Audit, covering_length
from llmtrain.data.chat_template import REASONING_OPTION
from llmtrain.data.config import ChatConfig, PairConfig
from llmtrain.data.corpus import EncodedCorpus
from llmtrain.data.examples import EncodedChats, EncodedPairs
from llmtrain.data.readers import Split
from llmtrain.data.records import Documents, Records, records_of
from llmtrain.data.render import AnyRenderer, PromptCompletionRenderer, Renderer
from llmtrain.data.request import DataRequest
from llmtrain.data.tokenized import Tokenized, metadata_of
from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import cache_folder, hashes_of, new_folder, write_sealed
from llmtrain.locks import file_lock

# The records of a source as tokens, which are encoded once, and written as the rows of each split.
EncodedSource: TypeAlias = EncodedCorpus | EncodedChats[Any]


def cached_rows(request: DataRequest) -> tuple[Tokenized, bool]:
    """Return the rows that a recipe asks for, and whether they were in the cache.

    The rows do not know the names and the mixture of the run: the cache entry may have been made
    from other files with the same content.

    Raises:
        UserError: if the records are wrong, or if the cache cannot be written.
    """
    folder = cache_folder() / request.digest()
    with contextlib.suppress(OSError):
        return Tokenized.open(folder), True

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(Path(f"{folder}.lock")) as has_lock:
            try:
                return Tokenized.open(folder), False  # another process has made them meanwhile
            except OSError as error:
                if folder.exists():
                    note(f"{folder}: {first_line(error)}; its rows are made again")

            # Without a lock, another process may be writing such a folder.
            leftovers = folder.parent.glob(f".tmp-*{folder.name}-*") if has_lock else ()
            for leftover in leftovers:  # of a killed process
                shutil.rmtree(leftover, ignore_errors=True)
            names = " ".join(source.name for source in request.sources)
            say("data", f"reading and tokenising {names}", sys.stderr)
            _make(folder, request)
    except OSError as error:
        raise UserError(
            f"the cache folder {folder.parent}: {error.strerror or error}; set LLMTRAIN_CACHE to "
            "another."
        ) from None
    with as_user_error(f"{folder} cannot be read back", describe=first_line):
        return Tokenized.open(folder), False


# --- making a cache entry


def _make(folder: Path, request: DataRequest) -> None:
    """Make a cache entry: the tokenizer, if it is trained on the data, and the rows of each source.

    The folder exists only once it is complete.
    """
    readers = [
        records_of(source, request.config, request.chat, request.unpaired)
        for source in request.sources
    ]
    tokenizer = request.tokenizer
    if tokenizer is None:
        tokenizer = _train_tokenizer(request, readers)
    renderer: AnyRenderer | None = None
    if request.chat is not None:
        if tokenizer.chat_template is None:
            renderer = PromptCompletionRenderer(tokenizer)
        else:
            only_last_turns = isinstance(request.chat, ChatConfig) and request.chat.turns == "last"
            renderer = Renderer(tokenizer, request.stop_token_ids, only_last_turns)

    with new_folder(folder) as working, contextlib.ExitStack() as temporary:
        encoded: list[EncodedSource] = []
        for number, reader in enumerate(readers):
            path = working / f"tokens-{number}"
            source = _encoder_of(reader, tokenizer, renderer, request, path)
            temporary.callback(source.store.close)
            source.encode()
            encoded.append(source)
        length = _row_length(request, encoded)
        train, eval = _write_rows(working, request, encoded, length)
        temporary.close()  # deletes what is not part of the entry

        metadata = metadata_of(
            " ".join(request.train_names),
            request.spec,
            tokenizer,
            length,
            train=train,
            eval=eval,
            shared=isinstance(request.chat, PairConfig) and request.chat.shares_prompts,
            stop_token_ids=[] if renderer is None else sorted(renderer.stop_token_ids),
        )
        if request.tokenizer is None:  # it was trained on the data
            tokenizer.model_max_length = length
        if metadata.audit is not None:
            # The finished tokenizer_config.json has this, too.
            tokenizer = copy.copy(tokenizer)
            tokenizer.init_kwargs = {**tokenizer.init_kwargs}
            tokenizer.init_kwargs.pop(REASONING_OPTION, None)
            tokenizer.init_kwargs |= metadata.audit.template_options
        # A library in Rust raises no OSError.
        with as_user_error(f"the tokenizer cannot be written to {folder}", describe=first_line):
            tokenizer.save_pretrained(working / "tokenizer")

        files = sorted(path for path in working.rglob("*") if path.is_file())
        names = [str(path.relative_to(working)) for path in files]
        hashes = dict(zip(names, hashes_of(files), strict=True))
        content = {"metadata": dataclasses.asdict(metadata), "files": hashes}
        write_sealed(working / "facts.json", content)


def _train_tokenizer(request: DataRequest, readers: Sequence[Records[Any]]) -> tok.FastTokenizer:
    """Train the tokenizer on the data, and give it the chat template that they need."""
    trained = tok.train_tokenizer(
        request.spec,
        train=chain.from_iterable(reader.texts("train") for reader in readers),
        all_texts=lambda: chain.from_iterable(reader.texts() for reader in readers),
    )
    tokenizer = tok.as_pretrained(trained)
    if request.chat is not None:
        tok.set_template(tokenizer, request.chat.chat_template or "chatml")
    return tokenizer


def _row_length(request: DataRequest, encoded: Sequence[EncodedSource]) -> int:
    """Return ``--max_length``; with ``auto``, a length that most training examples fit in."""
    if request.max_length != "auto":
        return request.max_length
    split: Split = "train" if request.train_names else "eval"
    chats = [source for source in encoded if isinstance(source, EncodedChats)]
    lengths = [source.lengths(split) for source in chats]
    # If there are no examples, writing the rows reports that, whatever their length.
    length = max(covering_length(np.concatenate(lengths)), 1)
    return min(length, request.max_positions or length)


# --- the stages of each source


def _encoder_of(
    reader: Records[Any],
    tokenizer: tok.FastTokenizer,
    renderer: AnyRenderer | None,
    request: DataRequest,
    path: Path,
) -> EncodedSource:
    """Return the object that encodes the records of a source, with a temporary file at ``path``."""
    if isinstance(reader, Documents):
        is_trained = tok.is_trained(request.spec)
        return EncodedCorpus(reader, tokenizer, is_trained, request.text_columns, path)

    assert request.chat is not None, "records that are not text have a config"
    assert renderer is not None, "and a renderer"
    if isinstance(request.chat, PairConfig):
        return EncodedPairs(reader, renderer, request.chat, path, request.unpaired)
    return EncodedChats(reader, renderer, request.chat, path)


def _write_rows(
    working: Path,
    request: DataRequest,
    encoded: Sequence[EncodedSource],
    length: int,
) -> tuple[list[Audit], list[Audit]]:
    """Write the rows of all sources, and return the counts of both splits, one for each source.

    Raises:
        UserError: if there is too little to train or to evaluate on.
    """
    train: list[Audit] = []
    eval: list[Audit] = []
    for source, examples in zip(request.sources, encoded, strict=True):
        if source.only_split != "eval":
            train.append(examples.write(working / f"train-{len(train)}.arrow", "train", length))
        if source.only_split != "train":
            eval.append(examples.write(working / f"eval-{len(eval)}.arrow", "eval", length))

    for name, stats in zip(request.train_names, train, strict=True):
        size = stats.targets
        if request.chat is None and size < length:
            flag = "--max_length" if request.takes_conversations else "--block_size"
            raise UserError(
                f"{flag} {length} is larger than the training text ({size + 1} tokens of {name}); "
                f"use at most {max(size, 1)}, or more text."
            )
    return train, eval
