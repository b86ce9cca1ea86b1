"""The page of a report shows the content of run folders, without a network."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.lab.commands.report import differing_values, events, html
from llmtrain.lab.report.charts import charts, downsample, phase_bars
from llmtrain.phase_names import PHASES
from llmtrain.record.history import History
from tests.command_line import run_cli
from tests.lab import seed_runs
from tests.launching import read_json

START_TIME = 1_760_000_000


def time_text(seconds: float) -> str:
    """Return the time this many seconds after the start, as records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(START_TIME + seconds))


def log_entry(step: int, seconds: float, ranks: int = 2, **metrics: Any) -> dict[str, Any]:
    """Return a log entry of training.

    Args:
        step: the step.
        seconds: the time of the entry, since the start.
        ranks: the number of ranks. Each next one takes 0.1 s longer in every phase.
        metrics: further metrics, or other values.
    """
    phases = {}
    for number, phase in enumerate(PHASES, start=1):
        phases[phase] = [0.01 * number + 0.1 * rank for rank in range(ranks)]
    entry = {
        "step": step,
        "tokens": 100 * step,
        "train/loss": 8 / step,
        "train/grad_norm": 1.0,
        "time": START_TIME + seconds,
        "train/tokens_per_second": 50.0,
        "phases": phases,
        "memory": {"host": [1.0 + rank for rank in range(ranks)]},
    }
    return entry | metrics


def eval_entry(step: int, seconds: float, loss: float, **metrics: float) -> dict[str, Any]:
    counters = {"step": step, "tokens": 100 * step, "time": START_TIME + seconds}
    return counters | {"eval/loss": loss} | metrics


FIRST_START = {"time": time_text(0), "step": 0}


