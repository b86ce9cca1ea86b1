"""Formulas of the losses that compare answers.

The log-probability of an answer is the sum over its target tokens. The formulas are TRL's
(docs/guides/preferences.md lists the differences), and those of these papers:

- ``sigmoid``: DPO, Rafailov et al. 2023, arXiv:2305.18290. With label smoothing, conservative DPO
  (Mitchell 2023).
- ``robust``: Chowdhury et al. 2024, arXiv:2403.00409.
- ``ipo``: Azar et al. 2023, arXiv:2310.12036. It uses the mean over an answer's tokens, as its
  authors meant it.
- ``kto``: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8.
- ``orpo``: Hong et al. 2024, arXiv:2403.07691.
- ``simpo``: Meng et al. 2024, arXiv:2405.14734.
- ``reward``: Bradley and Terry 1952, as in Ouyang et al. 2022, arXiv:2203.02155.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.models.config import PreferenceConfig


class Answers(NamedTuple):
    """The two answers of preference pairs: chosen and rejected.

    An unpaired answer is the first one.

    Attributes:
        logps: log-probabilities in nats, or scores of a reward model; [..., 2].
        tokens: the number of target tokens; [..., 2].
        reference: log-probabilities under the reference model; [..., 2].
        desirable: whether the first answer is desirable; bool [...].
    """

    logps: Tensor
    tokens: Tensor
    reference: Tensor
    desirable: Tensor


def losses(config: PreferenceConfig, answers: Answers, baseline: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of pairs, and the rewards of their answers.

    Args:
        config: which loss, and its parameters.
        answers: the answers of the pairs.
        baseline: how far the model has moved from the reference model, in nats per answer. Only
            ``kto`` uses it.

    Returns:
        The loss of each pair [...], and the reward of each answer [..., 2].
    """
    beta = config.beta
    mean_logps = answers.logps / answers.tokens
    log_ratios = answers.logps - answers.reference

    match config.loss_type:
        case "reward":
            rewards = answers.logps
        case "orpo" | "simpo":
            rewards = beta * mean_logps
        case _:
            rewards = beta * log_ratios
    margin = rewards[..., 0] - rewards[..., 1]

    match config.loss_type:
        case "ipo":
            mean_ratios = log_ratios / answers.tokens
            distance = mean_ratios[..., 0] - mean_ratios[..., 1] - 1 / (2 * beta)
            return distance**2, rewards
        case "kto":
            above = rewards[..., 0] - beta * baseline
            loss_if_desirable = config.desirable_weight * (1 - torch.sigmoid(above))
            loss_if_undesirable = config.undesirable_weight * (1 - torch.sigmoid(-above))
            loss = torch.where(answers.desirable, loss_if_desirable, loss_if_undesirable)
            return loss, rewards
        case "orpo":
            log_odds = mean_logps - _log1mexp(mean_logps)
            log_odds_ratio = log_odds[..., 0] - log_odds[..., 1]
            return -mean_logps[..., 0] - beta * F.logsigmoid(log_odds_ratio), rewards
        case "simpo":
            margin = margin - config.simpo_gamma

    smoothing = config.label_smoothing
    loss_if_right = -F.logsigmoid(margin)
    loss_if_swapped = -F.logsigmoid(-margin)
    if config.loss_type == "robust":
        unbiased = (1 - smoothing) * loss_if_right - smoothing * loss_if_swapped
        return unbiased / (1 - 2 * smoothing), rewards
    return (1 - smoothing) * loss_if_right + smoothing * loss_if_swapped, rewards


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of negative numbers, accurate both near zero and far from it.

    This is equation 7 of Mächler 2012, "Accurately computing log(1 - exp(-|a|))". Numbers that
    rounding has made zero or positive are replaced by the largest negative number.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near_zero = x > -math.log(2)

    # Both branches are computed everywhere. A branch that is not used gets -1, because NaN in it
    # would also become NaN in the gradient.
    near_zero = torch.log(-torch.expm1(x.where(is_near_zero, -1)))
    far_from_zero = torch.log1p(-torch.exp(x.where(~is_near_zero, -1)))
    return torch.where(is_near_zero, near_zero, far_from_zero)
