"""Conversations as tokens: which of them fit into rows, and how many turns of the others."""

import array
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from llmtrain.data.config import RowConfig
from llmtrain.data.encoded import EncodedExamples, Fitted
from llmtrain.data.formats import Conversation
from llmtrain.data.packing import Examples
from llmtrain.data.records import ReadRecord, Records
from llmtrain.data.render import AnyRenderer
from llmtrain.data.rendered import Rendered, TurnEnd
from llmtrain.data.splits import Split
from llmtrain.errors import UserError


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
        turn_ends = self._turn_ends
        lengths = selection.lengths
        last_turns = selection.last_turns
        width = self.row_width(max_length)

        has_targets = turn_ends[last_turns, 1] > 0
        is_overlong = lengths > width
        is_kept = has_targets & ~is_overlong
        kept_lengths = np.where(is_kept, lengths, 0)
        untrainable = int((~has_targets & ~is_overlong).sum())

        cut_away: list[int] = []  # the examples that truncation would leave without a target
        for example in np.flatnonzero(is_overlong).tolist():
            if self.config.overlong == "error":
                self._refuse_overlong(selection, example, max_length)
            if self.config.overlong == "truncate":
                # The turns that end in the row and have a target.
                first_turn = selection.first_turns[example]
                turns = turn_ends[first_turn : last_turns[example] + 1]
                fitting = np.flatnonzero((turns[:, 0] <= width) & (turns[:, 1] > 0))
                if len(fitting):
                    last_turns[example] = first_turn + fitting[-1]
                    kept_lengths[example] = turns[fitting[-1], 0]
                    is_kept[example] = True
                else:
                    cut_away.append(example)
        untrainable += len(cut_away)

        kept = np.flatnonzero(is_kept)
        for example in cut_away:
            # If the template changes earlier turns, other turns of the conversation may be kept.
            if selection.records[example] not in selection.records[kept]:
                self._refuse_untrainable(selection, example, max_length)
        kept_turns = turn_ends[last_turns[kept]]
        _, targets, target_bytes, ended_turns = kept_turns.sum(axis=0).tolist()
        tokens = int(kept_lengths.sum())
        longest = _sum_of_longest(kept_lengths[kept], selection.records[kept])
        counts = {
            "untrainable": untrainable,
            "overlong": int(is_overlong.sum()),
            "lost_tokens": int((lengths - kept_lengths)[is_overlong].sum()),
            "kept": len(kept),
            "tokens": tokens,
            "targets": targets,
            "repeated_tokens": tokens - longest,
            "turns": int((last_turns - selection.first_turns + 1)[kept].sum()),
            "ended_turns": ended_turns,
        }
        examples = Examples.of_sequences(selection.sequences[kept], kept_lengths[kept])
        return Fitted(examples, counts, target_bytes)

    @property
    def _turn_ends(self) -> np.ndarray:
        """The :class:`TurnEnd` of each turn, int64 [turns, 4]."""
        return np.array(self._turns, np.int64).reshape(-1, len(TurnEnd._fields))

    def _select(self, split: Split) -> _Selection:
        """Return the examples of a split."""
        records = np.array(self._records, np.int64)
        first_turns = np.array(self._first_turns, np.int64)
        last_turns = np.append(first_turns, len(self._turn_ends))[1:] - 1
        selected = np.flatnonzero(self.records.is_in(split)[records])
        return _Selection(
            sequences=selected,
            records=records[selected],
            first_turns=first_turns[selected],
            last_turns=last_turns[selected],
            lengths=self.store.lengths[selected],
        )

    def _refuse_overlong(self, selection: _Selection, example: int, max_length: int) -> NoReturn:
        """Raise :class:`UserError` for an example that is too long."""
        place = self.records.place_of(selection.records[example])
        raise UserError(
            f"{place}: {selection.lengths[example]:,} tokens are more than --max_length "
            f"{max_length} allows; raise it, or set --overlong drop or truncate."
        )

    def _refuse_untrainable(self, selection: _Selection, example: int, max_length: int) -> None:
        """Raise :class:`UserError`, unless bad records are skipped: truncation leaves no target."""
        if self.config.on_bad_row == "skip":
            return
        raise UserError(
            f"{self.records.place_of(selection.records[example])}: none of the assistant's turns "
            f"ends within --max_length {max_length}, so truncation would leave nothing to train "
            "on; raise it, set --overlong drop, or leave such records out with --on_bad_row skip."
        )


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
