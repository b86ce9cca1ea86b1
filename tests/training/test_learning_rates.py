"""The learning rate of a parameter group is its peak times a function of the step."""

import functools
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup_lr_rate

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.training.learning_rates import LearningRates, rate_at
from llmtrain.training.settings import OptimConfig
from recipes import gpt
from tests.launching import metrics
from tests.training.learning_rates import triangle, two_groups, user_set

SCHEDULES = ("cosine", "linear", "constant", "warmup_stable_decay")
FALLING_SCHEDULES = ("cosine", "linear", "warmup_stable_decay")


# --- the schedules of --lr_scheduler_type


def rates(
    schedule: Any,
    *,
    max_steps: int,
    warmup_steps: int,
    peak: float = 1.0,
    floor: float = 0.0,
    **settings: Any,
) -> list[float]:
    """Return the learning rate of each step."""
    config = OptimConfig(
        max_steps=max_steps,
        warmup_steps=warmup_steps,
        lr_scheduler_type=schedule,
        min_lr=floor,
        **settings,
    )
    return [rate_at(step, config, peak=peak, floor=floor) for step in range(max_steps)]


# (1 + cos(pi k / 8)) / 2 for k from 0 to 7
HALF_COSINE = [1, 0.96193977, 0.85355339, 0.69134172, 0.5, 0.30865828, 0.14644661, 0.03806023]
HALF_COSINE_TO_0_2 = [0.2 + 0.8 * value for value in HALF_COSINE]


