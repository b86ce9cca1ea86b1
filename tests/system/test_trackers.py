"""Runs that log to real trackers. The tests read the logs with the libraries of the trackers."""

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.environments import environment_with
from tests.failing_calls import failing, needs_failing_calls
from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    accelerate,
    long_form,
    metrics,
    read_json,
    run,
    start_process,
    stop_group,
    wait_for_log_entries,
)
from tests.wandb_server import Server, serving

# Enough steps that the run does not end before it is killed.
STEPS = 200
FLAGS = [*TINY, *shlex.split(f"--max_steps {STEPS} --eval_steps 10 --save_steps 10")]
KEYS = ("train/loss", "eval/loss")

# Values by key: pairs of a step and a number, in the order of logging.
Values = dict[str, list[tuple[int, float]]]

READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("llmtrain").experiment_id])
keys = ("train/loss", "eval/loss")
values = {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in keys}
print(json.dumps({"values": values, "params": run.data.params, "status": run.info.status}))
"""


def kill_and_resume(
    folder: Path,
    dataset: Path,
    flags: str,
    launcher: list[str] = PYTHON,
    env: dict[str, str] | None = None,
) -> None:
    """Train a GPT. Kill it after its second checkpoint, and start it again."""
    run_flags = shlex.split(f"--dataset {dataset} --output_dir {folder} {flags}")
    command = [*launcher, GPT, *FLAGS, *run_flags]
    process = start_process(command, env)
    try:
        wait_for_log_entries(process, folder, 25)
        time.sleep(0.5)
    finally:
        stop_group(process)
    assert read_json(folder / "status.json")["state"] == "running"

    run(command, env).assert_ok()

    assert read_json(folder / "status.json")["state"] == "finished"
    assert len(read_json(folder / "run.json")["starts"]) == 2


def values_in(rows: list[dict[str, Any]]) -> Values:
    """Return the losses in log entries or in rows of a tracker."""
    return {key: [(row["step"], row[key]) for row in rows if key in row] for key in KEYS}


def without_repetition(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points of a metric, each once.

    After a kill between an entry and the record of its position, that entry is sent again.
    """
    unique = [*dict.fromkeys(points)]
    assert len(points) - len(unique) <= 1
    return unique


@long_form
def test_tensorboard_has_each_value_of_a_killed_run_once(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    kill_and_resume(folder, text_file, "--report_to tensorboard")

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for key, expected in values_in(metrics(folder)).items():
        points = without_repetition([(event.step, event.value) for event in events.Scalars(key)])
        assert [step for step, _ in points] == [step for step, _ in expected]
        losses = [loss for _, loss in expected]
        assert [value for _, value in points] == pytest.approx(losses, rel=1e-6)


@needs_failing_calls
def test_tensorboard_on_a_full_disk_costs_one_note(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_flags = shlex.split(f"--dataset {text_file} --output_dir {folder} --report_to tensorboard")
    full = failing("write", "ENOSPC", "events.out.tfevents", after=20, times=1_000_000)

    ended = run_forked([*PYTHON, GPT, *TINY, *run_flags], full).assert_ok()

    assert "Traceback" not in ended.err
    [note] = [line for line in ended.err.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: tensorboard: tracking ")
    assert "No space left on device" in note
    assert metrics(folder)[-1]["step"] == 6


@long_form
def test_mlflow_in_its_own_environment_has_each_value_of_a_killed_run_once(
    text_file: Path, tmp_path: Path
) -> None:
    packages = ("mlflow-skinny>=3.12", "sqlalchemy", "alembic")
    python = str(environment_with("mlflow", packages, adds_to_ours=True) / "bin" / "python")
    folder = tmp_path / "run"
    env = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "PYTHONWARNINGS": "",  # a warning of a tracker is no fault of this package
    }

    kill_and_resume(folder, text_file, "--report_to mlflow", launcher=[python], env=env)

    out = run([python, "-c", READ_MLFLOW], env).assert_ok().out
    logged = json.loads(out.splitlines()[-1])
    values = {
        key: without_repetition([(int(step), value) for step, value in logged["values"][key]])
        for key in KEYS
    }
    assert values == values_in(metrics(folder))
    assert logged["params"]["global_batch_size"] == "8"
    assert logged["status"] == "FINISHED"


# --- W&B

WANDB_FLAGS = "--report_to wandb --sample_prompts 'The model'"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path, monkeypatch) as server:
        yield server


@long_form
def test_wandb_has_each_value_of_a_killed_run_of_two_processes_once(
    server: Server, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    kill_and_resume(folder, text_file, WANDB_FLAGS, launcher=accelerate("cpu_ddp"))

    assert [row["step"] for row in server.history] == [*range(STEPS + 1)]
    assert values_in(server.history) == values_in(metrics(folder))
    steps_with_samples = [row["step"] for row in server.history if "samples" in row]
    assert steps_with_samples == [*range(10, STEPS + 1, 10)]

    record = read_json(folder / "run.json")
    assert record["trackers"]["wandb"].startswith("http://127.0.0.1")
    assert "step    200/200" in (folder / "output.log").read_text()
