"""The table of preference losses, a sum of several, and a recipe's own."""

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
PAPERS = ("arXiv:", "Bradley and Terry 1952")


def squared(answers: lt.Answers, config: Any) -> Tensor:
    """Return the squared distance of each margin from a target."""
    margins = answers.log_ratios[..., 0] - answers.log_ratios[..., 1]
    return (margins - config.target_margin) ** 2


@dataclass
class OwnLosses(lt.PreferenceConfig):
    """The losses of the package, and one more with a parameter."""

    losses: ClassVar[Mapping[str, lt.PreferenceLoss]] = {
        **lt.PreferenceConfig.losses,
        "squared": lt.PreferenceLoss(squared, "squared margin", parameters=("target_margin",)),
    }

    target_margin: float = lt.flag(1.0, "squared: the margin to reach")


def own_config(*argv: str) -> Any:
    defaults = dataclasses.replace(preference.DEFAULTS, preference=OwnLosses())
    return lt.parse(defaults, list(argv)).preference


def some_answers() -> lt.Answers:
    torch.manual_seed(0)
    logps = -60 * torch.rand(5, 2)
    reference = -60 * torch.rand(5, 2)
    tokens = torch.randint(1, 20, (5, 2)).float()
    answers = lt.Answers(logps, tokens, reference, torch.rand(5) > 0.5)
    return answers._replace(all_pairs=answers)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_names_its_paper_and_has_the_name_of_its_function(name: str) -> None:
    formula = PREFERENCE_LOSSES[name].formula
    assert formula.__name__ == name
    assert any(paper in str(formula.__doc__) for paper in PAPERS)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_is_one_number_for_each_pair(name: str) -> None:
    smoothing = 1e-3 if name == "exo_pair" else 0.0
    config = lt.PreferenceConfig(loss_type=[name], label_smoothing=smoothing)
    answers = some_answers()
    assert PREFERENCE_LOSSES[name].formula(answers, config).shape == (5,)
    assert PREFERENCE_LOSSES[name].rewards(answers, config).shape == (5, 2)


def test_a_parameter_counts_only_for_the_losses_that_list_it() -> None:
    """A formula that reads an unlisted parameter would refuse the flag that it needs."""
    fields = {field.name: field for field in dataclasses.fields(lt.PreferenceConfig)}
    listed = {name for loss in PREFERENCE_LOSSES.values() for name in loss.parameters}
    answers = some_answers()
    for name, loss in PREFERENCE_LOSSES.items():
        config = lt.PreferenceConfig(loss_type=["exo_pair"], label_smoothing=0.1)
        before = loss.formula(answers, config)
        for parameter in listed:
            changed = dataclasses.replace(config)
            setattr(changed, parameter, 0.3)
            is_used = not torch.equal(loss.formula(answers, changed), before)
            assert is_used == (parameter in loss.parameters), (name, parameter)
    assert listed < fields.keys()


def test_a_sum_has_the_rewards_of_its_first_loss_and_what_any_of_them_needs() -> None:
    config = lt.PreferenceConfig(loss_type=["sft", "aot"], loss_weights=[0.5, 2.0])
    assert config.uses_reference
    assert config.needs_statistic("all_pairs")
    assert config.needs_statistic("mean_chosen_tokens")
    assert config.default_learning_rate(has_adapter=False) == 1e-6
    assert config.loss_name == "SFT + AOT (`--loss_type sft aot --loss_weights 0.5 2.0`)"
    assert config.weights == [0.5, 2.0]


@pytest.mark.parametrize(("loss", "rate"), [("ipo", 1e-6), ("reward", 1e-5)])
def test_the_default_learning_rate_is_that_of_the_loss(loss: str, rate: float) -> None:
    config = lt.PreferenceConfig(loss_type=[loss])
    assert config.default_learning_rate(has_adapter=False) == rate
    assert config.default_learning_rate(has_adapter=True) == 1e-5


def test_a_loss_of_a_recipe_s_own_is_a_choice_of_the_flag() -> None:
    config = own_config("--loss_type", "squared", "sft", "--target_margin", "3")
    assert config.selected_losses[0].formula is squared
    assert config.loss_name == "squared margin + SFT (`--loss_type squared sft`)"
    with pytest.raises(UserError, match=r"invalid choice: 'cubed'.*, reward, squared"):
        own_config("--loss_type", "cubed")
    with pytest.raises(UserError, match="invalid choice: 'squared'"):
        lt.parse(preference.DEFAULTS, ["--loss_type", "squared"])


def test_a_parameter_of_a_recipe_s_own_is_a_flag_that_others_refuse() -> None:
    message = "--target_margin is for --loss_type squared; leave it out."
    with pytest.raises(UserError, match=message):
        own_config("--target_margin", "3")


def test_another_parameter_or_formula_is_another_fingerprint() -> None:
    def fingerprint(*argv: str) -> Any:
        return PreferenceObjective(own_config(*argv), ROWS).fingerprint

    squared_margin = fingerprint("--loss_type", "squared")
    assert squared_margin == fingerprint("--loss_type", "squared", "--target_margin", "1")
    assert squared_margin != fingerprint("--loss_type", "squared", "--target_margin", "2")
    assert squared_margin["formulas"] == ["squared"]
