"""Conversations -> packed rows, and the audit of what in them is trained."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from tqdm import tqdm

from llmtrain.config import Config, flag
from llmtrain.data.chat import BadRow, Conversation, Renderer, conversation_of, recognise
from llmtrain.data.config import DataConfig
from llmtrain.data.packing import TokenStore
from llmtrain.data.sources import Source
from llmtrain.data.table import Written, hash_place
from llmtrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass
class ChatConfig(Config):
    """How records become conversations, and what of them is trained. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "conversations"
    acts: ClassVar[str] = "data"

    format: Literal["auto", "text", "messages", "prompt_completion", "sharegpt", "alpaca"] = flag(
        "auto", "what a record is; auto recognises it by its fields: conversations are fine-tuned on, text is continued"
    )
    chat_template: str | None = flag(None, "chatml or a Jinja file, where the tokenizer has no template or another's")
    overlong: Literal["drop", "truncate", "error"] = flag("drop", "a conversation that is longer than a row")
    on_bad_row: Literal["error", "skip"] = flag("error", "a conversation that cannot be trained on")
    packing: bool = flag(True, "several conversations a row, which do not see each other")


@dataclass
class Audit:
    """What fine-tuning will be supervised by: counted over the rows that were prepared."""

    conversations: int = 0  # that were read
    bad: int = 0  # of them: left out, with --on_bad_row skip
    overlong: int = 0  # dropped, or cut, as --overlong says
    untrained: int = 0  # left out: without a single trained token
    kept: int = 0
    tokens: int = 0  # of those that are kept
    trained: int = 0  # of them
    rows: int = 0
    places: int = 0  # of all rows, filled or not
    turns: int = 0  # of assistants, in conversations that are not cut
    ended: int = 0  # of them: with their end-of-turn token trained

    def left(self, overlong: str) -> str:
        """How many conversations are left, and why the others are not."""
        word = {"drop": "dropped", "truncate": "cut", "error": "overlong"}[overlong]
        return (
            f"{self.kept:,} of {self.conversations:,} conversations: {self.overlong:,} overlong {word}, "
            f"{self.untrained:,} without a trained token and {self.bad:,} bad ones left out"
        )

    def lines(self, overlong: str) -> list[str]:
        """For the banner."""
        return [
            self.left(overlong),
            f"{self.trained:,} of {self.tokens:,} tokens are trained ({self.trained / max(self.tokens, 1):.1%}), "
            f"{self.rows:,} rows are {self.tokens / max(self.places, 1):.1%} full, "
            f"{self.ended:,} of {self.turns:,} turns train their end",
        ]

    def check(self, name: str) -> None:
        """Raise :class:`UserError` where the mask cannot be meant: nothing trained, or everything."""
        if self.trained in (0, self.tokens - self.kept):  # first tokens are never trained
            share = "none" if not self.trained else "all"
            raise UserError(
                f"--dataset {name}: {share} of {self.tokens:,} tokens in {self.conversations:,} conversations would be "
                f"trained ({self.overlong:,} are overlong, {self.bad:,} bad); check --format, --block_size and the "
                "chat template."
            )


