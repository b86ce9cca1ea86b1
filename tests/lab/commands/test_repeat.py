"""`llmtrain repeat` runs each seed once, goes on with the same command, and stops with the run that stops."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.yaml_file import Entry, Setting, settings_in, text_of
from llmtrain.lab.commands import repeat
from llmtrain.lab.commands.seeds import repeat_command
from llmtrain.launching.children import run_to_end
from llmtrain.record.history import History
from llmtrain.record.resume import lock_of
from tests.lab.seed_runs import write_run
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    begin,
    long_form,
    read_json,
    run,
    wait,
    wait_for_readings,
    write_text,
)
from tests.test_cli import ended

LLMTRAIN = [*PYTHON, "-m", "llmtrain"]
LOSSES: dict[int, float | None] = {0: 5.0, 40: 2.0}
SHOWN = """
# a comment: with a colon
seed: 3

#learning_rate: 0.02
#max_steps: 40
#warmup_steps: 0.08
#output_dir: runs/gpt
#columns: null
#packing: auto
#logging_steps: 10
#ddp_timeout: 1800
#per_device_train_batch_size: 16
#bitwise: false
"""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Let a recipe print these settings instead of starting it."""
    text = {"text": SHOWN.replace("runs/gpt", f"{tmp_path}/gpt")}
    monkeypatch.setattr(repeat, "run_command", lambda *_, **__: text["text"])
    return text


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the seeds that are started, and end each at once with a finished run."""
    seeds: list[int] = []

    def run_to_end(command: list[str], **_: Any) -> repeat.Ending:
        seed, folder = command[-3], command[-1]
        seeds.append(int(seed))
        finished(Path(folder), int(seed))
        return repeat.Ending(status=0, stop_signal=None)

    monkeypatch.setattr(repeat, "run_to_end", run_to_end)
    return seeds


def finished(folder: Path, seed: int, **settings: Any) -> Path:
    values = {"learning_rate": 0.02, "max_steps": 40, "warmup_steps": 4, "columns": []} | settings
    return write_run(folder, seed, {0: 5.0, 40: 2.0 + seed / 100}, **values)


def set_by_user(folder: Path, *names: str) -> None:
    record = read_json(folder / "run.json")
    for name in names:
        record["settings"][name]["from"] = "command line"
    (folder / "run.json").write_text(json.dumps(record))


def repeated(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    return ended(capsys, "repeat", *argv)


def test_settings_are_read_as_they_are_printed() -> None:
    entries = [
        Entry("name", "a: #b", "help: with a colon", True),
        Entry("rate", 1e-05, "help", False),
        Entry("prompts", ["a", "b: c"], "help", True),
        Entry("nothing", [], "help", False),
        Entry("run_name", "two\nlines\n", "help", True),
        Entry("sample_prompts", ["a: 'b'\n\n c", "d\te"], "help", False),
    ]
    assert settings_in(text_of({"title": entries})) == {
        "name": Setting("a: #b", True),
        "rate": Setting(1e-05, False),
        "prompts": Setting(["a", "b: c"], True),
        "nothing": Setting(None, False),
        "run_name": Setting("two\nlines\n", True),
        "sample_prompts": Setting(["a: 'b'\n\n c", "d\te"], False),
    }


def test_seeds_begin_with_that_of_the_recipe_and_finished_ones_are_skipped(
    shown: dict[str, str], started: list[int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    finished(tmp_path / "gpt-seed-4", 4)
    status, out, err = repeated(capsys, "3", GPT)
    assert (status, err) == (0, "")
    assert started == [3, 5]
    assert f"seed      4: {tmp_path}/gpt-seed-4 is finished" in out
    assert "A             3     2.0400 ± 0.0100" in out
    assert f"llmtrain compare {tmp_path}/gpt-seed-* {tmp_path}/OTHER-seed-*" in out

    started.clear()
    status, out, _ = repeated(capsys, "4", GPT, "--json")
    assert (status, started) == (0, [6])
    (group,) = json.loads(out)["groups"]
    assert [item["seed"] for item in group["runs"]] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("there", "here", "differs"),
    [
        ({"learning_rate": 0.01}, "learning_rate: 0.02", "learning_rate 0.01 there, 0.02 here"),
        ({"learning_rate": 0.02}, "learning_rate: 0.02", ""),
        ({"warmup_steps": 4}, "warmup_steps: 0.1", ""),
        ({"warmup_steps": 5}, "warmup_steps: 0.1", "warmup_steps 5 there, 0.1 here"),
        ({"columns": []}, "columns: null", ""),
        ({"columns": ["a=b"]}, "#columns: null", "columns ['a=b'] there, None here"),
        ({"packing": True}, "packing: auto", ""),
        ({"logging_steps": 5}, "logging_steps: 10", ""),
        ({"ddp_timeout": 60}, "ddp_timeout: 1800", ""),
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size: 16", ""),
        ({"bitwise": True}, "bitwise: true", ""),
        ({"bitwise": True}, "bitwise: false", "bitwise True there, False here"),
        (
            {"per_device_train_batch_size": 4, "bitwise": True},
            "per_device_train_batch_size: 16",
            "bitwise True there, False here, per_device_train_batch_size 4 there, 16 here",
        ),
    ],
)
def test_a_run_with_other_settings_is_not_taken_for_a_repetition(
    there: dict[str, Any],
    here: str,
    differs: str,
    shown: dict[str, str],
    started: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    folder = finished(tmp_path / "gpt-seed-3", 3, **there)
    set_by_user(folder, *there)
    name = here.strip("#").partition(":")[0]
    lines = [line for line in shown["text"].splitlines() if not line.startswith(f"#{name}:")]
    shown["text"] = "\n".join([*lines, here])
    status, _, err = repeated(capsys, "1", GPT)
    if differs:
        assert status == 2
        assert f"{folder} holds a run with other settings ({differs})" in err
    else:
        assert (status, err) == (0, "")
    assert started == []


def test_a_default_that_followed_from_other_settings_is_no_other_setting(
    shown: dict[str, str], started: list[int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    finished(tmp_path / "gpt-seed-3", 3, learning_rate=2e-5)
    assert repeated(capsys, "1", GPT)[0] == 0


def test_a_seed_that_fails_ends_it_with_its_status(
    shown: dict[str, str],
    started: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    endings = [
        (repeat.Ending(status=7, stop_signal=None), "failed", 7),
        # As of torchrun, which ends with a traceback.
        (repeat.Ending(status=1, stop_signal=signal.SIGTERM), "preempted", 143),
        (repeat.Ending(status=0, stop_signal=None), "preempted", 1),  # --max_hours
    ]
    for ending, state, expected in endings:

        def run_to_end(
            command: list[str], ending: repeat.Ending = ending, state: str = state, **_: Any
        ) -> repeat.Ending:
            write_run(Path(command[-1]), 3, LOSSES, state=state)
            return ending

        monkeypatch.setattr(repeat, "run_to_end", run_to_end)
        status, out, err = repeated(capsys, "2", GPT)
        assert status == expected
        assert f"seed 3 has not finished in {tmp_path}/gpt-seed-3: {state} at step 40" in err
        assert "the same command again goes on with it" in err
        assert "4: " not in out
        shutil.rmtree(tmp_path / "gpt-seed-3")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["0", GPT], "0 seeds: run at least one"),
        (["many", GPT], "invalid int value"),
        (["2", "absent.py"], "absent.py is not a file"),
        (["2", GPT, "--processes", "0"], "start at least one process"),
        (["2", GPT, "--config_file", "absent.yaml"], "is not an accelerate config"),
    ],
)
def test_a_mistake_is_one_line(
    argv: list[str], says: str, shown: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    status, out, err = repeated(capsys, *argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_a_folder_of_something_else_is_one_line(
    shown: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "gpt-seed-3").mkdir()
    (tmp_path / "gpt-seed-3" / "notes.txt").write_text("mine")
    status, _, err = repeated(capsys, "1", GPT)
    assert (status, err.count("\n")) == (2, 1)
    assert "gpt-seed-3 is not a run folder" in err


def test_the_command_for_more_seeds_has_what_can_be_known_of_the_launch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 1, LOSSES)
    record = read_json(folder / "run.json")
    launches = [
        ({"processes": 2}, "llmtrain repeat --processes 2 5 recipes/gpt.py"),
        ({"mixed_precision": "bf16"}, "llmtrain repeat --config_file ACCELERATE_CONFIG 5"),
        ({"command": []}, None),
    ]
    for changes, expected in launches:
        start = record["starts"][0] | changes
        (folder / "run.json").write_text(json.dumps(record | {"starts": [start]}))
        command = repeat_command(History.of_run(folder), count=5)
        if expected is None:
            assert command is None
        else:
            assert command is not None
            assert command.startswith(expected)


def test_a_run_that_still_saves_after_its_launcher_has_ended_is_waited_for(
    shown: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def run_to_end(command: list[str], **_: Any) -> repeat.Ending:
        folder = write_run(Path(command[-1]), 3, LOSSES, state="running")
        lock = lock_of(folder)
        lock.acquire()

        def save() -> None:
            (folder / "status.json").write_text('{"state": "preempted", "step": 40}')
            lock.release()

        threading.Timer(0.3, save).start()
        return repeat.Ending(status=1, stop_signal=signal.SIGINT)

    monkeypatch.setattr(repeat, "run_to_end", run_to_end)
    status, _, err = repeated(capsys, "1", GPT)
    assert status == 130
    assert "preempted at step 40" in err


LAUNCHER = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)  # as a launcher that keeps signals to itself
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]]).returncode)
"""
WORKER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
pathlib.Path(sys.argv[1]).touch()
time.sleep(20)
"""


def test_a_signal_reaches_the_group_of_the_launcher(tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def stop_when_ready() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_ready, daemon=True).start()
    command = [*PYTHON, "-c", LAUNCHER, WORKER, str(ready)]
    assert run_to_end(command, on_cpu=True) == (5, signal.SIGTERM)


@long_form
def test_seeds_are_run_stopped_gone_on_with_and_compared(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    flags = [*TINY, "--dataset", str(text), "--max_steps", "40", "--save_steps", "1000"]
    base = tmp_path / "gpt"
    command = [*LLMTRAIN, "repeat", "3", GPT, *flags, "--output_dir", str(base)]
    first, second, third = (tmp_path / f"gpt-seed-{seed}" for seed in range(3))

    process = begin(command)
    wait_for_readings(process, first, 5)
    process.send_signal(signal.SIGTERM)
    stopped = wait(process)
    assert stopped.status == 128 + signal.SIGTERM
    assert read_json(first / "status.json")["state"] == "preempted"
    assert "seed 0 has not finished" in stopped.err
    assert "asked to stop by SIGTERM" in stopped.err
    assert not second.exists()

    done = run(command).assert_ok()
    assert "resumes from step" in done.out
    assert [History.of_run(folder).state for folder in (first, second, third)] == ["finished"] * 3
    assert sorted(path.name for path in tmp_path.glob("gpt*")) == [
        "gpt-seed-0",
        "gpt-seed-1",
        "gpt-seed-2",
    ]

    other = [*command[5:-1], str(tmp_path / "slow"), "--learning_rate", "0.0001"]
    run([*LLMTRAIN, "repeat", "2", *other]).assert_ok()
    content = json.loads(run([*LLMTRAIN, "compare", str(tmp_path), "--json"]).assert_ok().out)
    assert [group["name"] for group in content["groups"]] == [
        "learning_rate 0.02",
        "learning_rate 0.0001",
    ]
    (difference,) = content["differences"]
    assert difference["paired_seeds"] == [0, 1]
    assert difference["final_loss"]["low"] > 0
    assert difference["verdict"].startswith("B is higher than A")


@long_form
def test_a_signal_reaches_the_run_behind_a_launcher(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    flags = [*TINY, "--dataset", str(text), "--max_steps", "2000", "--output_dir"]
    for name, launch in (
        ("torchrun", ["--processes", "2"]),
        ("accelerate", ["--config_file", "accelerate_configs/cpu.yaml"]),
    ):
        base = tmp_path / name
        folder = tmp_path / f"{name}-seed-0"
        process = begin([*LLMTRAIN, "repeat", "2", *launch, GPT, *flags, str(base)])
        wait_for_readings(process, folder, 5)
        process.send_signal(signal.SIGINT)
        stopped = wait(process)
        assert stopped.status == 128 + signal.SIGINT, stopped.err
        assert read_json(folder / "status.json")["state"] == "preempted", name
        assert not (tmp_path / f"{name}-seed-1").exists()
