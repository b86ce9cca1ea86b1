"""Count what becomes of the records of a source, and choose a ``--max_length`` for them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np

from llmtrain.console import is_or_are, pluralize
from llmtrain.data.chat_template import REASONING_OPTION
from llmtrain.data.shards import SHARD_BYTES, SHARD_RECORDS
from llmtrain.data.turns import THINKING_COUNTS

# --max_length auto holds this share of the examples. A larger --max_length is suggested if the
# chosen one holds fewer.
COVERED_SHARE = 0.995
_MULTIPLE = 64  # that --max_length auto is rounded up to

Unit: TypeAlias = Literal["text", "conversation", "pair", "answer"]


@dataclass
class Audit:
    """Counts of the records, examples and tokens in one split of a source.

    Text has only ``records``, ``targets``, ``rows``, ``bytes`` and ``sha256``.

    Attributes:
        unit: what an example is. Answers are compared with answers to other prompts.
        records: records that were read, also bad ones.
        bad: records that ``--on_bad_row skip`` has left out.
        examples: training examples that the other records make. A conversation makes one, unless
            the chat template changes earlier turns; then it makes several.
        dropped: overlong examples that are left out.
        truncated: overlong examples that are truncated.
        lost_tokens: tokens that were dropped or cut off.
        untrained: examples without a target, also after truncation. They are left out.
        kept: examples that are in the rows.
        tokens: tokens of these. The prompt of a pair counts once for each answer.
        targets: target tokens among these.
        shared_tokens: tokens that are not stored, because the answers of a pair share a prompt.
        rows: rows that were written.
        positions: positions of these rows, with padding.
        bytes: UTF-8 bytes of the target tokens' text.
        pairs: the largest number of pairs in a row; 0 unless the rows hold preference data.
        sha256: a hex digest of the tokens, of their loss mask and of how they became rows.
        ended: kept examples with a turn whose end is trained.
        needed_length: the ``--max_length`` that nearly all examples fit in.
        first_fault: the place of the first bad record, and what is wrong with it.
        untrained_turns: turns that are not trained, because their weight is 0 or the chat template
            shows them differently from the way it prompts for them.
        hidden_turns: turns whose reasoning, or whose text next to a tool call, the chat template
            does not show.
        special_as_text: special tokens in messages that are encoded as text.
        thinking_turns: turns whose prompt asks for reasoning, if the template can be asked. This
            and the next two counts include turns of examples that are left out.
        no_thinking_turns: turns whose prompt asks for an answer without reasoning.
        unset_thinking_turns: turns whose prompt leaves that to the template.
    """

    unit: Unit = "text"
    records: int = 0
    bad: int = 0
    examples: int = 0
    dropped: int = 0
    truncated: int = 0
    lost_tokens: int = 0
    untrained: int = 0
    kept: int = 0
    tokens: int = 0
    targets: int = 0
    shared_tokens: int = 0
    rows: int = 0
    positions: int = 0
    bytes: int = 0
    pairs: int = 0
    sha256: str = ""
    ended: int = 0
    needed_length: int = 0
    first_fault: str = ""
    untrained_turns: int = 0
    hidden_turns: int = 0
    special_as_text: int = 0
    thinking_turns: int = 0
    no_thinking_turns: int = 0
    unset_thinking_turns: int = 0

    @property
    def overlong(self) -> int:
        """Examples that are too long for a row."""
        return self.dropped + self.truncated

    @property
    def template_options(self) -> dict[str, bool]:
        """The options of the template with which all turns are prompted for, if they agree."""
        settings = [setting for setting, name in THINKING_COUNTS.items() if getattr(self, name)]
        if len(settings) != 1 or settings[0] is None:
            return {}
        return {REASONING_OPTION: settings[0]}

    def left_out(self) -> str:
        """Return one line that says how many examples are kept, and why the rest is not."""
        overlong = f"{self.overlong:,} overlong"
        if self.overlong:
            outcome = "truncated" if self.truncated else "dropped"
            share = self.lost_tokens / (self.tokens + self.lost_tokens)
            overlong += f" {outcome} ({share:.1%} of the tokens)"
        bad = pluralize(self.bad, "bad one")
        return (
            f"{self.kept:,} of {pluralize(self.examples + self.bad, 'example')}: {overlong}, "
            f"{self.untrained:,} without a target token and {bad} left out"
        )

    def remedy(self, max_length: int) -> str:
        """Return what to do if no example is left, given the value of ``--max_length``."""
        if self.overlong:
            return (
                f"raise --max_length {max_length} to {self.needed_length}, if the model has as "
                "many positions"
            )
        if self.untrained_turns:
            return self._untrained()
        if self.bad:
            return f"the first bad one is {self.first_fault}"
        return "check --columns and the chat template"

    def lines(self) -> list[str]:
        """Return the lines of the start-up log."""
        share = self.targets / max(self.tokens, 1)
        fill = (self.tokens - self.shared_tokens) / max(self.positions, 1)
        lines = [
            self.left_out(),
            f"{self.targets:,} of {self.tokens:,} tokens are targets ({share:.1%}), "
            f"{pluralize(self.rows, 'row')} {is_or_are(self.rows)} {fill:.1%} full",
        ]
        if self.unit == "conversation" and self.examples + self.bad > self.records:
            count = self.records - self.bad
            lines.append(
                f"{pluralize(count, 'conversation')} {'makes' if count == 1 else 'make'} "
                f"{self.examples:,} "
                "examples, because the template changes earlier turns; --turns last trains only "
                "the last one"
            )
        if self.untrained_turns:
            lines.append(self._untrained())
        if self.hidden_turns:
            turns = pluralize(self.hidden_turns, "turn")
            lines.append(f"{turns} whose reasoning, or text, the chat template does not show")
        if self.special_as_text:
            tokens = pluralize(self.special_as_text, "special token")
            lines.append(f"{tokens} in messages encoded as text")
        return lines

    def _untrained(self) -> str:
        return (
            f"{pluralize(self.untrained_turns, 'turn')} not trained: the weight is 0, or the chat "
            "template shows the turn differently from the way it prompts for it"
        )


def total_audit(audits: Sequence[Audit]) -> Audit | None:
    """Return the sums of the counts of several sources, without text; ``None`` if all are text."""
    audits = [audit for audit in audits if audit.unit != "text"]
    return summed(audits) if audits else None


def summed(audits: Sequence[Audit]) -> Audit:
    """Return the sums of counts, and the largest or the first of what is no count."""
    total = Audit(audits[0].unit)
    for field in fields(Audit):
        if type(field.default) is int:
            setattr(total, field.name, sum(getattr(audit, field.name) for audit in audits))
    total.pairs = max(audit.pairs for audit in audits)
    total.needed_length = max(audit.needed_length for audit in audits)
    total.first_fault = next((audit.first_fault for audit in audits if audit.first_fault), "")
    return total


def total_of_shards(audits: Sequence[Audit]) -> Audit:
    """Return the counts of a source, given those of its shards.

    Its hash says how records became shards, if there are several.
    """
    total = summed(audits)
    total.sha256 = audits[0].sha256
    if len(audits) > 1:
        hashes = " ".join(audit.sha256 for audit in audits)
        rule = f"shards of {SHARD_RECORDS} records or {SHARD_BYTES} bytes: {hashes}"
        total.sha256 = hashlib.sha256(rule.encode()).hexdigest()
    return total


def covering_length(lengths: np.ndarray) -> int:
    """Return the smallest multiple of 64 that holds 99.5 % of the examples; 0 if there are none.

    Args:
        lengths: int [examples], the smallest ``--max_length`` that holds each.
    """
    if not len(lengths):
        return 0
    index = int(np.ceil(len(lengths) * COVERED_SHARE)) - 1
    quantile = int(np.partition(lengths, index)[index])
    return -(-max(quantile, 1) // _MULTIPLE) * _MULTIPLE
