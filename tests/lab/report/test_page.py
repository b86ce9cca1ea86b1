"""The page of a run says what the run folder says, whatever that holds, and opens in a browser without a network."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config import flags
from llmtrain.lab.diff import diff_runs, metadata_differences
from llmtrain.lab.report.charts import charts, downsample, phase_bars
from llmtrain.lab.report.page import differing_values, events, html, overview
from llmtrain.phase_names import PHASES
from llmtrain.record.history import History
from tests.recorded_settings import EFFECTS, recorded
from tests.test_cli import ended

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
BEGAN = 1_760_000_000


def at(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(BEGAN + seconds))


def reading(step: int, seconds: float, ranks: int = 2, **more: Any) -> dict[str, Any]:
    phases = {
        phase: [0.01 * (number + 1) + 0.1 * rank for rank in range(ranks)]
        for number, phase in enumerate(PHASES)
    }
    memory = {"host": [1.0 + rank for rank in range(ranks)]}
    found = {
        "step": step,
        "tokens": 100 * step,
        "train/loss": 8 / step,
        "train/grad_norm": 1.0,
        "time": BEGAN + seconds,
    }
    return found | {"train/tokens_per_second": 50.0, "phases": phases, "memory": memory} | more


def make(
    folder: Path, readings: list[dict[str, Any]], starts: list[dict[str, Any]], **settings: Any
) -> Path:
    folder.mkdir(parents=True)
    versions = {
        "versions": {"torch": "2.13.0"},
        "host": "here",
        "processes": 2,
        "mixed_precision": "bf16",
    }
    record = {
        "format_version": 1,
        "settings": recorded(settings, "command line"),
        "dataset": "some text",
        "starts": [versions | start for start in starts],
    }
    (folder / "run.json").write_text(json.dumps(record))
    status = {
        "state": "finished",
        "step": 30,
        "reason": "all steps are done",
        "time": at(100),
        "host": "here",
    }
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in readings))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten updates in 20 s; an hour's pause; and twenty more in 40 s."""
    readings = [{"step": 0, "tokens": 0, "eval/loss": 9.0, "time": BEGAN + 5}]
    readings += [
        reading(10, 20),
        {"step": 10, "tokens": 1000, "eval/loss": 2.5, "time": BEGAN + 20},
    ]
    readings += [reading(20, 3620), reading(30, 3640, **{"train/loss": None})]
    starts = [{"time": at(0), "step": 0}, {"time": at(3600), "step": 10, "restart": 1}]
    return make(tmp_path / "run", readings, starts, max_steps=30, learning_rate=0.01)


def test_hours_are_those_that_were_trained_and_no_pause_between(run: Path) -> None:
    history = History.of_run(run)
    assert history.training_hours() == pytest.approx(
        [seconds / 3600 for seconds in (5, 20, 20, 40, 60)]
    )
    curve = next(chart for chart in charts([history]) if chart.title == "Loss").curves[0]
    assert curve.x["step"] == [10, 20]  # of the last reading the loss is no number
    assert curve.x["tokens"] == [1000, 2000]
    assert curve.x["hours"] == pytest.approx([20 / 3600, 40 / 3600])


def test_what_one_asks_first_is_what_the_folder_says(run: Path) -> None:
    said = overview(History.of_run(run))
    assert [said[key] for key in ("state", "step", "max_steps", "tokens")] == [
        "finished",
        30,
        30,
        3000,
    ]
    assert [said[key] for key in ("loss", "best_loss", "best_step")] == [0.4, 2.5, 10]
    assert said["hours"] == pytest.approx(60 / 3600)
    assert [said[key] for key in ("tokens_per_second", "memory_gib", "processes")] == [50.0, 2.0, 2]
    assert said["mixed_precision"] == "bf16"


