"""Turn text, conversations or preference data into a set: shards of rows, with a manifest.

The stages that a record passes are listed in :mod:`llmtrain.data`. A set is in the cache, or in a
folder that the user has named, or at an address. It is complete once it has a manifest. Until
then, each shard has its own facts, so that a start after a kill makes only what is missing.
"""

import contextlib
import copy
import shutil
import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from llmtrain.console import is_or_are, note, pluralize, say
from llmtrain.data import tokenizer as tok
from llmtrain.data.audit import Audit, covering_length, total_of_shards
from llmtrain.data.chat_template import REASONING_OPTION
from llmtrain.data.config import ChatConfig, PairConfig
from llmtrain.data.corpus import EncodedCorpus
from llmtrain.data.examples import EncodedChats, EncodedPairs, EncodedTokens
from llmtrain.data.packing import TokenStore
from llmtrain.data.readers import Source, Split
from llmtrain.data.records import Documents, records_of
from llmtrain.data.render import AnyRenderer, PromptCompletionRenderer, Renderer
from llmtrain.data.request import DataRequest
from llmtrain.data.shards import Shard, TokenRows, create_shard, facts_of
from llmtrain.data.tokenized import FORMAT_VERSION, MANIFEST, Tokenized, metadata_of
from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import (
    JsonObject,
    cache_folder,
    digest,
    hashes_of,
    new_folder,
    read_hashed,
    read_sealed,
    sync,
    temporary_sibling,
    write_sealed,
)
from llmtrain.locks import file_lock
from llmtrain.model_folders import vocabulary_of
from llmtrain.storage import Storage
from llmtrain.versions import versions

# The records of a shard as tokens, which are encoded once, and written as the rows of each split.
EncodedShard: TypeAlias = EncodedCorpus | EncodedChats[Any]
# Shards whose rows a model scores are so many times smaller, because each takes long.
_SCORED_SHARD_SCALE = 32


def cached_rows(request: DataRequest) -> tuple[Tokenized, bool]:
    """Return the rows that a recipe asks for, and whether they were in the cache.

    The rows do not know the names and the mixture of the run: the cache entry may have been made
    from other files with the same content.

    Raises:
        UserError: if the records are wrong, or if the cache cannot be written.
    """
    folder = cache_folder() / request.digest()
    with contextlib.suppress(OSError):
        return Tokenized.open(folder, check=True), True

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(Path(f"{folder}.lock")) as has_lock:
            try:
                return Tokenized.open(folder, check=True), False  # made by another process
            except OSError as error:
                if (folder / MANIFEST).exists():
                    note(f"{folder}: {first_line(error)}; its rows are made again")
                    shutil.rmtree(folder)
            names = " ".join(source.name for source in request.recorded)
            say("data", f"reading and tokenising {names}", sys.stderr)
            # Without a lock, other processes may make the same entry.
            working = folder if has_lock else temporary_sibling(folder)
            try:
                maker = SetMaker(working, request)
                maker.make()
                maker.finish()
                working.replace(folder)
            except Exception as error:
                # Other data will make another entry. Otherwise, a new start needs the shards.
                if isinstance(error, UserError) or not [*folder.glob("shard-*.json")]:
                    shutil.rmtree(working, ignore_errors=True)
                if not (folder / MANIFEST).exists():
                    raise
    except OSError as error:
        raise UserError(
            f"the cache folder {folder.parent}: {error.strerror or error}; set LLMTRAIN_CACHE to "
            "another."
        ) from None
    with as_user_error(f"{folder} cannot be read back", describe=first_line):
        return Tokenized.open(folder), False


