"""The losses that compare answers: a function for each, and the table of them.

The log-probability of an answer is the sum over its target tokens. Most formulas are TRL's;
docs/guides/preferences.md lists the differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmtrain.models.preference import Answers, LossParameters, PreferenceLoss, implicit_rewards

if TYPE_CHECKING:
    from torch import Tensor

# --- rewards, which the metrics show, and most losses use


def mean_rewards(answers: Answers, config: LossParameters) -> Tensor:
    """Return beta times the mean log-probability of each answer, without a reference."""
    return config.beta * answers.mean_logps


def scores(answers: Answers, config: LossParameters) -> Tensor:
    """Return the score that a reward model gives each answer."""
    return answers.logps


# --- losses of pairs


def sigmoid(answers: Answers, config: LossParameters) -> Tensor:
    """DPO: Rafailov et al. 2023, arXiv:2305.18290.

    With label smoothing, it is conservative DPO (Mitchell 2023).
    """
    return _smoothed(_difference(implicit_rewards(answers, config)), config)


def sigmoid_norm(answers: Answers, config: LossParameters) -> Tensor:
    """DPO with log-ratios per token: Lambert et al. 2024, arXiv:2411.15124, section 5.1."""
    return -_log_sigmoid(config.beta * _difference(answers.log_ratios / answers.tokens))


def robust(answers: Answers, config: LossParameters) -> Tensor:
    """DPO for noisy labels, without bias: Chowdhury et al. 2024, arXiv:2403.00409."""
    margin = _difference(implicit_rewards(answers, config))
    smoothing = config.label_smoothing
    loss_if_right = -_log_sigmoid(margin)
    loss_if_swapped = -_log_sigmoid(-margin)
    unbiased = (1 - smoothing) * loss_if_right - smoothing * loss_if_swapped
    return unbiased / (1 - 2 * smoothing)


def hinge(answers: Answers, config: LossParameters) -> Tensor:
    """Hinge loss: SLiC, Zhao et al. 2023, arXiv:2305.10425, with the margin of DPO.

    Liu et al. 2023, arXiv:2309.06657, compare it with DPO.
    """
    return (1 - _difference(implicit_rewards(answers, config))).relu()


def ipo(answers: Answers, config: LossParameters) -> Tensor:
    """IPO: Azar et al. 2023, arXiv:2310.12036.

    It uses the mean over an answer's tokens, as its authors meant it.
    """
    mean_ratios = answers.log_ratios / answers.tokens
    distance = mean_ratios[..., 0] - mean_ratios[..., 1] - 1 / (2 * config.beta)
    return distance**2


def apo_zero(answers: Answers, config: LossParameters) -> Tensor:
    """APO-zero: D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7.

    Chosen answers become likelier, and rejected ones less likely. It is meant for chosen answers
    that are better than the model's own.
    """
    rewards = implicit_rewards(answers, config)
    return 1 - rewards[..., 0].sigmoid() + rewards[..., 1].sigmoid()


def apo_down(answers: Answers, config: LossParameters) -> Tensor:
    """APO-down: D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8.

    Both answers become less likely, the rejected one more so. It is meant for chosen answers that
    are worse than the model's own.
    """
    rewards = implicit_rewards(answers, config)
    return rewards[..., 0].sigmoid() + 1 - _difference(rewards).sigmoid()


def sft(answers: Answers, config: LossParameters) -> Tensor:
    """Fine-tuning on the chosen answers, the third term of MPO: Wang et al. 2024, arXiv:2411.10442.

    Its mean over the pairs of the global batch is the mean negative log-likelihood of a target
    token of the chosen answers.
    """
    return -answers.logps[..., 0] / answers.mean_chosen_tokens


def orpo(answers: Answers, config: LossParameters) -> Tensor:
    """ORPO: Hong et al. 2024, arXiv:2403.07691."""
    mean_logps = answers.mean_logps
    log_odds_ratio = _difference(mean_logps - _log1mexp(mean_logps))
    return -mean_logps[..., 0] - config.beta * _log_sigmoid(log_odds_ratio)


def simpo(answers: Answers, config: LossParameters) -> Tensor:
    """SimPO: Meng et al. 2024, arXiv:2405.14734."""
    margin = _difference(mean_rewards(answers, config)) - config.simpo_gamma
    return _smoothed(margin, config)


def reward(answers: Answers, config: LossParameters) -> Tensor:
    """Bradley and Terry 1952, as in Ouyang et al. 2022, arXiv:2203.02155."""
    return -_log_sigmoid(_difference(scores(answers, config)))


# --- losses of unpaired answers


def kto(answers: Answers, config: LossParameters) -> Tensor:
    """KTO: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8."""
    rewards = implicit_rewards(answers, config)
    above = rewards[..., 0] - config.beta * answers.kl_baseline
    return _of_labels(above, answers, config)


def apo_zero_unpaired(answers: Answers, config: LossParameters) -> Tensor:
    """APO-zero of single answers: D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7."""
    return _of_labels(implicit_rewards(answers, config)[..., 0], answers, config)


# --- parts of formulas


def _difference(values: Tensor) -> Tensor:
    """Return the values of chosen answers minus those of rejected ones."""
    return values[..., 0] - values[..., 1]


def _smoothed(margin: Tensor, config: LossParameters) -> Tensor:
    """Return the logistic loss of a margin, with label smoothing."""
    smoothing = config.label_smoothing
    loss_if_right = -_log_sigmoid(margin)
    loss_if_swapped = -_log_sigmoid(-margin)
    return (1 - smoothing) * loss_if_right + smoothing * loss_if_swapped


def _of_labels(reward: Tensor, answers: Answers, config: LossParameters) -> Tensor:
    """Return how far rewards are on the wrong side of 0, weighted by the label of the answer."""
    loss_if_desirable = config.desirable_weight * (1 - reward.sigmoid())
    loss_if_undesirable = config.undesirable_weight * (1 - (-reward).sigmoid())
    return loss_if_desirable.where(answers.desirable, loss_if_undesirable)


def _log_sigmoid(x: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.logsigmoid(x)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of negative numbers, accurate both near zero and far from it.

    This is equation 7 of Mächler 2012, "Accurately computing log(1 - exp(-|a|))". Numbers that
    rounding has made zero or positive are replaced by the largest negative number.
    """
    import torch

    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near_zero = x > -math.log(2)

    # Both branches are computed everywhere. A branch that is not used gets -1, because NaN in it
    # would also become NaN in the gradient.
    near_zero = torch.log(-torch.expm1(x.where(is_near_zero, -1)))
    far_from_zero = torch.log1p(-torch.exp(x.where(~is_near_zero, -1)))
    return torch.where(is_near_zero, near_zero, far_from_zero)


