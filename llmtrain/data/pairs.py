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

from llmtrain.data.config import PairConfig
from llmtrain.data.examples import EncodedChats
from llmtrain.data.formats import PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.packing import Examples
from llmtrain.data.records import ReadRecord, Records
from llmtrain.data.render import AnyRenderer, Rendered, TokenSequence

_Read: TypeAlias = ReadRecord[PreferenceRecord]


class EncodedPairs(EncodedChats[PreferenceRecord]):
    """The preference data of a source as tokens: two token sequences for each pair.

    Args:
        records: the preference records.
        renderer: renders them.
        config: says how they become rows.
        folder: the folder of the temporary file.
        unpaired: the loss takes single answers. Each answer of a pair is then a single one, too.
    """

    parts = 2
    tokens_beyond = 0

    def __init__(
        self,
        records: Records[PreferenceRecord],
        renderer: AnyRenderer,
        config: PairConfig,
        folder: Path,
        unpaired: bool,
    ) -> None:
        super().__init__(records, renderer, config, folder)
        self.unit = "answer" if unpaired else "pair"
        self.own_parts = 1 if unpaired else 2
        self.digest_note = f" {unpaired}"
        self.unpaired = unpaired
        self.shares_prompts = config.shares_prompts
        # For each pair: whether its first answer is desirable, and the tokens of the prompt that
        # are stored for the first answer alone.
        self._are_desirable: list[bool] = []
        self._shared = array.array("q")
        # By whether they are eval data: the first record, which is compared with the last one, with
        # its answers, and the last record so far.
        self._first: dict[bool, tuple[_Read, list[TokenSequence]]] = {}
        self._previous: dict[bool, PreferenceRecord] = {}

    def encode(self) -> None:
        """Read and render all records; see :class:`EncodedChats`."""
        if self.unpaired:
            self.records.divide()  # answers are compared inside their split
        super().encode()
        for is_eval, (read, answers) in self._first.items():
            self._add_singles(read, answers, self._previous[is_eval])

    def add(self, read: _Read, rendered: Rendered) -> None:
        """Store the answers of a record in pairs."""
        if not self.unpaired:
            chosen, rejected = rendered.sequences
            self._add_pair(read.number, chosen, rejected, read.record.desirable)
            return

        is_eval = bool(self.records.divide()["eval"][read.number])
        if is_eval in self._first:
            self._add_singles(read, rendered.sequences, self._previous[is_eval])
        else:
            self._first[is_eval] = (read, rendered.sequences)
        self._previous[is_eval] = read.record

    def _add_singles(
        self, read: _Read, answers: list[TokenSequence], previous: PreferenceRecord
    ) -> None:
        """Store single answers, each with the first answer of the record before theirs.

        That answer is rendered after their own prompt.
        """
        try:
            compared = self.renderer(read.record._replace(answers=previous.answers[:1]))
        except BadRecord as error:
            reason = f"compared with the answer of the record before: {error}"
            self.records.refuse(read.number, read.place, BadRecord(reason))
            return
        for number, answer in enumerate(answers):
            # Of two answers, the first is the chosen one.
            is_desirable = read.record.desirable and number == 0
            self._add_pair(read.number, answer, compared.sequences[0], is_desirable)

    def _add_pair(
        self, record: int, first: TokenSequence, second: TokenSequence, is_desirable: bool
    ) -> None:
        self.add_example(record, first, second)
        self._are_desirable.append(is_desirable)
        shared = 0
        if self.shares_prompts:
            length = min(len(first.ids), len(second.ids))
            is_prompt = first.ids[:length] == second.ids[:length]
            is_prompt &= ~first.loss_mask[:length] & ~second.loss_mask[:length]
            # The last token of the prompt predicts the first one of the answer.
            shared = max(int(np.logical_and.accumulate(is_prompt).sum()) - 1, 0)
        self._shared.append(shared)

    def truncated(self, sequences: np.ndarray, width: int) -> np.ndarray:
        """Return the first tokens of answers with their prompts, which end no turn."""
        ends: np.ndarray = self.ends()[sequences]
        starts = self.store.bounds[sequences].tolist()
        for i, start in enumerate(starts):
            encoded = self.store.read_encoded(start, start + width)
            targets = encoded[encoded >= 0]
            text = self.renderer.encoder.decode(targets.tolist())
            ends[i] = (sequences[i], width, len(targets), len(text.encode()), 0)
        return ends

    def examples_of(self, sequences: np.ndarray, lengths: np.ndarray) -> Examples:
        """Return what is written of pairs: of the second answer not the prompt that is shared."""
        pairs = sequences[:, 0] // self.parts
        written = super().examples_of(sequences, lengths)
        written.starts[:, 1] = np.array(self._shared, np.int64)[pairs]
        written.is_first_desirable = np.array(self._are_desirable, bool)[pairs]
        return written
