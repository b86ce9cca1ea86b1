"""Where the answers of preference pairs are in rows of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.interfaces import answer_codes
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.models.documents import Documents
from llmtrain.models.loss import inputs_of, target_positions_of, targets_of


@dataclass(frozen=True)
class AnswerRows:
    """Where the answers of preference pairs are in rows of tokens.

    The column ``answers`` [B, T] has the code of the answer that each position belongs to; see
    :mod:`llmtrain.interfaces.answer_codes`.

    Attributes:
        answers_per_row: the most answers that a row has.
        are_packed: whether a row holds several pairs. Otherwise each answer of a pair has half of a
            row.
        share_prompts: whether the two answers of a pair follow one copy of their prompt.
        are_scored: whether answers have a score at their last token instead of a log-probability.
    """

    answers_per_row: int
    are_packed: bool
    share_prompts: bool
    are_scored: bool

    def unfold(self, column: Tensor) -> Tensor:
        """Return rows with one answer each, if a row has two halves."""
        if self.are_packed:
            return column
        return column.view(2 * len(column), -1)

    def unfold_columns(self, batch: Batch) -> Batch:
        """Return a micro-batch whose columns of tokens are unfolded."""
        unfolded = Batch()
        for name, column in batch.items():
            is_of_tokens = name != "reference"
            unfolded[name] = self.unfold(column) if is_of_tokens else column
        return unfolded

    def answer_of_targets(self, labels: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the answer that each position's target belongs to, and whether the target counts.

        Args:
            labels: unfolded [R, T].
            answers: unfolded [R, T].

        Returns:
            The number of the answer among those of all rows, int64 [R * (T - 1)], and whether the
            target is trained on, bool [R * (T - 1)].
        """
        codes = targets_of(answers)
        rows = torch.arange(len(codes), device=codes.device)[:, None]
        if not self.are_packed:
            rows = rows // 2
        numbers = rows * self.answers_per_row + answer_codes.answer_of(codes)
        is_target = targets_of(labels) != IGNORED
        return numbers.clamp(min=0).flatten(), is_target.flatten()

    def is_undesirable(self, answers: Tensor) -> Tensor:
        """Return whether each target belongs to an undesirable answer, bool [R * (T - 1)]."""
        return answer_codes.is_undesirable(targets_of(answers).flatten())

    def count_pairs(self, labels: Tensor, answers: Tensor) -> Tensor:
        """Return the number of pairs with target tokens in rows [B, T], an int64 scalar."""
        return (self._tokens_of_first_answers(labels, answers) > 0).sum()

    def count_chosen_tokens(self, labels: Tensor, answers: Tensor) -> Tensor:
        """Return the number of target tokens of chosen answers in rows [B, T], an int64 scalar."""
        return self._tokens_of_first_answers(labels, answers).sum()

    def _tokens_of_first_answers(self, labels: Tensor, answers: Tensor) -> Tensor:
        """Return the number of target tokens of the first answer of each pair, int64."""
        numbers, is_target = self.answer_of_targets(self.unfold(labels), self.unfold(answers))
        tokens = torch.zeros(
            len(labels) * self.answers_per_row, dtype=torch.int64, device=is_target.device
        )
        return tokens.index_add(0, numbers, is_target.long())[::2]

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
        """Find the documents and the target tokens of a micro-batch, on the host.

        Args:
            batch: a micro-batch by column.
            on_gpu: prepare what a GPU takes, in shapes that recur.

        Returns:
            Further columns of the micro-batch.
        """
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
