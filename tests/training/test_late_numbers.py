"""The numbers of a step are read one step late; the device decides whether the step changes anything.

The reference is the other order of the same loop: an optimizer that cannot skip on the device makes
the host read the norm before each step.
"""

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import llmtrain as lt
from llmtrain.device_numbers import DeviceScalars
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult
from llmtrain.parallel.ranks import Sharding
from llmtrain.record.history import read_lines
from llmtrain.training import step
from llmtrain.training.adamw import EightBitAdamW
from llmtrain.training.run import Run
from llmtrain.training.step import can_skip_on_device
from tests.engines import engine_of
from tests.launching import read_json

STEPS = 12
NAN_STEPS = (2, 6, 7)


class NanLoss(lt.Objective):
    """The usual loss, which is NaN in some steps."""

    settings = None
    is_active = False

    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        sums = super().loss(model, batch, extra)
        return sums._replace(loss=sums.loss * float("nan")) if self.is_active else sums


class NanLossAt(lt.Callback):
    """Makes the loss NaN in some steps, and collects the last optimizer and weights."""

    settings = None

    def __init__(self, objective: NanLoss, steps: tuple[int, ...]) -> None:
        self.objective = objective
        self.steps = steps

    def setup(self, training: Any) -> None:
        self.training = training

    def on_step_begin(self, batch: LocalBatch) -> None:
        self.objective.is_active = self.training.step + 1 in self.steps

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.objective.is_active = False

    def on_train_end(self) -> None:
        self.weights = [p.detach().clone() for p in self.training.model.parameters()]
        self.state = self.training.optimizer.state_dict()["state"]


Train = Callable[..., tuple[Run, NanLossAt]]


