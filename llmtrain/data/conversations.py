"""Conversations -> packed rows, and the audit of what in them is trained."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tqdm import tqdm

from llmtrain.data.chat import Conversation, Judged, conversation_of, recognise
from llmtrain.data.config import ChatConfig, DataConfig, RowConfig
from llmtrain.data.sources import Fields, Source
from llmtrain.data.table import Counts, TokenStore, Written, hash_place
from llmtrain.data.template import BadRow
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.data.turns import Renderer
from llmtrain.errors import UserError, require

LEFT = {
    "drop": "dropped",
    "truncate": "truncated",
    "error": "overlong",
}  # what --overlong does, once it has done it


@dataclass
class Audit(Counts):
    """The supervision of fine-tuning, counted over the rows."""

    conversations: int = 0  # that were read
    documents: int = 0  # that those make that are not bad: one each, if the template never changes what came before
    untrained: int = (
        0  # left out: conversations without a single trained token, and documents truncated to that
    )
    trained: int = 0  # tokens
    repeated: int = 0  # tokens that are in a longer document of the same conversation too
    turns: int = 0  # of assistants that are trained, in documents that are not truncated
    ended: int = 0  # of them: with their end-of-turn token trained
    left_answers: int = (
        0  # turns that are left out, since they are shown otherwise than they are prompted for
    )
    left_calls: int = 0
    unshown: int = (
        0  # turns whose reasoning, or words beside a call, the chat template does not show
    )
    remade: int = 0  # turns trained whole, since {% generation %} marks them in a form that no prompt leads to

    def left(self, overlong: str) -> str:
        """Return how many conversations are left, and why the others are not, in one line."""
        several = self.documents > self.conversations - self.bad
        of = f"{self.documents:,} documents" if several else f"{self.conversations:,} conversations"
        return (
            f"{self.kept:,} of {of}: {self.overlong:,} overlong {LEFT[overlong]}, "
            f"{self.untrained:,} without a trained token and {self.bad:,} bad ones left out"
        )

    def lines(self, overlong: str) -> list[str]:
        """Return lines for the banner."""
        lines = [
            self.left(overlong),
            f"{self.trained:,} of {self.tokens:,} tokens are trained ({self.trained / max(self.tokens, 1):.1%}), "
            f"{self.rows:,} rows are {self.tokens / max(self.places, 1):.1%} full, "
            f"{self.ended:,} of {self.turns:,} turns train their end",
        ]
        if self.repeated:
            factor = self.tokens / (self.tokens - self.repeated)
            advice = "; --turns last trains the last alone" if factor > 3 else ""
            lines.append(
                f"{self.conversations - self.bad:,} conversations make {self.documents:,} documents, in which "
                f"{self.repeated:,} tokens are repeated (x {factor:.2f}): the template changes earlier turns{advice}"
            )
        if self.left_answers or self.left_calls:
            lines.append(
                f"{self.left_answers:,} answers and {self.left_calls:,} calls are left out: the chat template shows "
                "them otherwise than it prompts for them"
            )
        if self.unshown:
            lines.append(
                f"{self.unshown:,} turns lose reasoning, or words beside a call: the chat template shows none"
            )
        if self.remade:
            lines.append(
                f"{self.remade:,} turns are trained whole: {{% generation %}} marks what no prompt leads to"
            )
        return lines

    def check(self, name: str) -> None:
        """Raise :class:`UserError` where the mask cannot be meant: nothing is trained, or the end of no turn."""
        if not self.trained:
            left = self.left_answers + self.left_calls
            others = f", {left:,} turns shown otherwise than prompted for" if left else ""
            raise UserError(
                f"--dataset {name}: none of {self.tokens:,} tokens in {self.conversations:,} conversations would be "
                f"trained ({self.overlong:,} are overlong, {self.bad:,} bad{others}); check --format, --block_size and "
                "the chat template."
            )
        if self.turns and not self.ended:
            raise UserError(
                f"--dataset {name}: none of {self.turns:,} turns trains the token that ends it, and the model would "
                "never stop; put that token inside {% generation %} of the chat template, or take those marks out."
            )


R = TypeVar("R", Conversation, Judged)


class Records(Generic[R]):
    """The records of a source, some of them held out: those whose hash falls lowest.

    ``stops`` are the tokens at which the model's generation ends, as far as it says so.
    """

    def __init__(
        self,
        source: Source,
        read: Callable[[Fields], R],
        config: DataConfig,
        chat: RowConfig,
        stops: Collection[int],
    ) -> None:
        self.source, self.chat, self.stops = source, chat, stops
        self.read: Callable[[Fields], R] = read
        places = [_place_of(conversation) for _, conversation in self._read()]
        require(places, f"--dataset {source.name} holds no conversation.")
        self.limit = _limit_of(places, config.eval_fraction)
        held_out = sum(place < self.limit for place in places)
        self.documents = len(places) - held_out, held_out

    def texts(self, held_out: bool | None = None) -> Iterator[str]:
        """Yield what is said in the conversations that are held out, or in those to train on, or in all."""
        for _, conversation in self._read(held_out):
            # without halves of surrogate pairs, which tokenizers cannot take; to render them is an error with a place
            contents = (
                message["content"].encode(errors="ignore").decode()
                for message in conversation.messages
            )
            yield from filter(None, contents)

    def _read(self, held_out: bool | None = None) -> Iterator[tuple[str, R]]:
        self._bad = 0
        for place, fields in self.source.records(None):
            try:
                conversation = self.read(fields)
            except BadRow as error:
                self._refuse(place, error)
                self._bad += 1
            else:
                if held_out is None or held_out == (_place_of(conversation) < self.limit):
                    yield place, conversation

    def _refuse(self, place: str, error: BadRow) -> None:
        if self.chat.on_bad_row == "error":
            raise UserError(
                f"{place}: {error}; mend it, or leave such rows out with --on_bad_row skip."
            ) from None

    def _truncates(self, audit: Counts, complaint: str) -> bool:
        """Count what is overlong, and return whether its beginning is kept; an error where --overlong says so."""
        require(
            self.chat.overlong != "error",
            f"{complaint}; raise it, or set --overlong drop or truncate.",
        )
        audit.overlong += 1
        return self.chat.overlong == "truncate"


class Conversations(Records[Conversation]):
    """The conversations of a source, of which the assistant's turns are trained."""

    def __init__(
        self,
        source: Source,
        format: str,
        config: DataConfig,
        chat: ChatConfig,
        stops: Collection[int] = (),
    ) -> None:
        super().__init__(
            source, lambda fields: conversation_of(fields, format), config, chat, stops
        )
        self.last = chat.turns == "last"

    def write(
        self, tokenizer: FastTokenizer, block_size: int, path: Path, held_out: bool
    ) -> Written:
        """Write the rows of one side.

        Raises :class:`UserError` with the place of a conversation that cannot be rendered, or is overlong, where the
        flags do not say to go on without it.
        """
        render, width = Renderer(tokenizer, self.stops, self.last), block_size + 1
        store, audit, size, total = TokenStore(path), Audit(), 0, self.documents[held_out]
        for place, conversation in tqdm(
            self._read(held_out), total=total, desc="rendering", leave=False
        ):
            audit.conversations += 1
            try:
                rendered = render(conversation)
            except BadRow as error:
                self._refuse(place, error)
                audit.bad += 1
                continue
            audit.documents += len(rendered.documents)
            audit.untrained += not rendered.documents
            audit.left_answers += rendered.left_answers
            audit.left_calls += rendered.left_calls
            audit.unshown += rendered.unshown
            audit.remade += rendered.remade
            lengths = [0]
            for document in rendered.documents:
                kept = document
                if (length := len(document.ids)) > width:
                    what = f"{length:,} tokens are more than --block_size {block_size} has room for"
                    if not self._truncates(audit, f"{place}: {what}"):
                        continue
                    kept = render.cut(document, width)
                if not kept.trained.any():
                    audit.untrained += 1
                    continue
                lengths.append(len(kept.ids))
                audit.kept += 1
                audit.trained += int(kept.trained.sum())
                audit.turns += kept.turns
                audit.ended += kept.ended
                size += kept.trained_bytes
                store.add(kept.ids, kept.trained)
            audit.tokens += sum(lengths)
            audit.repeated += sum(lengths) - max(lengths)
        audit.rows = store.write_rows(path, width, self.chat.packing)
        audit.places = audit.rows * width
        if not held_out:
            audit.bad += self._bad  # which side they would have been on, nobody knows
            audit.conversations += self._bad
            audit.check(self.source.name)
        return Written(total, audit.rows, audit.trained, size, store.digest.hexdigest(), audit)


