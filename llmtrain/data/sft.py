"""Render conversations, fit them into rows, and count their target tokens.

That takes three stages: :meth:`Conversations.encode` reads the source once, and writes the tokens
of all conversations to temporary files. Then ``--max_length`` is known, also if it is ``auto``.
:meth:`EncodedConversations.write` drops or truncates what is longer, and packs the rest into rows.
"""

import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmtrain.console import is_or_are, pluralize
from llmtrain.data.config import ChatConfig, DataConfig
from llmtrain.data.formats import Conversation, conversation_of, detect_format
from llmtrain.data.lengths import (
    check_not_all_overlong,
    describe_overlong_count,
    ways_to_fit,
)
from llmtrain.data.messages import BadRecord
from llmtrain.data.packing import Counts, Examples, Split, SplitStats, TokenStore
from llmtrain.data.parallel_rendering import render_all
from llmtrain.data.prompt_completion import AnyRenderer, make_renderer
from llmtrain.data.records import Records
from llmtrain.data.rendered import Rendered, TurnEnd
from llmtrain.data.sources import Source
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.errors import UserError


@dataclass
class Audit(Counts):
    """Counts of the conversations, turns and target tokens in one split of a source.

    Attributes:
        conversations: conversations that were read.
        documents: training examples that the readable conversations make. That is one each, unless
            the chat template changes earlier turns; then a conversation makes several.
        untrained: conversations without a single target token, and documents that truncation would
            leave without one. They are left out.
        trained: target tokens.
        repeated: tokens that a longer document of the same conversation holds, too.
        turns: assistant turns that are trained.
        ended: the turns among these whose end-of-turn token is a target.
        left_answers: assistant answers that are not trained, because the chat template shows them
            differently from the way it prompts for them.
        left_calls: the same for turns that call a tool.
        unshown: turns whose reasoning, or whose text next to a tool call, the chat template does
            not show.
        remade: turns that are trained in full, because ``{% generation %}`` marks text that no
            prompt leads to.
        unweighted: turns that are not trained, because their weight is 0.
        special_as_text: special tokens in messages that are encoded as text.
        other_fields: the number of messages that have each field that llmtrain does not read.
    """

    conversations: int = 0
    documents: int = 0
    untrained: int = 0
    trained: int = 0
    repeated: int = 0
    turns: int = 0
    ended: int = 0
    left_answers: int = 0
    left_calls: int = 0
    unshown: int = 0
    remade: int = 0
    unweighted: int = 0
    special_as_text: int = 0
    other_fields: dict[str, int] = field(default_factory=dict)

    def left_out(self, overlong: str) -> str:
        """Return one line that says how many conversations are kept, and why the rest is not.

        Args:
            overlong: the value of ``--overlong``.
        """
        readable = self.conversations - self.bad
        if self.documents > readable:
            total = pluralize(self.documents, "document")
        else:
            total = pluralize(self.conversations, "conversation")
        bad = pluralize(self.bad, "bad one")
        return (
            f"{self.kept:,} of {total}: {self.describe_overlong(overlong)}, "
            f"{self.untrained:,} without a target token and {bad} left out"
        )

    def lines(self, overlong: str) -> list[str]:
        """Return the lines of the start-up log."""
        target_share = self.trained / max(self.tokens, 1)
        fill = self.tokens / max(self.places, 1)
        lines = [
            self.left_out(overlong),
            f"{self.trained:,} of {self.tokens:,} tokens are targets ({target_share:.1%}), "
            f"{pluralize(self.rows, 'row')} {is_or_are(self.rows)} {fill:.1%} full, "
            f"{self.ended:,} of {pluralize(self.turns, 'turn')} "
            f"{'trains its' if self.ended == 1 else 'train their'} end",
        ]
        if self.repeated:
            factor = self.tokens / (self.tokens - self.repeated)
            advice = "; --turns last trains only the last one" if factor > 3 else ""
            readable = self.conversations - self.bad
            lines.append(
                f"{pluralize(readable, 'conversation')} {'makes' if readable == 1 else 'make'} "
                f"{self.documents:,} documents, which repeat {self.repeated:,} tokens "
                f"(x {factor:.2f}), because the template changes earlier turns{advice}"
            )
        if self.left_answers or self.left_calls:
            lines.append(
                f"{pluralize(self.left_answers, 'answer')} and "
                f"{pluralize(self.left_calls, 'call')} are not trained: the "
                "chat template shows them differently from the way it prompts for them"
            )
        if self.unshown:
            lines.append(
                f"{pluralize(self.unshown, 'turn')} "
                f"{'loses its' if self.unshown == 1 else 'lose their'} reasoning, or the text next "
                "to a tool call: the chat template does not show it"
            )
        if self.remade:
            lines.append(
                f"{pluralize(self.remade, 'turn')} {is_or_are(self.remade)} trained in full: "
                "{% generation %} marks text that no prompt leads to"
            )
        if self.unweighted:
            lines.append(
                f"{pluralize(self.unweighted, 'turn')} {is_or_are(self.unweighted)} not trained, "
                f"because {'its' if self.unweighted == 1 else 'their'} weight is 0"
            )
        return lines + lines_about_messages(self.special_as_text, self.other_fields)

    def check(self, name: str, overlong: str, first_fault: str) -> None:
        """Check that there are target tokens, and that turns train the token that ends them.

        Args:
            name: the data set, as it is named in ``--dataset``.
            overlong: how many conversations are overlong, in words.
            first_fault: the first bad record, and what is wrong with it.

        Raises:
            UserError: if there are no target tokens, or if no turn trains its end.
        """
        if not self.trained:
            reasons = f"{overlong}, {self.bad:,} bad"
            if self.bad:
                reasons += f", the first one {first_fault}"
            left_out = self.left_answers + self.left_calls
            if left_out:
                pronoun = "it is" if left_out == 1 else "they are"
                reasons += (
                    f"; {pluralize(left_out, 'turn')} {is_or_are(left_out)} shown differently from "
                    f"the way {pronoun} prompted for"
                )
            if self.unweighted:
                verb = "has" if self.unweighted == 1 else "have"
                reasons += f"; {pluralize(self.unweighted, 'turn')} {verb} weight 0"
            raise UserError(
                f"--dataset {name}: no token of {pluralize(self.conversations, 'conversation')} "
                f"would be trained ({reasons}); check --format, --max_length and the chat template."
            )
        if self.turns and not self.ended:
            raise UserError(
                f"--dataset {name}: none of {pluralize(self.turns, 'turn')} trains the token that "
                "ends it, so the model would never stop. Put that token inside {% generation %} in "
                "the chat template, or remove those marks."
            )


