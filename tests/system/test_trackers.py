"""Runs that log to real trackers. The tests read the logs with the libraries of the trackers."""

import json
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
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
from tests.wandb_file import read_history
from tests.wandb_server import Server, serving

KILLS = int(os.environ.get("LLMTRAIN_KILLS", "1"))
# Enough steps that the run does not end before it is killed.
STEPS = 40 + 20 * KILLS
FLAGS = [*TINY, *shlex.split(f"--max_steps {STEPS} --eval_steps 10 --save_steps 5")]
KEYS = ("train/loss", "eval/loss", "tokens")

# Values by key: pairs of a step and a number, in the order of logging.
Values = dict[str, list[tuple[int, float]]]

READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("llmtrain").experiment_id])
keys = ("train/loss", "eval/loss", "tokens")
values = {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in keys}
print(json.dumps({"values": values, "params": run.data.params, "status": run.info.status}))
"""


def starts_of(folder: Path) -> int:
    record = folder / "run.json"
    return len(read_json(record)["starts"]) if record.exists() else 0


def kill_and_resume(
    folder: Path,
    dataset: Path,
    flags: str,
    launcher: list[str] = PYTHON,
    env: dict[str, str] | None = None,
) -> None:
    """Train a GPT. Kill it at random moments, and start it again each time."""
    run_flags = shlex.split(f"--dataset {dataset} --output_dir {folder} {flags}")
    command = [*launcher, GPT, *FLAGS, *run_flags]
    draw = Random(0)
    for start in range(1, KILLS + 1):
        process = start_process(command, env)
        try:
            while starts_of(folder) < start:
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            wait_for_log_entries(process, folder, 1)
            entries = len(metrics(folder))
            wait_for_log_entries(process, folder, entries + draw.randrange(4, 20))
            time.sleep(draw.uniform(0, 0.1))
        finally:
            stop_group(process)
        assert read_json(folder / "status.json")["state"] == "running"

    run(command, env).assert_ok()

    assert read_json(folder / "status.json")["state"] == "finished"
    assert starts_of(folder) == KILLS + 1


def values_in(rows: list[dict[str, Any]]) -> Values:
    """Return the values of each step, in log entries or in rows of a tracker."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    return {key: [(step, row[key]) for step, row in by_step.items() if key in row] for key in KEYS}


def wandb_file(folder: Path) -> Path:
    """Return the file that W&B wrote in the newest start of a run that is offline."""
    [file] = (folder / "wandb/latest-run").resolve().glob("*.wandb")
    return file


@long_form
def test_each_tracker_has_each_step_of_a_killed_run_once(text_file: Path, tmp_path: Path) -> None:
    packages = ("mlflow-skinny>=3.12", "sqlalchemy", "alembic")
    python = str(environment_with("mlflow", packages, adds_to_ours=True) / "bin" / "python")
    folder = tmp_path / "run"
    env = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "PYTHONWARNINGS": "",  # a warning of a tracker is no fault of this package
        "WANDB_MODE": "offline",
    }

    flags = "--report_to wandb tensorboard mlflow"
    kill_and_resume(folder, text_file, flags, launcher=[python], env=env)

    expected = values_in(metrics(folder))
    assert [step for step, _ in expected["tokens"]] == [*range(STEPS + 1)]

    rows = read_history(wandb_file(folder))
    assert [row["step"] for row in rows] == [*range(STEPS + 1)]
    assert values_in(rows) == expected

    out = run([python, "-c", READ_MLFLOW], env).assert_ok().out
    logged = json.loads(out.splitlines()[-1])
    for key, points in expected.items():
        assert [tuple(point) for point in logged["values"][key]] == points
    assert logged["params"]["global_batch_size"] == "8"
    assert logged["status"] == "FINISHED"

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for key, points in expected.items():
        # TensorBoard stores float32.
        float32_points = [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
        assert [(event.step, event.value) for event in events.Scalars(key)] == float32_points


@needs_failing_calls
def test_tensorboard_on_a_full_disk_costs_one_note(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_flags = shlex.split(f"--dataset {text_file} --output_dir {folder} --report_to tensorboard")
    full = failing("write", "ENOSPC", "events.out.tfevents", after=20, times=1_000_000)

    ended = run_forked([*PYTHON, GPT, *TINY, *run_flags], full).assert_ok()

    # TensorBoard's own thread prints a traceback at the same time, piece by piece.
    assert ended.err.count("note: ") == 1
    assert "note: tensorboard: tracking stopped: [Errno 28] No space left on device" in ended.err
    assert metrics(folder)[-1]["step"] == 6


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
    assert read_json(folder / "run.json")["trackers"]["wandb"].startswith("http://127.0.0.1")
