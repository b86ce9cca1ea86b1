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
from tests.training.test_learning_rates import triangle, two_groups, user_set

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


def embedding_only() -> nn.Module:
    return nn.Embedding(5, 3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    "model", [GPT(lt.GPTConfig(n_embd=16), 30), embedding_only()], ids=["GPT", "embedding"]
)
def test_no_flag_is_refused_beside_the_optimizer_of_the_package(
    name: Any, model: nn.Module
) -> None:
    """Muon has nothing to do in a model without hidden matrices, and AdamW takes its place."""
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
def test_a_flag_that_an_optimizer_of_the_users_own_does_not_read_is_refused(
    flag: str, value: object, reason: str
) -> None:
    model = GPT(lt.GPTConfig(n_embd=16), 30)
    config = OptimConfig(**{flag: value})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    check_optimizer_flags(config, model, optimizer)  # the user did not set it

    with pytest.raises(UserError) as caught:
        check_optimizer_flags(user_set(config, flag), model, optimizer)
    assert str(caught.value) == (
        f"flags without effect: --{flag} {value} ({reason}); leave them out."
    )


def test_a_flag_that_the_users_own_optimizer_reads_is_accepted() -> None:
    """Only the effect counts, not who made the optimizer."""
    flags = {"weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7}
    config = user_set(OptimConfig(**flags), *flags, "optim")
    check_optimizer_flags(config, nn.Linear(2, 2), two_groups())

    with_momentum = torch.optim.SGD([torch.ones(1)], momentum=0.7, weight_decay=0.0)
    flags = {"weight_decay": 0.0, "adam_beta1": 0.7}
    check_optimizer_flags(user_set(OptimConfig(**flags), *flags), nn.Linear(2, 2), with_momentum)


def test_a_flag_beside_an_optimizer_with_a_single_beta_is_refused() -> None:
    optimizer = torch.optim.SGD([{"params": [torch.ones(1)], "betas": 0.9}])
    with pytest.raises(UserError, match=r"--adam_beta2 0\.6 "):
        check_optimizer_flags(
            user_set(OptimConfig(adam_beta2=0.6), "adam_beta2"), nn.Linear(2, 2), optimizer
        )


def test_flags_of_a_schedule_are_refused_beside_one_of_the_users_own() -> None:
    flags = {"lr_scheduler_type": "linear", "warmup_steps": 3, "min_lr": 0.1}
    config = user_set(OptimConfig(**flags), *flags)
    with pytest.raises(UserError) as caught:
        check_optimizer_flags(config, nn.Linear(2, 2), two_groups(), triangle)
    assert str(caught.value) == (
        "flags without effect: --lr_scheduler_type (the recipe has its own schedule), "
        "--warmup_steps (the recipe has its own schedule), "
        "--min_lr (the recipe has its own schedule); leave them out."
    )
    check_optimizer_flags(config, nn.Linear(2, 2), two_groups())
    check_optimizer_flags(OptimConfig(**flags), nn.Linear(2, 2), two_groups(), triangle)


def test_different_peaks_are_printed(capsys: pytest.CaptureFixture) -> None:
    say_rates(LearningRates(two_groups(1e-3, 1e-3), OptimConfig()))
    assert capsys.readouterr().out == ""
    say_rates(LearningRates(two_groups(), OptimConfig()))
    assert (
        "peak learning rates of the parameter groups: embedding: 0.01, head: 0.0001"
        in capsys.readouterr().out
    )


# --- after a resume from a checkpoint that the user has named


def fingerprint(config: OptimConfig, rates: LearningRates, **optimizer: Any) -> dict[str, Any]:
    return {"optimizer": config.fingerprint | optimizer, "learning_rates": rates.fingerprint}


def say_changes(
    recorded: dict[str, Any], config: OptimConfig, rates: LearningRates, **optimizer: Any
) -> None:
    """Print what has changed since a checkpoint of step 3."""
    run: Any = SimpleNamespace(
        step=3,
        settings=SimpleNamespace(log=LogConfig(), optim=config),
        rates=rates,
        fingerprint=fingerprint(config, rates, **optimizer),
        resume_point=ResumePoint(Path(), named_fingerprint=recorded),
    )
    say_changed_settings(run)


def constant(**settings: Any) -> OptimConfig:
    return OptimConfig(lr_scheduler_type="constant", warmup_steps=0, **settings)


def test_a_run_goes_on_though_it_was_begun_with_settings_that_are_no_more(
    capsys: pytest.CaptureFixture,
) -> None:
    before = constant(learning_rate=1e-3)
    recorded = fingerprint(before, LearningRates(two_groups(1e-3, 1e-3), before), gone=1)
    config = constant(learning_rate=2e-3)
    say_changes(recorded, config, LearningRates(two_groups(2e-3, 2e-3), config))
    assert (
        "learning_rate 0.001 -> 0.002; the learning rate goes from 0.001 in step 3 to 0.002 in "
        "step 4\n"
    ) in capsys.readouterr().out


def test_changed_peaks_of_groups_and_a_changed_schedule_are_printed(
    capsys: pytest.CaptureFixture,
) -> None:
    config = constant()
    before = LearningRates(two_groups(), config)
    recorded = fingerprint(config, before, groups=[1])
    say_changes(recorded, config, before, groups=[1])
    assert capsys.readouterr().out == ""

    say_changes(recorded, config, before, groups=[2])
    assert "changed   settings of the optimizer's parameter groups; " in capsys.readouterr().out

    say_changes(recorded, config, LearningRates(two_groups(5e-3, 1e-4), config), groups=[2])
    assert (
        "changed   group_learning_rates [0.01, 0.0001] -> [0.005, 0.0001]; the learning rate goes "
        "from 0.01 in step 3 to 0.005 in step 4\n"
    ) in capsys.readouterr().out

    # The values of a schedule are not recorded, so the earlier rate is not known.
    with_schedule = LearningRates(two_groups(), config, triangle)
    say_changes(fingerprint(config, with_schedule), config, before)
    out = capsys.readouterr().out
    assert "schedule triangle " in out
    assert "-> None; the learning rate goes to 0.01 in step 4\n" in out
