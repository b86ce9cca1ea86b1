"""Formulas of the losses that compare answers.

The log-probability of an answer is the sum over its target tokens. The formulas are TRL's
(docs/preference.md says where they differ), and those of these papers:

- ``sigmoid``: DPO, Rafailov et al. 2023, arXiv:2305.18290; smoothed, conservative DPO (Mitchell 2023).
- ``robust``: Chowdhury et al. 2024, arXiv:2403.00409.
- ``ipo``: Azar et al. 2023, arXiv:2310.12036, of the mean over an answer's tokens, as its authors meant it.
- ``kto``: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8.
- ``orpo``: Hong et al. 2024, arXiv:2403.07691. ``simpo``: Meng et al. 2024, arXiv:2405.14734.
- ``reward``: Bradley and Terry 1952, as in Ouyang et al. 2022, arXiv:2203.02155.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.models.config import PreferenceConfig


class Answers(NamedTuple):
    """The two answers of pairs [..., 2]: chosen and rejected. An unpaired answer is the first."""

    logps: Tensor  # log-probabilities in nats, or scores
    tokens: Tensor  # the number of target tokens
    reference: Tensor  # log-probabilities under the reference model
    desirable: Tensor  # bool [...]: whether the first answer is desirable


def losses(config: PreferenceConfig, answers: Answers, baseline: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair [...] and the rewards of its answers [..., 2].

    Args:
        baseline: how far the model has moved from the reference, in nats an answer. Only ``kto``
            compares with it.
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

    It is equation 7 of Mächler 2012, "Accurately computing log(1 - exp(-|a|))". Numbers that
    rounding has brought to zero, or above, count as the largest negative number.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near_zero = x > -math.log(2)

    # The branch that is not taken gets -1: NaN there would become NaN in the gradient of both.
    near_zero = torch.log(-torch.expm1(x.where(is_near_zero, -1)))
    far_from_zero = torch.log1p(-torch.exp(x.where(~is_near_zero, -1)))
    return torch.where(is_near_zero, near_zero, far_from_zero)
