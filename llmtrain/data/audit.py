"""Count what becomes of the records of a source, and say it in the start-up log.

That includes how many examples are overlong, and which ``--max_length`` holds most of them.
"""

import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np

from llmtrain.console import is_or_are, pluralize
from llmtrain.data.chat_template import REASONING_OPTION
from llmtrain.data.turns import THINKING_COUNTS
from llmtrain.errors import UserError

# --max_length auto holds this share of the examples. A larger --max_length is suggested if the
# chosen one holds fewer.
COVERED_SHARE = 0.995
_MULTIPLE = 64  # that --max_length auto is rounded up to

# The fields of an audit that are no counts.
_NO_COUNTS = ("unit", "truncates")
_WHY_UNTRAINED = (
    "not trained: the weight is 0, or the chat template shows the turn differently from the way it "
    "prompts for it"
)
Unit: TypeAlias = Literal["conversation", "pair", "answer"]


@dataclass
class Audit:
    """Counts of the records, examples and tokens in one split of a source.

    Attributes:
        unit: ``conversation``, ``pair`` or ``answer``. Answers are compared with answers to other
            prompts, and each such pair is an example.
        truncates: whether overlong examples are truncated, not dropped.
        records: records that were read.
        bad: records that ``--on_bad_row skip`` has left out.
        examples: training examples that the other records make. A conversation makes one, unless
            the chat template changes earlier turns; then it makes several.
        overlong: examples that were dropped or truncated.
        lost_tokens: tokens of these that were dropped or cut off.
        untrainable: conversations without a single target, and examples that truncation would
            leave without one; pairs whose answers have the same tokens, or none. They are left out.
        kept: examples that are in the rows.
        tokens: tokens of the examples that are kept. The prompt of a pair counts once for each
            answer.
        targets: target tokens among these.
        repeated_tokens: tokens that a longer example of the same conversation holds, too.
        shared_tokens: tokens that are not stored, because the answers of a pair share a prompt.
        rows: rows that were written.
        positions: positions of these rows, with padding.
        turns: assistant turns that are trained.
        ended_turns: the turns among these whose end-of-turn token is a target.
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

    unit: Unit
    truncates: bool = False
    records: int = 0
    bad: int = 0
    examples: int = 0
    overlong: int = 0
    lost_tokens: int = 0
    untrainable: int = 0
    kept: int = 0
    tokens: int = 0
    targets: int = 0
    repeated_tokens: int = 0
    shared_tokens: int = 0
    rows: int = 0
    positions: int = 0
    turns: int = 0
    ended_turns: int = 0
    untrained_turns: int = 0
    hidden_turns: int = 0
    special_as_text: int = 0
    thinking_turns: int = 0
    no_thinking_turns: int = 0
    unset_thinking_turns: int = 0

    def add(self, counts: Mapping[str, int]) -> None:
        """Add counts, by the names of the fields."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    @property
    def template_options(self) -> dict[str, bool]:
        """The options of the template with which all turns are prompted for, if they agree."""
        settings = [setting for setting, name in THINKING_COUNTS.items() if getattr(self, name)]
        if len(settings) != 1 or settings[0] is None:
            return {}
        return {REASONING_OPTION: settings[0]}

    @property
    def has_omissions(self) -> bool:
        """Whether anything is left out or truncated."""
        return bool(self.bad or self.overlong or self.untrainable)

    def left_out(self) -> str:
        """Return one line that says how many examples are kept, and why the rest is not."""
        bad = pluralize(self.bad, "bad one")
        if self.unit != "conversation":
            return (
                f"{self.kept:,} of {self.examples:,} kept: {self._overlong()}, "
                f"{self.untrainable:,} without {self._lacking} and {bad} left out"
            )
        if self.examples > self.records - self.bad:
            total = pluralize(self.examples, "example")
        else:
            total = pluralize(self.records, "conversation")
        return (
            f"{self.kept:,} of {total}: {self._overlong()}, "
            f"{self.untrainable:,} without a target token and {bad} left out"
        )

    def lines(self) -> list[str]:
        """Return the lines of the start-up log."""
        lines = [self.left_out()]
        if self.unit == "conversation":
            lines += self._lines_about_turns()
        else:
            lines.append(self._line_about_pairs())

        if self.special_as_text:
            tokens = pluralize(self.special_as_text, "special token")
            verb = is_or_are(self.special_as_text)
            lines.append(f"{tokens} in messages {verb} encoded as text")
        return lines

    def check(self, name: str, overlong: str, first_fault: str) -> None:
        """Check that there are examples to train on, and that turns train the token that ends them.

        Args:
            name: the data set, as it is named in ``--dataset``.
            overlong: how many examples are overlong, in words.
            first_fault: the first bad record, and what is wrong with it.

        Raises:
            UserError: if there is nothing to train on, or if no turn trains its end.
        """
        if self.unit != "conversation":
            if not self.kept:
                first = f", the first one {first_fault}" if self.bad else ""
                raise UserError(
                    f"--dataset {name}: none of {pluralize(self.records, 'record')} can be "
                    f"compared ({overlong}, {self.bad:,} bad{first}, {self.untrainable:,} without "
                    f"{self._lacking}); check --max_length and the chat template."
                )
            return

        if not self.targets:
            raise UserError(
                f"--dataset {name}: no token of {pluralize(self.records, 'conversation')} "
                f"would be trained ({overlong}, {self._reasons(first_fault)}); check --format, "
                "--max_length and the chat template."
            )
        if self.turns and not self.ended_turns:
            raise UserError(
                f"--dataset {name}: none of {pluralize(self.turns, 'turn')} trains the token that "
                "ends it, so the model would never stop. Put that token inside {% generation %} in "
                "the chat template, or remove those marks."
            )

    @property
    def _lacking(self) -> str:
        """What untrainable examples lack, in words."""
        return "a difference" if self.unit == "pair" else "a target token"

    def _overlong(self) -> str:
        """Return how many examples are overlong, and how many tokens that has cost."""
        if not self.overlong:
            return "0 overlong"
        outcome = "truncated" if self.truncates else "dropped"
        share = self.lost_tokens / (self.tokens + self.lost_tokens)
        return f"{self.overlong:,} overlong {outcome} ({share:.1%} of the tokens)"

    def _reasons(self, first_fault: str) -> str:
        """Return why conversations have no targets, besides their length."""
        reasons = f"{self.bad:,} bad"
        if self.bad:
            reasons += f", the first one {first_fault}"
        if self.untrained_turns:
            reasons += f"; {pluralize(self.untrained_turns, 'turn')} {_WHY_UNTRAINED}"
        return reasons

    def _line_about_pairs(self) -> str:
        target_share = self.targets / max(self.tokens, 1)
        shared_share = self.shared_tokens / max(self.tokens, 1)
        fill = (self.tokens - self.shared_tokens) / max(self.positions, 1)
        return (
            f"{self.targets:,} of {self.tokens:,} tokens are targets ({target_share:.1%}), "
            f"{self.shared_tokens:,} positions saved by sharing prompts ({shared_share:.1%}), "
            f"{pluralize(self.rows, 'row')} {is_or_are(self.rows)} {fill:.1%} full"
        )

    def _lines_about_turns(self) -> list[str]:
        target_share = self.targets / max(self.tokens, 1)
        fill = self.tokens / max(self.positions, 1)
        lines = [
            f"{self.targets:,} of {self.tokens:,} tokens are targets ({target_share:.1%}), "
            f"{pluralize(self.rows, 'row')} {is_or_are(self.rows)} {fill:.1%} full, "
            f"{self.ended_turns:,} of {pluralize(self.turns, 'turn')} "
            f"{'trains its' if self.ended_turns == 1 else 'train their'} end"
        ]
        if self.repeated_tokens:
            factor = self.tokens / (self.tokens - self.repeated_tokens)
            advice = "; --turns last trains only the last one" if factor > 3 else ""
            readable = self.records - self.bad
            lines.append(
                f"{pluralize(readable, 'conversation')} {'makes' if readable == 1 else 'make'} "
                f"{self.examples:,} examples, which repeat {self.repeated_tokens:,} tokens "
                f"(x {factor:.2f}), because the template changes earlier turns{advice}"
            )
        if self.untrained_turns:
            lines.append(f"{pluralize(self.untrained_turns, 'turn')} {_WHY_UNTRAINED}")
        if self.hidden_turns:
            lines.append(
                f"{pluralize(self.hidden_turns, 'turn')} "
                f"{'loses its' if self.hidden_turns == 1 else 'lose their'} reasoning, or the text "
                "next to a tool call: the chat template does not show it"
            )
        return lines