@pytest.mark.parametrize(
    ("schedule", "floor", "golden"),
    [
        ("linear", 0.0, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("linear", 0.2, [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        ("constant", 0.0, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("warmup_stable_decay", 0.0, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]),
        ("warmup_stable_decay", 0.2, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.6]),
        ("cosine", 0.0, [0.5, 1, *HALF_COSINE]),
        ("cosine", 0.2, [0.5, 1, *HALF_COSINE_TO_0_2]),
        ("cosine_with_min_lr", 0.2, [0.5, 1, *HALF_COSINE_TO_0_2]),
    ],
)
def test_the_rates_of_each_schedule(schedule: str, floor: float, golden: list[float]) -> None:
    curve = rates(schedule, max_steps=10, warmup_steps=2, floor=floor)
    assert curve == pytest.approx(golden, abs=1e-8)

    peak = 3e-4
    scaled = rates(schedule, max_steps=10, warmup_steps=2, peak=peak, floor=peak * floor)
    assert scaled == pytest.approx([peak * rate for rate in golden], abs=1e-11)


def rates_of_transformers(
    make_scheduler: Callable[..., Any], warmup_steps: int, peak: float
) -> list[float]:
    """Return the learning rate of each of 100 steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    scheduler = make_scheduler(optimizer, num_warmup_steps=warmup_steps)
    curve = []
    for _ in range(100):
        curve += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return curve


@pytest.mark.parametrize(
    ("flags", "make_scheduler"),
    [
        pytest.param(
            {"lr_scheduler_type": "constant"}, get_constant_schedule_with_warmup, id="constant"
        ),
        pytest.param(
            {"lr_scheduler_type": "linear"},
            functools.partial(get_linear_schedule_with_warmup, num_training_steps=100),
            id="linear",
        ),
        pytest.param(
            {"lr_scheduler_type": "linear", "min_lr": 2e-4},
            functools.partial(
                get_polynomial_decay_schedule_with_warmup, num_training_steps=100, lr_end=2e-4
            ),
            id="linear with a minimum",
        ),
        pytest.param(
            {"lr_scheduler_type": "cosine"},
            functools.partial(get_cosine_schedule_with_warmup, num_training_steps=100),
            id="cosine",
        ),
        pytest.param(
            {"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 2e-4},
            functools.partial(
                get_cosine_with_min_lr_schedule_with_warmup, num_training_steps=100, min_lr=2e-4
            ),
            id="cosine with a minimum",
        ),
        pytest.param(
            {"lr_scheduler_type": "warmup_stable_decay", "decay_share": 0.3, "min_lr": 2e-4},
            functools.partial(
                get_wsd_schedule,
                num_training_steps=100,
                num_decay_steps=30,
                min_lr_ratio=0.1,
                decay_type="linear",
            ),
            id="warmup, stable, decay",
        ),
    ],
)
@pytest.mark.parametrize("warmup_steps", [0, 10])
def test_the_rates_after_the_warmup_are_those_of_transformers(
    flags: dict[str, Any], make_scheduler: Callable[..., Any], warmup_steps: int
) -> None:
    expected = rates_of_transformers(make_scheduler, warmup_steps, peak=2e-3)

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    config = OptimConfig(max_steps=100, warmup_steps=warmup_steps, **flags)
    learning_rates = LearningRates(optimizer, config)

    for step in range(warmup_steps, 100):
        assert learning_rates.after(step) == pytest.approx([expected[step]], rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_warmup_is_that_of_cosine_warmup_with_min_lr_of_transformers(schedule: str) -> None:
    """Transformers' other schedules begin at a rate of 0, so their first step changes nothing."""
    make_scheduler = functools.partial(
        get_cosine_with_min_lr_schedule_with_warmup_lr_rate, num_training_steps=100, min_lr=0.0
    )
    expected = rates_of_transformers(make_scheduler, warmup_steps=10, peak=2e-3)

    curve = rates(schedule, max_steps=100, warmup_steps=10, peak=2e-3)

    assert curve[:10] == pytest.approx(expected[:10], rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 100])
@pytest.mark.parametrize("floor", [0.0, 2e-4])
def test_the_rate_rises_to_the_peak_and_never_again(
    schedule: str, warmup_steps: int, floor: float
) -> None:
    if schedule == "constant":
        floor = 0.0
    peak = 2e-3

    curve = rates(schedule, max_steps=400, warmup_steps=warmup_steps, peak=peak, floor=floor)

    assert min(curve) > 0
    assert max(curve) == pytest.approx(peak, rel=1e-12)
    assert curve[max(warmup_steps - 1, 0)] == pytest.approx(peak, rel=1e-12)
    for earlier, later in pairwise(curve[:warmup_steps]):
        assert later > earlier
    for earlier, later in pairwise(curve[warmup_steps:]):
        assert later <= earlier


@pytest.mark.parametrize("schedule", FALLING_SCHEDULES)
def test_a_falling_schedule_ends_just_above_its_minimum(schedule: Any) -> None:
    to_zero = rates(schedule, max_steps=1000, warmup_steps=50)
    to_a_tenth = rates(schedule, max_steps=1000, warmup_steps=50, floor=0.1)

    assert 0 < to_zero[-1] < 0.01
    assert 0.1 < to_a_tenth[-1] < 0.11
    config = OptimConfig(max_steps=1000, lr_scheduler_type=schedule)
    assert rate_at(1000, config, peak=1.0) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("decay_share", "first_step_of_decay"), [(0.2, 801), (0.4, 601), (1.0, 51)]
)
def test_the_rate_stays_at_the_peak_until_the_decay(
    decay_share: float, first_step_of_decay: int
) -> None:
    curve = rates("warmup_stable_decay", max_steps=1000, warmup_steps=50, decay_share=decay_share)

    assert set(curve[50:first_step_of_decay]) == {1.0}
    for earlier, later in pairwise(curve[first_step_of_decay - 1 :]):
        assert later < earlier


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("max_steps", "warmup_steps"), [(1, 0), (1, 1), (2, 2), (5, 9)])
def test_the_rate_only_rises_in_a_run_that_ends_with_its_warmup(
    schedule: str, max_steps: int, warmup_steps: int
) -> None:
    curve = rates(schedule, max_steps=max_steps, warmup_steps=warmup_steps)

    assert curve == sorted(curve)
    assert all(0 < rate <= 1 for rate in curve)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"lr_scheduler_type": "cosine_with_min_lr"},
            "--lr_scheduler_type cosine_with_min_lr needs --min_lr",
        ),
        ({"lr_scheduler_type": "constant", "min_lr": 1e-4}, "needs a schedule that falls"),
        ({"min_lr": -1.0}, "--min_lr -1.0 is out of range"),
        ({"min_lr": math.nan}, "--min_lr nan is out of range"),
        ({"decay_share": 0.0}, "--decay_share 0.0 is out of range"),
        ({"decay_share": 1.1}, "--decay_share 1.1 is out of range"),
        ({"adam_epsilon": -1e-8}, "--adam_epsilon -1e-08 is out of range"),
    ],
)
def test_flags_that_contradict_each_other_or_are_out_of_range_are_refused(
    flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        OptimConfig(**flags)


def test_a_decay_share_needs_the_schedule_that_has_it() -> None:
    defaults = lt.Settings(data=lt.DataConfig())
    flags = ["--decay_share", "0.4"]

    with pytest.raises(UserError, match=r"--decay_share 0\.4 has no effect with"):
        lt.parse(defaults, flags)

    settings = lt.parse(defaults, [*flags, "--lr_scheduler_type", "warmup_stable_decay"])
    assert settings.optim.decay_share == 0.4


# --- parameter groups


def rates_in(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


def linear(**settings: Any) -> OptimConfig:
    return OptimConfig(max_steps=10, warmup_steps=2, lr_scheduler_type="linear", **settings)


LINEAR_SHARES = [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]


def test_each_group_keeps_its_proportion_and_its_other_settings() -> None:
    optimizer = two_groups()
    settings_before = [{**group, "lr": None} for group in optimizer.param_groups]
    learning_rates = LearningRates(optimizer, linear())

    for step, share in enumerate(LINEAR_SHARES):
        learning_rates.set(step)
        assert rates_in(optimizer) == pytest.approx([1e-2 * share, 1e-4 * share], rel=1e-12)

    assert [{**group, "lr": None} for group in optimizer.param_groups] == settings_before


def test_the_peaks_are_the_rates_before_a_checkpoint_is_loaded() -> None:
    """A checkpoint may have a rate that has decayed."""
    optimizer = two_groups()
    learning_rates = LearningRates(optimizer, linear())

    learning_rates.set(9)
    optimizer.load_state_dict(optimizer.state_dict())
    learning_rates.set(1)

    assert rates_in(optimizer) == [1e-2, 1e-4]


def test_a_learning_rate_flag_sets_the_peak_of_the_fastest_group() -> None:
    config = user_set(linear(learning_rate=3e-3), "learning_rate")

    slow, fast = LearningRates(two_groups(1e-4, 1e-2), config).peaks
    assert slow == pytest.approx(3e-5)
    assert fast == 3e-3
    assert LearningRates(two_groups(0.0, 0.0), config).peaks == [3e-3, 3e-3]


def test_the_default_learning_rate_of_a_recipe_does_not_change_an_optimizer_of_the_user() -> None:
    learning_rates = LearningRates(two_groups(), linear(learning_rate=3e-3))

    assert learning_rates.peaks == [1e-2, 1e-4]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("peak", [1e-3, 2e-5, 0.02, 0.1 + 0.2])
def test_a_default_learning_rate_and_the_same_flag_give_the_same_bits(
    schedule: Any, peak: float
) -> None:
    config = OptimConfig(
        max_steps=137, warmup_steps=13, learning_rate=peak, lr_scheduler_type=schedule
    )
    optimizer = lt.make_optimizer(Accelerator(), nn.Linear(3, 3), config)
    by_default = LearningRates(optimizer, config)
    by_flag = LearningRates(optimizer, user_set(config, "learning_rate"))

    for step in range(138):
        (rate,) = set(by_default.after(step))
        assert rate == rate_at(step, config, peak=peak)
        assert set(by_flag.after(step)) == {rate}


def test_the_minimum_is_that_of_the_fastest_group_and_others_are_in_proportion() -> None:
    learning_rates = LearningRates(two_groups(), linear(min_lr=2e-3))

    assert learning_rates.after(10) == pytest.approx([2e-3, 2e-5], rel=1e-12)
    assert learning_rates.after(6) == pytest.approx([6e-3, 6e-5], rel=1e-12)


def test_peaks_of_zero_stay_at_zero() -> None:
    assert LearningRates(two_groups(0.0, 0.0), linear()).after(5) == [0.0, 0.0]


def test_a_minimum_above_the_peak_is_refused() -> None:
    message = r"--min_lr 0\.02 is above the peak learning rate, 0\.01"
    with pytest.raises(UserError, match=message):
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
    learning_rates = LearningRates(torch.optim.AdamW(groups, lr=0.2), linear())

    learning_rates.set(6)

    assert learning_rates.logged() == {
        "train/learning_rate": pytest.approx(0.1),
        "train/learning_rate/embedding": pytest.approx(0.15),
        "train/learning_rate/3": pytest.approx(0.2),
    }


def test_groups_with_the_same_name_and_different_rates_are_refused() -> None:
    optimizer = two_groups()
    parameter = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [parameter], "lr": 0.5, "name": "head"})

    with pytest.raises(UserError, match="two parameter groups of the optimizer are named head"):
        LearningRates(optimizer, linear())


