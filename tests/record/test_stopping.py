"""A run stops before its time is over, on a signal, or if its evaluations no longer improve."""

import json
import math
import signal

import pytest

from llmtrain.files import json_text
from llmtrain.record import stopping
from llmtrain.record.stopping import Deadline, Patience, stop_signals


class Clock:
    """Replaces the module ``time``.

    Attributes:
        seconds: the time of the monotonic clock.
        wall_seconds: the time since 1970, which an administrator may set.
    """

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.wall_seconds = 5_000_000.0

    def monotonic(self) -> float:
        return self.seconds

    def time(self) -> float:
        return self.wall_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    clock = Clock()
    monkeypatch.setattr(stopping, "time", clock)
    return clock


@pytest.fixture
def slurm_job_ends_in(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    """A function that sets the remaining seconds of the Slurm job."""

    def slurm_job_ends_in(seconds: int) -> None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(clock.wall_seconds) + seconds))

    return slurm_job_ends_in


def seconds_until_near(deadline: Deadline, clock: Clock) -> int:
    """Advance the clock in steps of one second until the deadline is near."""
    for second in range(10_000):
        if deadline.is_near():
            return second
        clock.seconds += 1
    raise AssertionError("the deadline is never near")


def test_the_earlier_of_two_time_limits_counts(clock: Clock, slurm_job_ends_in) -> None:
    no_deadline = Deadline.of(None)
    clock.seconds += 1e9
    assert not no_deadline.is_near()

    slurm_job_ends_in(600)
    assert "Slurm job" in Deadline.of(0.5).reason

    slurm_job_ends_in(36_000)
    assert "--max_hours 0.5" in Deadline.of(0.5).reason


def test_a_deadline_is_near_when_only_the_reserved_time_is_left(
    clock: Clock, slurm_job_ends_in
) -> None:
    slurm_job_ends_in(600)
    deadline = Deadline.of(None)
    deadline.reserve("save", 100)
    deadline.reserve("save", 40)  # shorter than before, so the longer one stays
    deadline.reserve("evaluation", 20)
    clock.wall_seconds += 36_000  # an administrator sets it

    margin = 30
    assert seconds_until_near(deadline, clock) == 600 - margin - 100 - 20 + 1


def test_the_time_limit_counts_from_the_start_of_the_process(clock: Clock) -> None:
    deadline = Deadline.of(0.5, seconds_since_start=1700)

    seconds_left = 1800 - 1700
    margin = seconds_left // 10
    assert seconds_until_near(deadline, clock) == seconds_left - margin + 1


@pytest.mark.parametrize(
    ("losses", "stop_step", "reason"),
    [
        pytest.param([3.0, 2.0, 2.0, 2.5, 1.0], 3, "since step 1", id="equal and worse"),
        pytest.param([3.0, 2.0, 2.5, 1.5, 1.6, 1.7], 5, "since step 3", id="one improvement"),
        pytest.param([3.0, math.nan, math.nan, 1.0], 2, "was not a number", id="NaN"),
    ],
)
def test_a_run_ends_after_two_evaluations_without_an_improvement(
    losses: list[float], stop_step: int, reason: str
) -> None:
    patience = Patience(allowed=2, metric="eval/loss", keeps_best=True)

    for step, loss in enumerate(losses):
        patience.record(step, {"eval/loss": loss})
        if patience.is_over:
            break

    assert patience.is_over
    assert step == stop_step
    assert reason in patience.reason


@pytest.mark.parametrize(
    ("metric", "values", "best_step"),
    [
        pytest.param("eval/loss", [2.0, 2.5, 2.25], 2, id="not that before the first step"),
        pytest.param("eval/accuracy", [0.0, 0.25, 0.5], 2, id="higher is better"),
        pytest.param("eval/glossary_accuracy", [0.0, 0.25, 0.5], 2, id="part of a word"),
        pytest.param("eval/kl", [2.0, 2.5, 3.0], 1, id="KL divergence"),
        pytest.param("eval/loss", [2.0, math.nan, 3.0], 2, id="NaN"),
    ],
)
def test_the_best_evaluation_is_known_also_after_the_run_resumed(
    metric: str, values: list[float], best_step: int
) -> None:
    patience = Patience(0, metric, keeps_best=True)
    for step, value in enumerate(values):
        patience.record(step, {metric: value})

        state = json.loads(json_text(patience.state))
        patience = Patience(0, metric, keeps_best=True)
        patience.restore(state)

    assert patience.best_step == best_step


def test_only_a_signal_some_seconds_after_the_first_one_interrupts(clock: Clock) -> None:
    reasons = []
    handler_before = signal.getsignal(signal.SIGUSR1)

    with stop_signals(lambda reason, received: reasons.append(reason)):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
        assert reasons == ["asked to stop by SIGUSR1"]

        clock.seconds += 3.1
        signal.raise_signal(signal.SIGXCPU)  # which Linux repeats after each second
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)

    assert signal.getsignal(signal.SIGUSR1) is handler_before


def test_a_run_under_nohup_ignores_a_lost_terminal() -> None:
    reasons = []
    handler_before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(lambda reason, received: reasons.append(reason)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, handler_before)

    assert reasons == []
