"""What the callbacks of the loop record, and when."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.callback import StepInfo
from llmtrain.interfaces.model_bundle import ModelBundle, Recomputation
from llmtrain.observe.throughput import Throughput
from llmtrain.parallel.gradient_syncs import GradientSyncs
from llmtrain.phase_names import PHASES
from llmtrain.training import periodic
from llmtrain.training.callbacks import MemoryAdvice
from llmtrain.training.context import LoopContext
from llmtrain.training.periodic import Samples
from llmtrain.training.step_log import Logging
from recipes import finetune, gpt
from tests.engines import engine_of


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (gpt.DEFAULTS, "Lower --block_size, or"),
        (finetune.DEFAULTS, "Lower --max_length, or"),
        (lt.Settings(data=lt.BatchConfig()), "Make the rows shorter, or"),
    ],
)
def test_the_advice_on_memory_names_the_flag_that_the_recipe_has(
    settings: lt.Settings, expected: str
) -> None:
    advice = advice_on_memory(settings, ModelBundle(nn.Linear(1, 1)))
    assert advice.startswith(
        f"out of memory with 1 row at a time: one row is too much. {expected} make the model smaller"
    )


@pytest.mark.parametrize(("every", "is_named"), [(None, True), (0, True), (2, True), (1, False)])
def test_the_advice_on_memory_names_recomputation_unless_all_blocks_do_it(
    every: int | None, is_named: bool
) -> None:
    model = lt.GPT(lt.GPTConfig(n_layer=1, n_head=1, n_embd=8), 8)
    recomputation = None if every is None else Recomputation(every)
    advice = advice_on_memory(gpt.DEFAULTS, ModelBundle(model, recomputation=recomputation))
    assert ("--gradient_checkpointing" in advice) == is_named


def advice_on_memory(settings: lt.Settings, bundle: ModelBundle) -> str:
    """Return the error of a run that is out of memory."""
    run = SimpleNamespace(layout=SimpleNamespace(micro_batch=1), settings=settings, bundle=bundle)
    engine = SimpleNamespace(ranks=SimpleNamespace(is_sharded=False))
    context: Any = SimpleNamespace(run=run, engine=engine)
    with pytest.raises(UserError) as caught, MemoryAdvice(context).context():
        raise torch.OutOfMemoryError
    return str(caught.value)


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
        batches=unused,
        eval_batches=None,
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
    settings = SimpleNamespace(
        eval=SimpleNamespace(eval_steps=2, sample_prompts=["a"]), optim=SimpleNamespace(seed=0)
    )
    run: Any = SimpleNamespace(
        settings=settings,
        rows=SimpleNamespace(tokenizer=None, stop_token_ids=()),
        deadline=SimpleNamespace(reserve=reserved.__setitem__),
        log_samples=lambda samples: steps.append(samples[0]["text"]),
    )
    phases = SimpleNamespace(begin=lambda phase: None)
    engine: Any = SimpleNamespace(phases=phases, model=nn.Linear(1, 1))
    throughput = SimpleNamespace(paused=contextlib.nullcontext)
    context: Any = SimpleNamespace(
        run=run, engine=engine, throughput=throughput, settle=lambda: None
    )
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


def test_a_late_rank_is_an_event_but_not_in_the_first_step() -> None:
    events: list[str] = []
    run: Any = SimpleNamespace(settings=SimpleNamespace(loop=None))
    run.record_event = lambda kind, text: events.append(kind)
    accelerator = Accelerator(cpu=True)
    engine = engine_of(accelerator, nn.Linear(1, 1))
    unused: Any = None
    context = LoopContext(
        run=run,
        engine=engine,
        optimizer=unused,
        batches=unused,
        eval_batches=None,
        throughput=Throughput(accelerator, engine.unwrapped),
    )
    logging = Logging(context, GradientSyncs(engine.model))
    late = {phase: [1.0, 1.0] for phase in PHASES} | {"data": [0.0, 90.0]}
    for _ in range(3):
        logging._record_if_a_rank_is_late(late)
    assert events == []

    engine.phases.has_dropped_first_step = True
    for _ in range(3):
        logging._record_if_a_rank_is_late(late)
    assert events == ["late"]
