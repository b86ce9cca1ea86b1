"""A flag without effect is refused, and a resumed run says what has changed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.models.gpt import GPT
from llmtrain.record.resume import ResumePoint
from llmtrain.training.checks import check_optimizer_flags, say_changed_settings, say_rates
from llmtrain.training.learning_rates import LearningRates
from llmtrain.training.settings import LogConfig, OptimConfig
from tests.training.learning_rates import triangle, two_groups, user_set

# Each flag of the optimizer, with a value that is not the default.
FLAGS = {
    "optim": "muon",
    "learning_rate": 0.5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 3,
    "min_lr": 0.1,
    "decay_share": 0.5,
    "weight_decay": 0.3,
    "adam_beta1": 0.7,
    "adam_beta2": 0.6,
    "adam_epsilon": 1e-5,
}


# --- flags without effect


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(GPT(lt.GPTConfig(n_embd=16), 30), id="GPT"),
        # Muon has nothing to do without hidden matrices, so AdamW trains it alone.
        pytest.param(nn.Embedding(5, 3), id="embedding"),
    ],
)
def test_every_flag_is_accepted_with_the_optimizer_of_the_package(
    name: Any, model: nn.Module
) -> None:
    config = user_set(OptimConfig(**(FLAGS | {"optim": name})), *FLAGS)
    optimizer = lt.make_optimizer(Accelerator(), model, config)

    check_optimizer_flags(config, model, optimizer)


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("optim", "adamw", "the recipe makes SGD"),
        ("optim", "muon", "the recipe makes SGD"),
        ("weight_decay", 0.3, "no parameter group has this value"),
        ("adam_beta1", 0.7, "no parameter group has this value"),
        ("adam_beta2", 0.6, "no parameter group has this value"),
        ("adam_epsilon", 1e-05, "no parameter group has this value"),
    ],
)
def test_a_flag_that_the_optimizer_of_a_recipe_does_not_read_is_refused(
    flag: str, value: object, reason: str
) -> None:
    model = GPT(lt.GPTConfig(n_embd=16), 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    config = OptimConfig(**{flag: value})
    check_optimizer_flags(config, model, optimizer)  # the user did not set it

    with pytest.raises(UserError) as error:
        check_optimizer_flags(user_set(config, flag), model, optimizer)

    assert str(error.value) == (
        f"flags without effect: --{flag} {value} ({reason}); leave them out."
    )


@pytest.mark.parametrize(
    ("flags", "optimizer"),
    [
        pytest.param(
            {"weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7},
            two_groups(),
            id="AdamW",
        ),
        pytest.param(
            {"weight_decay": 0.0, "adam_beta1": 0.7},
            torch.optim.SGD([torch.ones(1)], momentum=0.7, weight_decay=0.0),
            id="SGD with momentum",
        ),
    ],
)
def test_a_flag_is_accepted_if_a_group_has_its_value(
    flags: dict[str, float], optimizer: torch.optim.Optimizer
) -> None:
    """It does not matter whether the recipe has read the flag."""
    config = user_set(OptimConfig(**flags), *flags)

    check_optimizer_flags(config, nn.Linear(2, 2), optimizer)


def test_the_default_optimizer_flag_is_accepted_with_an_adamw_of_the_recipe() -> None:
    config = user_set(OptimConfig(), "optim")

    check_optimizer_flags(config, nn.Linear(2, 2), two_groups())


def test_a_second_beta_is_refused_with_an_optimizer_of_a_single_one() -> None:
    optimizer = torch.optim.SGD([{"params": [torch.ones(1)], "betas": 0.9}])
    config = user_set(OptimConfig(adam_beta2=0.6), "adam_beta2")

    with pytest.raises(UserError, match=r"--adam_beta2 0\.6 "):
        check_optimizer_flags(config, nn.Linear(2, 2), optimizer)


def test_flags_of_a_schedule_are_refused_with_a_schedule_of_the_recipe() -> None:
    flags = {"lr_scheduler_type": "linear", "warmup_steps": 3, "min_lr": 0.1}
    config = user_set(OptimConfig(**flags), *flags)
    model = nn.Linear(2, 2)

    with pytest.raises(UserError) as error:
        check_optimizer_flags(config, model, two_groups(), triangle)

    assert str(error.value) == (
        "flags without effect: --lr_scheduler_type (the recipe has its own schedule), "
        "--warmup_steps (the recipe has its own schedule), "
        "--min_lr (the recipe has its own schedule); leave them out."
    )
    check_optimizer_flags(config, model, two_groups())
    check_optimizer_flags(OptimConfig(**flags), model, two_groups(), triangle)


# --- messages


def test_the_peaks_of_groups_are_printed_if_they_differ(capsys: pytest.CaptureFixture) -> None:
    say_rates(LearningRates(two_groups(1e-3, 1e-3), OptimConfig()))
    assert capsys.readouterr().out == ""

    say_rates(LearningRates(two_groups(), OptimConfig()))
    line = "peak learning rates of the parameter groups: embedding: 0.01, head: 0.0001"
    assert line in capsys.readouterr().out


# A resume from a checkpoint that the user has named


def fingerprint(config: OptimConfig, rates: LearningRates, **optimizer: Any) -> dict[str, Any]:
    return {"optimizer": config.fingerprint | optimizer, "learning_rates": rates.fingerprint}


@pytest.fixture
def changes_since(capsys: pytest.CaptureFixture):
    """A function that returns what is printed about changes since a checkpoint of step 3."""

    def changes_since(
        recorded: dict[str, Any], config: OptimConfig, rates: LearningRates, **optimizer: Any
    ) -> str:
        run: Any = SimpleNamespace(
            step=3,
            settings=SimpleNamespace(log=LogConfig(), optim=config),
            rates=rates,
            fingerprint=fingerprint(config, rates, **optimizer),
            resume_point=ResumePoint(Path(), named_fingerprint=recorded),
        )
        say_changed_settings(run)
        return capsys.readouterr().out

    return changes_since


def constant(**settings: Any) -> OptimConfig:
    return OptimConfig(lr_scheduler_type="constant", warmup_steps=0, **settings)


def test_a_changed_learning_rate_is_printed_and_a_removed_setting_is_ignored(
    changes_since,
) -> None:
    config_before = constant(learning_rate=1e-3)
    rates_before = LearningRates(two_groups(1e-3, 1e-3), config_before)
    recorded = fingerprint(config_before, rates_before, removed_setting=1)

    config = constant(learning_rate=2e-3)
    changes = changes_since(recorded, config, LearningRates(two_groups(2e-3, 2e-3), config))

    assert (
        "learning_rate 0.001 -> 0.002; the learning rate goes from 0.001 in step 3 to 0.002 in "
        "step 4\n"
    ) in changes


def test_changed_groups_and_peaks_are_printed(changes_since) -> None:
    config = constant()
    rates = LearningRates(two_groups(), config)
    recorded = fingerprint(config, rates, groups=[1])
    assert changes_since(recorded, config, rates, groups=[1]) == ""

    with_other_groups = changes_since(recorded, config, rates, groups=[2])
    assert "changed   settings of the optimizer's parameter groups; " in with_other_groups

    other_rates = LearningRates(two_groups(5e-3, 1e-4), config)
    with_other_peaks = changes_since(recorded, config, other_rates, groups=[2])
    assert (
        "changed   group_learning_rates [0.01, 0.0001] -> [0.005, 0.0001]; the learning rate goes "
        "from 0.01 in step 3 to 0.005 in step 4\n"
    ) in with_other_peaks


def test_a_removed_schedule_is_printed_without_the_earlier_rate(changes_since) -> None:
    """A fingerprint does not have the values of a schedule."""
    config = constant()
    recorded = fingerprint(config, LearningRates(two_groups(), config, triangle))

    changes = changes_since(recorded, config, LearningRates(two_groups(), config))

    assert "schedule triangle " in changes
    assert "-> None; the learning rate goes to 0.01 in step 4\n" in changes
