"""How the answers of preference pairs lie in rows of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.models.documents import Documents
from llmtrain.models.loss import inputs_of, target_positions_of, targets_of
from llmtrain.types import IGNORED, Batch


@dataclass(frozen=True)
class AnswerRows:
    """How the answers of preference pairs lie in rows of tokens.

    The column ``answers`` [B, T] says of each position to which answer it belongs: four times the
    number of the pair in its row, plus 2 if the answer is undesirable, plus 1 if it is the second
    answer of its pair.

    Attributes:
        answers_per_row: the most answers that a row has.
        are_packed: whether a row holds several pairs. Otherwise each answer has half of a row.
        share_prompts: whether the two answers of a pair follow one copy of their prompt.
        are_scored: whether answers get a score at their last token, instead of log-probabilities.
    """

    answers_per_row: int
    are_packed: bool
    share_prompts: bool
    are_scored: bool

    def unfold(self, column: Tensor) -> Tensor:
        """Return rows with one answer each, if a row has two halves."""
        return column if self.are_packed else column.view(2 * len(column), -1)

    def unfold_columns(self, batch: Batch) -> Batch:
        """Return a micro-batch whose columns of tokens are unfolded."""
        return {
            name: column if name == "reference" else self.unfold(column)
            for name, column in batch.items()
        }

    def answer_of_targets(self, labels: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return to which answer each target belongs, and whether it is a target token at all.

        Args:
            labels: unfolded [R, T].
            answers: unfolded [R, T].

        Returns:
            int64 [R * (T - 1)], which counts the answers of all rows, and bool [R * (T - 1)].
        """
        codes = targets_of(answers)
        rows_of_batch = torch.arange(len(codes), device=codes.device)[:, None]
        rows = rows_of_batch // (1 if self.are_packed else 2)
        numbers = rows * self.answers_per_row + (codes >> 2) * 2 + (codes & 1)
        is_target = targets_of(labels) != IGNORED
        return numbers.clamp(min=0).flatten(), is_target.flatten()

    def is_undesirable(self, answers: Tensor) -> Tensor:
        """Return whether each target belongs to an undesirable answer, bool [R * (T - 1)]."""
        return targets_of(answers).flatten() & 2 > 0

    def count_pairs(self, labels: Tensor, answers: Tensor) -> Tensor:
        """Return the number of pairs in rows [B, T] that have target tokens, an int64 scalar."""
        numbers, is_target = self.answer_of_targets(self.unfold(labels), self.unfold(answers))
        tokens = torch.zeros(
            len(labels) * self.answers_per_row, dtype=torch.int64, device=is_target.device
        )
        tokens = tokens.index_add(0, numbers, is_target.long())
        first_answers = tokens[::2]
        return (first_answers > 0).sum()

    def documents(self, position_ids: Tensor, answers: Tensor, on_gpu: bool = False) -> Documents:
        """Return the documents of unfolded rows [R, T], on the device of the rows."""
        if not self.are_scored:
            position_ids = inputs_of(position_ids)
            answers = inputs_of(answers)
        answers_on_host = answers.cpu() if self.share_prompts else None
        documents = Documents.of(
            position_ids.cpu(), on_gpu or position_ids.is_cuda, answers_on_host
        )
        return documents.to(position_ids.device)

    def prepare_batch(self, batch: Batch, on_gpu: bool) -> Batch:
        """Find on the host where the documents of a micro-batch begin, and where its targets are."""
        unfolded = self.unfold_columns(batch)
        prepared = Batch()
        if not self.are_scored:
            target_positions = target_positions_of(unfolded["labels"], on_gpu)
            is_every_position = len(target_positions) >= targets_of(unfolded["labels"]).numel()
            if not is_every_position:
                prepared["target_positions"] = target_positions
        if "position_ids" in unfolded:
            prepared["documents"] = self.documents(
                unfolded["position_ids"], unfolded["answers"], on_gpu
            )
        return prepared
