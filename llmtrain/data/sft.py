"""Render conversations as packed rows, and count their target tokens."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tqdm import tqdm

from llmtrain.data.chat_template import BadRow
from llmtrain.data.config import ChatConfig, DataConfig, RowConfig
from llmtrain.data.formats import Conversation, PreferenceRecord, conversation_of, detect_format
from llmtrain.data.packing import Counts, Split, SplitStats, TokenStore, hash_fraction
from llmtrain.data.render import Document, Rendered, Renderer
from llmtrain.data.sources import Fields, Source
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.errors import UserError

# How the log describes overlong conversations, for each value of --overlong.
OVERLONG_OUTCOMES = {"drop": "dropped", "truncate": "truncated", "error": "overlong"}


@dataclass
class Audit(Counts):
    """Counts of the conversations, turns and target tokens in one split of a source.

    Attributes:
        conversations: conversations that were read.
        documents: training examples that the readable conversations make. That is one each, unless
            the chat template changes earlier turns; then a conversation makes several.
        untrained: conversations without a single target token, and documents truncated to none.
            They are left out.
        trained: target tokens.
        repeated: tokens that a longer document of the same conversation holds, too.
        turns: assistant turns that are trained, in documents that are not truncated.
        ended: the turns among these whose end-of-turn token is a target.
        left_answers: assistant answers that are not trained, because the chat template shows them
            differently from the way it prompts for them.
        left_calls: the same for turns that call a tool.
        unshown: turns whose reasoning, or whose text next to a tool call, the chat template does
            not show.
        remade: turns that are trained in full, because ``{% generation %}`` marks text that no
            prompt leads to.
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

    def left_out(self, overlong: str) -> str:
        """Return one line that says how many conversations are kept, and why the rest is not.

        Args:
            overlong: the value of ``--overlong``.
        """
        readable = self.conversations - self.bad
        if self.documents > readable:
            total = f"{self.documents:,} documents"
        else:
            total = f"{self.conversations:,} conversations"
        return (
            f"{self.kept:,} of {total}: {self.overlong:,} overlong {OVERLONG_OUTCOMES[overlong]}, "
            f"{self.untrained:,} without a target token and {self.bad:,} bad ones left out"
        )

    def lines(self, overlong: str) -> list[str]:
        """Return the lines of the start-up log."""
        target_share = self.trained / max(self.tokens, 1)
        fill = self.tokens / max(self.places, 1)
        lines = [
            self.left_out(overlong),
            f"{self.trained:,} of {self.tokens:,} tokens are targets ({target_share:.1%}), "
            f"{self.rows:,} rows are {fill:.1%} full, "
            f"{self.ended:,} of {self.turns:,} turns train their end",
        ]
        if self.repeated:
            factor = self.tokens / (self.tokens - self.repeated)
            advice = "; --turns last trains only the last one" if factor > 3 else ""
            lines.append(
                f"{self.conversations - self.bad:,} conversations make {self.documents:,} "
                f"documents, which repeat {self.repeated:,} tokens (x {factor:.2f}), because the "
                f"template changes earlier turns{advice}"
            )
        if self.left_answers or self.left_calls:
            lines.append(
                f"{self.left_answers:,} answers and {self.left_calls:,} calls are not trained: the "
                "chat template shows them differently from the way it prompts for them"
            )
        if self.unshown:
            lines.append(
                f"{self.unshown:,} turns lose their reasoning, or the text next to a tool call: "
                "the chat template does not show it"
            )
        if self.remade:
            lines.append(
                f"{self.remade:,} turns are trained in full: {{% generation %}} marks text that no "
                "prompt leads to"
            )
        return lines

    def check(self, name: str) -> None:
        """Check that there are target tokens, and that turns train the token that ends them.

        Args:
            name: the data set, as it is named in ``--dataset``.

        Raises:
            UserError: if there are no target tokens, or if no turn trains its end.
        """
        if not self.trained:
            reasons = f"{self.overlong:,} are overlong, {self.bad:,} bad"
            left_out = self.left_answers + self.left_calls
            if left_out:
                reasons += (
                    f"; {left_out:,} turns are shown differently from the way they are prompted for"
                )
            raise UserError(
                f"--dataset {name}: none of {self.tokens:,} tokens in {self.conversations:,} "
                f"conversations would be trained ({reasons}); check --format, --block_size and the "
                "chat template."
            )
        if self.turns and not self.ended:
            raise UserError(
                f"--dataset {name}: none of {self.turns:,} turns trains the token that ends it, so "
                "the model would never stop. Put that token inside {% generation %} in the chat "
                "template, or remove those marks."
            )


