"""The table of preference losses, sums of them, and losses that a recipe adds."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.models.answers import AnswerRows
from llmtrain.models.preference_losses import PREFERENCE_LOSSES
from llmtrain.models.preference_objective import PreferenceObjective
from recipes import preference

ROWS = AnswerRows(answers_per_row=2, are_packed=True, share_prompts=True, are_scored=False)
PAIRS = 5


# --- the table


def random_answers() -> lt.Answers:
    torch.manual_seed(0)
    return lt.Answers(
        logps=-60 * torch.rand(PAIRS, 2),
        reference=-60 * torch.rand(PAIRS, 2),
        tokens=torch.randint(1, 20, (PAIRS, 2)).float(),
        desirable=torch.rand(PAIRS) > 0.5,
    )


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_has_the_name_of_its_function_which_names_the_paper(name: str) -> None:
    formula = PREFERENCE_LOSSES[name].formula
    assert formula.__name__ == name
    docstring = str(formula.__doc__)
    assert "arXiv:" in docstring or "Bradley and Terry 1952" in docstring


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_has_a_value_for_each_pair_and_a_reward_for_each_answer(name: str) -> None:
    config = lt.PreferenceConfig(loss_type=[name])
    answers = random_answers()
    assert PREFERENCE_LOSSES[name].formula(answers, config).shape == (PAIRS,)
    assert PREFERENCE_LOSSES[name].rewards(answers, config).shape == (PAIRS, 2)


PARAMETERS = (
    "label_smoothing",
    "desirable_weight",
    "undesirable_weight",
    "simpo_gamma",
)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_lists_the_parameters_that_its_formula_reads(name: str) -> None:
    """The flags of other parameters are refused."""
    loss = PREFERENCE_LOSSES[name]
    answers = random_answers()
    config = lt.PreferenceConfig(loss_type=["sigmoid"], label_smoothing=0.1)
    value = loss.formula(answers, config)

    parameters_read = []
    for parameter in PARAMETERS:
        changed = dataclasses.replace(config)
        setattr(changed, parameter, 0.3)
        if not torch.equal(loss.formula(answers, changed), value):
            parameters_read.append(parameter)

    assert sorted(parameters_read) == sorted(loss.parameters)


def test_the_table_lists_no_other_parameters() -> None:
    listed: set[str] = set()
    for loss in PREFERENCE_LOSSES.values():
        listed.update(loss.parameters)
    assert listed == set(PARAMETERS)


# --- sums of losses, and defaults


def test_a_sum_needs_the_statistics_of_all_its_losses() -> None:
    config = lt.PreferenceConfig(loss_type=["sft", "ipo"], loss_weights=[0.5, 2.0])
    assert config.uses_reference
    assert config.needs_statistic("mean_chosen_tokens")
    assert config.default_learning_rate(has_adapter=False) == 1e-6
    assert config.loss_name == "SFT + IPO (`--loss_type sft ipo --loss_weights 0.5 2.0`)"
    assert config.weights == [0.5, 2.0]


@pytest.mark.parametrize(("loss", "learning_rate"), [("ipo", 1e-6), ("reward", 1e-5)])
def test_the_default_learning_rate_is_that_of_the_loss_or_of_adapters(
    loss: str, learning_rate: float
) -> None:
    config = lt.PreferenceConfig(loss_type=[loss])
    assert config.default_learning_rate(has_adapter=False) == learning_rate
    assert config.default_learning_rate(has_adapter=True) == 1e-5


# --- a loss that a recipe adds


def squared(answers: lt.Answers, config: Any) -> Tensor:
    """Return the squared distance of each margin from a target."""
    margins = answers.log_ratios[..., 0] - answers.log_ratios[..., 1]
    return (margins - config.target_margin) ** 2


@dataclass
class RecipeLosses(lt.PreferenceConfig):
    """The losses of the package, and another one with a parameter."""

    losses: ClassVar[Mapping[str, lt.PreferenceLoss]] = {
        **lt.PreferenceConfig.losses,
        "squared": lt.PreferenceLoss(squared, "squared margin", parameters=("target_margin",)),
    }

    target_margin: float = lt.flag(1.0, "squared: the margin to reach")


def parse(flags: str) -> Any:
    defaults = dataclasses.replace(preference.DEFAULTS, preference=RecipeLosses())
    return lt.parse(defaults, flags.split()).preference


def test_a_loss_of_a_recipe_is_a_choice_of_the_flag() -> None:
    config = parse("--loss_type squared sft --target_margin 3")
    assert config.selected_losses[0].formula is squared
    assert config.target_margin == 3
    assert config.loss_name == "squared margin + SFT (`--loss_type squared sft`)"


def test_the_choices_of_the_flag_are_those_of_the_recipe() -> None:
    with pytest.raises(UserError, match=r"invalid choice: 'cubed'.*, reward, squared"):
        parse("--loss_type cubed")
    with pytest.raises(UserError, match="invalid choice: 'squared'"):
        lt.parse(preference.DEFAULTS, ["--loss_type", "squared"])


def test_a_parameter_of_a_recipe_is_refused_for_other_losses() -> None:
    message = "--target_margin is for --loss_type squared; leave it out."
    with pytest.raises(UserError, match=message):
        parse("--target_margin 3")


def test_formulas_and_parameters_are_in_the_fingerprint() -> None:
    def fingerprint(flags: str) -> Any:
        return PreferenceObjective(parse(flags), ROWS).fingerprint

    by_default = fingerprint("--loss_type squared")
    assert by_default["formulas"] == ["squared"]
    assert fingerprint("--loss_type squared --target_margin 1") == by_default
    assert fingerprint("--loss_type squared --target_margin 2") != by_default