class SetMaker:
    """Makes what is missing of a set.

    Args:
        folder: the folder of the set.
        request: the rows.
        storage: moves each shard there, under the hashes of its files, before the next is made.
    """

    def __init__(self, folder: Path, request: DataRequest, storage: Storage | None = None) -> None:
        self.folder = folder
        self.request = request
        self.storage = storage
        self.place = storage or folder
        vocabulary = 0 if request.tokenizer is None else vocabulary_of(request.tokenizer)
        self.readers = [
            records_of(source, request.config, request.chat, request.unpaired, vocabulary)
            for source in request.recorded
        ]
        if request.scorer is not None:
            for reader in self.readers:
                reader.shard_scale = _SCORED_SHARD_SCALE
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = request.tokenizer or self._trained_tokenizer()
        self.vocabulary = vocabulary_of(self.tokenizer)
        # A trained tokenizer depends on the version of its library, too.
        self.digest = digest({**request.content, "tokenizer": tok.digest(self.tokenizer)})
        # That of ``auto`` is known when all records are encoded.
        self.length = 0 if request.max_length == "auto" else request.max_length

        # The dtype of a token's values in each extra column. The first record says how many.
        self.extra: dict[str, np.dtype] = {}
        first = request.recorded[0].first
        for name, (field, dtype) in self.readers[0].extra_columns.items():
            value = first.fields.get(field) if first else None
            shape = np.shape(value[0]) if isinstance(value, list) and value else ()
            self.extra[name] = np.dtype((dtype, shape))

        self.renderer: AnyRenderer | None = None
        if request.chat is None:
            return
        if self.tokenizer.chat_template is None:
            self.renderer = PromptCompletionRenderer(self.tokenizer)
        else:
            only_last_turns = isinstance(request.chat, ChatConfig) and request.chat.turns == "last"
            self.renderer = Renderer(self.tokenizer, request.stop_token_ids, only_last_turns)

    def _trained_tokenizer(self) -> tok.FastTokenizer:
        """Return the tokenizer that is trained on the data, with the template that they need."""
        request = self.request
        folder = self.folder / "tokenizer"
        if not folder.exists():  # otherwise, a start that was killed has trained it
            trained = tok.train_tokenizer(
                request.spec,
                train=chain.from_iterable(reader.texts("train") for reader in self.readers),
                all_texts=lambda: chain.from_iterable(reader.texts() for reader in self.readers),
            )
            tokenizer = tok.as_pretrained(trained)
            if request.chat is not None:
                tok.set_template(tokenizer, request.chat.chat_template or "chatml")
            self._save_tokenizer(tokenizer)
        # Loading adds settings, which are saved with the set. So it is loaded in both cases.
        return tok.load_tokenizer(str(folder), trained=True)

    def _save_tokenizer(self, tokenizer: tok.FastTokenizer) -> None:
        with new_folder(self.folder / "tokenizer") as working:
            # A library in Rust raises no OSError.
            failure = f"the tokenizer cannot be written to {self.folder}"
            with as_user_error(failure, describe=first_line):
                tokenizer.save_pretrained(working)

    def make(self, part: int = 1, parts: int = 1) -> None:
        """Make the shards that are missing.

        Args:
            part: the part of the shards that this process makes, from 1.
            parts: the number of parts.

        Raises:
            UserError: if a record is wrong, or if the folder has shards of another set.
            OSError: if the disk is full, or fails.
        """
        with contextlib.ExitStack() as temporary:
            encoded = self._encoded(part, parts)
            temporary.callback(encoded.close)
            shards: Iterable[tuple[int, int, EncodedShard]] = encoded
            if self.request.max_length == "auto":
                # All of them are encoded before the length is known.
                shards = [*encoded]
                for _, _, shard in shards:
                    temporary.callback(shard.store.close)
                self.length = row_length(self.request, [shard for _, _, shard in shards])
            for source, number, shard in shards:
                self._write(source, number, shard)

    def check_parts(self) -> None:
        """Raise :class:`UserError` if a shard depends on the records of others."""
        config = self.request.config
        for reader in self.readers:
            reader.divide()
        reasons = {
            "--max_length auto": self.request.max_length == "auto",
            f"--tokenizer {self.request.spec}": self.request.tokenizer is None,
            "--max_train_samples": config.max_train_samples is not None,
            f"the eval data (--eval_fraction {config.eval_fraction:g} chooses none, or most)": any(
                reader.is_chosen_by_all for reader in self.readers
            ),
        }
        for reason in [name for name, holds in reasons.items() if holds]:
            raise UserError(
                f"--shard: {reason} needs all records; choose another value, or make the set "
                "without --shard and --finish."
            )

    def _encoded(self, part: int, parts: int) -> Generator[tuple[int, int, EncodedShard]]:
        """Yield the number of a source and of a shard, and the shard as tokens, one at a time."""
        is_auto = self.request.max_length == "auto"
        for source, reader in enumerate(self.readers):
            reader.divide()
            # Shards of other parts are looked at, too: they may be of another set.
            numbers = range(len(reader.shards))
            complete = {number for number in numbers if self._facts(source, number)}
            own = numbers[part - 1 :: parts]
            missing = [number for number in own if is_auto or number not in complete]
            for number, records in reader.read_shards(missing):
                shard = self.encoder(source, number)
                try:
                    shard.encode(records)
                    yield source, number, shard
                finally:
                    if not is_auto:
                        shard.store.close()

    def encoder(self, source: int, number: int) -> EncodedShard:
        """Return the object that encodes the records of a shard."""
        reader = self.readers[source]
        shard = reader.shards[number]
        request = self.request
        store = TokenStore(temporary_sibling(self.folder / "tokens"), self.extra)
        if isinstance(reader, Documents):
            is_trained = tok.is_trained(request.spec)
            return EncodedCorpus(
                reader, shard, self.tokenizer, is_trained, request.text_columns, store
            )

        assert request.chat is not None, "records that are not text have a config"
        assert self.renderer is not None, "and a renderer"
        if isinstance(request.chat, PairConfig):
            return EncodedPairs(reader, shard, self.renderer, request.chat, store, request.unpaired)
        encoder = EncodedTokens if reader.source.format == "tokens" else EncodedChats
        return encoder(reader, shard, self.renderer, request.chat, store)

    def _facts_path(self, source: int, number: int) -> Path:
        return self.folder / f"shard-{source}-{number:05}.json"

    def _facts(self, source: int, number: int) -> JsonObject:
        """Return the facts of a shard, which are empty if it is not complete.

        Raises:
            UserError: if it belongs to another set.
        """
        facts = read_sealed(self._facts_path(source, number))
        if facts and facts["set"] != self.digest:
            raise UserError(
                f"{self.place} has shards of another set: its data, tokenizer or flags differ; "
                "name another folder, or delete this one."
            )
        return facts

    def _write(self, source: int, number: int, shard: EncodedShard) -> None:
        """Write the files of a shard, and then its facts."""
        facts: JsonObject = {"set": self.digest}
        for split in self.request.recorded[source].splits:
            path = self.folder / f"{split}-{source}-{number:05}.safetensors"
            working = path.with_name(f".tmp-{path.name}")
            audit = self._write_rows(working, split, shard)
            sync(working)
            working.rename(path)
            facts[split] = {"audit": asdict(audit), **facts_of(path)}
            if self.request.scorer is not None:
                facts[split]["precision"] = self.request.scorer.precision
            if self.storage is not None:
                name = f"{facts[split]['sha256']}.safetensors"
                if self.storage.sizes(name).get(name) != facts[split]["bytes"]:
                    self.storage.upload(name, path)
                facts[split]["file"] = name
                path.unlink()

        facts_path = self._facts_path(source, number)
        write_sealed(facts_path, facts)
        if self.storage is not None:
            self.storage.upload(facts_path.name, facts_path)

    def _write_rows(self, path: Path, split: Split, shard: EncodedShard) -> Audit:
        """Write the rows of a split, with the columns of the scorer if there is one."""
        scorer = self.request.scorer
        if scorer is None:
            return shard.write(path, split, self.length, self.vocabulary)

        unscored_path = path.with_name(f"{path.name}-unscored")
        audit, unscored = self.unscored(unscored_path, split, shard, self.length)
        rows = unscored.train
        width = unscored.positions + 1
        columns = {**rows.columns, **scorer.columns(width, self.vocabulary)}
        with create_shard(path, columns, len(rows)) as write:
            start = 0
            for scores in scorer.score(unscored):
                stop = start + len(next(iter(scores.values())))
                write({**rows.read(np.arange(start, stop)), **scores})
                start = stop
        unscored_path.unlink()
        # The scores belong to the data of a run, too.
        return replace(audit, sha256=read_hashed(path)["sha256"])

    def unscored(
        self, path: Path, split: Split, shard: EncodedShard, length: int
    ) -> tuple[Audit, Tokenized]:
        """Write the rows of a split without the columns of the scorer, and open them."""
        audit = shard.write(path, split, length, self.vocabulary)
        request = self.request
        rows = Tokenized(
            TokenRows([Shard(path.parent, facts_of(path))]),
            None,
            self.tokenizer,
            metadata_of("", request.spec, self.tokenizer, length, train=[audit], eval=[]),
            new_tokens=request.new_tokens,
        )
        return audit, rows

    def finish(self) -> None:
        """Write the manifest.

        Raises:
            UserError: if a shard is missing, or if there is too little to train or evaluate on.
        """
        request = self.request
        splits: dict[str, list[JsonObject]] = {"train": [], "eval": []}
        precisions: set[str | None] = set()
        audits: dict[str, list[Audit]] = {"train": [], "eval": []}
        for number, (source, reader) in enumerate(zip(request.recorded, self.readers, strict=True)):
            reader.divide()
            shards = [self._facts(number, shard) for shard in range(len(reader.shards))]
            missing = [str(shard + 1) for shard, facts in enumerate(shards) if not facts]
            if missing:
                raise UserError(
                    f"{self.place}: {pluralize(len(missing), 'shard')} of {source.name} "
                    f"{is_or_are(len(missing))} missing, such as number {missing[0]}; make all "
                    "parts, and then finish."
                )
            for split in source.splits:
                files = [facts[split] for facts in shards]
                precisions.update(file.get("precision") for file in files)
                audit = total_of_shards([Audit(**file.pop("audit")) for file in files])
                _check_split(source, split, audit, self.length, request)
                audits[split].append(audit)
                splits[split].append({"audit": asdict(audit), "shards": files})
        precisions -= {None, ""}  # of shards without rows, or without scores
        if len(precisions) > 1:
            raise UserError(
                f"{self.place}: the teacher has scored parts of the set in different precisions; "
                "make all parts on machines with a GPU, or all without one."
            )

        metadata = metadata_of(
            " ".join(request.train_names),
            request.spec,
            self.tokenizer,
            self.length,
            train=audits["train"],
            eval=audits["eval"],
            shared=isinstance(request.chat, PairConfig) and request.chat.shares_prompts,
            stop_token_ids=[] if self.renderer is None else sorted(self.renderer.stop_token_ids),
        )
        tokenizer = self.tokenizer
        if request.tokenizer is None:  # it was trained on the data
            tokenizer.model_max_length = self.length
        if metadata.audit is not None:
            # The finished tokenizer_config.json has this, too.
            tokenizer = copy.copy(tokenizer)
            tokenizer.init_kwargs = {**tokenizer.init_kwargs}
            tokenizer.init_kwargs.pop(REASONING_OPTION, None)
            tokenizer.init_kwargs |= metadata.audit.template_options
        self._save_tokenizer(tokenizer)

        files = sorted(path for path in (self.folder / "tokenizer").iterdir())
        names = [str(path.relative_to(self.folder)) for path in files]
        content = {
            "format": FORMAT_VERSION,
            "made_from": request.content,
            "versions": versions(),
            "metadata": asdict(metadata),
            "tokenizer": dict(zip(names, hashes_of(files), strict=True)),
            **splits,
        }
        write_sealed(self.folder / MANIFEST, content)
        for leftover in (*self.folder.glob("shard-*.json"), *self.folder.glob(".tmp-*")):
            leftover.unlink(missing_ok=True)


