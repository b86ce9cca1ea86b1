"""The learning rate of a parameter group is its peak times a function of the step."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.training.learning_rates import LearningRates, rate_at
from llmtrain.training.optim import check_optimizer_flags
from llmtrain.training.run import Run
from llmtrain.training.settings import OptimConfig
from tests.training.small_runs import StopAfter


def user_set(config: OptimConfig, *names: str) -> OptimConfig:
    """Return a config as if the user had set these flags on the command line."""
    config.origins = dict.fromkeys(names, "command line")
    return config


def two_groups(embedding: Any = 1e-2, head: Any = 1e-4) -> torch.optim.AdamW:
    """Make an optimizer of two groups with these learning rates."""
    first = {"params": [nn.Parameter(torch.ones(2))], "lr": embedding, "name": "embedding"}
    second = {
        "params": [nn.Parameter(torch.ones(2))],
        "lr": head,
        "name": "head",
        "weight_decay": 0.3,
    }
    return torch.optim.AdamW([first, second], betas=(0.8, 0.9), eps=1e-7)


def triangle(step: int, max_steps: int) -> float:
    """Rise until the middle of the run, and fall again."""
    return 1 - abs(2 * step / max_steps - 1)


# --- the schedules of --lr_scheduler_type


# (1 + cos(pi k / 8)) / 2 for k from 0 to 7
HALF_COSINE = [1, 0.96193977, 0.85355339, 0.69134172, 0.5, 0.30865828, 0.14644661, 0.03806023]
HALF_COSINE_TO_0_2 = [0.2 + 0.8 * value for value in HALF_COSINE]


@pytest.mark.parametrize(
    ("schedule", "floor", "golden"),
    [
        ("linear", 0.2, [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        ("constant", 0.0, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("warmup_stable_decay", 0.2, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.6]),
        ("cosine", 0.0, [0.5, 1, *HALF_COSINE]),
        ("cosine_with_min_lr", 0.2, [0.5, 1, *HALF_COSINE_TO_0_2]),
    ],
)
def test_the_rates_of_each_schedule(schedule: Any, floor: float, golden: list[float]) -> None:
    config = OptimConfig(max_steps=10, warmup_steps=2, lr_scheduler_type=schedule, min_lr=floor)
    peak = 3e-4

    curve = [rate_at(step, config, peak=peak, floor=peak * floor) for step in range(10)]

    assert curve == pytest.approx([peak * share for share in golden], abs=1e-11)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "--min_lr"),
        ({"lr_scheduler_type": "constant", "min_lr": 1e-4}, "--min_lr"),
        ({"min_lr": math.nan}, "--min_lr"),
        ({"decay_share": 0.0}, "--decay_share"),
        ({"adam_epsilon": -1e-8}, "--adam_epsilon"),
    ],
)
def test_flags_that_contradict_each_other_or_are_out_of_range_are_refused(
    flags: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        OptimConfig(**flags)


def test_a_decay_share_needs_the_schedule_that_has_it() -> None:
    defaults = lt.Settings(data=lt.DataConfig(), optim=OptimConfig(max_steps=10, warmup_steps=2))
    flags = ["--decay_share", "0.4"]

    with pytest.raises(UserError, match="--decay_share"):
        lt.parse(defaults, flags)

    config = lt.parse(defaults, [*flags, "--lr_scheduler_type", "warmup_stable_decay"]).optim
    curve = [rate_at(step, config, peak=1.0) for step in range(10)]
    assert curve == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


# --- parameter groups


def rates_in(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


def linear(**settings: Any) -> OptimConfig:
    return OptimConfig(max_steps=10, warmup_steps=2, lr_scheduler_type="linear", **settings)


def test_a_learning_rate_flag_sets_the_peak_of_the_fastest_group() -> None:
    config = user_set(linear(learning_rate=3e-3), "learning_rate")

    by_default = LearningRates(two_groups(), linear(learning_rate=3e-3))
    assert by_default.peaks == [1e-2, 1e-4], "a default does not change an optimizer of the user"
    slow, fast = LearningRates(two_groups(1e-4, 1e-2), config).peaks
    assert slow == pytest.approx(3e-5)
    assert fast == 3e-3
    assert LearningRates(two_groups(0.0, 0.0), config).peaks == [3e-3, 3e-3]


def test_the_minimum_is_that_of_the_fastest_group_and_others_are_in_proportion() -> None:
    learning_rates = LearningRates(two_groups(), linear(min_lr=2e-3))

    assert learning_rates.after(10) == pytest.approx([2e-3, 2e-5], rel=1e-12)
    assert learning_rates.after(6) == pytest.approx([6e-3, 6e-5], rel=1e-12)
    assert LearningRates(two_groups(0.0, 0.0), linear()).after(5) == [0.0, 0.0]
    with pytest.raises(UserError, match="--min_lr"):
        LearningRates(two_groups(), linear(min_lr=0.02))


def test_a_rate_that_is_a_tensor_is_filled_in_place() -> None:
    rate = torch.tensor(1e-2, dtype=torch.float64)
    optimizer = two_groups(embedding=rate)
    learning_rates = LearningRates(optimizer, linear())

    learning_rates.set(6)
    assert rates_in(optimizer)[0] is rate
    assert rate.item() == pytest.approx(5e-3, rel=1e-12)
    assert rate.dtype == torch.float64

    learning_rates.set(1)
    assert rate.item() == pytest.approx(1e-2, rel=1e-12), "the peak has not changed"
    assert learning_rates.logged() == {
        "train/learning_rate": pytest.approx(1e-2),
        "train/learning_rate/head": pytest.approx(1e-4),
    }


def test_groups_with_another_rate_are_logged_by_name_or_index() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    groups = [
        {"params": [parameters[0]], "name": "matrices"},
        {"params": [parameters[1]], "weight_decay": 0.0, "name": "vectors"},
        {"params": [parameters[2]], "lr": 0.3, "name": "embedding"},
        {"params": [parameters[3]], "lr": 0.4},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.2)
    learning_rates = LearningRates(optimizer, linear())

    learning_rates.set(6)

    assert learning_rates.logged() == {
        "train/learning_rate": pytest.approx(0.1),
        "train/learning_rate/embedding": pytest.approx(0.15),
        "train/learning_rate/3": pytest.approx(0.2),
    }

    optimizer.param_groups[3]["name"] = "embedding"
    assert LearningRates(optimizer, linear()).names == ["matrices", "vectors", "embedding", "3"]


@pytest.mark.parametrize("rate", [None, math.nan, -1e-3])
def test_a_group_without_a_valid_learning_rate_is_refused(rate: object) -> None:
    optimizer = two_groups()
    optimizer.param_groups[1]["lr"] = rate

    with pytest.raises(UserError, match="parameter group head"):
        LearningRates(optimizer, linear())


def test_the_fingerprint_has_peaks_that_differ_from_the_learning_rate() -> None:
    def fingerprint(*peaks: float) -> dict[str, Any]:
        return LearningRates(two_groups(*peaks), linear(learning_rate=1e-3)).fingerprint

    assert fingerprint(1e-3, 1e-3) == {"group_learning_rates": None, "schedule": None}
    expected = {"group_learning_rates": [1e-2, 1e-4], "schedule": None}
    assert fingerprint(1e-2, 1e-4) == expected
    # The power function of another machine may compute another last digit.
    assert fingerprint(math.nextafter(1e-2, 1), 1e-4) == expected


# --- schedules of the user


class Triangle(lt.Schedule):
    """Like :func:`triangle`, with a height."""

    def __init__(self, height: float = 1.0) -> None:
        self.height = height

    def share(self, step: int, max_steps: int) -> float:
        return self.height * triangle(step, max_steps)


def schedule_in_fingerprint(schedule: Any) -> str:
    return LearningRates(two_groups(), linear(), schedule).fingerprint["schedule"]


def test_the_fingerprint_has_the_name_and_the_values_of_a_schedule() -> None:
    def noisy(step: int, max_steps: int) -> float:
        return triangle(step, max_steps) * (1 + 1e-15 * (step % 3))

    noisy.__name__ = triangle.__name__
    assert schedule_in_fingerprint(triangle).startswith("triangle ")
    assert schedule_in_fingerprint(noisy) == schedule_in_fingerprint(triangle)
    assert schedule_in_fingerprint(Triangle(1.0)) == schedule_in_fingerprint(Triangle(1.0))
    assert schedule_in_fingerprint(Triangle(1.0)) != schedule_in_fingerprint(Triangle(1.001))


@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        (lambda step, max_steps: math.nan if step == 7 else 1.0, "step 7 of 10"),
        (lambda step, max_steps: -0.1, "step 0 of 10"),
        (lambda step, max_steps: None, "step 0 of 10"),
        (lambda step: 1.0, "two arguments"),
        (Triangle, "Triangle"),
        (0.5, "schedule: 0.5"),
    ],
)
def test_a_schedule_without_valid_values_is_refused_before_the_first_step(
    schedule: Any, named: str
) -> None:
    with pytest.raises(UserError, match=named):
        LearningRates(two_groups(), linear(), schedule)


# --- in a run


class KeepsRates(Callback):
    """Keeps the learning rates of each step of a start."""

    settings = None

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def setup(self, training: Any) -> None:
        self._optimizer = training.optimizer

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.rates.append(rates_in(self._optimizer))


def optimizer_of_two_groups(other_peak: float = 1e-4) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that makes an optimizer from a model."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        head, *others = model.parameters()
        groups = [
            {"params": [head], "lr": 1e-2, "name": "head"},
            {"params": others, "lr": other_peak, "name": "others"},
        ]
        return torch.optim.AdamW(groups)

    return make


@pytest.mark.parametrize("schedule", [None, triangle], ids=["cosine", "schedule of the user"])
def test_groups_keep_their_proportions_in_a_run_that_resumes(
    schedule: Any, train_gpt: Callable[..., Run]
) -> None:
    parts = {"optimizer": optimizer_of_two_groups(), "schedule": schedule}
    before_stop = KeepsRates()
    after_stop = KeepsRates()
    stopped = train_gpt(**parts, callbacks=[before_stop, StopAfter(6)])
    resumed = train_gpt(**parts, callbacks=[after_stop])
    assert resumed.folder == stopped.folder

    rates_of_run = before_stop.rates + after_stop.rates
    assert len(rates_of_run) == 12
    for step, rates_of_step in enumerate(rates_of_run):
        if schedule is None:
            share = rate_at(step, resumed.settings.optim, peak=1.0)
        else:
            share = schedule(step, 12)
        assert rates_of_step == pytest.approx([1e-2 * share, 1e-4 * share], abs=1e-15)


def test_another_peak_or_schedule_starts_another_run(train_gpt: Callable[..., Run]) -> None:
    def folder_of(other_peak: float = 1e-4, schedule: Any = None) -> str:
        optimizer = optimizer_of_two_groups(other_peak)
        callbacks = [StopAfter(2)]
        return train_gpt(optimizer=optimizer, schedule=schedule, callbacks=callbacks).folder.name

    assert folder_of() == "run"
    assert folder_of(other_peak=2e-4) == "run-2"
    assert folder_of(schedule=triangle) == "run-3"
    assert folder_of() == "run"


def test_changed_rates_are_printed_if_a_run_is_resumed_by_name(
    train_gpt: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    constant = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    stopped = train_gpt(
        optim=constant, optimizer=optimizer_of_two_groups(), callbacks=[StopAfter(3)]
    )

    def changes(other_peak: float, schedule: Any = None) -> str:
        capsys.readouterr()
        train_gpt(
            optim=constant,
            optimizer=optimizer_of_two_groups(other_peak),
            schedule=schedule,
            resume=str(stopped.folder),
            callbacks=[StopAfter(4)],
        )
        return capsys.readouterr().out

    with_other_peak = changes(other_peak=0.02)
    assert "group_learning_rates [0.01, 0.0001] -> [0.01, 0.02]" in with_other_peak
    with_schedule = changes(other_peak=1e-4, schedule=triangle)
    assert "schedule None -> triangle " in with_schedule


# --- flags without effect

# The values that `two_groups` has.
FLAGS = {"weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7}


def test_flags_are_accepted_if_the_optimizer_has_their_values() -> None:
    """It does not matter whether the recipe has read them."""
    # Muon has nothing to do without hidden matrices, so AdamW trains this model.
    model = nn.Embedding(5, 3)
    config = user_set(OptimConfig("muon", **FLAGS), "optim", *FLAGS)
    check_optimizer_flags(config, model, two_groups())
    check_optimizer_flags(config, model, lt.make_optimizer(Accelerator(), model, config))

    sgd = torch.optim.SGD(model.parameters(), momentum=0.8)
    check_optimizer_flags(user_set(OptimConfig(**FLAGS), "adam_beta1"), model, sgd)


def test_flags_that_the_optimizer_or_the_schedule_of_a_recipe_does_not_read_are_refused() -> None:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    flags = {"optim": "adamw", **FLAGS, "lr_scheduler_type": "linear", "warmup_steps": 3}
    config = OptimConfig(**flags)
    check_optimizer_flags(config, model, sgd, triangle)  # the user did not set them

    with pytest.raises(UserError, match=" .*".join(f"--{name}" for name in flags)):
        check_optimizer_flags(user_set(config, *flags), model, sgd, triangle)
    with pytest.raises(UserError, match="--dtype bfloat16 "):
        check_optimizer_flags(OptimConfig(dtype="bfloat16"), model, sgd)
