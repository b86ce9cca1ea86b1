"""Conversations as tokens: which of them fit into rows, and how many turns of the others."""

import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmtrain.data.config import RowConfig
from llmtrain.data.encoded import EncodedExamples, Fitted
from llmtrain.data.formats import Conversation
from llmtrain.data.packing import Examples
from llmtrain.data.records import ReadRecord, Records
from llmtrain.data.render import AnyRenderer, Rendered, TurnEnd
from llmtrain.data.splits import Split
from llmtrain.errors import UserError

_NO_TURN = -1  # an index of turns


class _Selection(NamedTuple):
    """The examples of a split. Each array is int64 [examples].

    Attributes:
        sequences: their numbers in the store.
        records: the number of the record of each.
        first_turns: the index of the first turn of each among all turns.
        last_turns: the index of its last turn.
        lengths: the number of its tokens.
    """

    sequences: np.ndarray
    records: np.ndarray
    first_turns: np.ndarray
    last_turns: np.ndarray
    lengths: np.ndarray


class _TurnEnds(NamedTuple):
    """The fields of :class:`TurnEnd`, of all turns. Each array is int64 [turns]."""

    length: np.ndarray
    targets: np.ndarray
    target_bytes: np.ndarray
    ended: np.ndarray


class EncodedConversations(EncodedExamples[Conversation]):
    """The conversations of a source as tokens. The assistant's turns are trained.

    A conversation is one token sequence, unless the chat template changes earlier turns. Then it
    is several, and each is an example.

    Args:
        records: the conversations.
        renderer: renders them.
        config: says how they become rows.
        folder: the folder of the temporary file.
    """

    def __init__(
        self,
        records: Records[Conversation],
        renderer: AnyRenderer,
        config: RowConfig,
        folder: Path,
    ) -> None:
        super().__init__(records, renderer, config, folder, unit="conversation")
        self._records = array.array("q")  # the number of the record of each sequence
        self._first_turns = array.array("q")  # the index of its first turn among all turns
        self._turns = array.array("q")  # the TurnEnd of each turn, one number after the other

    def add(self, read: ReadRecord[Conversation], rendered: Rendered) -> dict[str, int]:
        """Store the token sequences of a conversation."""
        for sequence in rendered.sequences:
            self.store.add(sequence.ids, sequence.loss_mask)
            self._records.append(read.number)
            self._first_turns.append(len(self._turns) // len(TurnEnd._fields))
            for turn_end in sequence.turn_ends:
                self._turns.extend(turn_end)
        count = len(rendered.sequences)
        return {"examples": max(count, 1), "untrainable": int(count == 0)}

    def row_width(self, max_length: int) -> int:
        """Return one token more: the last one of a row predicts nothing."""
        return max_length + 1

    def lengths(self, split: Split) -> np.ndarray:
        """Return the smallest ``--max_length`` that holds each example, int64 [examples]."""
        return self._select(split).lengths - 1

    def fit(self, split: Split, max_length: int) -> Fitted:
        """Choose the examples that become rows, and the turns of others that do."""
        selection = self._select(split)
        turns = self._turn_ends()
        width = self.row_width(max_length)
        truncates = self.config.overlong == "truncate"
        is_overlong = selection.lengths > width
        if self.config.overlong == "error" and is_overlong.any():
            example = int(np.argmax(is_overlong))
            raise UserError(
                f"{self.records.place_of(selection.records[example])}: "
                f"{selection.lengths[example]:,} tokens are more than --max_length {max_length} "
                "allows; raise it, or set --overlong drop or truncate."
            )

        last_turns = np.where(is_overlong, _NO_TURN, selection.last_turns)
        if truncates:
            for example in np.flatnonzero(is_overlong).tolist():
                last_turns[example] = _last_fitting_turn(turns, selection, example, width)
        is_kept = (last_turns != _NO_TURN) & (turns.targets[last_turns] > 0)
        is_cut_away = truncates & is_overlong & ~is_kept
        self._check_cut_away(selection, is_cut_away, is_kept, max_length)

        kept = np.flatnonzero(is_kept)
        kept_turns = last_turns[kept]
        kept_lengths = turns.length[kept_turns]
        tokens = int(kept_lengths.sum())
        overlong_tokens = int(selection.lengths[is_overlong].sum())
        counts = {
            "untrainable": int((is_cut_away | ~is_overlong & ~is_kept).sum()),
            "overlong": int(is_overlong.sum()),
            "lost_tokens": overlong_tokens - int(kept_lengths[is_overlong[kept]].sum()),
            "kept": len(kept),
            "tokens": tokens,
            "targets": int(turns.targets[kept_turns].sum()),
            "repeated_tokens": tokens - _sum_of_longest(kept_lengths, selection.records[kept]),
            "turns": int((kept_turns - selection.first_turns[kept] + 1).sum()),
            "ended_turns": int(turns.ended[kept_turns].sum()),
        }
        return Fitted(
            examples=Examples.of_sequences(selection.sequences[kept], kept_lengths),
            counts=counts,
            target_bytes=int(turns.target_bytes[kept_turns].sum()),
        )

    def _turn_ends(self) -> _TurnEnds:
        """Return what is known of all turns of all sequences."""
        table = np.array(self._turns, np.int64).reshape(-1, len(TurnEnd._fields))
        return _TurnEnds(*table.T)

    def _select(self, split: Split) -> _Selection:
        """Return the examples of a split."""
        records = np.array(self._records, np.int64)
        first_turns = np.array(self._first_turns, np.int64)
        turn_count = len(self._turns) // len(TurnEnd._fields)
        # The last turn of a sequence comes before the first turn of the next sequence.
        last_turns = np.append(first_turns[1:], turn_count) - 1
        selected = np.flatnonzero(self.records.is_in(split)[records])
        return _Selection(
            sequences=selected,
            records=records[selected],
            first_turns=first_turns[selected],
            last_turns=last_turns[selected],
            lengths=self.store.lengths[selected],
        )

    def _check_cut_away(
        self,
        selection: _Selection,
        is_cut_away: np.ndarray,
        is_kept: np.ndarray,
        max_length: int,
    ) -> None:
        """Raise :class:`UserError` if truncation leaves nothing of a conversation.

        If the template changes earlier turns, one example of a conversation may be cut away, and
        another one kept. With ``--on_bad_row skip``, all of them may be cut away.

        Args:
            selection: the examples.
            is_cut_away: bool [examples], whether none of its turns fits in a row.
            is_kept: bool [examples].
            max_length: the value of ``--max_length``.
        """
        if self.config.on_bad_row == "skip":
            return
        is_lost = is_cut_away & ~np.isin(selection.records, selection.records[is_kept])
        if is_lost.any():
            record = selection.records[np.argmax(is_lost)]
            raise UserError(
                f"{self.records.place_of(record)}: none of the assistant's turns ends within "
                f"--max_length {max_length}, so truncation would leave nothing to train on; raise "
                "it, set --overlong drop, or leave such records out with --on_bad_row skip."
            )


def _last_fitting_turn(turns: _TurnEnds, selection: _Selection, example: int, width: int) -> int:
    """Return the index of the last turn that ends in a row and has a target, or ``_NO_TURN``."""
    indices = np.arange(selection.first_turns[example], selection.last_turns[example] + 1)
    fitting = indices[(turns.length[indices] <= width) & (turns.targets[indices] > 0)]
    return int(fitting[-1]) if len(fitting) else _NO_TURN


def _sum_of_longest(lengths: np.ndarray, records: np.ndarray) -> int:
    """Return the sum of the longest example's length of each record.

    Args:
        lengths: int64 [examples].
        records: int64 [examples], the number of the record of each, in ascending order.
    """
    if not len(lengths):
        return 0
    first_examples = np.flatnonzero(np.diff(records, prepend=records[0] - 1))
    return int(np.maximum.reduceat(lengths, first_examples).sum())
