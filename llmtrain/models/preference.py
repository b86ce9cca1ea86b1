"""Losses that compare answers: a function for each, the table of them, and their flags.

The log-probability of an answer is the sum over its target tokens. Most formulas are TRL's;
docs/guides/preferences.md lists the differences. ``--help`` lists the losses, so this module
imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from llmtrain.config.flags import Affects, Config, flag, flags_of, require_range
from llmtrain.console import pluralize
from llmtrain.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Answers(NamedTuple):
    """The two answers of preference pairs: chosen and rejected.

    An unpaired answer is the first one. The last two attributes are of the global batch. They are
    only set for a loss whose entry in the table asks for them.

    Attributes:
        logps: log-probabilities in nats, or scores of a reward model; [..., 2].
        tokens: the number of target tokens; [..., 2].
        reference: log-probabilities under the reference model; [..., 2].
        desirable: whether the first answer is desirable; bool [...].
        kl_baseline: how far the model has moved from the reference model, in nats per answer.
        mean_chosen_tokens: the mean number of target tokens of a chosen answer.
    """

    logps: Tensor
    tokens: Tensor
    reference: Tensor
    desirable: Tensor
    kl_baseline: Tensor | float = 0.0
    mean_chosen_tokens: Tensor | float = 1.0

    @property
    def log_ratios(self) -> Tensor:
        """How much likelier each answer has become, in nats; [..., 2]."""
        return self.logps - self.reference

    @property
    def mean_logps(self) -> Tensor:
        """The mean log-probability of a token of each answer, in nats; [..., 2]."""
        return self.logps / self.tokens


# --- rewards, which the metrics show


def implicit_rewards(answers: Answers, config: PreferenceConfig) -> Tensor:
    """Return beta times the log-ratio of each answer, the reward of DPO."""
    return config.beta * answers.log_ratios


def mean_rewards(answers: Answers, config: PreferenceConfig) -> Tensor:
    """Return beta times the mean log-probability of each answer, without a reference."""
    return config.beta * answers.mean_logps


def scores(answers: Answers, config: PreferenceConfig) -> Tensor:
    """Return the score that a reward model gives each answer."""
    return answers.logps


# --- losses


def sigmoid(answers: Answers, config: PreferenceConfig) -> Tensor:
    """DPO: Rafailov et al. 2023, arXiv:2305.18290; with label smoothing, conservative DPO."""
    return _smoothed(_difference(implicit_rewards(answers, config)), config)


def sigmoid_norm(answers: Answers, config: PreferenceConfig) -> Tensor:
    """DPO with log-ratios per token: Lambert et al. 2024, arXiv:2411.15124, section 5.1."""
    return -_log_sigmoid(config.beta * _difference(answers.log_ratios / answers.tokens))


def robust(answers: Answers, config: PreferenceConfig) -> Tensor:
    """DPO for noisy labels, without bias: Chowdhury et al. 2024, arXiv:2403.00409."""
    margin = _difference(implicit_rewards(answers, config))
    smoothing = config.label_smoothing
    return _weighted(margin, 1 - smoothing, -smoothing) / (1 - 2 * smoothing)


def hinge(answers: Answers, config: PreferenceConfig) -> Tensor:
    """SLiC, Zhao et al. 2023, arXiv:2305.10425, with the margin of DPO, as in arXiv:2309.06657."""
    return (1 - _difference(implicit_rewards(answers, config))).relu()


def ipo(answers: Answers, config: PreferenceConfig) -> Tensor:
    """IPO: Azar et al. 2023, arXiv:2310.12036, with means over tokens, as its authors meant it."""
    return (_difference(answers.log_ratios / answers.tokens) - 1 / (2 * config.beta)) ** 2


def apo_zero(answers: Answers, config: PreferenceConfig) -> Tensor:
    """APO-zero: D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7."""
    rewards = implicit_rewards(answers, config)
    return 1 - rewards[..., 0].sigmoid() + rewards[..., 1].sigmoid()


def apo_down(answers: Answers, config: PreferenceConfig) -> Tensor:
    """APO-down: D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8."""
    rewards = implicit_rewards(answers, config)
    return rewards[..., 0].sigmoid() + 1 - _difference(rewards).sigmoid()


def sft(answers: Answers, config: PreferenceConfig) -> Tensor:
    """Fine-tuning on the chosen answers, the third term of MPO: Wang et al. 2024, arXiv:2411.10442.

    Its mean over the pairs of the global batch is the mean nll of a target token.
    """
    return -answers.logps[..., 0] / answers.mean_chosen_tokens


def orpo(answers: Answers, config: PreferenceConfig) -> Tensor:
    """ORPO: Hong et al. 2024, arXiv:2403.07691."""
    mean_logps = answers.mean_logps
    log_odds_ratio = _difference(mean_logps - _log1mexp(mean_logps))
    return -mean_logps[..., 0] - config.beta * _log_sigmoid(log_odds_ratio)


def simpo(answers: Answers, config: PreferenceConfig) -> Tensor:
    """SimPO: Meng et al. 2024, arXiv:2405.14734."""
    margin = _difference(mean_rewards(answers, config)) - config.simpo_gamma
    return _smoothed(margin, config)


def reward(answers: Answers, config: PreferenceConfig) -> Tensor:
    """Bradley and Terry 1952, as in Ouyang et al. 2022, arXiv:2203.02155."""
    return -_log_sigmoid(_difference(answers.logps))


def kto(answers: Answers, config: PreferenceConfig) -> Tensor:
    """KTO: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8."""
    rewards = implicit_rewards(answers, config)
    return _of_labels(rewards[..., 0] - config.beta * answers.kl_baseline, answers, config)


def apo_zero_unpaired(answers: Answers, config: PreferenceConfig) -> Tensor:
    """APO-zero of single answers: D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7."""
    return _of_labels(implicit_rewards(answers, config)[..., 0], answers, config)


def _difference(values: Tensor) -> Tensor:
    """Return the values of chosen answers minus those of rejected ones."""
    return values[..., 0] - values[..., 1]


def _smoothed(margin: Tensor, config: PreferenceConfig) -> Tensor:
    """Return the logistic loss of a margin, with label smoothing."""
    return _weighted(margin, 1 - config.label_smoothing, config.label_smoothing)


def _weighted(margin: Tensor, right: float, swapped: float) -> Tensor:
    """Return the weighted sum of the logistic losses of a margin and of its opposite."""
    return right * -_log_sigmoid(margin) + swapped * -_log_sigmoid(-margin)


def _of_labels(reward: Tensor, answers: Answers, config: PreferenceConfig) -> Tensor:
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


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss that compares answers.

    Attributes:
        formula: returns the loss of each pair [...]. It gets :class:`Answers` and the
            :class:`PreferenceConfig`, whose fields are its parameters.
        title: its name in the literature.
        rewards: returns the reward of each answer [..., 2], for the metrics.
        parameters: the names of parameters that not every loss uses.
        statistics: attributes of :class:`Answers` of the global batch that it needs.
            ``kl_baseline`` takes a further forward pass, without gradients.
        uses_reference: whether it takes log-probabilities of the reference model.
        is_unpaired: whether it takes single answers instead of pairs.
        is_reward_model: whether it trains a reward model, which scores answers.
        learning_rate: the default peak learning rate.
    """

    formula: Callable[[Answers, Any], Tensor]
    title: str
    rewards: Callable[[Answers, Any], Tensor] = implicit_rewards
    parameters: tuple[str, ...] = ()
    statistics: tuple[Literal["kl_baseline", "mean_chosen_tokens"], ...] = ()
    uses_reference: bool = True
    is_unpaired: bool = False
    is_reward_model: bool = False
    # That of Rafailov et al. 2023 (arXiv:2305.18290), and TRL's for each of these losses.
    learning_rate: float = 1e-6