def json_lines(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run(
    folder: Path, entries: list[dict[str, Any]], starts: list[dict[str, Any]], **settings: Any
) -> Path:
    """Write the folder of a finished run of 30 steps."""
    seed_runs.write_run(folder, seed=None, losses={30: 0.0}, **settings)
    defaults = {"versions": {"torch": "2.13.0"}, "processes": 2, "mixed_precision": "bf16"}
    record = read_json(folder / "run.json")
    record["starts"] = [defaults | start for start in starts]
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text(json_lines(entries))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 10 steps in 20 s, and an hour later 20 more in 40 s. The last loss is NaN."""
    return write_run(
        tmp_path / "run",
        entries=[
            eval_entry(0, seconds=5, loss=9.0),
            log_entry(10, seconds=20),
            eval_entry(10, seconds=20, loss=2.5),
            log_entry(20, seconds=3620),
            log_entry(30, seconds=3640, **{"train/loss": None}),
        ],
        starts=[FIRST_START, {"time": time_text(3600), "step": 10, "restart": 1}],
        max_steps=30,
        learning_rate=0.01,
    )


# --- numbers and curves


def test_the_pause_between_two_starts_does_not_count_as_training_hours(run: Path) -> None:
    history = History.of_run(run)

    hours = [seconds / 3600 for seconds in (5, 20, 20, 40, 60)]
    assert history.training_hours() == pytest.approx(hours)
    loss_chart = next(chart for chart in charts([history]) if chart["title"] == "Loss")
    curve = loss_chart["curves"][0]
    assert curve["x"]["step"] == [10, 20], "a loss that is NaN has no point"
    assert curve["x"]["tokens"] == [1000, 2000]
    assert curve["x"]["hours"] == pytest.approx([20 / 3600, 40 / 3600])


def test_a_preference_run_has_charts_of_rewards_and_a_loss_without_a_unit(tmp_path: Path) -> None:
    names = ("rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
    entries = [
        log_entry(1, seconds=1, **{f"train/{name}": 0.5 for name in names}),
        eval_entry(2, seconds=2, loss=0.6, **{"eval/rewards/accuracies": 0.7}),
    ]
    run = write_run(tmp_path / "preferences", entries, [FIRST_START])

    by_title = {chart["title"]: chart for chart in charts([History.of_run(run)])}

    assert by_title["Loss"]["unit"] == ""
    train, evaluation = by_title["Pairs whose chosen answer has the higher reward"]["curves"]
    assert (train["y"], evaluation["y"]) == ([0.5], [0.7])
    answers = by_title["Log-probability of an answer"]["curves"]
    assert [curve["name"] for curve in answers] == ["chosen, train", "rejected, train"]


def test_downsampling_keeps_the_highest_and_the_lowest_value() -> None:
    values = [1.0] * 10_000
    values[1234] = 50.0
    values[8765] = -50.0

    indices = [*downsample(values, 100)]

    assert len(indices) <= 100
    assert indices == sorted(indices)
    assert {1234, 8765} <= {*indices}


def test_the_bars_of_phases_are_medians_over_the_last_start(run: Path) -> None:
    with_four_ranks = log_entry(1, seconds=1, ranks=4)
    entries = [log_entry(step, seconds=step) for step in (2, 3, 4)]
    entries[1]["phases"]["forward"] = [100.0, 100.0]  # an outlier
    (run / "metrics.jsonl").write_text(json_lines([with_four_ranks, *entries]))

    bars = phase_bars([History.of_run(run)])

    assert bars is not None
    assert bars["processes"] == ["rank 0", "rank 1"]
    assert bars["phases"]["forward"] == [0.03, 0.13]


def test_each_run_has_its_own_curve_and_colour(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [log_entry(1, seconds=1)], [FIRST_START])

    loss_chart = charts([History.of_run(run), History.of_run(other)])[0]

    curves = [(curve["name"], curve["color"], curve["y"]) for curve in loss_chart["curves"]]
    assert curves == [
        ("run, train", 0, [0.8, 0.4]),
        ("other, train", 1, [8.0]),
        ("run, eval", 0, [9.0, 2.5]),
    ]


# --- events


def test_restarts_and_recorded_events_are_listed_once_by_step(run: Path) -> None:
    recorded_events = [
        {"step": 25, "time": START_TIME + 3630, "kind": "late", "text": "rank 1 takes longer"},
        {"step": 8, "time": START_TIME + 18, "kind": "failed", "text": "no space"},
        {"step": 8, "time": START_TIME + 18.5, "kind": "failed", "text": "no space"},
    ]
    half_a_line = '{"step": 9, "ti'
    (run / "events.jsonl").write_text(json_lines(recorded_events) + half_a_line)

    failed, resumed, late = events([History.of_run(run)])

    assert (failed.step, failed.kind) == (8, "failed")
    assert (resumed.step, resumed.kind) == (10, "resumed")
    assert "restart 1" in resumed.text
    assert (late.step, late.kind) == (25, "late")


# --- differences between runs


def test_only_values_that_differ_between_runs_are_listed(run: Path, tmp_path: Path) -> None:
    other = write_run(
        tmp_path / "other",
        entries=[log_entry(10, seconds=20)],
        starts=[FIRST_START | {"processes": 4}],
        max_steps=30,
        learning_rate=0.02,
        dropout=0.1,
    )

    values = differing_values([History.of_run(run), History.of_run(other)])

    assert values == {
        "--learning_rate": ["0.01", "0.02"],
        "processes": ["2", "4"],
        "--dropout": ["None", "0.1"],
    }


# --- the page


@pytest.mark.parametrize("name", ["run.json", "status.json", "metrics.jsonl"])
@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff\xfe", b"null\n3\n"],
)
def test_a_damaged_file_does_not_prevent_the_page(name: str, content: bytes, run: Path) -> None:
    (run / name).write_bytes(content)

    assert "</html>" in html([History.of_run(run)])


def test_text_of_a_run_is_not_markup_on_the_page(run: Path, tmp_path: Path) -> None:
    markup = "</script><script>alert(1)</script>"
    other = write_run(
        tmp_path / markup.replace("/", "_"),
        entries=[log_entry(1, seconds=1)],
        starts=[FIRST_START],
        run_name=markup,
    )

    page = html([History.of_run(run), History.of_run(other)])

    assert "<script>alert(1)" not in page.replace("<_script>", "")
    assert page.count("<script>") == 2


def test_the_page_has_the_samples_of_the_last_evaluations(run: Path) -> None:
    steps = range(0, 1000, 10)
    samples = [{"step": step, "prompt": "The", "text": f"<b>text {step}"} for step in steps]
    (run / "samples.jsonl").write_text(json_lines(samples))

    shown = re.findall(r"&lt;b&gt;text (\d+)</td>", html([History.of_run(run)]))

    assert [int(step) for step in shown] == [*steps][-8:]


# --- the command


def test_the_command_writes_one_file_that_loads_nothing(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    status, out, err = run_cli(capsys, "report", str(run))

    assert status == 0
    assert err == ""
    assert out == f"report    {run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    # Plotly contains addresses, from which it would load maps.
    without_plotly = re.sub(r"<script>/\*\*.*?</script>", "", page, flags=re.DOTALL)
    assert len(without_plotly) < 100_000
    assert not re.search(r"https?://|@import|src=|<link", without_plotly)


def test_the_command_prints_the_newest_and_the_best_numbers_as_json(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    status, out, _ = run_cli(capsys, "report", str(run), "--json")

    assert status == 0
    numbers = json.loads(out)["runs"]["run"]
    assert numbers.pop("hours") == pytest.approx(60 / 3600)
    expected = {
        "state": "finished",
        "step": 30,
        "tokens": 3000,
        "loss": None,  # the last one was not finite
        "best_loss": 2.5,
        "best_step": 10,
        "tokens_per_second": 50.0,
        "memory_gib": 2.0,
        "processes": 2,
        "mixed_precision": "bf16",
    }
    assert {name: numbers[name] for name in expected} == expected
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("flags", ["{folder}", "{run} --output {folder}/absent/page.html"])
def test_a_page_that_cannot_be_made_is_an_error_of_one_line(
    flags: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    status, _, err = run_cli(capsys, "report", *flags.format(folder=tmp_path, run=run).split())

    assert status == 2
    assert str(tmp_path) in err
    assert err.count("\n") == 1
