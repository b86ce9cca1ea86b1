"""What the callbacks of the loop record, and when."""

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.models.answers import AnswerRows
from llmtrain.models.config import GPTConfig, ModelConfig, PreferenceConfig
from llmtrain.models.preference_objective import PreferenceObjective
from llmtrain.observe.phases import Phases
from llmtrain.observe.throughput import Throughput
from llmtrain.parallel.gradient_syncs import GradientSyncs
from llmtrain.training import callbacks
from llmtrain.training.callbacks import Logging, LoopContext, MemoryAdvice, Samples
from llmtrain.types import Batch, LossSums, StepInfo, StepResult
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


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (GPTConfig(), "Lower --block_size, or"),
        (ModelConfig(), "Lower --max_length, or"),
        (None, "Make the rows shorter, or"),
    ],
)
def test_the_advice_on_memory_names_the_flag_that_the_recipe_has(model: Any, expected: str) -> None:
    run = SimpleNamespace(
        layout=SimpleNamespace(micro_batch=1), settings=SimpleNamespace(model=model)
    )
    engine = SimpleNamespace(is_sharded=False)
    context: Any = SimpleNamespace(run=run, engine=engine, timing=None)
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
    timing = SimpleNamespace(
        phases=Phases(engine.device, engine.model),
        syncs=GradientSyncs(engine.model),
        throughput=Throughput(accelerator, engine.unwrapped),
        progress=SimpleNamespace(show_entry=lambda step, entry: None),
    )
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    context: Any = SimpleNamespace(run=run, engine=engine, optimizer=optimizer, timing=timing)
    return Logging(context)


def events_of(rewards: list[tuple[float, float]]) -> list[int]:
    """Return the log entries, counted from 1, at which the event was recorded."""
    objective = GivenRewards()
    entries: list[Any] = []
    events: list[int] = []

    def note_event(kind: str, text: str) -> None:
        assert kind == "chosen"
        events.append(len(entries) + 1)

    settings = SimpleNamespace(log=SimpleNamespace(logging_steps=1))
    run = SimpleNamespace(settings=settings, record_event=note_event, log=entries.append)
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
        settings=SimpleNamespace(eval=SimpleNamespace(eval_steps=2)),
        patience=SimpleNamespace(keeps_best=keeps_best),
    )
    unused: Any = None
    context = LoopContext(
        run=run,
        engine=unused,
        optimizer=unused,
        eval_batches=None,
        metric=None,
        timing=unused,
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
    settings = SimpleNamespace(
        eval=SimpleNamespace(eval_steps=2, sample_prompts=["a"]), optim=SimpleNamespace(seed=0)
    )
    run: Any = SimpleNamespace(
        settings=settings,
        rows=SimpleNamespace(tokenizer=None, stop_token_ids=()),
        deadline=SimpleNamespace(reserve=reserved.__setitem__),
        log_samples=lambda samples: steps.append(samples[0]["text"]),
    )
    engine: Any = SimpleNamespace(set_phase=lambda phase: None, model=nn.Linear(1, 1))
    timing: Any = SimpleNamespace(throughput=SimpleNamespace(paused=contextlib.nullcontext))
    context: Any = SimpleNamespace(run=run, engine=engine, timing=timing)
    samples = Samples(context)
    unused: Any = None
    for info in (
        StepInfo(2, is_last=False, should_stop=False),
        StepInfo(4, is_last=False, should_stop=True),
        StepInfo(5, is_last=True, should_stop=True),
    ):
        step = info.step
        monkeypatch.setattr(callbacks, "sample", lambda *_, step=step, **__: [step])
        samples.on_step_end(unused, unused, info)
    assert steps == [2, 5]
    assert reserved["samples"] >= 0


def test_ranks_that_share_a_model_count_once_in_the_fingerprint_of_a_batch() -> None:
    logging: Any = SimpleNamespace(engine=SimpleNamespace(model_parallel_size=2))
    assert Logging._of_global_batch(logging, [5.0, 5.0, 7.0, 7.0]) == 12