def row_length(request: DataRequest, encoded: Sequence[EncodedShard]) -> int:
    """Return a length that most training examples fit in, for ``--max_length auto``."""
    split: Split = "train" if request.train_names else "eval"
    chats = [shard for shard in encoded if isinstance(shard, EncodedChats)]
    lengths = [shard.lengths(split) for shard in chats]
    # If there are no examples, finishing the set reports that, whatever their length.
    length = max(covering_length(np.concatenate(lengths)), 1)
    return min(length, request.max_positions or length)


def _check_split(
    source: Source, split: Split, audit: Audit, length: int, request: DataRequest
) -> None:
    """Raise :class:`UserError` if there is too little to train or to evaluate on.

    Eval data may be empty, unless the user chose them.
    """
    if audit.unit == "text":
        if split == "train" and not audit.bytes:
            raise UserError(
                f"no text of {source.name} is left to train on; lower --eval_fraction, or raise "
                "--max_train_samples."
            )
        if split == "train" and request.chat is None and audit.targets < length:
            flag = "--max_length" if request.takes_conversations else "--block_size"
            raise UserError(
                f"{flag} {length} is larger than the training text ({audit.targets + 1} tokens of "
                f"{source.name}); use at most {max(audit.targets, 1)}, or more text."
            )
        return

    if not audit.kept and (split == "train" or source.only_split == "eval"):
        raise UserError(
            f"{source.flag} {source.name}: no example is left: {audit.left_out()}; "
            f"{audit.remedy(length)}."
        )
    has_turns = audit.unit == "conversation" and source.format != "tokens"
    if split == "train" and has_turns and not audit.ended:
        raise UserError(
            f"--dataset {source.name}: no turn trains the token that ends it, so the model "
            "would never stop. Put that token inside {% generation %} in the chat template, or "
            "remove those marks."
        )
