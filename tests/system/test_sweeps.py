"""Runs in a W&B sweep, with a stand-in that sets what W&B's agent sets."""

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from tests.environments import environment_with
from tests.launching import (
    BIN,
    GPT,
    PYTHON,
    ROOT,
    TINY,
    Ended,
    accelerate,
    begin,
    long_form,
    metrics,
    read_json,
    run,
    stop_group,
    wait,
    wait_for_readings,
)
from tests.wandb_file import read_records

SWEEP = yaml.safe_load((ROOT / "recipes/sweep.yaml").read_text())
FLAGS = [*TINY, "--eval_steps", "2", "--report_to", "wandb"]
TOGETHER = 8


def agents_environment(folder: Path, run_id: str, **parameters: Any) -> dict[str, str]:
    """The environment of a run that W&B's agent starts (``wandb/wandb_agent.py``)."""
    path = folder / f"config-{run_id}.yaml"
    values = {name: {"value": value} for name, value in parameters.items()}
    path.write_text(yaml.safe_dump({"wandb_version": 1, **values}))
    return {
        "WANDB_SWEEP_ID": "sweep1",
        "WANDB_RUN_ID": run_id,
        "WANDB_SWEEP_PARAM_PATH": str(path),
        "WANDB_PROJECT": "mine",
        "WANDB_MODE": "offline",
    }


def at_wandb(folder: Path) -> Any:
    """The run record in a run's W&B file."""
    (file,) = (folder / "wandb/latest-run").resolve().glob("*.wandb")
    return next(
        record.run for record in read_records(file) if record.WhichOneof("record_type") == "run"
    )


@long_form
def test_runs_started_at_once_get_folders_of_their_own(text_file: Path, tmp_path: Path) -> None:
    processes: list[subprocess.Popen] = []
    for number in range(TOGETHER):
        rate = 0.001 * (number % 2 + 1)  # pairs of them have the same settings
        env = agents_environment(tmp_path, f"run{number}", learning_rate=rate)
        command = [*PYTHON, GPT, *FLAGS, "--dataset", str(text_file), f"--learning_rate={rate}"]
        processes.append(begin([*command, "--output_dir", str(tmp_path / "sweep")], env))
    ended: dict[int, Ended] = {}

    def end(number: int) -> None:
        ended[number] = wait(processes[number], 240)

    threads = [threading.Thread(target=end, args=(number,)) for number in range(TOGETHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(TOGETHER):
        ended[number].assert_ok()

    names = ["sweep", *(f"sweep-{number}" for number in range(2, TOGETHER + 1))]
    folders = sorted(path for path in tmp_path.iterdir() if (path / "run.json").exists())
    assert [folder.name for folder in folders] == sorted(names)
    ids = {read_json(folder / "run.json")["run_id"] for folder in folders}
    assert ids == {f"run{number}" for number in range(TOGETHER)}
    for folder in folders:
        record = at_wandb(folder)
        assert record.run_id == read_json(folder / "run.json")["run_id"]
        assert (record.sweep_id, record.project) == ("sweep1", "mine")
        assert len(metrics(folder)) >= 6


@long_form
def test_a_run_of_a_sweep_is_resumed_by_its_id(text_file: Path, tmp_path: Path) -> None:
    """The agent starts a preempted run again under the same id, and another run under another."""
    flags = [*FLAGS, "--dataset", str(text_file), "--max_steps", "40", "--save_steps", "5"]
    command = [*PYTHON, GPT, *flags, "--output_dir", str(tmp_path / "sweep")]
    process = begin(command, agents_environment(tmp_path, "first"))
    try:
        wait_for_readings(process, tmp_path / "sweep", 12)
    finally:
        stop_group(process)
    run(command, agents_environment(tmp_path, "second")).assert_ok()
    run(command, agents_environment(tmp_path, "first")).assert_ok()

    first, second = (read_json(tmp_path / name / "run.json") for name in ("sweep", "sweep-2"))
    assert (first["run_id"], len(first["starts"])) == ("first", 2)
    assert (second["run_id"], len(second["starts"])) == ("second", 1)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(SWEEP["command"], id="alone"),
        pytest.param(
            ["${env}", *accelerate("cpu_ddp"), "${program}", "${args}"],
            id="launcher",
            marks=long_form,
        ),
    ],
)
def test_the_sweep_file_starts_a_run(command: list[str], text_file: Path, tmp_path: Path) -> None:
    chosen = {"learning_rate": 0.0123, "weight_decay": 0.1, "output_dir": str(tmp_path / "sweep")}
    assert chosen.keys() == SWEEP["parameters"].keys()
    arguments = create_sweep_command_args(
        {"args": {name: {"value": value} for name, value in chosen.items()}}
    )
    macros = {
        "env": ["/usr/bin/env"],
        "interpreter": [str(BIN / "python")],
        "program": [SWEEP["program"]],
        "args": [*arguments["args"], *FLAGS, "--dataset", str(text_file)],
    }
    words: list[str] = []
    for word in create_sweep_command(list(command)):
        is_macro = word.startswith("${")
        words += macros[word[2:-1]] if is_macro else [word]

    env = agents_environment(tmp_path, "run0", **chosen)
    env["PATH"] = f"{BIN}:/usr/bin:/bin"
    run(words, env).assert_ok()
    settings = read_json(tmp_path / "sweep/run.json")["settings"]
    assert settings["learning_rate"]["value"] == 0.0123
    record = at_wandb(tmp_path / "sweep")
    assert record.run_id == "run0"
    assert record.display_name == "", "the sweep has chosen a name"
    assert SWEEP["metric"]["name"] in metrics(tmp_path / "sweep")[-1]


CHECK = """
import json, sys
from sweeps.config import schema_violations_from_proposed_config
config = json.loads(sys.stdin.read()) if len(sys.argv) < 2 else json.loads(sys.argv[1])
print(json.dumps(schema_violations_from_proposed_config(config)))
"""


@long_form
def test_the_sweep_file_has_wandbs_schema() -> None:
    python = str(environment_with("sweeps", ["sweeps"]) / "bin" / "python")

    def violations(config: dict[str, Any]) -> list[str]:
        command = [python, "-c", CHECK, json.dumps(config)]
        # Warnings of the package are no errors of ours.
        out = run(command, {"PYTHONWARNINGS": ""}).assert_ok().out
        return json.loads(out.splitlines()[-1])

    assert violations(SWEEP) == []
    assert violations({**SWEEP, "method": "bays"}) != []
    misspelled = {"learning_rate": {"distribution": "log_uniform", "minimum": 0.1}}
    assert violations({**SWEEP, "parameters": misspelled}) != []