# --- the table

_SMOOTHED = ("label_smoothing",)
_WEIGHTED = ("desirable_weight", "undesirable_weight")

PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = MappingProxyType(
    {
        "sigmoid": PreferenceLoss(sigmoid, "DPO", parameters=_SMOOTHED),
        "sigmoid_norm": PreferenceLoss(sigmoid_norm, "length-normalized DPO"),
        "robust": PreferenceLoss(robust, "robust DPO", parameters=_SMOOTHED),
        "hinge": PreferenceLoss(hinge, "hinge loss"),
        "ipo": PreferenceLoss(ipo, "IPO"),
        "apo_zero": PreferenceLoss(apo_zero, "APO-zero"),
        "apo_down": PreferenceLoss(apo_down, "APO-down"),
        "sft": PreferenceLoss(
            sft,
            "SFT",
            rewards=mean_rewards,
            statistics=("mean_chosen_tokens",),
            uses_reference=False,
        ),
        "orpo": PreferenceLoss(orpo, "ORPO", rewards=mean_rewards, uses_reference=False),
        "simpo": PreferenceLoss(
            simpo,
            "SimPO",
            rewards=mean_rewards,
            parameters=("label_smoothing", "simpo_gamma"),
            uses_reference=False,
        ),
        "kto": PreferenceLoss(
            kto, "KTO", parameters=_WEIGHTED, statistics=("kl_baseline",), is_unpaired=True
        ),
        "apo_zero_unpaired": PreferenceLoss(
            apo_zero_unpaired, "APO-zero", parameters=_WEIGHTED, is_unpaired=True
        ),
        "reward": PreferenceLoss(
            reward,
            "Bradley-Terry",
            rewards=scores,
            uses_reference=False,
            is_reward_model=True,
            # A reward model has a new head to train: Ouyang et al. 2022 (arXiv:2203.02155) and
            # Touvron et al. 2023 (arXiv:2307.09288) use about 1e-5.
            learning_rate=1e-5,
        ),
    }
)