@pytest.fixture
def train_with_nan(train_gpt: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Train:
    """A function that trains a small GPT whose loss is NaN in some steps.

    It saves and evaluates after every fourth step. It returns the run, and the callback that has
    collected the weights.
    """

    def train(
        name: str,
        nan_steps: tuple[int, ...] = NAN_STEPS,
        callbacks: tuple[lt.Callback, ...] = (),
        logging_steps: int = 1,
        skip_on: str = "device",
        **optim: Any,
    ) -> tuple[Run, NanLossAt]:
        objective = NanLoss()
        nan_loss = NanLossAt(objective, nan_steps)
        log = lt.LogConfig(logging_steps=logging_steps, log_rows=True)
        with monkeypatch.context() as patch:
            if skip_on == "host":
                # Then the host reads the norm before the optimizer's step.
                patch.setattr(step, "can_skip_on_device", lambda _: False)
            run = train_gpt(
                name,
                log=log,
                optim=optim,
                objective=objective,
                callbacks=[nan_loss, *callbacks],
            )
        return run, nan_loss

    return train


# What differs between two equal runs.
TIMES = ("time", "phases", "memory", "train/tokens_per_second")


def entries_without_times(run: Run, name: str) -> list[dict[str, str]]:
    """Return the lines of a file in a run folder. Values are texts, because NaN equals nothing."""
    return [
        {key: repr(value) for key, value in entry.items() if key not in TIMES}
        for entry in read_lines(run.folder / name)
    ]


def check_equal_states(states: dict[Any, Any], expected: dict[Any, Any]) -> None:
    torch.testing.assert_close(states, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "optim",
    [
        {"optim": "adamw"},
        {"optim": "muon"},
        {"optim": "adamw_torch_8bit"},
        {"optim": "muon", "dtype": "bfloat16"},
    ],
    ids=lambda optim: " ".join(optim.values()),
)
def test_skipping_on_the_device_leaves_the_same_run_as_skipping_on_the_host(
    train_with_nan: Train, optim: dict[str, str]
) -> None:
    flags = {**optim, "skip_nonfinite": 5}
    run, late = train_with_nan("on-device", **flags)
    reference_run, reference = train_with_nan("on-host", skip_on="host", **flags)

    assert all(map(torch.equal, late.weights, reference.weights))
    assert all(weights.isfinite().all() for weights in late.weights)
    check_equal_states(late.state, reference.state)

    for name in ("metrics.jsonl", "rows.jsonl", "events.jsonl"):
        entries = entries_without_times(run, name)
        assert entries
        assert entries == entries_without_times(reference_run, name), name
    assert run.status.skipped == reference_run.status.skipped == len(NAN_STEPS)
    assert run.status.tokens == reference_run.status.tokens == STEPS * 2 * 16  # 2 rows of 16

    norms = {
        entry["step"]: entry["train/grad_norm"]
        for entry in read_lines(run.folder / "metrics.jsonl")
        if "train/grad_norm" in entry
    }
    assert [*norms] == [*range(1, STEPS + 1)]
    assert [step for step, norm in norms.items() if norm is None] == [*NAN_STEPS]


@pytest.mark.parametrize(
    ("allowed", "failing_step", "saved"),
    [
        pytest.param(0, 2, [], id="none may be skipped"),
        pytest.param(1, 6, ["step-00000004"], id="one may be skipped"),
    ],
)
def test_too_many_skipped_steps_end_the_run_in_the_same_way_on_the_device_and_the_host(
    train_with_nan: Train, tmp_path: Path, allowed: int, failing_step: int, saved: list[str]
) -> None:
    messages = set()
    for skip_on in ("device", "host"):
        with pytest.raises(UserError, match=f"^step {failing_step} was skipped: ") as error:
            train_with_nan(skip_on, skip_nonfinite=allowed, skip_on=skip_on)
        messages.add(str(error.value))

        status = read_json(tmp_path / skip_on / "status.json")
        assert status["state"] == "failed"
        assert status["step"] == failing_step - 1
        checkpoints = (tmp_path / skip_on / "checkpoints").glob("step-*")
        assert [path.name for path in checkpoints] == saved
    assert len(messages) == 1


def test_the_next_forward_pass_begins_before_the_numbers_of_a_step_are_read(
    train_with_nan: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    read = DeviceScalars.read
    objective_loss = NanLoss.loss

    def loss(self: NanLoss, *arguments: Any) -> lt.LossSums:
        if torch.is_grad_enabled():
            calls.append("forward")
        return objective_loss(self, *arguments)

    def recorded_read(scalars: DeviceScalars) -> dict[str, float]:
        is_first = not scalars.is_read
        numbers = read(scalars)
        if is_first and "grad_norm" in numbers:
            calls.append("read")
        return numbers

    monkeypatch.setattr(NanLoss, "loss", loss)
    monkeypatch.setattr(DeviceScalars, "read", recorded_read)
    train_with_nan("run", nan_steps=())

    # Steps 4, 8 and 12 are evaluated and saved.
    steps_1_to_4 = ["forward", "forward", "read", "forward", "read", "forward", "read", "read"]
    assert calls == steps_1_to_4 * 3


class CrashesAt(lt.Callback):
    """Fails in the first start when a step is launched, before its numbers are read."""

    settings = None

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if info.step == self.step:
            self.step = 0
            raise CrashError


class CrashError(Exception):
    pass


@pytest.mark.parametrize("crash_step", [6, 7])
def test_a_crash_before_the_numbers_are_read_counts_nothing_twice(
    train_with_nan: Train, crash_step: int
) -> None:
    run, reference = train_with_nan("unbroken", skip_nonfinite=5)
    crash = CrashesAt(crash_step)
    with pytest.raises(CrashError):
        train_with_nan("crashed", callbacks=(crash,), skip_nonfinite=5)
    resumed_run, resumed = train_with_nan("crashed", callbacks=(crash,), skip_nonfinite=5)

    assert all(map(torch.equal, resumed.weights, reference.weights))
    check_equal_states(resumed.state, reference.state)
    assert resumed_run.status.tokens == run.status.tokens
    assert resumed_run.status.skipped == len(NAN_STEPS)


def test_a_resumed_run_that_may_skip_fewer_steps_ends_at_the_next(train_with_nan: Train) -> None:
    crash = CrashesAt(5)
    with pytest.raises(CrashError):
        train_with_nan("run", callbacks=(crash,), skip_nonfinite=5)
    with pytest.raises(UserError, match="step 6 was skipped"):
        train_with_nan("run", callbacks=(crash,), skip_nonfinite=0)


class ReadsNumbers(lt.Callback):
    """Reads the numbers of a step when it ends, as it may."""

    settings = None

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.late_norms: list[float] = []

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.norms.append(result.grad_norm)
        assert bool(result.is_skipped) is not math.isfinite(result.grad_norm)

    def on_step_result(self, step: int, result: StepResult) -> None:
        self.late_norms.append(result.grad_norm)


def test_a_callback_may_read_the_numbers_when_the_step_ends(train_with_nan: Train) -> None:
    reader = ReadsNumbers()
    run, _ = train_with_nan("run", callbacks=(reader,), skip_nonfinite=5)
    assert [i + 1 for i, norm in enumerate(reader.norms) if math.isnan(norm)] == [*NAN_STEPS]
    assert repr(reader.late_norms) == repr(reader.norms)
    assert run.status.skipped == len(NAN_STEPS)


class Projected(torch.optim.AdamW):
    """Changes the weights after the step of its base, whether that changed anything or not."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=1e-9)
        return loss


def test_only_optimizers_that_are_known_to_skip_do_so_on_the_device() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    muon = lt.Muon([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1, weight_decay=0.0)
    fused = torch.optim.AdamW([matrix], fused=True)
    unfused = torch.optim.AdamW([matrix])
    assert can_skip_on_device(fused)
    assert can_skip_on_device(muon)
    assert can_skip_on_device(EightBitAdamW([matrix], lr=0.1))
    assert can_skip_on_device(lt.MuonWithAdamW(muon, fused))

    assert not can_skip_on_device(unfused)
    assert not can_skip_on_device(lt.MuonWithAdamW(muon, unfused))
    assert not can_skip_on_device(Projected([matrix], fused=True))
    # Its momentum would be uninitialised after a first step that is skipped.
    assert not can_skip_on_device(torch.optim.SGD([matrix], lr=0.1, momentum=0.9, fused=True))

    for register in (fused.register_step_pre_hook, fused.register_step_post_hook):
        hook = register(lambda *_: None)
        assert not can_skip_on_device(fused)
        hook.remove()
        assert can_skip_on_device(fused)


def test_a_loss_scaler_an_offload_and_mps_leave_the_decision_to_the_host(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(accelerator, torch.nn.Linear(2, 2))
    optimizer = accelerator.prepare(torch.optim.AdamW(engine.model.parameters(), fused=True))
    assert step.skips_on_device(engine, optimizer)

    offload = Sharding(replicas=1, shards=1, cpu_offload=True)
    for owner, name, value in (
        (accelerator, "scaler", torch.amp.GradScaler("cpu")),
        (engine.ranks, "sharding", offload),
        (engine, "device", torch.device("mps")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not step.skips_on_device(engine, optimizer)


class Records(lt.Callback):
    """Records when it is called. It takes the result of a step before the next one, or during it."""

    settings = None

    def __init__(self, takes_late_results: bool) -> None:
        self.takes_late_results = takes_late_results
        self.calls: list[tuple[str, int]] = []

    def setup(self, training: Any) -> None:
        self.training = training

    def on_step_begin(self, batch: LocalBatch) -> None:
        self.calls.append(("begin", self.training.step + 1))

    def on_step_result(self, step: int, result: StepResult) -> None:
        self.calls.append(("result", step))


class ComparesLog(lt.Callback):
    """Notes whether the log entry of a step comes before the next one, and with its weights."""

    settings = None

    def setup(self, training: Any) -> None:
        self.weights = next(training.model.parameters())
        self.is_in_time: dict[int, bool] = {}

    def on_step_begin(self, batch: LocalBatch) -> None:
        self.after_step = torch.zeros(())

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.after_step = self.weights.detach().clone()

    def on_log(self, step: int, metrics: Any) -> None:
        if "train/loss" in metrics:
            self.is_in_time[step] = torch.equal(self.weights, self.after_step)


def test_a_callback_gets_results_and_log_entries_before_the_next_step_or_takes_them_late(
    train_with_nan: Train,
) -> None:
    """Otherwise, its decisions would depend on where the run is saved or evaluated."""
    records = Records(takes_late_results=False)
    compares_log = ComparesLog()
    train_with_nan("run", nan_steps=(), callbacks=(records, compares_log))
    assert compares_log.is_in_time == dict.fromkeys(range(1, STEPS + 1), True)
    expected = [(call, step) for step in range(1, STEPS + 1) for call in ("begin", "result")]
    assert records.calls == expected

    late = Records(takes_late_results=True)
    train_with_nan("late", nan_steps=(), callbacks=(late,))
    calls = late.calls
    assert calls.index(("begin", 3)) < calls.index(("result", 2)) < calls.index(("begin", 4))


def test_memory_of_the_prepass_is_free_in_the_next_step(
    train_with_nan: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the logits of a teacher, which may be as large as the batch allows."""
    logits: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def prepass(objective: object, engine: object, batches: object, totals: object) -> Batch:
        alive.append(sum(reference() is not None for reference in logits))
        tensor = torch.zeros(4)
        logits.append(weakref.ref(tensor))
        return {"logits": tensor, "scale": torch.ones(())}

    monkeypatch.setattr(NanLoss, "prepass", prepass)
    train_with_nan("run", nan_steps=(), logging_steps=1000)
    assert alive == [0] * STEPS


def test_a_step_too_many_is_the_reason_even_if_a_callback_fails_because_of_it(
    train_with_nan: Train,
) -> None:
    class FailsToo(lt.Callback):
        settings = None

        def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
            if not torch.isfinite(result.sums.loss):
                raise CrashError

    with pytest.raises(UserError, match=r"step 2 was skipped: .* its rows are"):
        train_with_nan("run", callbacks=(FailsToo(),))


@pytest.mark.parametrize(
    ("failure", "nan_steps"),
    [(CrashError, (7,)), (KeyboardInterrupt, ())],
    ids=["crash after a skipped step", "Ctrl-C"],
)
def test_what_was_made_before_a_failure_is_counted_and_logged(
    train_with_nan: Train,
    tmp_path: Path,
    failure: type[BaseException],
    nan_steps: tuple[int, ...],
) -> None:
    class Fails(lt.Callback):
        settings = None
        steps = 0

        def on_step_begin(self, batch: LocalBatch) -> None:
            self.steps += 1
            if self.steps == 8:
                raise failure

    with pytest.raises(failure):
        train_with_nan("run", nan_steps=nan_steps, callbacks=(Fails(),), skip_nonfinite=1)

    assert read_json(tmp_path / "run" / "status.json")["step"] == 7
    assert [*read_lines(tmp_path / "run" / "metrics.jsonl")][-1]["step"] == 7
    events = read_lines(tmp_path / "run" / "events.jsonl")
    skipped_steps = [event["step"] for event in events if event["kind"] == "skipped"]
    assert skipped_steps == [*nan_steps]
