"""A loss that compares answers: what it gets, and what the objective must know about it.

:mod:`llmtrain.models.preference_losses` has the losses. Neither module imports torch when it is
imported, because ``--help`` lists the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from llmtrain.config.flags import Config, flag

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


@dataclass
class LossParameters(Config):
    """The losses that are added, and their parameters. Each field is a flag."""

    group: ClassVar[str] = "preferences"
    affects: ClassVar[str] = "pass"

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


# Computes the loss of each pair [...], or the reward of each answer [..., 2]. The second argument
# is the PreferenceConfig of the run, or a subclass that has further parameters.
Formula: TypeAlias = "Callable[[Answers, Any], Tensor]"


def implicit_rewards(answers: Answers, config: LossParameters) -> Tensor:
    """Return beta times the log-ratio of each answer, the reward of DPO."""
    return config.beta * answers.log_ratios


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

    formula: Formula
    title: str
    rewards: Formula = implicit_rewards
    parameters: tuple[str, ...] = ()
    statistics: tuple[Literal["kl_baseline", "mean_chosen_tokens"], ...] = ()
    uses_reference: bool = True
    is_unpaired: bool = False
    is_reward_model: bool = False
    # That of Rafailov et al. 2023 (arXiv:2305.18290), and TRL's for each of these losses.
    learning_rate: float = 1e-6