R = TypeVar("R", Conversation, PreferenceRecord)


class Records(Generic[R]):
    """The records of a source, divided into training and eval data by a hash of their content.

    Args:
        source: the records, as fields.
        read: turns the fields of a record into a conversation or a preference record, or raises
            :class:`BadRow`.
        config: holds the share of the eval data.
        chat: says what to do with bad and overlong records.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.

    Attributes:
        documents: the number of records in each split.
    """

    def __init__(
        self,
        source: Source,
        read: Callable[[Fields], R],
        config: DataConfig,
        chat: RowConfig,
        stop_token_ids: Collection[int],
    ) -> None:
        self.source = source
        self.chat = chat
        self.stop_token_ids = stop_token_ids
        self.read: Callable[[Fields], R] = read
        self._bad = 0  # records that the last pass over the source could not read

        hashes = [_hash_of(record) for _, record in self._read()]
        if not hashes:
            raise UserError(f"--dataset {source.name} holds no conversation.")
        self.eval_limit = _eval_limit(hashes, config.eval_fraction)
        eval_count = sum(number < self.eval_limit for number in hashes)
        self.documents: dict[Split, int] = {
            "train": len(hashes) - eval_count,
            "eval": eval_count,
        }

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield the text of every message in one split, or in both."""
        for _, record in self._read(split):
            for message in record.messages:
                # Tokenizers cannot take half of a surrogate pair. Rendering reports its line.
                text = message["content"].encode(errors="ignore").decode()
                if text:
                    yield text

    def _split_of(self, record: R) -> Split:
        """Return the split that the hash of a record chooses."""
        return "eval" if _hash_of(record) < self.eval_limit else "train"

    def _read(self, split: Split | None = None) -> Iterator[tuple[str, R]]:
        """Yield the readable records of one split, or of both, each with its place.

        The place is the file and the line or row.
        """
        self._bad = 0
        for place, fields in self.source.records(None):
            try:
                record = self.read(fields)
            except BadRow as error:
                self._refuse(place, error)
                self._bad += 1
                continue
            if split is None or split == self._split_of(record):
                yield place, record

    def _refuse(self, place: str, error: BadRow) -> None:
        """Raise :class:`UserError` for a bad record, unless ``--on_bad_row`` says to skip it."""
        if self.chat.on_bad_row == "error":
            raise UserError(
                f"{place}: {error}; fix it, or leave such records out with --on_bad_row skip."
            ) from None

    def _truncates(self, audit: Counts, complaint: str) -> bool:
        """Count an overlong document, and return whether to keep its beginning.

        Args:
            audit: the counts.
            complaint: the place of the document and what is wrong, for the error.

        Raises:
            UserError: if ``--overlong`` is ``error``.
        """
        if self.chat.overlong == "error":
            raise UserError(f"{complaint}; raise --block_size, or set --overlong drop or truncate.")
        audit.overlong += 1
        return self.chat.overlong == "truncate"


class Conversations(Records[Conversation]):
    """The conversations of a source. The assistant's turns are trained."""

    def __init__(
        self,
        source: Source,
        format: str,
        config: DataConfig,
        chat: ChatConfig,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        super().__init__(
            source,
            read=lambda fields: conversation_of(fields, format),
            config=config,
            chat=chat,
            stop_token_ids=stop_token_ids,
        )
        self.only_last_turns = chat.turns == "last"

    def write(
        self, tokenizer: FastTokenizer, block_size: int, path: Path, split: Split
    ) -> SplitStats:
        """Render a split and write its rows.

        Args:
            tokenizer: a tokenizer with a chat template.
            block_size: a row holds ``block_size + 1`` tokens.
            path: the file to write.
            split: the split.

        Raises:
            UserError: with the place of a conversation that cannot be rendered or is too long, if
                the flags do not say to go on without it; or if no training data are left.
        """
        renderer = Renderer(tokenizer, self.stop_token_ids, self.only_last_turns)
        store = TokenStore(path)
        audit = Audit()
        width = block_size + 1
        target_bytes = 0
        total = self.documents[split]

        records = self._read(split)
        for place, conversation in tqdm(records, total=total, desc="rendering", leave=False):
            audit.conversations += 1
            try:
                rendered = renderer(conversation)
            except BadRow as error:
                self._refuse(place, error)
                audit.bad += 1
                continue
            _count(rendered, audit)

            lengths = []
            for full_document in rendered.documents:
                document = self._fitted(renderer, full_document, block_size, place, audit)
                if document is None:
                    continue
                store.add(document.ids, document.loss_mask)
                lengths.append(len(document.ids))
                target_bytes += document.target_bytes
                audit.kept += 1
                audit.trained += int(document.loss_mask.sum())
                audit.turns += document.turns
                audit.ended += document.ended
            audit.tokens += sum(lengths)
            audit.repeated += sum(lengths) - max(lengths, default=0)

        audit.rows = store.write_rows(path, width, self.chat.is_packed)
        audit.places = audit.rows * width
        if split == "train":
            # Unreadable records have no hash, so they are all counted as training data.
            audit.bad += self._bad
            audit.conversations += self._bad
            audit.check(self.source.name)
        return SplitStats(
            documents=total,
            rows=audit.rows,
            targets=audit.trained,
            bytes=target_bytes,
            sha256=store.digest.hexdigest(),
            audit=audit,
        )

    def _fitted(
        self, renderer: Renderer, document: Document, block_size: int, place: str, audit: Audit
    ) -> Document | None:
        """Return a document that fits in a row and has a target, or ``None`` if it is left out."""
        width = block_size + 1
        if len(document.ids) > width:
            complaint = (
                f"{place}: {len(document.ids):,} tokens are more than --block_size {block_size} "
                "allows"
            )
            if not self._truncates(audit, complaint):
                return None
            document = renderer.cut(document, width)
        if not document.loss_mask.any():
            audit.untrained += 1
            return None
        return document


def _count(rendered: Rendered, audit: Audit) -> None:
    """Add the counts of one rendered conversation."""
    audit.documents += len(rendered.documents)
    audit.untrained += not rendered.documents
    audit.left_answers += rendered.left_answers
    audit.left_calls += rendered.left_calls
    audit.unshown += rendered.unshown
    audit.remade += rendered.remade


def format_of(source: Source, chat: ChatConfig) -> str:
    """Return the format of a source's records: ``--format``, or detected from the first record.

    Records that are not conversations are ``text``.
    """
    if chat.format != "auto":
        return chat.format
    first = next(source.records(None), None)
    if first is None:
        return "text"
    return detect_format(first.fields) or "text"


def _eval_limit(hashes: list[float], fraction: float) -> float:
    """Return the limit below which the hash of a conversation makes it eval data.

    The limit is ``fraction``, unless that would choose no conversation or far too many. Then it is
    a limit that chooses about ``fraction`` of them. Copies of a conversation have the same hash and
    stay in the same split.

    Args:
        hashes: the hash of each conversation, in [0, 1).
        fraction: the share of eval data, in [0, 1).
    """
    chosen = sum(number < fraction for number in hashes)
    largest = min(len(hashes) * max(0.5, 2 * fraction), len(hashes) - 1)
    if not fraction or 0 < chosen <= largest:
        return fraction

    ascending = sorted(hashes)
    count = min(math.ceil(len(hashes) * fraction), len(hashes) - 1)
    for number in ascending[count:]:
        if number > ascending[0]:
            return number
    return 0.0  # all conversations are the same


def _hash_of(record: Conversation | PreferenceRecord) -> float:
    """Hash a record to a number in [0, 1), which decides whether it is training or eval data."""
    # All answers to a prompt stay in the same split.
    content = record.prompt if isinstance(record, PreferenceRecord) else record
    return hash_fraction(json.dumps(content, sort_keys=True, default=str))


def total_audit(audits: Sequence[Counts]) -> Counts:
    """Return the sums of the counts of several sources."""
    totals = [sum(values) for values in zip(*map(astuple, audits), strict=True)]
    return type(audits[0])(*totals)
