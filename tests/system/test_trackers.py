"""Runs that report to real trackers, read back with the trackers' own libraries."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.environments import environment_with
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    accelerate,
    begin,
    long_form,
    metrics,
    read_json,
    run,
    stop_group,
    wait_for_readings,
)
from tests.wandb_file import read_history
from tests.wandb_server import Server, serving

STEPS = 200  # the run must not end in the half second after which it is killed
FLAGS = [*TINY, "--max_steps", str(STEPS), "--eval_steps", "10", "--save_steps", "10"]

READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("llmtrain").experiment_id])
keys = ("train/loss", "eval/loss")
values = {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in keys}
print(json.dumps({"values": values, "params": run.data.params, "status": run.info.status}))
"""
READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
[name] = SQLiteStorage.get_runs("llmtrain")
logs = SQLiteStorage.get_logs("llmtrain", name)
keys = ("train/loss", "eval/loss")
values = {key: [(log["step"], log[key]) for log in logs if key in log] for key in keys}
print(json.dumps({"values": values, "params": SQLiteStorage.get_run_config("llmtrain", name)}))
"""


def killed_and_resumed(
    launcher: list[str], flags: list[str], folder: Path, env: dict[str, str]
) -> None:
    """Kill a run with SIGKILL after its second checkpoint, and start it again."""
    command = [*launcher, GPT, *flags, "--output_dir", str(folder)]
    process = begin(command, env)
    try:
        wait_for_readings(process, folder, 25)
        time.sleep(0.5)
    finally:
        stop_group(process)
    assert read_json(folder / "status.json")["state"] == "running"
    run(command, env).assert_ok()
    assert read_json(folder / "status.json")["state"] == "finished"
    assert len(read_json(folder / "run.json")["starts"]) == 2


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by metric, in ``metrics.jsonl``."""
    return {
        key: [(line["step"], line[key]) for line in metrics(folder) if key in line]
        for key in ("train/loss", "eval/loss")
    }


def pairs(values: dict[str, list[list[float]]]) -> dict[str, list[tuple[int, float]]]:
    return {key: [(int(step), value) for step, value in found] for key, found in values.items()}


@long_form
def test_tensorboard_has_a_killed_run_once(text_file: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--dataset", str(text_file), "--report_to", "tensorboard"]
    killed_and_resumed([*PYTHON], flags, tmp_path / "run", {})
    events = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for key, expected in logged(tmp_path / "run").items():
        # The kill may come between an entry and the record of its position: it is then written again.
        found = list(dict.fromkeys((event.step, event.value) for event in events.Scalars(key)))
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([v for _, v in expected], rel=1e-6)


@long_form
@pytest.mark.parametrize(
    ("name", "requirements", "reader"),
    [
        ("mlflow", ("mlflow-skinny>=3.12", "sqlalchemy", "alembic"), READ_MLFLOW),
        ("trackio", ("trackio>=0.40",), READ_TRACKIO),
    ],
)
def test_a_tracker_in_an_environment_of_its_own_has_a_killed_run_once(
    name: str, requirements: tuple[str, ...], reader: str, text_file: Path, tmp_path: Path
) -> None:
    folder = environment_with(name, requirements, adds_to_ours=True)
    python = str(folder / "bin" / "python")
    env = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONWARNINGS": "",  # theirs are no errors of ours
    }
    flags = [*FLAGS, "--dataset", str(text_file), "--report_to", name]
    killed_and_resumed([python], flags, tmp_path / "run", env)
    found = json.loads(run([python, "-c", reader], env).assert_ok().out.splitlines()[-1])
    values = pairs(found["values"])
    if name == "trackio":  # which may have the entries of the last seconds before the kill twice
        values = {key: sorted(set(value)) for key, value in values.items()}
    assert values == logged(tmp_path / "run")
    assert str(found["params"]["global_batch_size"]) == "8"
    assert found.get("status", "FINISHED") == "FINISHED"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path, monkeypatch) as server:
        yield server


def test_wandb_has_a_killed_run_of_two_processes_once(
    server: Server, text_file: Path, tmp_path: Path
) -> None:
    flags = [*FLAGS, "--dataset", str(text_file), "--report_to", "wandb"]
    flags += ["--sample_prompts", "The model"]
    killed_and_resumed(accelerate("cpu_ddp"), flags, tmp_path / "run", {})

    steps = [row["step"] for row in server.history]
    assert steps == list(range(STEPS + 1))
    for key, expected in logged(tmp_path / "run").items():
        found = [(row["step"], row[key]) for row in server.history if key in row]
        assert found == expected
    with_samples = [row["step"] for row in server.history if "samples" in row]
    assert with_samples == list(range(10, STEPS + 1, 10))

    record = read_json(tmp_path / "run/run.json")
    assert record["trackers"]["wandb"].startswith("http://127.0.0.1")
    printed = (tmp_path / "run/output.log").read_text()
    assert "step    200/200" in printed
    assert printed.count("loss") > 60


@long_form
def test_wandb_offline_has_every_step_and_the_samples(text_file: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--dataset", str(text_file), "--report_to", "wandb"]
    flags += ["--sample_prompts", "The model"]
    killed_and_resumed([*PYTHON], flags, tmp_path / "run", {"WANDB_MODE": "offline"})
    (file,) = (tmp_path / "run/wandb/latest-run").resolve().glob("*.wandb")
    history = read_history(file)
    assert [row["step"] for row in history] == list(range(STEPS + 1))
    for key, expected in logged(tmp_path / "run").items():
        assert [(row["step"], row[key]) for row in history if key in row] == expected
    assert (tmp_path / "run/wandb/latest-run/files/output.log").exists()
