"""The objective of a run that compares answers: the mean loss per preference pair."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.models.answers import AnswerRows
from llmtrain.models.attention import ATTENTION_NAME
from llmtrain.models.causal_lm import CausalLM, own_arguments, sliding_window
from llmtrain.models.config import PreferenceConfig
from llmtrain.models.documents import Documents
from llmtrain.models.preference import Answers, losses
from llmtrain.models.probe import differ, example_tokens, output_for, trying
from llmtrain.types import Batch, LossSums, Objective, StepTotals


class _Pairs(NamedTuple):
    """The pairs of a micro-batch [P, 2]; padding has no target tokens."""

    values: Tensor  # log-probabilities in nats, or scores
    tokens: Tensor  # the number of target tokens
    reference: Tensor  # log-probabilities under the reference model
    is_undesirable: Tensor  # bool


class PreferenceObjective(Objective):
    """The mean loss per preference pair, or per unpaired answer.

    Args:
        config: which loss, and its parameters.
        rows: how answers lie in rows.
    """

    uses_prepass_in_eval = True

    def __init__(self, config: PreferenceConfig, rows: AnswerRows) -> None:
        self.config = config
        self.rows = rows
        # One log-probability for each answer of a row.
        self.reference_size = rows.answers_per_row if config.takes_reference else 0
        self.displacement = Displacement() if config.takes_reference else None

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        pairs = self._pairs(model, batch)
        is_pair = pairs.tokens[:, 0] > 0

        values = pairs.values
        if not self.rows.are_scored:
            # Formulas need numbers where there is no answer, too.
            values = values.where(pairs.tokens > 0, -1)
        answers = Answers(
            logps=values,
            tokens=pairs.tokens.clamp(min=1),
            reference=pairs.reference,
            desirable=~pairs.is_undesirable[:, 0],
        )
        baseline = extra.get("kl_baseline", values.new_zeros(()))
        pair_losses, rewards = losses(self.config, answers, baseline)
        return LossSums(
            loss=(pair_losses * is_pair).sum(),
            metrics=self._metric_sums(answers, is_pair, rewards, baseline),
        )

    def denominator(self, batch: Batch) -> Tensor:
        """Return the number of pairs in a micro-batch, an int64 scalar."""
        return self.rows.count_pairs(batch["labels"], batch["answers"])

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        """Compute the baseline of KTO: how far the model has moved from the reference.

        It is the mean log-ratio of the mismatched answers of the global batch, in nats per answer,
        and never negative.
        """
        if not self.config.alone:
            return {}
        total, answers = engine.sum_over_batches(self._log_ratio_of_mismatched, batches)
        return {"kl_baseline": (total / answers.clamp(min=1)).clamp(min=0)}

    def reference(self, model: Any, batch: Batch) -> Tensor:
        """Return the log-probabilities of the answers, float [B, answers_per_row]."""
        return self._pairs(model, batch).values.view(-1, self.rows.answers_per_row)

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        """Return means over the answers, by TRL's names; log-probabilities are in nats."""
        pairs = max(sums["pairs"], 1)
        means = {
            f"{quantity}/{side}": sums[f"{quantity}/{side}"] / max(sums[side], 1)
            for quantity, side in _MEANS
        }
        metrics = {
            "rewards/accuracies": sums["right"] / pairs,
            "rewards/margins": means["rewards/chosen"] - means["rewards/rejected"],
            **means,
        }
        if self.rows.are_scored:
            return {name: value for name, value in metrics.items() if name.startswith("rewards")}
        if "kl_baseline" in extra:
            return {"kl": float(extra["kl_baseline"]), **metrics}
        if self.config.takes_reference and not self.config.alone:
            metrics["kl"] = sums["moved"] / max(2 * sums["pairs"], 1)
        return metrics

    def eval_metrics(self, loss_sum: float, mean_loss: float, text_bytes: int) -> dict[str, float]:
        """Return nothing: the loss is no likelihood of a text."""
        return {}

    def notable_event(self, metrics: Mapping[str, float]) -> tuple[str, str] | None:
        """Notice, once, if chosen and rejected answers keep becoming less likely."""
        if self.displacement is None or "rewards/chosen" not in metrics:
            return None
        chosen = metrics["rewards/chosen"]
        rejected = metrics["rewards/rejected"]
        if not self.displacement.is_lasting(chosen, rejected):
            return None
        self.displacement = None
        text = (
            "chosen answers have become less likely than under the first weights, "
            "rejected ones still more: see docs/preference.md"
        )
        return "chosen", text

    def check(self, model: CausalLM) -> None:
        """Check that two answers which follow one prompt do not attend to each other.

        Raises:
            UserError: they do.
        """
        if not self.rows.share_prompts:
            return
        with trying(model):
            is_right = _computes_shared_prompts(model)
        if model.config._attn_implementation != ATTENTION_NAME or not is_right:
            raise UserError(
                f"{model.own_class.__name__} cannot share a prompt between two answers: "
                "use --no_share_prompts."
            )

    # --- log-probabilities and scores

    def _pairs(self, model: Any, batch: Batch) -> _Pairs:
        """Run the model on a micro-batch and sort the results by pairs."""
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
                model, batch, labels=labels, answers=answers, numbers=numbers
            )

        zeros = torch.zeros_like(values)
        is_undesirable = is_target & self.rows.is_undesirable(answers)
        tokens = zeros.index_add(0, numbers, is_target.to(values.dtype))
        undesirable_tokens = zeros.index_add(0, numbers, is_undesirable.to(values.dtype))
        reference = batch.get("reference")
        if reference is None:
            reference = zeros
        return _Pairs(
            values=values.view(-1, 2),
            tokens=tokens.view(-1, 2),
            reference=reference.to(values.dtype).view(-1, 2),
            is_undesirable=(undesirable_tokens > 0).view(-1, 2),
        )

    def _log_probabilities(
        self, model: Any, batch: Batch, labels: Tensor, answers: Tensor, numbers: Tensor
    ) -> Tensor:
        """Return the log-probability of each answer, [B * answers_per_row].

        Args:
            model: the model.
            batch: the micro-batch, whose rows are not unfolded.
            labels: unfolded [R, T].
            answers: unfolded [R, T].
            numbers: the answer of each target, int64 [R * (T - 1)].
        """
        position_ids = batch.get("position_ids")
        documents = batch.get("documents")
        if documents is None and position_ids is not None:
            documents = self.rows.documents(position_ids, answers)

        target_positions = batch.get("target_positions")
        nll = model.nll(
            input_ids=self.rows.unfold(batch["input_ids"]),
            labels=labels,
            position_ids=position_ids,
            documents=documents,
            target_positions=target_positions,
            per_target=True,
        )
        if target_positions is not None:
            numbers = numbers[target_positions.clamp(min=0)]
        log_probabilities: Tensor = nll.new_zeros(len(batch["labels"]) * self.rows.answers_per_row)
        return log_probabilities.index_add(0, numbers, -nll)

    def _scores(self, model: Any, batch: Batch, labels: Tensor, answers: Tensor) -> Tensor:
        """Return the score of each answer, read at its last token: [B * answers_per_row]."""
        position_ids = batch.get("position_ids")
        documents = batch.get("documents")
        if documents is None and position_ids is not None:
            documents = self.rows.documents(position_ids, answers)

        ids = self.rows.unfold(batch["input_ids"])
        arguments = own_arguments(model, ids, position_ids, documents)
        hidden = model.base_model(**arguments).last_hidden_state
        scores: Tensor = model.get_submodule("score")(hidden).view(-1)
        if scores.dtype != torch.float64:
            scores = scores.float()

        # Padded by one position, a token counts at its own place and not at that of its prediction.
        numbers, is_target = self.rows.answer_of_targets(
            F.pad(labels, (1, 0)), F.pad(answers, (1, 0))
        )
        positions = torch.arange(labels.numel(), device=labels.device)
        last_positions = positions.new_zeros(len(batch["labels"]) * self.rows.answers_per_row)
        last_positions = last_positions.scatter_reduce(0, numbers, positions * is_target, "amax")
        return scores[last_positions]

    def _log_ratio_of_mismatched(self, model: Any, batch: Batch) -> Tensor:
        """Return the sum of log-ratios of mismatched answers, and their number, float64 [2]."""
        pairs = self._pairs(model, batch)
        has_both = (pairs.tokens > 0).all(1)

        # MPS has no float64.
        wide = torch.float32 if pairs.values.device.type == "mps" else torch.float64
        log_ratios = ((pairs.values - pairs.reference)[:, 1] * has_both).to(wide)
        # Multiples of 2^-30 whose sum is below 2^23 nats add up exactly, in any order.
        log_ratios = (log_ratios * 2**30).round() / 2**30
        return torch.stack([log_ratios.sum(), has_both.sum().to(wide)])

    # --- metrics

    @torch.no_grad()
    def _metric_sums(
        self, answers: Answers, is_pair: Tensor, rewards: Tensor, baseline: Tensor
    ) -> dict[str, Tensor]:
        """Return the sums over a micro-batch from which :meth:`metrics` computes means."""
        logps = answers.logps
        if self.config.alone:
            chosen = is_pair & answers.desirable
            rejected = is_pair & ~answers.desirable
            is_above = rewards[:, 0] > self.config.beta * baseline
            is_right = is_above == answers.desirable
            rejected_answer = 0
        else:
            chosen = is_pair
            rejected = is_pair
            is_right = rewards[:, 0] > rewards[:, 1]
            rejected_answer = 1
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


