"""A group's learning rate is its peak times a function of the step."""

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
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)
from transformers.optimization import (
    get_cosine_with_min_lr_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
)

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.record.history import read_lines
from llmtrain.training.learning_rates import LearningRates, rate_at
from llmtrain.training.settings import OptimConfig
from recipes import gpt

SCHEDULES = ("cosine", "linear", "constant", "warmup_stable_decay")
FALLING = ("cosine", "linear", "warmup_stable_decay")


def user_set(config: OptimConfig, *names: str) -> OptimConfig:
    """Return a config as if the user had set these flags on the command line."""
    config.origins = dict.fromkeys(names, "command line")
    return config


# --- the schedules of --lr_scheduler_type


def rates(
    schedule: Any, max_steps: int, warmup_steps: int, peak: float = 1.0, floor: float = 0.0
) -> list[float]:
    config = OptimConfig(
        max_steps=max_steps, warmup_steps=warmup_steps, lr_scheduler_type=schedule, min_lr=floor
    )
    return [rate_at(step, config, peak=peak, floor=floor) for step in range(max_steps)]


# (1 + cos(pi k / 8)) / 2
HALF_COSINE = [1, 0.96193977, 0.85355339, 0.69134172, 0.5, 0.30865828, 0.14644661, 0.03806023]


@pytest.mark.parametrize(
    ("schedule", "golden"),
    [
        ("linear", [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("warmup_stable_decay", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]),
        ("cosine", [0.5, 1, *HALF_COSINE]),
    ],
)
def test_each_schedule_gives_its_known_learning_rates(schedule: str, golden: list[float]) -> None:
    assert rates(schedule, 10, 2) == pytest.approx(golden, abs=1e-8)
    scaled = [3e-4 * rate for rate in golden]
    assert rates(schedule, 10, 2, peak=3e-4) == pytest.approx(scaled, abs=1e-11)


@pytest.mark.parametrize(
    ("schedule", "golden"),
    [
        # From 1 to 0.2: the share of 0.8 that is left, above 0.2.
        ("linear", [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        ("warmup_stable_decay", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.6]),
        ("cosine", [0.5, 1, *(0.2 + 0.8 * share for share in HALF_COSINE)]),
        ("cosine_with_min_lr", [0.5, 1, *(0.2 + 0.8 * share for share in HALF_COSINE)]),
    ],
)
def test_a_schedule_with_a_minimum_ends_there(schedule: str, golden: list[float]) -> None:
    assert rates(schedule, 10, 2, floor=0.2) == pytest.approx(golden, abs=1e-8)


def rate_before_there_were_groups(step: int, config: OptimConfig) -> float:
    """The formula as it was when all groups had one rate and all schedules ended at 0."""
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    remaining = max(config.max_steps - step, 0)
    steps_after_warmup = max(config.max_steps - config.warmup_steps, 1)
    match config.lr_scheduler_type:
        case "linear":
            return peak * remaining / steps_after_warmup
        case "cosine":
            return peak * 0.5 * (1 - math.cos(math.pi * remaining / steps_after_warmup))
        case "warmup_stable_decay":
            decay_steps = max(min(0.2 * config.max_steps, steps_after_warmup), 1)
            return peak * min(1.0, remaining / decay_steps)
        case _:
            return peak


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("peak", [1e-3, 2e-5, 0.02, 0.1 + 0.2])
@pytest.mark.parametrize("is_set", [False, True])
def test_the_rates_of_the_package_s_optimizers_have_the_bits_that_they_had(
    schedule: Any, peak: float, is_set: bool
) -> None:
    config = OptimConfig(
        max_steps=137, warmup_steps=13, learning_rate=peak, lr_scheduler_type=schedule
    )
    if is_set:
        user_set(config, "learning_rate")
    optimizer = lt.make_optimizer(Accelerator(), nn.Linear(3, 3), config)
    ours = LearningRates(optimizer, config)
    for step in range(138):
        assert set(ours.after(step)) == {rate_before_there_were_groups(step, config)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 100])
@pytest.mark.parametrize("floor", [0.0, 2e-4])
def test_the_rate_rises_to_the_peak_and_never_again(
    schedule: str, warmup: int, floor: float
) -> None:
    if schedule == "constant":
        floor = 0.0
    curve = rates(schedule, 400, warmup, peak=2e-3, floor=floor)
    rising, rest = curve[:warmup], curve[warmup:]
    assert rising == sorted(set(rising))
    assert all(rate > 0 for rate in curve)
    assert max(curve) == pytest.approx(2e-3, rel=1e-12)
    assert curve[max(warmup - 1, 0)] == pytest.approx(2e-3, rel=1e-12)
    assert all(later <= earlier for earlier, later in pairwise(rest))


@pytest.mark.parametrize("schedule", FALLING)
def test_a_falling_schedule_ends_next_to_its_minimum(schedule: Any) -> None:
    assert 0 < rates(schedule, 1000, 50)[-1] < 0.01
    assert 0.1 < rates(schedule, 1000, 50, floor=0.1)[-1] < 0.11
    config = OptimConfig(max_steps=1000, lr_scheduler_type=schedule)
    assert rate_at(1000, config, peak=1.0) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("share", "first_below"), [(0.2, 801), (0.4, 601), (1.0, 51)])
