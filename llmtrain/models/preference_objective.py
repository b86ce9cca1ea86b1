"""The objective of a run that compares answers: the mean loss per preference pair.

The column ``answers`` [B, T] of a micro-batch has the code of the answer that each token belongs
to; see :mod:`llmtrain.interfaces.batches`. A row that is not packed has one pair, and each
answer has half of the row. The model then gets these halves as rows of their own. Below, the model
gets R rows of T' tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from llmtrain.device_numbers import widest_dtype
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED, PADDING_CODE, Batch, answer_of, is_undesirable
from llmtrain.interfaces.objective import LossSums, Objective, StepTotals
from llmtrain.models.causal_lm import CausalLM, own_arguments
from llmtrain.models.documents import Documents
from llmtrain.models.loss import inputs_of, target_positions_of, targets_of
from llmtrain.models.preference import Answers, PreferenceConfig
from llmtrain.models.probe import shares_prompts


class PreferenceObjective(Objective):
    """The mean loss per preference pair, or per unpaired answer.

    Args:
        config: which loss, and its parameters.
        answers_per_row: the most answers that a row has.
        is_packed: whether a row may hold several pairs.
        share_prompts: whether the two answers of a pair follow one copy of their prompt.
    """

    def __init__(
        self, config: PreferenceConfig, answers_per_row: int, is_packed: bool, share_prompts: bool
    ) -> None:
        self.config = config
        self.answers_per_row = answers_per_row
        self.is_packed = is_packed
        self.share_prompts = share_prompts
        uses_reference = any(loss.uses_reference for loss in config.selected_losses)
        self.reference_size = answers_per_row if uses_reference else 0
        self.uses_prepass_in_eval = any(loss.statistics for loss in config.selected_losses)

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        answers = self._answers(model, batch)
        is_pair = answers.tokens[:, 0] > 0

        # The formulas need numbers for a missing answer, too.
        logps = answers.logps.where(answers.tokens > 0, -1)
        answers = answers._replace(logps=logps, tokens=answers.tokens.clamp(min=1), **extra)

        losses = self.config.selected_losses
        weights = self.config.loss_weights or [1.0] * len(losses)
        weighted_losses = [
            weight * loss.formula(answers, self.config)
            for weight, loss in zip(weights, losses, strict=True)
        ]
        pair_losses = torch.stack(weighted_losses).sum(0)
        rewards = losses[0].rewards(answers, self.config)
        metrics = self._metric_sums(answers, rewards, is_pair)
        return LossSums((pair_losses * is_pair).sum(), metrics)

    @torch.no_grad()
    def _metric_sums(self, answers: Answers, rewards: Tensor, is_pair: Tensor) -> dict[str, Tensor]:
        """Return the sums over pairs from which :meth:`metrics` computes means."""
        chosen = is_pair
        rejected = is_pair
        rejected_answer = 1
        if self.config.is_unpaired:
            chosen = is_pair & answers.desirable
            rejected = is_pair & ~answers.desirable
            rejected_answer = 0

        sums = {
            "chosen": chosen,
            "rejected": rejected,
            "right": is_pair & (rewards[:, 0] > rewards[:, 1]),
            "moved": (answers.reference - answers.logps).sum(1) * is_pair,
            "rewards/chosen": rewards[:, 0] * chosen,
            "rewards/rejected": rewards[:, rejected_answer] * rejected,
            "logps/chosen": answers.logps[:, 0] * chosen,
            "logps/rejected": answers.logps[:, rejected_answer] * rejected,
        }
        return {name: values.sum().float() for name, values in sums.items()}

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        """Return means over the answers, by TRL's names. Log-probabilities are in nats.

        Unpaired answers have no ``rewards/accuracies``, because it compares two answers.
        """
        chosen = max(sums["chosen"], 1)
        rejected = max(sums["rejected"], 1)
        metrics = {
            "rewards/chosen": sums["rewards/chosen"] / chosen,
            "rewards/rejected": sums["rewards/rejected"] / rejected,
        }
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if not self.config.is_unpaired:
            metrics["rewards/accuracies"] = sums["right"] / chosen
        if self.config.is_reward_model:
            return metrics

        metrics["logps/chosen"] = sums["logps/chosen"] / chosen
        metrics["logps/rejected"] = sums["logps/rejected"] / rejected
        if "kl_baseline" in extra:
            metrics["kl"] = float(extra["kl_baseline"])
        elif self.reference_size and not self.config.is_unpaired:
            metrics["kl"] = sums["moved"] / (2 * chosen)
        return metrics

    def eval_metrics(self, loss_sum: float, mean_loss: float, text_bytes: int) -> dict[str, float]:
        """Return no metrics, because the loss is not the likelihood of a text."""
        return {}

    def denominator(self, batch: Batch) -> Tensor:
        """Return the number of pairs in a micro-batch, an int64 scalar."""
        return (self._target_tokens(batch)[:, 0] > 0).sum()

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        """Compute the attributes of :class:`Answers` of the global batch that the loss needs.

        The baseline of KTO is the mean log-ratio of mismatched answers, or 0 if that is negative.
        """
        losses = self.config.selected_losses
        if any("kl_baseline" in loss.statistics for loss in losses):
            log_ratios, answers = engine.sum_over_batches(self._sum_of_mismatched, batches)
            return {"kl_baseline": (log_ratios / answers.clamp(min=1)).clamp(min=0)}

        if any("mean_chosen_tokens" in loss.statistics for loss in losses):
            counts = [self._target_tokens(batch)[:, 0].sum() for batch in batches]
            chosen_tokens = engine.ranks.sum_over_ranks(torch.stack(counts).sum())
            chosen_tokens = chosen_tokens.to(widest_dtype(chosen_tokens.device))
            return {"mean_chosen_tokens": chosen_tokens / totals.denominator.clamp(min=1)}
        return {}

    def _sum_of_mismatched(self, model: Any, batch: Batch) -> Tensor:
        """Return the sum of log-ratios of mismatched answers, and their number, float64 [2].

        These are the second answers of unpaired data: answers to other prompts.
        """
        answers = self._answers(model, batch)
        has_both = (answers.tokens > 0).all(1)

        wide = widest_dtype(has_both.device)
        log_ratios = (answers.log_ratios[:, 1] * has_both).to(wide)
        # Multiples of 2^-30 whose sum is below 2^23 nats add up exactly, in any order.
        log_ratios = (log_ratios * 2**30).round() / 2**30
        return torch.stack([log_ratios.sum(), has_both.sum().to(wide)])

    def reference(self, model: Any, batch: Batch) -> Tensor:
        """Return the log-probabilities of the answers, float [B, answers_per_row]."""
        return self._answers(model, batch).logps.view(-1, self.answers_per_row)

    def check(self, model: CausalLM) -> None:
        """Check that two answers which share a prompt do not attend to each other.

        Raises:
            UserError: if they do. The model then needs rows in which each answer has its own
                prompt.
        """
        if self.share_prompts and not shares_prompts(model):
            raise UserError(
                f"{model.own_class.__name__} cannot share a prompt between two answers: "
                "use --no_share_prompts."
            )

    def prepare_batch(self, batch: Batch, on_gpu: bool) -> Batch:
        """Return further columns of a micro-batch: where its documents begin and its targets are.

        Args:
            batch: a micro-batch by column, on the host.
            on_gpu: prepare what a GPU takes, in shapes that recur.
        """
        prepared = Batch()
        if not self.config.is_reward_model:
            labels = self._rows_of_model(batch["labels"])
            target_positions = target_positions_of(labels, on_gpu)
            if len(target_positions) < targets_of(labels).numel():
                prepared["target_positions"] = target_positions

        if "position_ids" in batch:
            position_ids = batch["position_ids"]
            answers = batch["answers"]
            if not self.config.is_reward_model:
                position_ids = inputs_of(position_ids)
                answers = inputs_of(answers)
            prepared["documents"] = Documents.of(
                position_ids, on_gpu, answers if self.share_prompts else None
            )
        return prepared

    # --- the answers of a micro-batch

    def _answers(self, model: Any, batch: Batch) -> Answers:
        """Run the model on a micro-batch, and sort the results by pairs.

        A missing answer has no target tokens, and both answers of a pair that is padding are
        missing.
        """
        codes, numbers = self._targets(batch)
        is_target = codes >= 0
        if self.config.is_reward_model:
            logps = self._scores(model, batch, numbers, is_target)
        else:
            target_positions = batch.get("target_positions")
            nll = model.nll(
                input_ids=self._rows_of_model(batch["input_ids"]),
                labels=self._rows_of_model(batch["labels"]),
                position_ids=batch.get("position_ids"),
                documents=batch["documents"] if "position_ids" in batch else None,
                target_positions=target_positions,
                per_target=True,
            )
            numbers_of_nll = numbers
            if target_positions is not None:
                numbers_of_nll = numbers[target_positions.clamp(min=0)]
            logps = self._sum_by_answer(batch, numbers_of_nll, -nll)

        tokens = self._sum_by_answer(batch, numbers, is_target.long())
        is_undesirable_target = is_target & is_undesirable(codes)
        undesirable_tokens = self._sum_by_answer(batch, numbers, is_undesirable_target.long())
        reference = batch["reference"] if "reference" in batch else torch.zeros_like(logps)
        return Answers(
            logps=logps,
            tokens=tokens.to(logps.dtype),
            reference=reference.to(logps.dtype).view(-1, 2),
            desirable=undesirable_tokens[:, 0] == 0,
        )

    def _scores(self, model: Any, batch: Batch, numbers: Tensor, is_target: Tensor) -> Tensor:
        """Return the score of each answer, [pairs, 2]: the output of the head at its last token."""
        input_ids = self._rows_of_model(batch["input_ids"])
        arguments = own_arguments(
            model,
            input_ids,
            positions=batch.get("position_ids"),
            documents=batch["documents"] if "position_ids" in batch else None,
        )
        hidden = model.base_model(**arguments).last_hidden_state
        scores: Tensor = model.get_submodule("score")(hidden).view(-1)
        if scores.dtype != torch.float64:
            scores = scores.float()

        positions = torch.arange(len(scores), device=scores.device).view_as(input_ids)
        target_positions = targets_of(positions).flatten() * is_target
        last_positions = numbers.new_zeros(len(batch["labels"]) * self.answers_per_row)
        last_positions = last_positions.scatter_reduce(0, numbers, target_positions, reduce="amax")
        return scores[last_positions].view(-1, 2)

    def _targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the answers that the targets of a micro-batch belong to.

        Returns:
            The code of each target's answer, or -1 if the target does not count, and the number of
            that answer among the answers of all rows; both int64 [R * (T' - 1)].
        """
        labels = batch["labels"]
        # A memory plan has no answers: every token belongs to the first one.
        codes = batch["answers"] if "answers" in batch else torch.zeros_like(labels)
        codes = codes.masked_fill(labels == IGNORED, PADDING_CODE)

        first_numbers = self.answers_per_row * torch.arange(len(labels), device=labels.device)
        numbers = first_numbers[:, None] + answer_of(codes).clamp(min=0)
        return (
            targets_of(self._rows_of_model(codes)).flatten(),
            targets_of(self._rows_of_model(numbers)).flatten(),
        )

    def _target_tokens(self, batch: Batch) -> Tensor:
        """Return the number of target tokens of the answers of each pair, int64 [pairs, 2]."""
        codes, numbers = self._targets(batch)
        return self._sum_by_answer(batch, numbers, (codes >= 0).long())

    def _sum_by_answer(self, batch: Batch, numbers: Tensor, values: Tensor) -> Tensor:
        """Sum values of targets over each answer, [pairs, 2]."""
        sums = values.new_zeros(len(batch["labels"]) * self.answers_per_row)
        return sums.index_add(0, numbers, values).view(-1, 2)

    def _rows_of_model(self, column: Tensor) -> Tensor:
        """Return a column of tokens [B, T] in the rows that the model gets, [R, T']."""
        return column if self.is_packed else column.view(2 * len(column), -1)
