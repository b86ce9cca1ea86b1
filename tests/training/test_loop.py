"""The loop calls the callbacks, and leaves nothing behind: a model can be trained again."""

import contextlib
import functools
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.interfaces.model import ModelBundle, Recomputation
from llmtrain.observe.stragglers import Stragglers
from llmtrain.record.history import as_numbers, read_lines
from llmtrain.training import periodic
from llmtrain.training.callbacks import MemoryAdvice
from llmtrain.training.loop import Loop
from llmtrain.training.run import Run
from recipes import finetune, gpt
from tests.launching import read_json, series
from tests.models.small_models import byte_tokenizer
from tests.training.small_runs import TWELVE_STEPS, StopAfter


class CrashError(Exception):
    """Stands for a crash."""


@pytest.fixture
def train(train_gpt: Callable[..., Run]) -> Callable[..., Run]:
    """A function that trains a small GPT for three steps."""
    return functools.partial(train_gpt, optim={"max_steps": 3})


def crash(*_: object, **__: object) -> None:
    raise CrashError("out of luck")


# --- hooks on the model


def hook_count(model: nn.Module) -> int:
    """Return how many hooks there are on a model's modules and parameters."""
    on_modules = sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    )
    on_parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return on_modules + on_parameters


class RecordsContext(Callback):
    """Records when its context is opened and closed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        self.calls.append("open")
        try:
            yield
        finally:
            self.calls.append("close")

    def on_train_begin(self) -> None:
        self.calls.append("train begins")


def test_a_run_that_fails_closes_its_contexts_and_leaves_no_hooks_and_no_thread(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lt.GPT(TWELVE_STEPS.model, len(byte_tokenizer()), seed=0)
    before = hook_count(model)

    train("first", model=model)
    assert hook_count(model) == before

    monkeypatch.setattr(Loop, "settle", crash)
    recorder = RecordsContext()
    with pytest.raises(CrashError) as failure:
        train("second", model=model, callbacks=[recorder])
    assert recorder.calls == ["open", "train begins", "close"]
    assert hook_count(model) == before
    # The traceback keeps the frames of the loop alive, as a notebook would.
    assert failure.tb is not None
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("batches") for name in names), "one reads ahead"


# --- calls of callbacks


class Whereabouts(Callback):
    """Keeps where the heartbeat says that this process is, in some calls of the loop."""

    def __init__(self) -> None:
        self.locations: list[str] = []

    def setup(self, training: Any) -> None:
        self.phases = training.engine.phases

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.locations.append(self.phases.location)

    def on_train_end(self) -> None:
        self.locations.append(self.phases.location)


def test_a_callback_that_hangs_is_named_with_its_method_and_the_steps_made(
    train: Callable,
) -> None:
    whereabouts = Whereabouts()

    train("run", callbacks=[whereabouts])

    assert "Whereabouts" not in whereabouts.phases.location
    assert whereabouts.locations == [
        "Whereabouts.on_step_end after step 1",
        "Whereabouts.on_step_end after step 2",
        "Whereabouts.on_step_end after step 3",
        "Whereabouts.on_train_end after step 3",
    ]


def test_methods_that_an_instance_has_are_called(train: Callable) -> None:
    calls: list[int] = []
    callback = Callback()
    callback.on_step_end = lambda batch, result, info: calls.append(info.step)  # type: ignore

    train("run", callbacks=[callback])

    assert calls == [1, 2, 3]


# --- log entries


class LogRecorder(Callback):
    """Keeps the numbers of each log entry."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entries.append((step, dict(metrics)))


def test_a_callback_gets_the_numbers_of_each_log_entry(train: Callable, tmp_path: Path) -> None:
    recorder = LogRecorder()

    train("run", callbacks=[recorder])

    logged = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert recorder.entries == [(entry["step"], as_numbers(entry)) for entry in logged]


class CountsTokens(lt.Objective):
    """An objective with a metric of its prepass."""

    def prepass(self, engine: Any, batches: Any, totals: Any) -> dict[str, Any]:
        return {"tokens": totals.target_tokens}

    def metrics(self, sums: Mapping[str, float], extra: Mapping[str, Any]) -> dict[str, float]:
        return {"tokens": float(extra["tokens"])} if "tokens" in extra else {}


def test_an_entry_has_the_metrics_of_what_the_prepass_has_returned(train: Callable) -> None:
    run = train("run", objective=CountsTokens())
    assert series(run.folder, "train/tokens") == dict.fromkeys((1, 2, 3), 2 * 16)


# --- the end of a run