def test_the_stable_phase_holds_the_peak_until_the_decay(share: float, first_below: int) -> None:
    config = OptimConfig(
        max_steps=1000,
        warmup_steps=50,
        lr_scheduler_type="warmup_stable_decay",
        decay_share=share,
    )
    curve = [rate_at(step, config, peak=1.0) for step in range(1000)]
    assert set(curve[50:first_below]) == {1.0}
    assert all(later < earlier for earlier, later in pairwise(curve[first_below - 1 :]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("max_steps", "warmup"), [(1, 0), (1, 1), (2, 2), (5, 9)])
def test_a_run_shorter_than_its_warm_up_only_rises(
    schedule: str, max_steps: int, warmup: int
) -> None:
    curve = rates(schedule, max_steps, warmup)
    assert curve == sorted(curve)
    assert all(0 < rate <= 1 for rate in curve)


@pytest.mark.parametrize(
    ("ours", "make_theirs"),
    [
        ({"lr_scheduler_type": "linear"}, get_linear_schedule_with_warmup),
        ({"lr_scheduler_type": "cosine"}, get_cosine_schedule_with_warmup),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 2e-4},
            functools.partial(get_cosine_with_min_lr_schedule_with_warmup, min_lr=2e-4),
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "decay_share": 0.3, "min_lr": 2e-4},
            functools.partial(
                get_wsd_schedule, num_decay_steps=30, min_lr_ratio=0.1, decay_type="linear"
            ),
        ),
    ],
)
@pytest.mark.parametrize("warmup", [0, 10])
def test_the_rates_after_the_warmup_are_those_of_transformers(
    ours: dict[str, Any], make_theirs: Callable, warmup: int
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    config = OptimConfig(max_steps=100, warmup_steps=warmup, **ours)
    our_rates = LearningRates(optimizer, config)
    theirs = make_theirs(optimizer, num_warmup_steps=warmup, num_training_steps=100)
    for step in range(100):
        (rate,) = theirs.get_last_lr()
        if step >= warmup:
            assert our_rates.after(step)[0] == pytest.approx(rate, rel=1e-12)
        optimizer.step()
        theirs.step()


def test_the_warmup_is_that_of_transformers_cosine_warmup_with_min_lr() -> None:
    """Transformers' other schedules begin at a rate of 0, so their first step changes nothing."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    config = OptimConfig(
        max_steps=100, warmup_steps=10, lr_scheduler_type="cosine_with_min_lr", min_lr=2e-4
    )
    our_rates = LearningRates(optimizer, config)
    theirs = get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
        optimizer, num_warmup_steps=10, num_training_steps=100, min_lr=2e-4
    )
    for step in range(10):
        assert our_rates.after(step) == pytest.approx(theirs.get_last_lr(), rel=1e-12)
        optimizer.step()
        theirs.step()


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
def test_flags_of_a_schedule_that_contradict_each_other_are_refused(
    flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        OptimConfig(**flags)


def test_a_decay_that_the_schedule_has_not_is_refused() -> None:
    defaults = lt.Settings(data=lt.DataConfig())
    with pytest.raises(UserError, match=r"--decay_share 0\.4 has no effect with"):
        lt.parse(defaults, ["--decay_share", "0.4"])
    words = ["--decay_share", "0.4", "--lr_scheduler_type", "warmup_stable_decay"]
    assert lt.parse(defaults, words).optim.decay_share == 0.4


# --- groups


def two_groups(embedding: Any = 1e-2, head: Any = 1e-4) -> torch.optim.AdamW:
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "lr": embedding, "name": "embedding"},
        {
            "params": [torch.nn.Parameter(torch.ones(2))],
            "lr": head,
            "name": "head",
            "weight_decay": 0.3,
        },
    ]
    return torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-7)


def linear(**settings: Any) -> OptimConfig:
    return OptimConfig(max_steps=10, warmup_steps=2, lr_scheduler_type="linear", **settings)


def test_each_group_keeps_its_proportion_and_its_other_settings() -> None:
    optimizer = two_groups()
    others = [{**group, "lr": None} for group in optimizer.param_groups]
    group_rates = LearningRates(optimizer, linear())
    for step, share in enumerate([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]):
        group_rates.set(step)
        found = [group["lr"] for group in optimizer.param_groups]
        assert found == pytest.approx([1e-2 * share, 1e-4 * share], rel=1e-12)
    assert [{**group, "lr": None} for group in optimizer.param_groups] == others


def test_the_peaks_are_those_of_the_beginning() -> None:
    """Loading a checkpoint may bring back a rate that has decayed."""
    optimizer = two_groups()
    group_rates = LearningRates(optimizer, linear())
    group_rates.set(9)
    optimizer.load_state_dict(optimizer.state_dict())
    group_rates.set(1)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-4]


def test_a_learning_rate_of_the_user_is_that_of_the_fastest_group() -> None:
    config = user_set(linear(learning_rate=3e-3), "learning_rate")
    assert LearningRates(two_groups(1e-4, 1e-2), config).peaks == pytest.approx([3e-5, 3e-3])
    assert LearningRates(two_groups(1e-4, 1e-2), config).peaks[1] == 3e-3
    assert LearningRates(two_groups(0.0, 0.0), config).peaks == [3e-3, 3e-3]
    # A default of the recipe is for the optimizer that the recipe makes.
    assert LearningRates(two_groups(), linear(learning_rate=3e-3)).peaks == [1e-2, 1e-4]


def test_the_minimum_is_that_of_the_fastest_group_and_others_are_in_proportion() -> None:
    group_rates = LearningRates(two_groups(), linear(min_lr=2e-3))
    assert group_rates.after(10) == pytest.approx([2e-3, 2e-5], rel=1e-12)
    assert group_rates.after(6) == pytest.approx([6e-3, 6e-5], rel=1e-12)
    assert LearningRates(two_groups(0.0, 0.0), linear()).after(5) == [0.0, 0.0]

    with pytest.raises(UserError, match=r"--min_lr 0\.02 is above the peak learning rate, 0\.01"):
        LearningRates(two_groups(), linear(min_lr=0.02))


def test_a_rate_that_is_a_tensor_is_filled_in_place() -> None:
    tensor = torch.tensor(1e-2, dtype=torch.float64)
    optimizer = two_groups(embedding=tensor)
    group_rates = LearningRates(optimizer, linear())
    group_rates.set(6)
    assert optimizer.param_groups[0]["lr"] is tensor
    assert tensor.item() == pytest.approx(5e-3, rel=1e-12)
    assert tensor.dtype == torch.float64
    # The peak is a number of its own, which filling the tensor does not change.
    group_rates.set(1)
    assert tensor.item() == pytest.approx(1e-2, rel=1e-12)
    assert group_rates.logged() == {
        "train/learning_rate": pytest.approx(1e-2),
        "train/learning_rate/head": pytest.approx(1e-4),
    }


def test_groups_with_a_rate_of_their_own_are_logged_by_name_or_index() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    groups = [
        {"params": [parameters[0]], "name": "matrices"},
        {"params": [parameters[1]], "weight_decay": 0.0, "name": "vectors"},
        {"params": [parameters[2]], "lr": 0.3, "name": "embedding"},
        {"params": [parameters[3]], "lr": 0.4},
    ]
    group_rates = LearningRates(torch.optim.AdamW(groups, lr=0.2), linear())
    group_rates.set(6)
    assert group_rates.logged() == {
        "train/learning_rate": pytest.approx(0.1),
        "train/learning_rate/embedding": pytest.approx(0.15),
        "train/learning_rate/3": pytest.approx(0.2),
    }


def test_two_groups_of_one_name_and_two_rates_are_refused() -> None:
    optimizer = two_groups()
    third = {"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5, "name": "head"}
    optimizer.add_param_group(third)
    with pytest.raises(UserError, match="two parameter groups of the optimizer are named head"):
        LearningRates(optimizer, linear())


@pytest.mark.parametrize("rate", [None, math.nan, math.inf, -1e-3, "fast"])
def test_a_group_without_a_learning_rate_is_refused(rate: object) -> None:
    optimizer = two_groups()
    optimizer.param_groups[1]["lr"] = rate
    with pytest.raises(
        UserError, match=f"parameter group head of the optimizer has the learning rate {rate};"
    ):
        LearningRates(optimizer, linear())


def test_other_peaks_are_another_run() -> None:
    default = LearningRates(two_groups(1e-3, 1e-3), linear(learning_rate=1e-3)).fingerprint
    assert default == {"group_learning_rates": None, "schedule": None}
    other = LearningRates(two_groups(), linear(learning_rate=1e-3)).fingerprint
    assert other == {"group_learning_rates": [1e-2, 1e-4], "schedule": None}
    # The power function of another machine may give another last digit.
    last_digit = LearningRates(two_groups(math.nextafter(1e-2, 1), 1e-4), linear()).fingerprint
    assert last_digit == other


# --- a schedule of the user's own


def triangle(step: int, max_steps: int) -> float:
    """Rise until the middle of the run, and fall again."""
    return 1 - abs(2 * step / max_steps - 1)


class Triangle(lt.Schedule):
    """The same with a height."""

    def __init__(self, height: float = 1.0) -> None:
        self.height = height

    def share(self, step: int, max_steps: int) -> float:
        return self.height * triangle(step, max_steps)


@pytest.mark.parametrize("schedule", [triangle, Triangle()])
def test_a_schedule_replaces_the_warmup_and_the_decay(schedule: object) -> None:
    optimizer = two_groups()
    group_rates = LearningRates(optimizer, linear(), schedule)
    for step, share in enumerate([0, 0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2]):
        group_rates.set(step)
        found = [group["lr"] for group in optimizer.param_groups]
        assert found == pytest.approx([1e-2 * share, 1e-4 * share], abs=1e-15)


def test_a_schedule_is_known_by_its_values() -> None:
    def fingerprint(schedule: object, **settings: Any) -> str:
        return LearningRates(two_groups(), linear(**settings), schedule).fingerprint["schedule"]

    def noisy(step: int, max_steps: int) -> float:
        return triangle(step, max_steps) * (1 + 1e-15 * (step % 3))

    noisy.__name__ = "triangle"
    assert fingerprint(triangle).startswith("triangle ")
    assert fingerprint(noisy) == fingerprint(triangle)
    assert fingerprint(Triangle(1.0)) == fingerprint(Triangle(1.0))
    assert fingerprint(Triangle(1.0)) != fingerprint(Triangle(1.001))


@pytest.mark.parametrize("share", [math.nan, math.inf, -0.1, None, "0.5", torch.ones(1)])
def test_a_bad_value_of_a_schedule_is_found_before_the_first_step(share: object) -> None:
    def steps(step: int, max_steps: int) -> Any:
        return share if step == 7 else 1.0

    with pytest.raises(UserError, match=r"the schedule steps returned .* for step 7 of 10; return"):
        LearningRates(two_groups(), linear(), steps)


@pytest.mark.parametrize("schedule", [Triangle, "cosine", 0.5])
def test_what_is_no_schedule_is_refused(schedule: Any) -> None:
    with pytest.raises(UserError, match="is neither a function of a step and the number of steps"):
        LearningRates(two_groups(), linear(), schedule)


def test_a_schedule_without_the_number_of_steps_is_refused() -> None:
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
        self.rates.append([group["lr"] for group in self._optimizer.param_groups])

    def wants_to_stop(self) -> bool:
        return len(self.rates) + 1 == self._steps


@pytest.fixture
def start(text_file: Path, tmp_path: Path) -> Callable[..., tuple[Path, list[list[float]]]]:
    """Start or resume a run with two groups, and return its folder and the rates of its steps."""
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
        steps: int, schedule: Any = None, peaks: tuple[float, float] = (1e-2, 1e-4)
    ) -> tuple[Path, list[list[float]]]:
        accelerator = lt.start(settings)
        model = lt.GPT(settings.model, rows.vocabulary, seed=0)
        bundle = lt.ModelBundle(model, model.files(rows.tokenizer, rows.metadata.dataset))
        head, *others = model.parameters()
        groups = [
            {"params": [head], "lr": peaks[0], "name": "head"},
            {"params": others, "lr": peaks[1], "name": "others"},
        ]
        optimizer = torch.optim.AdamW(groups)
        callback = StopAfter(optimizer, steps)
        with lt.open_run(
            accelerator,
            settings,
            rows,
            bundle,
            optimizer,
            schedule=schedule,
            callbacks=[callback],
        ) as run:
            batches, _ = lt.loaders(run)
            lt.train(run, *accelerator.prepare(model, optimizer, batches))
        return run.folder, callback.rates

    return start


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        (None, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        (triangle, [0, 0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_groups_keep_their_proportions_in_a_run_and_after_a_resume(
    schedule: Any, shares: list[float], start: Callable
) -> None:
    folder, rates = start(6, schedule)
    same_folder, later_rates = start(99, schedule)
    assert same_folder == folder
    rates += later_rates

    assert len(rates) == 10
    for share, found in zip(shares, rates, strict=True):
        assert found == pytest.approx([1e-2 * share, 1e-4 * share], abs=1e-15)

    entries = [e for e in read_lines(folder / "metrics.jsonl") if "train/loss" in e]
    logged = [[e["train/learning_rate"], e["train/learning_rate/others"]] for e in entries]
    assert logged == rates


def test_another_peak_or_schedule_starts_another_run(start: Callable) -> None:
    folder, _ = start(2)
    assert start(2, peaks=(1e-2, 2e-4))[0].name == "run-2"
    assert start(2, schedule=triangle)[0].name == "run-3"
    assert start(2)[0] == folder