_COUNT_FIELDS = [count.name for count in fields(Audit) if count.name not in _NO_COUNTS]


class RecordCounts:
    """Counts of each record, by name; they are summed once the split of each record is known.

    Most records have the same counts as others, which are stored once.
    """

    def __init__(self) -> None:
        self._distinct: dict[tuple[tuple[str, int], ...], int] = {}
        self._records = array.array("q")
        self._numbers = array.array("q")  # in `_distinct`, for each of `_records`

    def add(self, record: int, counts: Mapping[str, int]) -> None:
        """Add counts of a record, given its number."""
        key = tuple(sorted((name, count) for name, count in counts.items() if count))
        if not key:
            return
        self._records.append(record)
        self._numbers.append(self._distinct.setdefault(key, len(self._distinct)))

    def total(self, is_selected: np.ndarray) -> dict[str, int]:
        """Return the sums over some records.

        Args:
            is_selected: bool [records].
        """
        are_selected = is_selected[np.array(self._records, np.int64)]
        numbers = np.array(self._numbers, np.int64)[are_selected]
        repetitions = np.bincount(numbers, minlength=len(self._distinct)).tolist()
        totals: dict[str, int] = {}
        for counts, repetition in zip(self._distinct, repetitions, strict=True):
            if repetition:
                add_counts(totals, {name: repetition * count for name, count in counts})
        return totals