def test_the_pages_of_trackers_are_links(run: Path, tmp_path: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    address = "https://wandb.ai/me/llmtrain/runs/abcd1234"
    record["trackers"] = {"wandb": address, "other": "javascript:alert(1)"}
    (run / "run.json").write_text(json.dumps(record))
    page = html([History.of_run(run)])
    assert f'<a href="{address}">{address}</a>' in page
    assert "javascript:" not in page.partition("<script")[0]


def test_readings_without_a_time_have_no_hours_and_are_drawn(tmp_path: Path) -> None:
    lines = [
        {key: value for key, value in reading(step, 0).items() if key != "time"} for step in (1, 2)
    ]
    history = History.of_run(make(tmp_path / "old", lines, [{"time": at(0), "step": 0}]))
    assert history.training_hours() == [None, None]
    assert charts([history])[0].curves[0].x == {
        "step": [1, 2],
        "tokens": [100, 200],
        "hours": [None, None],
    }
    assert overview(history)["hours"] is None


def test_what_compares_answers_has_charts_of_its_own_and_a_loss_without_a_unit(
    run: Path, tmp_path: Path
) -> None:
    names = ("rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
    lines = [reading(step, step, **{f"train/{name}": 0.5 for name in names}) for step in (1, 2)]
    lines.append(
        {
            "step": 2,
            "tokens": 200,
            "eval/loss": 0.6,
            "eval/rewards/accuracies": 0.7,
            "time": BEGAN + 2,
        }
    )
    compared = make(tmp_path / "compared", lines, [{"time": at(0), "step": 0}])
    plain, drawn = (
        {chart.title: chart for chart in charts([History.of_run(one)])} for one in (run, compared)
    )
    assert (plain["Loss"].unit, drawn["Loss"].unit) == ("nats per token", "")
    accuracy = drawn["Pairs whose chosen answer has the higher reward"]
    assert [(curve.name, curve.y) for curve in accuracy.curves] == [
        ("train", [0.5, 0.5]),
        ("eval", [0.7]),
    ]
    assert [curve.name for curve in drawn["Log-probability of an answer"].curves] == [
        "chosen, train",
        "rejected, train",
    ]
    assert len(drawn.keys() - plain.keys()) == 4


def test_a_restart_and_what_the_run_wrote_down_are_incidents_each_once_and_in_order(
    run: Path,
) -> None:
    lines = [
        {"step": 25, "time": BEGAN + 3630, "kind": "late", "text": "rank 1 takes longer"},
        {"step": 8, "time": BEGAN + 18, "kind": "failed", "text": "no space"},
        {"step": 8, "time": BEGAN + 18.5, "kind": "failed", "text": "no space"},
    ]
    (run / "events.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "ti'
    )
    assert [(one.step, one.kind) for one in events([History.of_run(run)])] == [
        (8, "failed"),
        (10, "resumed"),
        (25, "late"),
    ]
    assert "restart 1" in events([History.of_run(run)])[1].text


def test_the_phases_are_medians_of_the_processes_of_the_last_start(run: Path) -> None:
    lines = [reading(1, 1, ranks=4), *(reading(step, step) for step in (2, 3, 4))]
    lines[2]["phases"]["forward"] = [100.0, 100.0]  # once: a median does not see it
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = phase_bars([History.of_run(run)])
    assert found is not None
    assert found.processes == ["rank 0", "rank 1"]
    assert found.phases["forward"] == [0.03, 0.13]


def test_only_what_differs_between_runs_is_listed(run: Path, tmp_path: Path) -> None:
    starts = [{"time": at(0), "step": 0, "processes": 4}]
    other = make(
        tmp_path / "other", [reading(10, 20)], starts, max_steps=30, learning_rate=0.02, dropout=0.1
    )
    found = differing_values([History.of_run(run), History.of_run(other)])
    assert found == {
        "learning_rate": ["0.01", "0.02"],
        "processes": ["2", "4"],
        "dropout": ["\N{EN DASH}", "0.1"],
    }


def test_of_many_values_the_highest_and_the_lowest_stay() -> None:
    values = [1.0] * 10_000
    values[1234], values[8765] = 50.0, -50.0
    kept = list(downsample(values, 100))
    assert len(kept) <= 100
    assert kept == sorted(kept)
    assert {1234, 8765} <= {*kept}
    assert [*downsample(values[:100], 100)] == [*range(100)]


@pytest.mark.parametrize("name", ["run.json", "status.json", "metrics.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format_version": 1, "starts": 3, "settings": 4}',
        b"null\n3\n",
    ],
)
def test_a_file_that_is_missing_or_damaged_leaves_its_part_empty(
    name: str, content: bytes, run: Path
) -> None:
    (run / name).write_bytes(content)
    assert "</html>" in html([History.of_run(run)])


def test_what_a_run_says_is_text_on_the_page_and_not_markup(run: Path, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    other = make(
        tmp_path / evil.replace("/", "_"),
        [reading(1, 1)],
        [{"time": at(0), "step": 0}],
        run_name=evil,
    )
    page = html([History.of_run(run), History.of_run(other)])
    assert "<script>alert(1)" not in page.replace("<_script>", "")
    assert page.count("<script>") == 2


def test_what_it_wrote_is_shown_as_it_improved(run: Path) -> None:
    lines = [
        {"step": step, "prompt": "The", "text": f"<b>text {step}"} for step in range(0, 1000, 10)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = re.findall(r"&lt;b&gt;text (\d+)</td>", html([History.of_run(run)]))
    assert len(shown) == 8
    assert (shown[0], shown[-1]) == ("0", "990")


def test_the_command_makes_one_file_that_loads_nothing(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    status, out, err = ended(capsys, "report", str(run))
    assert (status, err) == (0, "")
    assert out == f"report    {run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    own = re.sub(
        r"<script>/\*\*.*?</script>", "", page, flags=re.S
    )  # without plotly, which could load maps, if asked
    assert len(own) < 100_000
    assert not re.search(r"https?://|@import|src=|<link", own)


def test_for_programs_it_prints_numbers_and_makes_nothing(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    status, out, _ = ended(capsys, "report", str(run), "--json")
    assert status == 0
    assert json.loads(out)["runs"]["run"]["best_loss"] == 2.5
    assert not (run / "report.html").exists()


def test_what_is_no_run_and_what_cannot_be_written_are_one_line(
    run: Path, tmp_path: Path, capsys
) -> None:
    status, _, err = ended(capsys, "report", str(tmp_path))
    assert (status, err.count("\n")) == (2, 1)
    assert "is not a run folder" in err
    status, _, err = ended(
        capsys, "report", str(run), "--output", str(tmp_path / "absent" / "page.html")
    )
    assert (status, err.count("\n")) == (2, 1)
    assert "could not be written" in err


def test_every_phase_has_a_colour_of_its_own(run: Path) -> None:
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", html([History.of_run(run)])))
    assert len({colours[phase] for phase in PHASES}) == len(PHASES)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_chart(scheme: str, run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(html([History.of_run(run)]))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    options += ["--virtual-time-budget=5000", "--host-resolver-rules=MAP * ~NOTFOUND"]
    options += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    drawn = re.findall(r'id="(chart-\d|bars)"[^>]*><div class="plot-container', done.stdout)
    assert drawn == [f"chart-{number}" for number in range(len(charts([History.of_run(run)])))] + [
        "bars"
    ]
    legend = re.findall(r'class="legendtext"[^>]*data-unformatted="([^"]*)"', done.stdout)
    assert [name.split(":")[0] for name in legend[-len(PHASES) :]] == list(PHASES)
    bar = re.findall(r'class="trace bars".*?fill: rgb\((\d+, \d+, \d+)\)', done.stdout, flags=re.S)
    assert bar[list(PHASES).index("forward")] == "76, 120, 168"
    curve = re.findall(r'class="js-line"[^>]*stroke: rgb\((\d+), (\d+), (\d+)\)', done.stdout)
    assert ("10", "102", "194") in curve if scheme == "light" else ("92", "171", "255") in curve


def test_what_differs_is_grouped_by_what_its_flag_affects(tmp_path: Path) -> None:
    one, other = (
        History.of_run(
            make(
                tmp_path / name,
                [],
                [],
                learning_rate=number,
                tokenizer=name,
                output_dir=name,
                invented=name,
            )
        )
        for number, name in enumerate(("a", "b"))
    )
    assert metadata_differences(one, other) == [
        (("update",), "--learning_rate 0 and 1"),
        (("data", "model"), "--tokenizer a and b"),
        (("any",), "--invented a and b"),
    ]


def test_another_commit_is_named_and_so_is_one_with_changed_files(tmp_path: Path) -> None:
    commits = ["0" * 40, "0" * 40 + "-dirty", "1" * 40]
    clean, dirty, other = (
        History.of_run(make(tmp_path / str(i), [reading(1, 1)], [{"step": 0, "git_sha": commit}]))
        for i, commit in enumerate(commits)
    )
    assert metadata_differences(clean, clean) == []
    assert metadata_differences(clean, dirty) == [
        (("code",), "commit: 000000000000... and 000000000000...-dirty")
    ]
    assert metadata_differences(clean, other) == [
        (("code",), "commit: 000000000000... and 111111111111...")
    ]
    assert "000000000000-dirty" in html([dirty])


ACTS = {
    "seed": ["seed"],
    "skip_nonfinite": ["update"],
    "learning_rate": ["update"],
    **{name: ["nowhere"] for name in ("output_dir", "ddp_timeout")},
    "dataset": ["data"],
    "packing": ["data"],
    "n_layer": ["model"],
    "lora_r": ["model"],
    **{name: ["model", "data"] for name in ("block_size", "tokenizer")},
    **{name: ["pass"] for name in ("dropout", "lora_dropout", "attn_implementation")},
    **{name: ["gradient"] for name in ("ddp_comm_hook", "sync_each_batch")},
    **{name: ["layout"] for name in ("bitwise", "torch_compile", "per_device_train_batch_size")},
    **{name: ["layout"] for name in ("gradient_checkpointing", "ddp_bucket_cap_mb")},
}


def test_every_flag_of_the_package_says_where_it_acts() -> None:
    effects = {name: words.split() for name, words in EFFECTS.items()}
    assert {word for words in effects.values() for word in words} <= {*flags.EFFECTS} - {"any"}
    assert {name: effects.get(name) for name in ACTS} == ACTS


def test_a_loss_that_is_no_number_on_one_side_parts_two_runs_and_on_both_does_not(
    tmp_path: Path,
) -> None:
    lines = [reading(step, step) for step in (1, 2, 3)]
    starts = [{"time": at(0), "step": 0, "device": "cpu"}]
    fine = History.of_run(make(tmp_path / "fine", lines, starts))
    lines[1] |= {"train/grad_norm": None}
    bad = History.of_run(make(tmp_path / "bad", lines, starts))
    found = diff_runs(fine, bad).first
    assert found is not None
    assert (found.link, found.step) == ("grad_norm", 2)
    assert diff_runs(bad, bad).first is None