@pytest.mark.parametrize("rate", [None, math.nan, math.inf, -1e-3, "fast"])
def test_a_group_without_a_valid_learning_rate_is_refused(rate: object) -> None:
    optimizer = two_groups()
    optimizer.param_groups[1]["lr"] = rate

    message = f"parameter group head of the optimizer has the learning rate {rate};"
    with pytest.raises(UserError, match=message):
        LearningRates(optimizer, linear())


def test_the_fingerprint_has_peaks_that_differ_from_the_learning_rate() -> None:
    default = LearningRates(two_groups(1e-3, 1e-3), linear(learning_rate=1e-3))
    different = LearningRates(two_groups(), linear(learning_rate=1e-3))

    assert default.fingerprint == {"group_learning_rates": None, "schedule": None}
    assert different.fingerprint == {"group_learning_rates": [1e-2, 1e-4], "schedule": None}


def test_the_last_digit_of_a_peak_is_not_in_the_fingerprint() -> None:
    """The power function of another machine may compute another one."""
    neighbor = math.nextafter(1e-2, 1)

    assert (
        LearningRates(two_groups(neighbor, 1e-4), linear()).fingerprint
        == LearningRates(two_groups(1e-2, 1e-4), linear()).fingerprint
    )


# --- schedules of the user


TRIANGLE_SHARES = [0, 0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2]


