"""Preference data as tokens: pairs of answers, and single answers with a label.

The two answers of a pair may share one copy of their prompt. Only the last token of the prompt is
then stored for each, because it predicts the first tokens of the answers, which differ.

Single answers (KTO) are stored in pairs, too: each with the answer of the record before it, which
usually has another prompt. From that the loss estimates how far the model has moved (Ethayarajh et
al. 2024, arXiv:2402.01306).
"""

import array
from pathlib import Path
from typing import TypeAlias

import numpy as np

from llmtrain.data.config import RowConfig
from llmtrain.data.examples import EncodedExamples
from llmtrain.data.formats import PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.packing import Examples
from llmtrain.data.records import ReadRecord, Records
from llmtrain.data.render import AnyRenderer, Rendered, TokenSequence, cut

_Read: TypeAlias = ReadRecord[PreferenceRecord]
# The columns of a table of pairs: whether the first answer is desirable, how many tokens both
# answers with their prompts begin with, and how many of these belong to the prompt of both.
_IS_DESIRABLE, _COMMON, _PROMPT = range(3)


class EncodedPairs(EncodedExamples[PreferenceRecord]):
    """The preference data of a source as tokens: two token sequences for each pair.

    Args:
        records: the preference records.
        renderer: renders them.
        config: says how they become rows.
        folder: the folder of the temporary file.
        unpaired: the loss takes single answers. Each answer of a pair is then a single one, too.
        shares_prompts: store the prompt of a pair once for both answers.
    """

    parts = 2
    tokens_beyond = 0

    def __init__(
        self,
        records: Records[PreferenceRecord],
        renderer: AnyRenderer,
        config: RowConfig,
        folder: Path,
        unpaired: bool,
        shares_prompts: bool,
    ) -> None:
        super().__init__(records, renderer, config, folder)
        self.unit = "answer" if unpaired else "pair"
        self.own_parts = 1 if unpaired else 2
        self.digest_note = f" {unpaired}"
        self.unpaired = unpaired
        self.shares_prompts = shares_prompts
        self._pairs = array.array("q")  # a row of the table of pairs for each
        # By whether they are eval data: the first record, which is compared with the last one, with
        # its answers, and the last record so far.
        self._first: dict[bool, tuple[_Read, list[TokenSequence]]] = {}
        self._previous: dict[bool, PreferenceRecord] = {}

    def encode(self) -> None:
        """Read and render all records; see :class:`EncodedExamples`."""
        if self.unpaired:
            self.records.divide()  # answers are compared inside their split
        super().encode()
        for read, answers in self._first.values():
            self._add_singles(read, answers)

    def add(self, read: _Read, rendered: Rendered) -> None:
        """Store the answers of a record in pairs."""
        assert read.record is not None, "it was rendered"
        if not self.unpaired:
            chosen, rejected = rendered.sequences
            self._add_pair(read.number, chosen, rejected, read.record.desirable)
            return

        is_eval = bool(self.records.is_in["eval"][read.number])
        if is_eval in self._first:
            self._add_singles(read, rendered.sequences)
        else:
            self._first[is_eval] = (read, rendered.sequences)
        self._previous[is_eval] = read.record

    def _add_singles(self, read: _Read, answers: list[TokenSequence]) -> None:
        """Store single answers, each with the first answer of the record before theirs.

        That answer is rendered after their own prompt.
        """
        assert read.record is not None, "it was rendered"
        previous = self._previous[bool(self.records.is_in["eval"][read.number])]
        try:
            compared = self.renderer(read.record._replace(answers=previous.answers[:1]))
        except BadRecord as error:
            reason = f"compared with the answer of the record before: {error}"
            self.refuse(read, BadRecord(reason))
            return
        for number, answer in enumerate(answers):
            # Of two answers, the first is the chosen one.
            is_desirable = read.record.desirable and number == 0
            self._add_pair(read.number, answer, compared.sequences[0], is_desirable)

    def _add_pair(
        self, record: int, first: TokenSequence, second: TokenSequence, is_desirable: bool
    ) -> None:
        self.add_example(record, first, second)
        length = min(len(first.ids), len(second.ids))
        differences = np.flatnonzero(first.ids[:length] != second.ids[:length])
        common = int(differences[0]) if len(differences) else length
        are_targets = first.loss_mask[:common] | second.loss_mask[:common]
        prompt = int(np.argmax(are_targets)) if are_targets.any() else common
        self._pairs.extend((int(is_desirable), common, prompt))

    def truncated(self, sequences: np.ndarray, width: int) -> np.ndarray:
        """Return the first tokens of answers with their prompts, which end no turn."""
        ends = self.ends()[sequences]
        for i, sequence in enumerate(sequences.tolist()):
            ids, loss_mask = self.store.read(sequence)
            beginning = cut(TokenSequence(ids, loss_mask, 0), width, self.renderer.encoder)
            targets = int(beginning.loss_mask.sum())
            ends[i] = (sequence, width, targets, beginning.target_bytes, 0, 0)
        return ends

    def are_same(self, sequences: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return whether the answers of pairs have the same tokens; no single answer does."""
        common = self._pairs_of(sequences)[:, _COMMON]
        are_same: np.ndarray = (lengths == lengths[:, :1]).all(axis=1) & (common >= lengths[:, 0])
        return are_same & (not self.unpaired)

    def examples_of(self, sequences: np.ndarray, lengths: np.ndarray) -> Examples:
        """Return what is written of pairs: of the second answer not the prompt that is shared."""
        pairs = self._pairs_of(sequences)
        written = super().examples_of(sequences, lengths)
        written.is_first_desirable = pairs[:, _IS_DESIRABLE].astype(bool)
        if self.shares_prompts:
            # The last token of the prompt predicts the first one of the answer.
            written.starts[:, 1] = np.maximum(pairs[:, _PROMPT] - 1, 0)
        return written

    def _pairs_of(self, sequences: np.ndarray) -> np.ndarray:
        """Return rows of the table of pairs, given their sequences, int64 [pairs, 3]."""
        table = np.array(self._pairs, np.int64).reshape(-1, 3)
        pairs: np.ndarray = table[sequences[:, 0] // self.parts]
        return pairs