def test_a_run_is_finished_as_soon_as_its_model_is_written(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(periodic, "final_sample", interrupt)

    with pytest.raises(KeyboardInterrupt):
        train("run")

    status = read_json(tmp_path / "run" / "status.json")
    assert status["state"] == "finished"
    assert status["step"] == 3


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


def test_the_advice_on_memory_names_recomputation_unless_all_blocks_are_recomputed() -> None:
    model = lt.GPT(lt.GPTConfig(n_layer=1, n_head=1, n_embd=8), 8)
    no_block = ModelBundle(model, recomputation=Recomputation(False))
    every_block = ModelBundle(model, recomputation=Recomputation(True))

    assert "--gradient_checkpointing" in advice_on_memory(gpt.DEFAULTS, no_block)
    assert "--gradient_checkpointing" not in advice_on_memory(gpt.DEFAULTS, every_block)


# --- evaluations and samples


@pytest.mark.parametrize("keeps_best", [False, True])
def test_a_run_that_stops_evaluates_only_if_it_keeps_the_best_checkpoint(
    keeps_best: bool, train_gpt: Callable[..., Run]
) -> None:
    evaluation = {"load_best_model_at_end": keeps_best}
    run = train_gpt(evaluation=evaluation, callbacks=[StopAfter(4)])

    assert read_json(run.folder / "status.json")["state"] == "preempted"
    assert [*series(run.folder, "eval/loss")] == ([0, 4] if keeps_best else [0])


def test_a_run_that_stops_makes_samples_only_after_its_last_step(
    train_gpt: Callable[..., Run],
) -> None:
    evaluation = {"sample_prompts": ["a"]}
    stopped = train_gpt(evaluation=evaluation, callbacks=[StopAfter(8)])
    assert "samples" in stopped.deadline.reserved

    resumed = train_gpt(evaluation=evaluation)

    samples = read_lines(resumed.folder / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [4, 12]


# --- late ranks


def test_a_late_rank_is_an_event_except_in_the_first_step(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stragglers, "find_new", lambda *_: "rank 1 is late")

    run = train("run")

    events = read_lines(run.folder / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "late"] == [2, 3]


# --- runs that a callback ends before their last step


TrainGpt = Callable[..., Run]


class Votes(lt.Callback):
    """Votes once, before step 6."""

    def __init__(self, vote: Any, name: str = "Votes") -> None:
        self.vote = vote
        self.name = name

    def setup(self, training: Any) -> None:
        self._training = training

    def wants_to_stop(self) -> Any:
        return self._training.step == 5 and self.vote


@pytest.fixture
def finished(train_gpt: TrainGpt) -> Run:
    """A run that a callback has finished after step 6 of 12."""
    return train_gpt(callbacks=[Votes("finish")])


def status_of(folder: Path) -> tuple[str, int, str]:
    status = read_json(folder / "status.json")
    return status["state"], status["step"], status["reason"]


def test_a_run_that_a_callback_finishes_is_evaluated_and_has_a_model(finished: Run) -> None:
    assert status_of(finished.folder) == ("finished", 6, "Votes has finished the run")
    assert [*series(finished.folder, "eval/loss")] == [0, 4, 6]
    assert (finished.folder / "checkpoints" / "step-00000006").is_dir()
    assert (finished.folder / "model" / "model.safetensors").exists()


def test_a_run_that_is_finished_makes_no_more_steps_unless_it_gets_more_or_other_callbacks(
    finished: Run, train_gpt: TrainGpt
) -> None:
    """Also if it was killed before it had written its model."""
    folder = finished.folder
    callbacks = [Votes("finish")]

    again = train_gpt(callbacks=callbacks, resume=str(folder))
    longer = train_gpt(callbacks=callbacks, resume=str(folder), optim={"max_steps": 14})
    changed = train_gpt(callbacks=[Votes(False)], resume=str(folder))
    shutil.rmtree(folder / "model")
    (folder / "status.json").unlink()
    killed = train_gpt(callbacks=callbacks)

    for run in (again, killed):
        assert status_of(run.folder) == ("finished", 6, "Votes has finished the run")
        assert (run.folder / "model" / "model.safetensors").exists()
    assert killed.folder == folder
    assert status_of(longer.folder) == ("finished", 14, "all steps are done")
    assert status_of(changed.folder) == ("finished", 12, "all steps are done")


def test_a_vote_to_save_outweighs_one_to_finish(train_gpt: TrainGpt) -> None:
    callbacks = [Votes("finish"), Votes("save", name="Saves"), Votes("finish", name="Third")]

    run = train_gpt(callbacks=callbacks)

    assert status_of(run.folder) == ("preempted", 6, "asked to stop; step 6 is saved")
    assert not (run.folder / "model").exists()
    assert status_of(train_gpt(callbacks=callbacks).folder)[:2] == ("finished", 12)


def test_another_word_is_refused(train_gpt: TrainGpt) -> None:
    with pytest.raises(UserError, match=r"Votes\.wants_to_stop returned 'stop'; return False"):
        train_gpt(callbacks=[Votes("stop")])