def format_of(source: Source, chat: ChatConfig) -> str:
    """Return ``text``, or the format of the source's conversations, recognised by the fields of its first record."""
    if chat.format != "auto":
        return chat.format
    return next((recognise(first.fields) for first in source.records(None)), None) or "text"


def _limit_of(places: list[float], fraction: float) -> float:
    """Return the hash below which a conversation is held out.

    It is the fraction, or such that so many are held out where chance gave none or too many. Copies of one conversation
    have one hash, and stay together.
    """
    chosen = sum(place < fraction for place in places)
    if not fraction or 0 < chosen <= min(len(places) * max(0.5, 2 * fraction), len(places) - 1):
        return fraction
    lowest = sorted(places)
    count = min(math.ceil(len(places) * fraction), len(places) - 1)
    return next((place for place in lowest[count:] if place > lowest[0]), 0.0)


def _place_of(record: Conversation | Judged) -> float:
    said = (
        record.prompt if isinstance(record, Judged) else record
    )  # answers to one prompt stay on one side
    return hash_place(json.dumps(said, sort_keys=True, default=str))


def audit_of(audits: Sequence[Counts]) -> Counts:
    """Return the sum over several sources."""
    return type(audits[0])(*map(sum, zip(*map(astuple, audits), strict=True)))