class Conversations:
    """The conversations of a source, some of them held out: those whose hash falls lowest."""

    task = "conversations"

    def __init__(self, source: Source, format: str, config: DataConfig, chat: ChatConfig) -> None:
        self.source, self.format, self.chat = source, format, chat
        self.audits: list[Audit] = []
        places = []
        for _, conversation in self._read():
            places.append(hash_place(_as_text(conversation)))
        if not places:
            raise UserError(f"--dataset {source.name} holds no conversation.")
        self.documents = len(places)
        self.limit = _limit_of(places, config.eval_fraction)
        self.eval_documents = sum(place < self.limit for place in places)
        self.eval_bytes = 0  # of what is trained: known when it is rendered

    def everything(self) -> Iterator[str]:
        """All that is said, for a tokenizer to learn from."""
        return (content for _, conversation in self._read() for content in _contents(conversation))

    def train(self) -> Iterator[str]:
        for _, conversation in self._read():
            if not self._is_held_out(conversation):
                yield from _contents(conversation)

    def write(
        self, tokenizer: "PreTrainedTokenizerFast", trained_here: bool, block_size: int, train: Path, held_out: Path
    ) -> tuple[Written, Written]:
        """Write the rows of both sides. Raises :class:`UserError` with the place of a conversation that cannot be
        rendered, or is overlong, where the flags do not say to go on without it."""
        render, width = Renderer(tokenizer), block_size + 1
        sides = [(TokenStore(path), hashlib.sha256(), Audit()) for path in (train, held_out)]
        for place, conversation in tqdm(self._read(), total=self.documents, desc="rendering", leave=False):
            store, digest, audit = sides[self._is_held_out(conversation)]
            audit.conversations += 1
            try:
                ids, trained, trained_bytes, turns, ended = render(conversation)
            except BadRow as error:
                self._refuse(place, error)
                audit.bad += 1
                continue
            if len(ids) > width:
                audit.overlong += 1
                if self.chat.overlong == "error":
                    raise UserError(
                        f"{place}: {len(ids):,} tokens are more than --block_size {block_size} has room for; raise it, "
                        "or set --overlong drop or truncate."
                    )
                if self.chat.overlong == "drop":
                    continue
                ids, trained, turns, ended = ids[:width], trained[:width], 0, 0  # where turns end is cut off
                said = ids[trained & ~np.isin(ids, render.control_ids)].tolist()
                trained_bytes = len(render.backend.decode(said, skip_special_tokens=False).encode())
            trained = np.concatenate([[False], trained[1:]])  # nothing comes before a first token
            if not trained.any():
                audit.untrained += 1
                continue
            audit.kept += 1
            audit.tokens += len(ids)
            audit.trained += int(trained.sum())
            audit.turns += turns
            audit.ended += ended
            if audit is sides[1][2]:
                self.eval_bytes += trained_bytes
            digest.update(ids.astype("<i4").tobytes() + np.packbits(trained).tobytes())
            store.add(ids, trained)
        written = []
        for path, (store, digest, audit) in zip((train, held_out), sides, strict=True):
            audit.rows = store.write_rows(path, width, self.chat.packing)
            audit.places = audit.rows * width
            digest.update(f"{width} {self.chat.packing}".encode())
            written.append(Written(audit.trained, audit.rows, digest.hexdigest()))
        audit = sides[0][2]
        audit.bad += self._bad  # which side they would have been on, nobody knows
        audit.conversations += self._bad
        audit.check(self.source.name)
        self.audits = [audit for _, _, audit in sides]
        return written[0], written[1]

    def _read(self) -> Iterator[tuple[str, Conversation]]:
        self._bad = 0
        for place, fields in self.source.records():
            try:
                yield place, conversation_of(fields, self.format)
            except BadRow as error:
                self._refuse(place, error)
                self._bad += 1

    def _refuse(self, place: str, error: BadRow) -> None:
        if self.chat.on_bad_row == "error":
            raise UserError(f"{place}: {error}; mend it, or leave such rows out with --on_bad_row skip.") from None

    def _is_held_out(self, conversation: Conversation) -> bool:
        return hash_place(_as_text(conversation)) < self.limit


def format_of(source: Source, chat: ChatConfig) -> str:
    """``text``, or the format of the source's conversations, recognised by the fields of its first record."""
    if chat.format != "auto":
        return chat.format
    first = next(iter(source.records()), None)
    return (recognise(first.fields) if first else None) or "text"


def _limit_of(places: list[float], fraction: float) -> float:
    """Below which hash a conversation is held out: the fraction, or so many of the lowest where chance gave none or
    too many. Copies of one conversation have one hash, and stay together."""
    chosen = sum(place < fraction for place in places)
    if not fraction or 0 < chosen <= min(len(places) * max(0.5, 2 * fraction), len(places) - 1):
        return fraction
    lowest = sorted(places)
    count = min(math.ceil(len(places) * fraction), len(places) - 1)
    return next((place for place in lowest[count:] if place > lowest[0]), 0.0)


def _as_text(conversation: Conversation) -> str:
    return json.dumps(conversation, sort_keys=True, default=str)


def _contents(conversation: Conversation) -> Iterator[str]:
    # without halves of surrogate pairs, which tokenizers cannot take; to render them is an error with a place
    contents = (message["content"].encode(errors="ignore").decode() for message in conversation.messages)
    return filter(None, contents)


def audit_of(parts: Iterable[Audit]) -> Audit:
    """The sum over several sources."""
    total = Audit()
    for part in parts:
        for name, count in asdict(part).items():
            setattr(total, name, getattr(total, name) + count)
    return total
