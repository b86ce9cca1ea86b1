"""The objective of distillation: a divergence between a student and a teacher, per target token.

The teacher's distributions come from one of three sources. A teacher in memory gives all of its
logits. Rows that :mod:`llmtrain.training.teacher_scorer` has scored have its k largest
log-probabilities. Rows that the student has generated have one number per token.

Below, p is the teacher's distribution of a token and q is the student's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from llmtrain.interfaces.batches import IGNORED, Batch, target_weights
from llmtrain.interfaces.objective import LossSums, Objective
from llmtrain.models.distillation import DistillConfig
from llmtrain.models.loss import targets_of

# Columns [B, T] or [B, T, k] of rows, whose value t belongs to label t.
SCORED_COLUMNS: tuple[str, ...] = ("teacher_ids", "teacher_logps", "teacher_rest", "teacher_logp")
SAMPLED_COLUMNS: tuple[str, ...] = ("student_logp", "teacher_logp")
# Below this, a log-probability counts as this. A model may mask logits with -inf.
LEAST_LOGP = -1e4


class Targets:
    """What the student's logits are compared with, for N target positions.

    Args:
        columns: tensors [N, ...] by name.
        teacher_logits: makes the teacher's logits [n, V] of its numbers in the column ``teacher``.
    """

    def __init__(
        self,
        columns: Mapping[str, Tensor],
        teacher_logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.columns = columns
        self.teacher_logits = teacher_logits

    def __getitem__(self, part: slice) -> "Targets":
        columns = {name: column[part] for name, column in self.columns.items()}
        if self.teacher_logits is not None:
            columns["teacher"] = self.teacher_logits(columns["teacher"])
        return Targets(columns)

    def of_labels(self, values: Tensor) -> Tensor:
        """Return the value of each label, [N], given those of all tokens, [N, V]."""
        ids = self.columns["labels"].clamp(min=0)
        return values.gather(1, ids[:, None])[:, 0]


class DistillationObjective(Objective):
    """(1 - S) x divergence + S x nll of the target, as a mean over the target tokens.

    If the rows have a column ``loss_weight``, each target token counts with its weight.

    Args:
        config: the divergence, and the share S of the nll.
        source: whether the teacher's distributions come from a ``teacher`` in memory, from scored
            ``rows``, or from ``samples`` of the student. An evaluation of the latter runs the
            teacher on the eval rows.
    """

    def __init__(
        self, config: DistillConfig, source: Literal["teacher", "rows", "samples"]
    ) -> None:
        self.source = source
        self.beta = 1.0 if source == "samples" else config.beta
        self.temperature = config.temperature
        self.sft_share = config.sft_share

    def frozen_inputs(self, engine: Any, batch: Batch) -> Batch:
        is_needed = self.source == "teacher" or not engine.model.training
        if self.source == "rows" or not is_needed:
            return {}
        deferred = engine.frozen(
            "teacher", lambda model, batch: model.deferred_logits(**batch), batch
        )
        return {"teacher": deferred}

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        values_of = self._values_of_rows
        columns = SCORED_COLUMNS
        last_metric = "teacher_nll"
        if "teacher" in batch:
            values_of = self._values_of_teacher
            columns = ()
        elif self.source == "samples":
            values_of = self._values_of_samples
            columns = SAMPLED_COLUMNS
            last_metric = "kl_to_sampler"
        targets = self._targets(batch, columns)

        values = model.sum_over_logits(values_of, targets, **batch)
        loss, divergence, nll, last = values.unbind()
        metrics = {
            "divergence": divergence,
            "nll": nll,
            last_metric: last,
            "weight": targets.columns["weight"].sum(),
        }
        return LossSums(loss, metrics)

    def _targets(self, batch: Batch, names: Sequence[str]) -> Targets:
        """Return what the student's logits are compared with.

        Args:
            batch: a micro-batch.
            names: its columns with scores.
        """
        labels = targets_of(batch["labels"])
        columns = {"labels": labels, "weight": (labels != IGNORED).float()}
        if "loss_weight" in batch:
            columns["weight"] = target_weights(batch)
        for name in names:
            columns[name] = targets_of(batch[name])

        columns = {name: column.flatten(0, 1) for name, column in columns.items()}
        positions = batch.get("target_positions")
        if positions is not None:
            for name, column in columns.items():
                columns[name] = column.index_select(0, positions.clamp(min=0))
            columns["weight"] = columns["weight"].masked_fill(positions < 0, 0)
        if "teacher" not in batch:
            return Targets(columns)
        columns["teacher"], teacher_logits = batch["teacher"]
        return Targets(columns, teacher_logits)

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        """Return means over the target tokens, in nats.

        ``divergence`` is without the nll; ``nll`` and ``teacher_nll`` are those of the two models.
        ``kl_to_sampler`` is the estimated KL divergence from the student that has generated the
        answers to the student that learns from them.
        """
        weight = sums["weight"] or 1
        return {name: value / weight for name, value in sums.items() if name != "weight"}

    def eval_metrics(self, loss_sum: float, mean_loss: float, text_bytes: int) -> dict[str, float]:
        """Return no metrics, because the loss is not the likelihood of a text."""
        return {}

    # --- values of target tokens [n, 4], given the student's logits [n, V]
    #
    # They are the loss, the divergence, the nll and a further metric.

    def _values_of_teacher(self, logits: Tensor, targets: Targets) -> Tensor:
        teacher_logits = targets.columns["teacher"].to(logits.dtype)
        vocabulary = min(logits.shape[1], teacher_logits.shape[1])
        logits = logits[:, :vocabulary]
        teacher_logits = teacher_logits[:, :vocabulary]

        log_p = log_probabilities(teacher_logits / self.temperature)
        log_q = log_probabilities(logits / self.temperature)
        divergence = generalized_jsd(log_p, log_q, self.beta)
        teacher_logp = targets.of_labels(log_probabilities(teacher_logits))
        return self._weighted_values(logits, targets, divergence, teacher_logp)

    def _values_of_rows(self, logits: Tensor, targets: Targets) -> Tensor:
        columns = targets.columns
        log_p, log_q = top_k_outcomes(
            logits / self.temperature,
            columns["teacher_ids"],
            columns["teacher_logps"].to(logits.dtype),
            columns["teacher_rest"].to(logits.dtype),
        )
        divergence = generalized_jsd(log_p, log_q, beta=0.0)
        return self._weighted_values(logits, targets, divergence, columns["teacher_logp"])

    def _weighted_values(
        self, logits: Tensor, targets: Targets, divergence: Tensor, teacher_logp: Tensor
    ) -> Tensor:
        nll = -targets.of_labels(log_probabilities(logits))
        loss = (1 - self.sft_share) * divergence + self.sft_share * nll
        values = torch.stack([loss, divergence, nll, -teacher_logp.to(nll.dtype)], dim=1)
        return values * targets.columns["weight"].to(values.dtype)[:, None]

    def _values_of_samples(self, logits: Tensor, targets: Targets) -> Tensor:
        """Return the values of tokens that a student has sampled.

        The loss is that of Lu, "On-Policy Distillation" (Thinking Machines Lab, 2025): a policy
        gradient with importance sampling, in which the advantage of a token is minus the reverse KL
        at this token alone. While the student has not changed, its gradient is an unbiased
        estimate of that of the reverse KL of the next token.
        """
        columns = targets.columns
        logp = targets.of_labels(log_probabilities(logits))
        sampler_logp = columns["student_logp"].to(logp.dtype)

        reverse_kl = sampler_logp - columns["teacher_logp"].to(logp.dtype)
        loss = (logp - sampler_logp).exp() * reverse_kl
        values = torch.stack([loss, reverse_kl, -logp, sampler_logp - logp], dim=1)
        return values * columns["weight"].to(values.dtype)[:, None]


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-probabilities of logits [n, V]."""
    return logits.log_softmax(1).clamp(min=LEAST_LOGP)