_MEANS = (
    ("rewards", "chosen"),
    ("logps", "chosen"),
    ("rewards", "rejected"),
    ("logps", "rejected"),
)


class Displacement:
    """Notices when both answers become less likely than under the reference model.

    This is common under DPO, where the loss only asks that the rejected answers fall further.
    Rewards are noisy, so one log entry proves nothing. The rule: in each of the last five entries
    the rejected answers have a lower mean reward than the chosen ones, whose own is below zero; and
    over these entries the chosen answers' reward is below -0.05 on average.
    """

    ENTRIES = 5
    MARGIN = 0.05

    def __init__(self) -> None:
        # Rewards of consecutive log entries in which both answers have fallen.
        self.chosen: deque[float] = deque(maxlen=self.ENTRIES)

    def is_lasting(self, chosen: float, rejected: float) -> bool:
        """Take the mean rewards of one log entry; return whether the rule holds now."""
        if not rejected < chosen < 0:
            self.chosen.clear()
            return False
        self.chosen.append(chosen)
        is_full = len(self.chosen) == self.ENTRIES
        return is_full and statistics.fmean(self.chosen) < -self.MARGIN


def _computes_shared_prompts(model: CausalLM) -> bool:
    """Return whether two answers in one row with their prompt have the outputs of two rows."""
    window = sliding_window(model) or 0
    prompt = min(model.row_length, window + 8) - 5
    ids = example_tokens(model, 1, prompt + 8)[0]
    first = ids[: prompt + 4]
    second = torch.cat([ids[:prompt], ids[prompt + 4 :]])

    row = torch.cat([first, second[prompt - 1 :]])[None]
    positions = torch.cat([torch.arange(prompt + 4), torch.arange(prompt - 1, prompt + 4)])[None]
    answers = (torch.arange(row.shape[1]) >= prompt + 4).long()[None]
    documents = Documents.of(positions, row.is_cuda, answers).to(row.device)
    arguments = own_arguments(model, row, positions.to(row.device), documents)
    together = output_for(model, arguments)[0]

    apart = []
    for answer in (first, second):
        output = output_for(model, own_arguments(model, answer[None], None, None))
        apart.append(output[0, prompt - 1 :])
    return not differ(together[prompt - 1 :], torch.cat(apart))