def lines_about_messages(special_as_text: int, other_fields: dict[str, int]) -> list[str]:
    """Return the lines of the start-up log about the content of messages.

    Args:
        special_as_text: special tokens in messages that are encoded as text.
        other_fields: the number of messages that have each field that llmtrain does not read.
    """
    lines = []
    if special_as_text:
        tokens = pluralize(special_as_text, "special token")
        lines.append(f"{tokens} in messages {is_or_are(special_as_text)} encoded as text")
    if other_fields:
        fields = ", ".join(f"{name} ({count:,})" for name, count in sorted(other_fields.items()))
        lines.append(
            f"some messages have fields that are not read here: {fields}; the chat template gets "
            "them"
        )
    return lines


class Conversations:
    """The conversations of a source. The assistant's turns are trained.

    Args:
        source: the records, as fields.
        format: the format of the records.
        config: holds the share of the eval data.
        chat: says how conversations become rows.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
        only_split: the split of all conversations; ``None`` to divide them by hashes of prompts.
        max_positions: the number of positions of the model, for error messages; ``None`` if there
            is no limit.
    """

    def __init__(
        self,
        source: Source,
        format: str,
        config: DataConfig,
        chat: ChatConfig,
        stop_token_ids: Collection[int] = (),
        only_split: Split | None = None,
        max_positions: int | None = None,
    ) -> None:
        self.source = source
        self.only_split = only_split
        self.records = Records[Conversation](
            source,
            read=lambda fields: conversation_of(
                fields,
                format,
                has_artificial_nulls=source.has_artificial_nulls,
                is_format_detected=chat.format == "auto",
            ),
            config=config,
            chat=chat,
            only_split=only_split,
        )
        self.chat = chat
        self.stop_token_ids = stop_token_ids
        self.processes = chat.rendering_processes
        self.max_positions = max_positions

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield the text of every message in one split, or in both."""
        return self.records.texts(split)

    def encode(self, tokenizer: FastTokenizer, folder: Path) -> "EncodedConversations":
        """Render all conversations, and write their tokens to temporary files.

        Args:
            tokenizer: a tokenizer. If it has no chat template, the conversations are plain text.
            folder: the folder of the temporary files.

        Raises:
            UserError: with the place of a conversation that cannot be read or rendered, if the
                flags do not say to go on without it.
        """
        renderer = make_renderer(
            tokenizer,
            stop_token_ids=self.stop_token_ids,
            only_last_turns=self.chat.turns == "last",
        )
        return self.records.encode_settled(lambda: self._encode_once(renderer, folder))

    def _encode_once(self, renderer: AnyRenderer, folder: Path) -> "EncodedConversations":
        encoded = EncodedConversations(self.records, self.chat, folder, self.max_positions)
        items = ((read, read.record) for read in self.records)
        results = render_all(renderer, items, self.processes)
        for read, _, rendered in self.records.progress(results):
            split = encoded.splits[read.split]
            split.audit.conversations += 1
            if isinstance(rendered, BadRecord):
                self.records.refuse(read.place, rendered)
                split.audit.bad += 1
            else:
                split.add(read.number, rendered)
        return encoded


class _EncodedSplit:
    """The documents of a split, whose tokens are in a temporary file.

    Attributes:
        store: the tokens.
        audit: the counts that do not depend on ``--max_length``.
        records: the number of the record that each document comes from.
        first_turns: the index of each document's first turn among all turns.
        turns: the :class:`TurnEnd` of each turn of each document, one number after the other.
    """

    def __init__(self, path: Path) -> None:
        self.store = TokenStore(path)
        self.audit = Audit()
        self.records = array.array("q")
        self.first_turns = array.array("q")
        self.turns = array.array("q")

    def add(self, record: int, rendered: Rendered) -> None:
        """Add the documents of a rendered conversation.

        Args:
            record: the number of its record.
            rendered: its documents.
        """
        _count(rendered, self.audit)
        for document in rendered.sequences:
            self.store.add(document.ids, document.loss_mask)
            self.records.append(record)
            self.first_turns.append(len(self.turns) // len(TurnEnd._fields))
            for turn_end in document.turn_ends:
                self.turns.extend(turn_end)

    @property
    def turn_ends(self) -> np.ndarray:
        """The :class:`TurnEnd` of each turn, int64 [turns, 4]."""
        return np.array(self.turns, np.int64).reshape(-1, len(TurnEnd._fields))


class _Fitted(NamedTuple):
    """The documents that fit in a row, possibly after truncation. Each array is int64 [documents].

    Attributes:
        documents: their numbers in the store.
        first_turns: the index of each document's first turn among all turns.
        last_turns: the index of its last turn that is kept.
        lengths: the number of tokens that are kept.
    """

    documents: np.ndarray
    first_turns: np.ndarray
    last_turns: np.ndarray
    lengths: np.ndarray


class EncodedConversations:
    """The conversations of a source as tokens, which do not fit into rows yet.

    Args:
        records: the source's records.
        chat: says how conversations become rows.
        folder: the folder of the temporary files.
        max_positions: the number of positions of the model; ``None`` if there is no limit.
    """

    def __init__(
        self,
        records: Records[Conversation],
        chat: ChatConfig,
        folder: Path,
        max_positions: int | None,
    ) -> None:
        self.records = records
        self.chat = chat
        self.max_positions = max_positions
        self.splits: dict[Split, _EncodedSplit] = {
            "train": _EncodedSplit(folder / "train.tokens"),
            "eval": _EncodedSplit(folder / "eval.tokens"),
        }

    def close(self) -> None:
        """Delete the temporary files."""
        for split in self.splits.values():
            split.store.close()

    def lengths(self, split: Split) -> np.ndarray:
        """Return the smallest ``--max_length`` that holds each document, int64 [documents]."""
        # The last token of a row predicts nothing, so a row holds one token more.
        return self.splits[split].store.lengths - 1

    def write(self, path: Path, split: Split, max_length: int) -> SplitStats:
        """Write the rows of a split.

        Args:
            path: the file to write.
            split: the split.
            max_length: a row holds one token more.

        Raises:
            UserError: with the place of a conversation that is too long, if the flags do not say to
                go on without it; or if no training data are left.
        """
        encoded = self.splits[split]
        audit = replace(encoded.audit)
        conversations = audit.conversations
        width = max_length + 1
        fitted = self._fit(encoded, width, audit)

        examples = Examples.of_documents(fitted.documents, fitted.lengths)
        written = encoded.store.write_rows(path, examples, width, self.chat.is_packed)

        turn_ends = encoded.turn_ends
        _, targets, target_bytes, ended = turn_ends[fitted.last_turns].sum(axis=0).tolist()
        audit.kept = len(fitted.documents)
        audit.tokens = int(fitted.lengths.sum())
        audit.trained = targets
        audit.turns = int((fitted.last_turns - fitted.first_turns + 1).sum())
        audit.ended = ended
        audit.repeated = audit.tokens - _sum_of_longest(
            fitted.lengths, np.array(encoded.records, np.int64)[fitted.documents]
        )
        audit.rows = written.rows
        audit.places = written.rows * width

        # Unreadable records have no hash. If records are divided, they count as training data.
        if split == (self.records.only_split or "train"):
            audit.bad += self.records.unreadable
            audit.conversations += self.records.unreadable
        if split == "train":
            name = self.records.source.name
            if self.chat.overlong == "drop":
                check_not_all_overlong(
                    self.lengths(split),
                    name=name,
                    unit="conversation",
                    max_length=max_length,
                    max_positions=self.max_positions,
                )
            overlong = describe_overlong_count(self.lengths(split), max_length, self.max_positions)
            audit.check(name, overlong, self.records.first_fault)
        return SplitStats(
            documents=conversations,
            rows=written.rows,
            targets=audit.trained,
            bytes=target_bytes,
            sha256=written.digest.hexdigest(),
            audit=audit,
        )

    def _fit(self, encoded: _EncodedSplit, width: int, audit: Audit) -> _Fitted:
        """Choose the documents that become rows, and where to truncate them.

        Args:
            encoded: the documents of a split.
            width: the number of tokens in a row.
            audit: counts the documents that are left out.
        """
        turn_ends = encoded.turn_ends
        first_turns = np.array(encoded.first_turns, np.int64)
        lengths = encoded.store.lengths
        last_turns = np.append(first_turns, len(turn_ends))[1:] - 1

        has_targets = turn_ends[last_turns, 1] > 0
        is_overlong = lengths > width
        is_kept = has_targets & ~is_overlong
        audit.untrained += int((~has_targets & ~is_overlong).sum())
        audit.overlong += int(is_overlong.sum())

        kept_lengths = np.where(is_kept, lengths, 0)
        for document in np.flatnonzero(is_overlong).tolist():
            if self.chat.overlong == "error":
                self._refuse_overlong(encoded, document, width)
            if self.chat.overlong == "truncate":
                # The turns that end in the row and have a target.
                own_turns = turn_ends[first_turns[document] : last_turns[document] + 1]
                fits = (own_turns[:, 0] <= width) & (own_turns[:, 1] > 0)
                if fits.any():
                    last_fitting = int(np.flatnonzero(fits)[-1])
                    last_turns[document] = first_turns[document] + last_fitting
                    kept_lengths[document] = own_turns[last_fitting, 0]
                    is_kept[document] = True
                else:
                    self._refuse_untrainable(encoded, document, width, own_turns)
                    audit.untrained += 1
        audit.lost += int((lengths - kept_lengths)[is_overlong].sum())

        documents = np.flatnonzero(is_kept)
        return _Fitted(
            documents=documents,
            first_turns=first_turns[documents],
            last_turns=last_turns[documents],
            lengths=kept_lengths[documents],
        )

    def _refuse_overlong(self, encoded: _EncodedSplit, document: int, width: int) -> None:
        """Raise :class:`UserError` for a document that is too long."""
        place = self.records.place_of(encoded.records[document])
        length = int(encoded.store.lengths[document])
        raise UserError(
            f"{place}: {length:,} tokens are more than --max_length {width - 1} allows; "
            f"{ways_to_fit(length - 1, self.max_positions)}, or set --overlong drop or truncate."
        )

    def _refuse_untrainable(
        self, encoded: _EncodedSplit, document: int, width: int, turn_ends: np.ndarray
    ) -> None:
        """Raise :class:`UserError`, unless bad records are skipped: truncation leaves no target.

        Args:
            encoded: the documents of a split.
            document: the number of the document.
            width: the number of tokens in a row.
            turn_ends: the :class:`TurnEnd` of each of its turns, int64 [turns, 4].
        """
        if self.chat.on_bad_row == "skip":
            return
        place = self.records.place_of(encoded.records[document])
        ends_with_targets = turn_ends[turn_ends[:, 1] > 0, 0]
        first_end = int(ends_with_targets.min(initial=encoded.store.lengths[document]))
        raise UserError(
            f"{place}: none of the assistant's turns ends within --max_length {width - 1}, so "
            "truncation would leave nothing to train on; "
            f"{ways_to_fit(first_end - 1, self.max_positions)}, set --overlong drop, or leave such "
            "records out with --on_bad_row skip."
        )


def _sum_of_longest(lengths: np.ndarray, records: np.ndarray) -> int:
    """Return the sum of the longest document's length of each record.

    Args:
        lengths: int64 [documents].
        records: int64 [documents], the number of the record of each document, in ascending order.
    """
    if not len(lengths):
        return 0
    first_documents = np.flatnonzero(np.diff(records, prepend=records[0] - 1))
    return int(np.maximum.reduceat(lengths, first_documents).sum())


def _count(rendered: Rendered, audit: Audit) -> None:
    """Add the counts of one rendered conversation."""
    audit.documents += len(rendered.sequences)
    audit.untrained += not rendered.sequences
    audit.left_answers += rendered.counts["mismatched_answers"]
    audit.left_calls += rendered.counts["mismatched_calls"]
    audit.unshown += rendered.counts["hidden_turns"]
    audit.remade += rendered.counts["unmarked_turns"]
    audit.unweighted += rendered.counts["unweighted_turns"]
    audit.special_as_text += rendered.counts["special_as_text"]
    add_counts(audit.other_fields, rendered.unread_fields)


def format_of(source: Source, chat: ChatConfig) -> str:
    """Return the format of a source's records: ``--format``, or detected from the first record.

    Records that are not conversations are ``text``.

    Raises:
        UserError: if there is no record whose format could be detected.
    """
    if chat.format != "auto":
        return chat.format
    first = next(source.records(None), None)
    if first is None:
        raise UserError(f"{source.flag} {source.name} holds no records.")
    return detect_format(first.fields) or "text"


def total_audit(audits: Sequence[Counts]) -> Counts:
    """Return the sums of the counts of several sources."""
    totals: list[Any] = []
    for values in zip(*map(astuple, audits), strict=True):
        if isinstance(values[0], dict):
            merged: dict[str, int] = {}
            for counts in values:
                add_counts(merged, counts)
            totals.append(merged)
        else:
            totals.append(sum(values))
    return type(audits[0])(*totals)


def add_counts(totals: dict[str, int], counts: Mapping[str, int]) -> None:
    """Add counts to totals with the same keys."""
    for name, count in counts.items():
        totals[name] = totals.get(name, 0) + count
