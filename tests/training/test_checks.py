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
from llmtrain.training.checks import check_optimizer_flags, say_changed_settings
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
    ("flag", "value"),
    [
        ("optim", "adamw"),
        ("optim", "muon"),
        ("weight_decay", 0.3),
        ("adam_beta1", 0.7),
        ("adam_beta2", 0.6),
        ("adam_epsilon", 1e-05),
    ],
)
def test_a_flag_that_the_optimizer_of_a_recipe_does_not_read_is_refused(
    flag: str, value: object
) -> None:
    model = GPT(lt.GPTConfig(n_embd=16), 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    config = OptimConfig(**{flag: value})
    check_optimizer_flags(config, model, optimizer)  # the user did not set it

    with pytest.raises(UserError, match=f"flags without effect: --{flag} {value} "):
        check_optimizer_flags(user_set(config, flag), model, optimizer)


def test_a_flag_is_accepted_if_a_group_has_its_value() -> None:
    """It does not matter whether the recipe has read the flag."""
    flags = {"weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7}
    config = user_set(OptimConfig(**flags), *flags, "optim")
    check_optimizer_flags(config, nn.Linear(2, 2), two_groups())

    sgd = torch.optim.SGD([torch.ones(1)], momentum=0.7)
    config = user_set(OptimConfig(adam_beta1=0.7), "adam_beta1")
    check_optimizer_flags(config, nn.Linear(2, 2), sgd)


def test_flags_of_a_schedule_are_refused_with_a_schedule_of_the_recipe() -> None:
    flags = {"lr_scheduler_type": "linear", "warmup_steps": 3, "min_lr": 0.1}
    config = user_set(OptimConfig(**flags), *flags)
    model = nn.Linear(2, 2)

    named = "--lr_scheduler_type .*--warmup_steps .*--min_lr "
    with pytest.raises(UserError, match=named):
        check_optimizer_flags(config, model, two_groups(), triangle)
    check_optimizer_flags(config, model, two_groups())
    check_optimizer_flags(OptimConfig(**flags), model, two_groups(), triangle)


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

    assert "learning_rate 0.001 -> 0.002" in changes
    assert "from 0.001 in step 3 to 0.002 in step 4\n" in changes
    assert "removed_setting" not in changes


def test_changed_groups_peaks_and_schedules_are_printed(changes_since) -> None:
    config = constant()
    rates = LearningRates(two_groups(), config)
    recorded = fingerprint(config, rates, groups=[1])
    assert changes_since(recorded, config, rates, groups=[1]) == ""

    with_other_groups = changes_since(recorded, config, rates, groups=[2])
    assert "settings of the optimizer's parameter groups" in with_other_groups

    other_rates = LearningRates(two_groups(5e-3, 1e-4), config)
    with_other_peaks = changes_since(recorded, config, other_rates, groups=[2])
    assert "group_learning_rates [0.01, 0.0001] -> [0.005, 0.0001]" in with_other_peaks
    assert "from 0.01 in step 3 to 0.005 in step 4\n" in with_other_peaks

    with_schedule = fingerprint(config, LearningRates(two_groups(), config, triangle))
    assert "schedule triangle " in changes_since(with_schedule, config, rates)
