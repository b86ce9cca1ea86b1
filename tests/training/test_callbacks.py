"""What the callbacks of the loop record, and when."""

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.config import Config, parse
from llmtrain.data.config import BatchConfig
from llmtrain.errors import UserError
from llmtrain.models.answers import AnswerRows
from llmtrain.models.config import GPTConfig, ModelConfig, PreferenceConfig
from llmtrain.models.preference_objective import PreferenceObjective
from llmtrain.observe.throughput import Throughput
from llmtrain.parallel.gradient_syncs import GradientSyncs
from llmtrain.phases import PHASES
from llmtrain.training import periodic
from llmtrain.training.callbacks import MemoryAdvice
from llmtrain.training.context import LoopContext
from llmtrain.training.periodic import Samples
from llmtrain.training.settings import Settings
from llmtrain.training.step_log import Logging
from llmtrain.types import Batch, JsonObject, LossSums, StepInfo, StepResult
from tests.engines import engine_of


class GivenRewards(PreferenceObjective):
    """The objective of a preference run, whose mean rewards the test sets."""

    def __init__(self) -> None:
        rows = AnswerRows(answers_per_row=2, are_packed=True, share_prompts=True, are_scored=False)
        super().__init__(PreferenceConfig(), rows)
        self.chosen = 0.0
        self.rejected = 0.0

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        return {"rewards/chosen": self.chosen, "rewards/rejected": self.rejected}


def typed(model: Config, *flags: str) -> Config:
    """The config of a model after these flags."""
    return parse(Settings(data=BatchConfig(), model=model), list(flags)).model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (GPTConfig(), "Lower --block_size, or"),
        (ModelConfig(), "Lower --max_length, or"),
        (typed(ModelConfig(), "--block_size", "8"), "Lower --block_size, or"),
        (typed(GPTConfig(), "--max_length", "8"), "Lower --max_length, or"),
        (None, "Make the rows shorter, or"),
    ],
)
def test_the_advice_on_memory_names_the_flag_that_the_recipe_has(model: Any, expected: str) -> None:
    run = SimpleNamespace(
        layout=SimpleNamespace(micro_batch=1), settings=SimpleNamespace(model=model, loop=None)
    )
    engine = SimpleNamespace(is_sharded=False)
    context: Any = SimpleNamespace(run=run, engine=engine)
    with (
        pytest.raises(
            UserError,
            match=f"with 1 row at a time: one row is too much. {expected} make the model smaller",
        ),
        MemoryAdvice(context).context(),
    ):
        raise torch.OutOfMemoryError


def logging_of(objective: GivenRewards, run: Any) -> Logging:
    """Return the callback that logs, without a loop around it."""
    accelerator = Accelerator(cpu=True)
    engine = engine_of(accelerator, nn.Linear(1, 1), objective)
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.1}])
    unused: Any = None
    context = LoopContext(
        run=run,
        engine=engine,
        optimizer=optimizer,
        batches=unused,
        eval_batches=None,
        metric=None,
        throughput=Throughput(accelerator, engine.unwrapped),
    )
    return Logging(context, GradientSyncs(engine.model))


def events_of(rewards: list[tuple[float, float]]) -> list[int]:
    """Return the log entries, counted from 1, at which the event was recorded."""
    objective = GivenRewards()
    entries: list[Any] = []

    def log(entry: JsonObject) -> JsonObject:
        entries.append(entry)
        return entry

    events: list[int] = []

    def note_event(kind: str, text: str) -> None:
        assert kind == "chosen"
        events.append(len(entries) + 1)

    settings = SimpleNamespace(loop=SimpleNamespace(logging_steps=1))
    run = SimpleNamespace(settings=settings, record_event=note_event, log=log, step=1)
    logging = logging_of(objective, run)

    batch: Any = SimpleNamespace(token_fingerprint=0, label_fingerprint=0)
    result = StepResult(
        sums=LossSums(torch.zeros(()), metrics={}),
        extra={},
        target_tokens=1,
        denominator=1,
        grad_norm=1.0,
        should_stop=False,
    )
    for step, (chosen, rejected) in enumerate(rewards, start=1):
        objective.chosen = chosen
        objective.rejected = rejected
        logging.on_step_end(batch, result, StepInfo(step, is_last=False, should_stop=False))
        assert entries[-1]["train/rewards/chosen"] == chosen
    return events


DISPLACED = (-0.3, -0.9)  # both below the reference model, rejected answers further