def generalized_jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return the divergence of Agarwal et al. 2023, arXiv:2306.13649, section 2, for each row.

    It is KL(p || q) if ``beta`` is 0, KL(q || p) if it is 1, and otherwise
    beta x KL(p || m) + (1 - beta) x KL(q || m) for the mixture m = beta x p + (1 - beta) x q.

    Args:
        log_p: log-probabilities of the teacher, [n, V].
        log_q: those of the student, [n, V].
        beta: from 0 to 1.
    """

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(1)

    if beta == 0:
        return kl(log_p, log_q)
    if beta == 1:
        return kl(log_q, log_p)
    mixture = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)


def top_k_outcomes(
    logits: Tensor, teacher_ids: Tensor, teacher_logps: Tensor, teacher_rest: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [n, k + 1] of both models: of k tokens, and of all others together.

    The divergence of fewer outcomes is a lower bound of that of all tokens.

    Args:
        logits: of the student, [n, V].
        teacher_ids: the k likeliest tokens of the teacher, [n, k].
        teacher_logps: their log-probabilities, [n, k].
        teacher_rest: the log of the probability of all others, [n].
    """
    # They are stored with less precision, so their sum is not quite 1.
    log_p = log_probabilities(torch.cat([teacher_logps, teacher_rest[:, None]], dim=1))

    log_q = log_probabilities(logits)
    least = torch.finfo(logits.dtype).min  # -inf would have no gradient if k is the vocabulary
    others = log_q.scatter(1, teacher_ids, least)
    log_rest = others.logsumexp(1, keepdim=True).clamp(min=LEAST_LOGP)
    return log_p, torch.cat([log_q.gather(1, teacher_ids), log_rest], dim=1)