def add_counts(totals: dict[str, int], counts: Mapping[str, int]) -> None:
    """Add counts to totals with the same keys."""
    for name, count in counts.items():
        totals[name] = totals.get(name, 0) + count


def total_audit(audits: Sequence[Audit]) -> Audit:
    """Return the sums of the counts of several sources."""
    total = Audit(unit=audits[0].unit, truncates=audits[0].truncates)
    for audit in audits:
        total.add({name: getattr(audit, name) for name in _COUNT_FIELDS})
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


def describe_overlong(lengths: np.ndarray, max_length: int) -> str:
    """Return how many examples are overlong, and which ``--max_length`` holds most of them.

    Args:
        lengths: int [examples], the smallest ``--max_length`` that holds each.
        max_length: the value of ``--max_length``.
    """
    overlong = int((lengths > max_length).sum())
    if not overlong:
        return "0 are overlong"
    return overlong_sentence(overlong, len(lengths), max_length, covering_length(lengths))


def overlong_sentence(overlong: int, examples: int, max_length: int, covering: int) -> str:
    """Return how many examples are overlong, and which ``--max_length`` holds most of them."""
    return (
        f"{overlong:,} of {examples:,} {is_or_are(overlong)} longer than --max_length "
        f"{max_length:,}; --max_length {covering} holds {COVERED_SHARE:.1%}"
    )


def check_not_all_overlong(lengths: np.ndarray, name: str, unit: str, max_length: int) -> None:
    """Raise :class:`UserError` if all training examples are overlong, and thus dropped.

    Args:
        lengths: int [examples], the smallest ``--max_length`` that holds each.
        name: the data set, as it is named in ``--dataset``.
        unit: a word for an example, in the singular.
        max_length: the value of ``--max_length``.
    """
    if not len(lengths) or (lengths <= max_length).any():
        return
    units_are = f"the only {unit} is" if len(lengths) == 1 else f"all {len(lengths):,} {unit}s are"
    raise UserError(
        f"--dataset {name}: {units_are} longer than --max_length {max_length}; set --max_length "
        f"{covering_length(lengths)}, if the model has as many positions, or --overlong truncate."
    )