def test_displaced_answers_are_an_event_after_five_log_entries_once() -> None:
    assert events_of([DISPLACED] * 4) == []
    assert events_of([DISPLACED] * 20) == [5]


@pytest.mark.parametrize(
    "rewards",
    [
        [(-0.001, -0.002)] * 20,
        [DISPLACED, DISPLACED, (0.1, -0.9)] * 7,
        [(-0.3, -0.1)] * 20,
        [(0.3, -0.9)] * 20,
        [(-0.3, 0.0)] * 20,
    ],
    ids=[
        "noise around zero",
        "no five entries in a row",
        "rejected answers have fallen less",
        "chosen answers have become more likely",
        "rejected answers have not fallen",
    ],
)
def test_answers_that_are_not_displaced_are_no_event(rewards: list[tuple[float, float]]) -> None:
    assert events_of(rewards) == []


def test_a_healthy_start_does_not_hide_a_later_displacement() -> None:
    assert events_of([(0.1, -0.1)] * 9 + [DISPLACED] * 9) == [14]


@pytest.mark.parametrize(("keeps_best", "evaluates"), [(False, False), (True, True)])
def test_a_stopping_run_skips_an_evaluation_unless_it_may_choose_the_best_checkpoint(
    keeps_best: bool, evaluates: bool
) -> None:
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(loop=SimpleNamespace(eval_steps=2)),
        patience=SimpleNamespace(keeps_best=keeps_best),
    )
    unused: Any = None
    context = LoopContext(
        run=run,
        engine=unused,
        optimizer=unused,
        batches=unused,
        eval_batches=None,
        metric=None,
        throughput=unused,
    )
    stopping = StepInfo(4, is_last=False, should_stop=True)
    assert context.evaluates_after(stopping) == evaluates
    assert context.evaluates_after(StepInfo(4, is_last=False, should_stop=False))
    assert not context.evaluates_after(StepInfo(3, is_last=False, should_stop=False))


def test_a_stopping_run_makes_no_samples_and_others_reserve_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserved: dict[str, float] = {}
    steps: list[int] = []
    loop = SimpleNamespace(eval_steps=2, sample_prompts=["a"], seed=0)
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(loop=loop),
        rows=SimpleNamespace(tokenizer=None, stop_token_ids=()),
        deadline=SimpleNamespace(reserve=reserved.__setitem__),
        log_samples=lambda samples: steps.append(samples[0]["text"]),
    )
    phases = SimpleNamespace(begin=lambda phase: None)
    engine: Any = SimpleNamespace(phases=phases, model=nn.Linear(1, 1))
    throughput = SimpleNamespace(paused=contextlib.nullcontext)
    context: Any = SimpleNamespace(run=run, engine=engine, throughput=throughput)
    samples = Samples(context)
    unused: Any = None
    for info in (
        StepInfo(2, is_last=False, should_stop=False),
        StepInfo(4, is_last=False, should_stop=True),
        StepInfo(5, is_last=True, should_stop=True),
    ):
        step = info.step
        monkeypatch.setattr(periodic, "sample", lambda *_, step=step, **__: [step])
        samples.on_step_end(unused, unused, info)
    assert steps == [2, 5]
    assert reserved["samples"] >= 0


def test_ranks_that_share_a_model_count_once_in_the_fingerprint_of_a_batch() -> None:
    logging: Any = SimpleNamespace(engine=SimpleNamespace(model_parallel_size=2))
    assert Logging._of_global_batch(logging, [5.0, 5.0, 7.0, 7.0]) == 12


def test_a_late_rank_is_an_event_but_not_in_the_first_step() -> None:
    events: list[str] = []
    run = SimpleNamespace(settings=SimpleNamespace(loop=None), step=1)
    run.record_event = lambda kind, text: events.append(kind)
    logging = logging_of(GivenRewards(), run)
    seconds = {phase: [1.0, 1.0] for phase in PHASES}
    by_rank: Any = SimpleNamespace(phase_seconds=seconds | {"data": [0.0, 90.0]})
    for _ in range(3):
        logging._record_events({"rewards/chosen": 0.0, "rewards/rejected": 0.0}, by_rank)
    assert events == []

    logging.engine.phases.has_dropped_first_step = True
    for _ in range(3):
        logging._record_events({"rewards/chosen": 0.0, "rewards/rejected": 0.0}, by_rank)
    assert events == ["late"]