class Triangle(lt.Schedule):
    """Like :func:`triangle`, with a height."""

    def __init__(self, height: float = 1.0) -> None:
        self.height = height

    def share(self, step: int, max_steps: int) -> float:
        return self.height * triangle(step, max_steps)


@pytest.mark.parametrize("schedule", [triangle, Triangle()], ids=["function", "object"])
def test_a_schedule_of_the_user_replaces_the_warmup_and_the_decay(schedule: Any) -> None:
    optimizer = two_groups()
    learning_rates = LearningRates(optimizer, linear(), schedule)

    for step, share in enumerate(TRIANGLE_SHARES):
        learning_rates.set(step)
        assert rates_in(optimizer) == pytest.approx([1e-2 * share, 1e-4 * share], abs=1e-15)


def schedule_in_fingerprint(schedule: Any) -> str:
    return LearningRates(two_groups(), linear(), schedule).fingerprint["schedule"]


def test_the_fingerprint_has_the_name_and_the_values_of_a_schedule() -> None:
    assert schedule_in_fingerprint(triangle).startswith("triangle ")
    assert schedule_in_fingerprint(Triangle(1.0)) == schedule_in_fingerprint(Triangle(1.0))
    assert schedule_in_fingerprint(Triangle(1.0)) != schedule_in_fingerprint(Triangle(1.001))


def test_rounding_errors_of_a_schedule_are_not_in_the_fingerprint() -> None:
    def noisy(step: int, max_steps: int) -> float:
        return triangle(step, max_steps) * (1 + 1e-15 * (step % 3))

    noisy.__name__ = triangle.__name__

    assert schedule_in_fingerprint(noisy) == schedule_in_fingerprint(triangle)


@pytest.mark.parametrize("share", [math.nan, math.inf, -0.1, None, "0.5", torch.ones(1)])
def test_an_invalid_value_of_a_schedule_is_found_before_the_first_step(share: object) -> None:
    def steps(step: int, max_steps: int) -> Any:
        return share if step == 7 else 1.0

    with pytest.raises(UserError, match=r"the schedule steps returned .* for step 7 of 10; return"):
        LearningRates(two_groups(), linear(), steps)


