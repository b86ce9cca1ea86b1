"""The objective of a run that compares answers: the mean loss per preference pair."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import LossSums, Objective, StepTotals
from llmtrain.interfaces.part import as_json, public_fields
from llmtrain.json_types import JsonObject
from llmtrain.models.answers import AnswerRows
from llmtrain.models.causal_lm import CausalLM, own_arguments
from llmtrain.models.documents import Documents
from llmtrain.models.preference import Answers
from llmtrain.models.preference_config import PreferenceConfig
from llmtrain.models.probe import shares_prompts


class PreferenceObjective(Objective):
    """The mean loss per preference pair, or per unpaired answer.

    Args:
        config: which loss, and its parameters.
        rows: where the answers are in rows of tokens.
    """

    uses_prepass_in_eval = True

    def __init__(self, config: PreferenceConfig, rows: AnswerRows) -> None:
        self.config = config
        self.rows = rows
        # One log-probability for each answer of a row.
        self.reference_size = rows.answers_per_row if config.uses_reference else 0

    @property
    def fingerprint(self) -> JsonObject | None:
        formulas = [loss.formula for loss in self.config.selected_losses]
        return {
            "class": type(self).__name__,
            **public_fields(self),
            "formulas": as_json(formulas),
        }

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        answers = self._answers(model, batch)
        is_pair = answers.tokens[:, 0] > 0

        # The formulas need numbers for a missing answer, too.
        if not self.rows.are_scored:
            answers = answers._replace(logps=answers.logps.where(answers.tokens > 0, -1))
        answers = answers._replace(tokens=answers.tokens.clamp(min=1), **extra)

        weighted_losses = [
            weight * loss.formula(answers, self.config)
            for weight, loss in zip(self.config.weights, self.config.selected_losses, strict=True)
        ]
        pair_losses = torch.stack(weighted_losses).sum(0)
        rewards = self.config.selected_losses[0].rewards(answers, self.config)
        return LossSums(
            loss=(pair_losses * is_pair).sum(),
            metrics=self._metric_sums(
                answers,
                is_pair=is_pair,
                rewards=rewards,
            ),
        )

    def denominator(self, batch: Batch) -> Tensor:
        """Return the number of pairs in a micro-batch, an int64 scalar."""
        return self.rows.count_pairs(batch["labels"], batch["answers"])

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        """Compute the attributes of :class:`Answers` of the global batch that the loss needs."""
        if self.config.needs_statistic("kl_baseline"):
            return {"kl_baseline": self._kl_baseline(engine, batches)}

        if self.config.needs_statistic("mean_chosen_tokens"):
            counts = [
                self.rows.count_chosen_tokens(batch["labels"], batch["answers"])
                for batch in batches
            ]
            chosen_tokens = engine.ranks.sum_over_ranks(torch.stack(counts).sum())
            return {"mean_chosen_tokens": _ratio(chosen_tokens, totals.denominator)}
        return {}

    def reference(self, model: Any, batch: Batch) -> Tensor:
        """Return the log-probabilities of the answers, float [B, answers_per_row]."""
        return self._answers(model, batch).logps.view(-1, self.rows.answers_per_row)

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        """Return means over the answers, by TRL's names. Log-probabilities are in nats.

        Unpaired answers have no ``rewards/accuracies``, because it compares two answers.
        """
        means = {
            f"{quantity}/{side}": sums[f"{quantity}/{side}"] / max(sums[side], 1)
            for quantity, side in _MEANS
        }
        margin = means["rewards/chosen"] - means["rewards/rejected"]
        metrics = {"rewards/margins": margin, **means}
        if not self.config.is_unpaired:
            accuracy = sums["right"] / max(sums["pairs"], 1)
            metrics = {"rewards/accuracies": accuracy, **metrics}
        if self.rows.are_scored:
            return {name: value for name, value in metrics.items() if name.startswith("rewards")}
        if "kl_baseline" in extra:
            return {"kl": float(extra["kl_baseline"]), **metrics}
        if self.config.uses_reference and not self.config.is_unpaired:
            metrics["kl"] = sums["moved"] / max(2 * sums["pairs"], 1)
        return metrics

    def eval_metrics(self, loss_sum: float, mean_loss: float, text_bytes: int) -> dict[str, float]:
        """Return no metrics, because the loss is not the likelihood of a text."""
        return {}

    def check(self, model: CausalLM) -> None:
        """Check that two answers which share a prompt do not attend to each other.

        Raises:
            UserError: if they do. The model then needs rows in which each answer has its own
                prompt.
        """
        if not self.rows.share_prompts:
            return
        if not shares_prompts(model):
            raise UserError(
                f"{model.own_class.__name__} cannot share a prompt between two answers: "
                "use --no_share_prompts."
            )

    # --- log-probabilities and scores

    def _answers(self, model: Any, batch: Batch) -> Answers:
        """Run the model on a micro-batch, and sort the results by pairs.

        A missing answer has no target tokens, and both answers of a pair that is padding are
        missing.
        """
        labels = self.rows.unfold(batch["labels"])
        answers = batch.get("answers")
        if answers is None:  # a memory plan has none: every token belongs to the first answer
            answers = torch.zeros_like(batch["labels"])
        answers = self.rows.unfold(answers)
        numbers, is_target = self.rows.answer_of_targets(labels, answers)
        if self.rows.are_scored:
            values = self._scores(model, batch, labels=labels, answers=answers)
        else:
            values = self._log_probabilities(
                model,
                batch,
                labels=labels,
                answers=answers,
                numbers=numbers,
            )

        zeros = torch.zeros_like(values)
        is_undesirable = is_target & self.rows.is_undesirable(answers)
        tokens = zeros.index_add(0, numbers, is_target.to(values.dtype))
        undesirable_tokens = zeros.index_add(0, numbers, is_undesirable.to(values.dtype))
        reference = batch.get("reference")
        if reference is None:
            reference = zeros
        return Answers(
            logps=values.view(-1, 2),
            tokens=tokens.view(-1, 2),
            reference=reference.to(values.dtype).view(-1, 2),
            desirable=undesirable_tokens.view(-1, 2)[:, 0] == 0,
        )

    def _documents(self, batch: Batch, answers: Tensor) -> Documents | None:
        """Return the documents of a micro-batch, if its rows are packed.

        Args:
            batch: the micro-batch. ``prepare_batch`` may have found them on the host.
            answers: unfolded [R, T].
        """
        documents: Documents | None = batch.get("documents")
        position_ids = batch.get("position_ids")
        if documents is None and position_ids is not None:
            return self.rows.documents(position_ids, answers)
        return documents

    def _log_probabilities(
        self,
        model: Any,
        batch: Batch,
        *,
        labels: Tensor,
        answers: Tensor,
        numbers: Tensor,
    ) -> Tensor:
        """Return the log-probability of each answer, [B * answers_per_row].

        Args:
            model: the model.
            batch: the micro-batch, whose rows are not unfolded.
            labels: unfolded [R, T].
            answers: unfolded [R, T].
            numbers: the answer that each target belongs to, int64 [R * (T - 1)].
        """
        target_positions = batch.get("target_positions")
        nll = model.nll(
            input_ids=self.rows.unfold(batch["input_ids"]),
            labels=labels,
            position_ids=batch.get("position_ids"),
            documents=self._documents(batch, answers),
            target_positions=target_positions,
            per_target=True,
        )
        if target_positions is not None:
            numbers = numbers[target_positions.clamp(min=0)]
        log_probabilities: Tensor = nll.new_zeros(len(batch["labels"]) * self.rows.answers_per_row)
        return log_probabilities.index_add(0, numbers, -nll)

    def _scores(self, model: Any, batch: Batch, *, labels: Tensor, answers: Tensor) -> Tensor:
        """Return the score of each answer, [B * answers_per_row].

        The score of an answer is the output of the head at its last token.

        Args:
            model: the model.
            batch: the micro-batch, whose rows are not unfolded.
            labels: unfolded [R, T].
            answers: unfolded [R, T].
        """
        arguments = own_arguments(
            model,
            self.rows.unfold(batch["input_ids"]),
            positions=batch.get("position_ids"),
            documents=self._documents(batch, answers),
        )
        hidden = model.base_model(**arguments).last_hidden_state
        scores: Tensor = model.get_submodule("score")(hidden).view(-1)
        if scores.dtype != torch.float64:
            scores = scores.float()

        # A target counts at the position before its token. Padding by one position undoes that.
        numbers, is_target = self.rows.answer_of_targets(
            F.pad(labels, (1, 0)), F.pad(answers, (1, 0))
        )
        positions = torch.arange(labels.numel(), device=labels.device)
        last_positions = positions.new_zeros(len(batch["labels"]) * self.rows.answers_per_row)
        last_positions = last_positions.scatter_reduce(
            0,
            numbers,
            positions * is_target,
            reduce="amax",
        )
        return scores[last_positions]

    # --- numbers of the global batch

    def _kl_baseline(self, engine: Any, batches: Iterable[Batch]) -> Tensor:
        """Return the baseline of KTO: how far the model has moved from the reference model.

        It is the mean log-ratio of the mismatched answers of the global batch, in nats per answer.
        If the mean is negative, the baseline is 0.
        """
        total, answers = engine.sum_over_batches(self._log_ratio_of_mismatched, batches)
        mean_log_ratio: Tensor = total / answers.clamp(min=1)
        return mean_log_ratio.clamp(min=0)

    def _log_ratio_of_mismatched(self, model: Any, batch: Batch) -> Tensor:
        """Return the sum of log-ratios of mismatched answers, and their number, float64 [2]."""
        answers = self._answers(model, batch)
        has_both = (answers.tokens > 0).all(1)

        wide = _widest_dtype(answers.logps.device)
        log_ratios = ((answers.logps - answers.reference)[:, 1] * has_both).to(wide)
        # Multiples of 2^-30 whose sum is below 2^23 nats add up exactly, in any order.
        log_ratios = (log_ratios * 2**30).round() / 2**30
        return torch.stack([log_ratios.sum(), has_both.sum().to(wide)])

    # --- metrics

    @torch.no_grad()
    def _metric_sums(
        self, answers: Answers, *, is_pair: Tensor, rewards: Tensor
    ) -> dict[str, Tensor]:
        """Return the sums over a micro-batch from which :meth:`metrics` computes means.

        Args:
            answers: of the pairs, [P, 2].
            is_pair: whether a pair is not padding, bool [P].
            rewards: of the answers, [P, 2].
        """
        logps = answers.logps
        if self.config.is_unpaired:
            chosen = is_pair & answers.desirable
            rejected = is_pair & ~answers.desirable
            rejected_answer = 0
        else:
            chosen = is_pair
            rejected = is_pair
            rejected_answer = 1
        is_right = rewards[:, 0] > rewards[:, 1]
        moved = (answers.reference - logps).sum(1)

        sums = {
            "right": is_right * is_pair,
            "pairs": is_pair * is_pair,
            "chosen": chosen * chosen,
            "rejected": rejected * rejected,
            "moved": moved * is_pair,
            "rewards/chosen": rewards[:, 0] * chosen,
            "logps/chosen": logps[:, 0] * chosen,
            "rewards/rejected": rewards[:, rejected_answer] * rejected,
            "logps/rejected": logps[:, rejected_answer] * rejected,
        }
        return {name: values.sum().float() for name, values in sums.items()}


def _ratio(count: Tensor, denominator: Tensor) -> Tensor:
    return count.to(_widest_dtype(count.device)) / denominator.clamp(min=1)


def _widest_dtype(device: torch.device) -> torch.dtype:
    """Return the most precise type of floating-point numbers that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


_MEANS = (
    ("rewards", "chosen"),
    ("logps", "chosen"),
    ("rewards", "rejected"),
    ("logps", "rejected"),
)
