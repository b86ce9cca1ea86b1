"""The callbacks of the loop evaluate, sample, give advice and record events."""

from collections.abc import Callable
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
from llmtrain.record.history import read_lines
from llmtrain.training.callbacks import MemoryAdvice
from llmtrain.training.context import LoopContext
from llmtrain.training.run import Run
from llmtrain.training.step_log import Logging
from recipes import finetune, gpt
from tests.engines import engine_of
from tests.training.small_runs import StopAfter

UNUSED: Any = None


# --- advice on memory


def advice_on_memory(settings: lt.Settings, bundle: ModelBundle) -> str:
    """Return the error of a run that is out of memory."""
    run = SimpleNamespace(layout=SimpleNamespace(micro_batch=1), settings=settings, bundle=bundle)
    engine = SimpleNamespace(ranks=SimpleNamespace(is_sharded=False))
    context: Any = SimpleNamespace(run=run, engine=engine)
    with pytest.raises(UserError) as error, MemoryAdvice(context).context():
        raise torch.OutOfMemoryError
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        pytest.param(gpt.DEFAULTS, "--block_size", id="pretraining"),
        pytest.param(finetune.DEFAULTS, "--max_length", id="fine-tuning"),
        pytest.param(lt.Settings(data=lt.BatchConfig()), "rows shorter", id="rows of the user"),
    ],
)
def test_the_advice_on_memory_names_a_flag_of_the_recipe(
    settings: lt.Settings, remedy: str
) -> None:
    assert remedy in advice_on_memory(settings, ModelBundle(nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("recomputation", "is_named"),
    [(None, True), (Recomputation(2), True), (Recomputation(1), False)],
    ids=["not possible", "every second block", "every block"],
)
def test_the_advice_on_memory_names_recomputation_unless_all_blocks_are_recomputed(
    recomputation: Recomputation | None, is_named: bool
) -> None:
    model = lt.GPT(lt.GPTConfig(n_layer=1, n_head=1, n_embd=8), 8)

    advice = advice_on_memory(gpt.DEFAULTS, ModelBundle(model, recomputation=recomputation))

    assert ("--gradient_checkpointing" in advice) == is_named


# --- evaluations and samples


def context_of(run: Any, engine: Any = UNUSED, throughput: Any = UNUSED) -> LoopContext:
    return LoopContext(
        run=run,
        engine=engine,
        optimizer=UNUSED,
        batches=UNUSED,
        eval_batches=None,
        throughput=throughput,
    )


@pytest.mark.parametrize("keeps_best", [False, True])
def test_a_run_that_stops_evaluates_only_if_it_keeps_the_best_checkpoint(keeps_best: bool) -> None:
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(eval=SimpleNamespace(eval_steps=2)),
        patience=SimpleNamespace(keeps_best=keeps_best),
    )
    context = context_of(run)

    assert context.evaluates_after(StepInfo(4, is_last=False, should_stop=False))
    assert not context.evaluates_after(StepInfo(3, is_last=False, should_stop=False))
    stopping = StepInfo(4, is_last=False, should_stop=True)
    assert context.evaluates_after(stopping) == keeps_best


def test_a_run_that_stops_makes_samples_only_after_its_last_step(
    train_gpt: Callable[..., Run],
) -> None:
    stopped = train_gpt(sample_prompts=["a"], callbacks=[StopAfter(8)])
    assert "samples" in stopped.deadline.reserved

    resumed = train_gpt(sample_prompts=["a"])

    samples = read_lines(resumed.folder / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [4, 12]


# --- late ranks


@pytest.mark.parametrize(
    ("has_dropped_first_step", "expected"),
    [
        pytest.param(False, [], id="in the first step"),
        pytest.param(True, ["late"], id="later"),
    ],
)
def test_a_late_rank_is_one_event_except_in_the_first_step(
    has_dropped_first_step: bool, expected: list[str]
) -> None:
    events: list[str] = []
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(optim=SimpleNamespace(max_steps=3)),
        rows=SimpleNamespace(in_order=False),
        record_event=lambda kind, text: events.append(kind),
    )
    accelerator = Accelerator(cpu=True)
    engine = engine_of(accelerator, nn.Linear(1, 1))
    engine.phases.has_dropped_first_step = has_dropped_first_step
    context = context_of(run, engine, Throughput(accelerator, engine.unwrapped))
    logging = Logging(context, GradientSyncs(engine.model))

    seconds = {phase: [1.0, 1.0] for phase in PHASES} | {"data": [0.0, 90.0]}
    for _ in range(3):
        logging._record_if_a_rank_is_late(seconds)

    assert events == expected