@pytest.mark.parametrize("schedule", [Triangle, "cosine", 0.5])
def test_an_object_that_is_no_schedule_is_refused(schedule: Any) -> None:
    with pytest.raises(UserError, match="is neither a function of a step and the number of steps"):
        LearningRates(two_groups(), linear(), schedule)


def test_a_schedule_that_does_not_take_the_number_of_steps_is_refused() -> None:
    def constant(step: int) -> float:
        return 1.0

    with pytest.raises(UserError, match="the schedule constant must take two arguments"):
        LearningRates(two_groups(), linear(), constant)  # type: ignore[arg-type]


# --- in a run


class StopAfter(Callback):
    """Asks to stop after some steps of this start, and keeps the rates of each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._optimizer = optimizer
        self._steps = steps
        self.rates: list[list[float]] = []

    @property
    def fingerprint(self) -> None:
        return None

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.rates.append(rates_in(self._optimizer))

    def wants_to_stop(self) -> bool:
        return len(self.rates) + 1 == self._steps


@pytest.fixture
def start(text_file: Path, tmp_path: Path) -> Callable[..., tuple[Path, list[list[float]]]]:
    """A function that starts a run with two groups, or resumes it.

    It returns the run folder and the rates of the steps.
    """
    settings = gpt.Settings(
        model=lt.GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, architecture="gpt2"),
        data=lt.DataConfig(
            dataset=[str(text_file)], tokenizer="byte", eval_fraction=0, global_batch_size=2
        ),
        optim=linear(),
        log=lt.LogConfig(logging_steps=1),
        run=lt.RunConfig(output_dir=str(tmp_path / "run"), report_to=["none"]),
    )
    rows = lt.tokenize(settings.data, 16)

    def start(
        steps: int, schedule: Any = None, head_peak: float = 1e-2, other_peak: float = 1e-4
    ) -> tuple[Path, list[list[float]]]:
        accelerator = lt.start(settings)
        model = lt.GPT(settings.model, rows.vocabulary, seed=0)
        head, *others = model.parameters()
        optimizer = torch.optim.AdamW(
            [
                {"params": [head], "lr": head_peak, "name": "head"},
                {"params": others, "lr": other_peak, "name": "others"},
            ]
        )
        callback = StopAfter(optimizer, steps)
        opened = lt.open_run(
            accelerator,
            settings,
            rows,
            lt.ModelBundle(model, model.files(rows.tokenizer, rows.metadata.dataset)),
            optimizer,
            schedule=schedule,
            callbacks=[callback],
        )
        with opened as run:
            batches, _ = lt.loaders(run)
            lt.train(run, *accelerator.prepare(model, optimizer, batches))
        return run.folder, callback.rates

    return start


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        pytest.param(None, LINEAR_SHARES, id="linear"),
        pytest.param(triangle, TRIANGLE_SHARES, id="schedule of the user"),
    ],
)
def test_groups_keep_their_proportions_in_a_run_that_resumes(
    schedule: Any, shares: list[float], start: Callable
) -> None:
    folder, rates_before = start(6, schedule)
    resumed_folder, rates_after = start(99, schedule)
    assert resumed_folder == folder

    rates_of_run = rates_before + rates_after
    assert len(rates_of_run) == len(shares)
    for share, rates_of_step in zip(shares, rates_of_run, strict=True):
        assert rates_of_step == pytest.approx([1e-2 * share, 1e-4 * share], abs=1e-15)

    logged = []
    for entry in metrics(folder):
        if "train/loss" in entry:
            logged.append([entry["train/learning_rate"], entry["train/learning_rate/others"]])
    assert logged == rates_of_run


def test_another_peak_or_schedule_starts_another_run(start: Callable) -> None:
    folder, _ = start(2)

    with_another_peak, _ = start(2, other_peak=2e-4)
    assert with_another_peak.name == "run-2"
    with_another_schedule, _ = start(2, schedule=triangle)
    assert with_another_schedule.name == "run-3"
    resumed_folder, _ = start(2)
    assert resumed_folder == folder
