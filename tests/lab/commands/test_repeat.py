"""`llmtrain repeat` runs each seed once, resumes if it is called again, and stops with a run."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from llmtrain.lab.commands import repeat
from llmtrain.launching.children import run_to_end
from llmtrain.record.history import History
from tests.command_line import run_cli
from tests.lab.seed_runs import write_run
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    long_form,
    run,
    start_process,
    wait,
    wait_for_log_entries,
    write_text,
)

LLMTRAIN = [*PYTHON, "-m", "llmtrain"]
LOSSES: dict[int, float | None] = {0: 5.0, 40: 2.0}


@pytest.fixture
def printed_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The recipe prints its settings: a comment, a seed and a default."""
    text = f"# a comment: with a colon\nseed: 3\n\n#output_dir: {tmp_path}/gpt\n"
    monkeypatch.setattr(repeat, "run_command", lambda *_, **__: text)


Ending: TypeAlias = tuple[int, signal.Signals | None]
RunToEnd = Callable[[int, Path], Ending]


@pytest.fixture
def replace_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunToEnd], None]:
    """A function that replaces the process of each run by a function of its seed and folder."""

    def replace_runs(run_seed: RunToEnd) -> None:
        def run_to_end(command: list[str], **_: Any) -> Ending:
            _, seed, _, folder = command[-4:]  # --seed 3 --output_dir runs/gpt-seed-3
            return run_seed(int(seed), Path(folder))

        monkeypatch.setattr(repeat, "run_to_end", run_to_end)

    return replace_runs


@pytest.fixture
def started_seeds(printed_settings: None, replace_runs: Callable[[RunToEnd], None]) -> list[int]:
    """The seeds that are started. Each run finishes at once."""
    seeds: list[int] = []

    def finish(seed: int, folder: Path) -> Ending:
        seeds.append(seed)
        write_finished_run(folder, seed)
        return 0, None

    replace_runs(finish)
    return seeds


def write_finished_run(folder: Path, seed: int) -> Path:
    return write_run(folder, seed, {0: 5.0, 40: 2.0 + seed / 100})


# --- which seeds run


def test_seeds_count_from_that_of_the_recipe_and_finished_ones_are_skipped(
    started_seeds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_finished_run(tmp_path / "gpt-seed-4", 4)

    status, out, err = run_cli(capsys, "repeat", "3", GPT)

    assert status == 0
    assert err == ""
    assert started_seeds == [3, 5]
    assert f"seed      4: {tmp_path}/gpt-seed-4 is finished" in out
    assert "A             3     2.0400 ± 0.0100" in out
    assert f"llmtrain compare {tmp_path}/gpt-seed-* {tmp_path}/OTHER-seed-*" in out

    status, out, _ = run_cli(capsys, "repeat", "4", GPT, "--json")  # one more seed
    assert status == 0
    assert started_seeds == [3, 5, 6]
    (group,) = json.loads(out)["groups"]
    assert [item["seed"] for item in group["runs"]] == [3, 4, 5, 6]


def test_a_finished_run_must_have_been_started_by_the_same_command(
    started_seeds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_finished_run(tmp_path / "gpt-seed-3", 3)

    assert run_cli(capsys, "repeat", "1", GPT)[0] == 0
    status, out, err = run_cli(capsys, "repeat", "1", GPT, "--learning_rate", "0.1")

    assert (status, out, started_seeds) == (2, "", [])
    command = f"recipes/gpt.py --seed 3 --output_dir {folder}"
    assert f"{folder} holds a run of another command ({command})" in err
    assert err.count("\n") == 1


# --- runs that stop


@pytest.mark.parametrize(
    ("ending", "state", "expected_status"),
    [
        ((7, None), "failed", 7),
        # After a signal torchrun ends with a traceback.
        ((1, signal.SIGTERM), "preempted", 128 + signal.SIGTERM),
        ((0, None), "preempted", 1),  # --max_hours
    ],
)
def test_a_run_that_does_not_finish_ends_the_command_with_its_status(
    ending: tuple[int, signal.Signals | None],
    state: str,
    expected_status: int,
    printed_settings: None,
    replace_runs: Callable[[RunToEnd], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    def stop(seed: int, folder: Path) -> Ending:
        write_run(folder, seed, LOSSES, state=state)
        return ending

    replace_runs(stop)

    status, out, err = run_cli(capsys, "repeat", "2", GPT)

    assert status == expected_status
    assert f"{tmp_path}/gpt-seed-3 has not finished: {state} at step 40" in err
    assert "the same command again goes on with it" in err
    assert "4: " not in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (f"0 {GPT}", "0 seeds"),
        (f"many {GPT}", "many"),
        (f"2 {GPT} --processes 0", "--processes 0"),
        (f"1 {GPT}", "gpt-seed-3 is not a run folder"),
    ],
)
def test_a_mistake_is_an_error_of_one_line(
    arguments: str,
    named: str,
    printed_settings: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "gpt-seed-3").mkdir()
    (tmp_path / "gpt-seed-3" / "notes.txt").write_text("mine")

    status, out, err = run_cli(capsys, "repeat", *arguments.split())

    assert (status, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1


# --- real processes

LAUNCHER = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)  # it does not pass the signal on
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]]).returncode)
"""
WORKER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
pathlib.Path(sys.argv[1]).touch()
time.sleep(20)
"""


def test_a_signal_reaches_the_workers_of_the_launcher(tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def stop_when_ready() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_ready, daemon=True).start()
    command = [*PYTHON, "-c", LAUNCHER, WORKER, str(ready)]

    assert run_to_end(command, on_cpu=True) == (5, signal.SIGTERM)


def states_of(folders: list[Path]) -> list[str]:
    return [History.of_run(folder).state for folder in folders]


@long_form
def test_seeds_run_stop_resume_and_are_compared(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    flags = [*TINY, "--dataset", str(text), "--max_steps", "40", "--save_steps", "1000"]
    command = [*LLMTRAIN, "repeat", "3", GPT, *flags, "--output_dir", str(tmp_path / "gpt")]
    folders = [tmp_path / f"gpt-seed-{seed}" for seed in range(3)]

    process = start_process(command)
    wait_for_log_entries(process, folders[0], 5)
    process.send_signal(signal.SIGTERM)
    stopped = wait(process)
    assert stopped.status == 128 + signal.SIGTERM
    assert states_of(folders[:1]) == ["preempted"]
    assert "gpt-seed-0 has not finished" in stopped.err
    assert "asked to stop by SIGTERM" in stopped.err
    assert not folders[1].exists()

    resumed = run(command).assert_ok()
    assert "resumes from step" in resumed.out
    assert states_of(folders) == ["finished"] * 3
    assert sorted(tmp_path.glob("gpt*")) == folders

    slow = ["--learning_rate", "0.0001", "--output_dir", str(tmp_path / "slow")]
    run([*LLMTRAIN, "repeat", "2", GPT, *flags, *slow]).assert_ok()
    content = json.loads(run([*LLMTRAIN, "compare", str(tmp_path), "--json"]).assert_ok().out)
    names = [group["name"] for group in content["groups"]]
    assert names == ["learning_rate 0.02", "learning_rate 0.0001"]
    (difference,) = content["differences"]
    assert difference["seeds"] == [0, 1]
    assert difference["loss"]["low"] > 0
    assert difference["verdict"] == "B is higher"