_WEIGHTED = ("desirable_weight", "undesirable_weight")

_LOSSES = {
    "sigmoid": PreferenceLoss(sigmoid, "DPO", parameters=("label_smoothing",)),
    "sigmoid_norm": PreferenceLoss(sigmoid_norm, "length-normalized DPO"),
    "robust": PreferenceLoss(robust, "robust DPO", parameters=("label_smoothing",)),
    "hinge": PreferenceLoss(hinge, "hinge loss"),
    "ipo": PreferenceLoss(ipo, "IPO"),
    "apo_zero": PreferenceLoss(apo_zero, "APO-zero"),
    "apo_down": PreferenceLoss(apo_down, "APO-down"),
    "sft": PreferenceLoss(
        sft, "SFT", mean_rewards, statistics=("mean_chosen_tokens",), uses_reference=False
    ),
    "orpo": PreferenceLoss(orpo, "ORPO", mean_rewards, uses_reference=False),
    "simpo": PreferenceLoss(
        simpo,
        "SimPO",
        mean_rewards,
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
        scores,
        uses_reference=False,
        is_reward_model=True,
        # A reward model has a new head to train: Ouyang et al. 2022 (arXiv:2203.02155) and
        # Touvron et al. 2023 (arXiv:2307.09288) use about 1e-5.
        learning_rate=1e-5,
    ),
}


