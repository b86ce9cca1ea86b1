import json
import math
import signal
import time

import pytest

from llmtrain.record import stopping
from llmtrain.record.stopping import Deadline, Patience, stop_signals


def test_the_earlier_end_counts_and_what_is_reserved_comes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, wall = 1000.0, 5_000_000.0
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now)
    monkeypatch.setattr(stopping.time, "time", lambda: wall)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert not Deadline.of(None).is_near()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(wall) + 600))
    deadline = Deadline.of(0.5)
    assert deadline.reason == "the Slurm job is about to end"
    deadline.reserve("save", 100)
    deadline.reserve("save", 40)
    deadline.reserve("evaluation", 20)
    now = 1000 + 600 - 30 - 100 - 20 - 1
    wall += 36_000  # a clock that is set changes nothing
    assert not deadline.is_near()
    now += 2
    assert deadline.is_near()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(wall) + 36_000))
    assert Deadline.of(0.5).reason == "--max_hours 0.5 have passed"
    # The start of the process counts, not that of the training.
    deadline = Deadline.of(0.5, seconds_since_start=1700)
    assert not deadline.is_near()
    now += 95
    assert deadline.is_near()


@pytest.mark.parametrize(
    ("metric", "values", "text"),
    [
        ("eval/loss", [2.0, 2.5, 2.25], "it was 2 before the first step and 2.25 at best, after"),
        ("eval/accuracy", [0.5, 0.25], "it was 0.5 before the first step and 0.25 at best, after"),
        ("eval/loss", [2.0, 2.5, 1.5], None),
        ("eval/accuracy", [0.5, 0.75], None),
        ("eval/loss", [math.nan, 2.5], None),
        ("eval/loss", [2.0, math.nan], None),
        (
            "eval/rewards/margins",
            [-0.2, -0.5],
            "it was -0.2 before the first step and -0.5 at best",
        ),
    ],
)
def test_a_run_that_was_best_before_its_first_step_says_so_also_after_a_resume(
    metric: str, values: list[float], text: str | None
) -> None:
    patience = Patience(0, metric, keeps_best=True)
    for step, value in enumerate(values):
        patience.record(step, {metric: value})
        state = json.loads(json.dumps(patience.state, allow_nan=False))
        patience = Patience(0, metric, keeps_best=True)
        patience.restore(state)
    sentence = patience.lack_of_improvement
    assert sentence is None if text is None else text in str(sentence)


def test_a_burst_of_signals_is_one_and_a_later_one_is_obeyed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, reasons = 0.0, []
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now)
    with stop_signals(lambda reason, _: reasons.append(reason)):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert reasons == ["asked to stop by SIGUSR1"]
        now = 3.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert time.monotonic() == now