@dataclass
class PreferenceConfig(Config):
    """The loss that compares answers, or a weighted sum of several. Each field is a flag.

    A subclass adds losses of its own to the table ``losses``, and their parameters as fields.

    Attributes:
        losses: every loss by its name in ``--loss_type``.
    """

    group: ClassVar[str] = "preferences"
    affects: ClassVar[Affects] = "numbers"
    losses: ClassVar[Mapping[str, PreferenceLoss]] = _LOSSES

    loss_type: list[str] = flag(
        ["sigmoid"],
        "the loss, or several whose weighted sum is the loss; sigmoid is DPO; kto and "
        "apo_zero_unpaired take single answers with a label; reward trains a reward model, which "
        "gives an answer a score; docs/guides/preferences.md has the formula of each",
    )
    loss_weights: list[float] = flag(
        [],
        "weights of the losses in --loss_type, in the same order (default: 1 for each)",
        hidden=True,
    )
    beta: float = flag(
        0.1,
        "how close the model stays to its initial weights (a larger value keeps it closer); orpo: "
        "weight of the odds-ratio loss; simpo: scale of the rewards; sft, reward: not used",
    )
    label_smoothing: float = flag(
        0.0,
        "sigmoid, robust, simpo: assumed share of pairs whose chosen and rejected answers are "
        "swapped",
        hidden=True,
    )
    desirable_weight: float = flag(
        1.0, "kto, apo_zero_unpaired: weight of the loss of desirable answers", hidden=True
    )
    undesirable_weight: float = flag(
        1.0, "kto, apo_zero_unpaired: weight of the loss of undesirable answers", hidden=True
    )
    simpo_gamma: float = flag(
        0.5,
        "simpo: margin by which the reward of the chosen answer should exceed that of the rejected "
        "one; a reward is beta times the mean log-probability of a token, in nats",
        hidden=True,
    )

    def __post_init__(self) -> None:
        for name in self.loss_type or [""]:
            if name not in self.losses:
                problem = f"{name} does not exist" if name else "is empty"
                raise UserError(f"--loss_type {problem}; use one of {', '.join(self.losses)}.")
        if self.loss_weights and len(self.loss_weights) != len(self.loss_type):
            raise UserError(
                f"--loss_weights has {pluralize(len(self.loss_weights), 'value')} for "
                f"{pluralize(len(self.loss_type), 'loss')}; give one weight for each loss."
            )
        for weight in self.loss_weights:
            if not 0 < weight < math.inf:
                raise UserError(
                    f"--loss_weights {weight} is out of range: it must be above 0 and finite."
                )
        kinds = {(loss.is_unpaired, loss.is_reward_model) for loss in self.selected_losses}
        if len(kinds) > 1 or (self.is_reward_model and len(self.loss_type) > 1):
            raise UserError(
                f"{self.loss_flags} cannot combine paired losses (such as sigmoid), unpaired ones "
                "(such as kto) and reward; use losses of one kind."
            )

        weights = ("beta", "desirable_weight", "undesirable_weight")
        require_range(self, *weights, above=0, below=math.inf)
        require_range(self, "label_smoothing", at_least=0, below=0.5)

        used = set(itertools.chain(*[loss.parameters for loss in self.selected_losses]))
        for name in itertools.chain(*[loss.parameters for loss in self.losses.values()]):
            is_set = getattr(self, name) != flags_of(self)[name].default
            if is_set and name not in used:
                raise UserError(f"--{name} is not for {self.loss_flags}; leave it out.")

    def choices(self, name: str) -> tuple[str, ...]:
        return tuple(self.losses) if name == "loss_type" else ()

    @property
    def selected_losses(self) -> list[PreferenceLoss]:
        """The losses in ``loss_type``. The rewards in the metrics are those of the first."""
        return [self.losses[name] for name in self.loss_type]

    @property
    def loss_flags(self) -> str:
        """The selected losses, as the user writes them."""
        flags = f"--loss_type {' '.join(self.loss_type)}"
        if self.loss_weights:
            flags += f" --loss_weights {' '.join(map(str, self.loss_weights))}"
        return flags

    @property
    def loss_name(self) -> str:
        """The name of the loss in the literature, and its flags."""
        titles = [loss.title for loss in self.selected_losses]
        return f"{' + '.join(titles)} (`{self.loss_flags}`)"

    @property
    def is_unpaired(self) -> bool:
        """Whether the loss takes single answers instead of pairs."""
        return any(loss.is_unpaired for loss in self.selected_losses)

    @property
    def is_reward_model(self) -> bool:
        """Whether the loss trains a reward model."""
        return any(loss.is_reward_model for loss in self.selected_losses)

    def default_learning_rate(self, has_adapter: bool) -> float:
        """Return the default learning rate: for LoRA one that is right for every loss."""
        return 1e-5 if has_adapter else max(loss.learning_rate for loss in self.selected_losses)
