"""Runs in a W&B sweep. The tests set the variables that W&B's agent sets."""

import shlex
from pathlib import Path
from typing import Any

import yaml

from tests.launching import (
    BIN,
    GPT,
    PYTHON,
    ROOT,
    TINY,
    long_form,
    metrics,
    read_json,
    run,
    start_process,
    stop_group,
    wait_for_log_entries,
)
from tests.wandb_file import read_records

SWEEP = yaml.safe_load((ROOT / "recipes/sweep.yaml").read_text())
FLAGS = [*TINY, *shlex.split("--eval_steps 2 --report_to auto")]


def agent_variables(folder: Path, run_id: str, **parameters: Any) -> dict[str, str]:
    """Return the variables of a run that W&B's agent starts (``wandb/wandb_agent.py``)."""
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


def wandb_run(folder: Path) -> Any:
    """Return the record of a run in its W&B file."""
    [file] = (folder / "wandb/latest-run").resolve().glob("*.wandb")
    records = read_records(file)
    return next(record.run for record in records if record.WhichOneof("record_type") == "run")


@long_form
def test_a_run_of_a_sweep_is_resumed_by_its_id(text_file: Path, tmp_path: Path) -> None:
    """The agent starts a preempted run again with the same id, and a new run with a new one."""
    folder = tmp_path / "sweep"
    flags = shlex.split(
        f"--max_steps 40 --save_steps 5 --dataset {text_file} --output_dir {folder}"
    )
    command = [*PYTHON, GPT, *FLAGS, *flags]

    process = start_process(command, agent_variables(tmp_path, "first"))
    try:
        wait_for_log_entries(process, folder, 12)
    finally:
        stop_group(process)
    run(command, agent_variables(tmp_path, "second")).assert_ok()
    run(command, agent_variables(tmp_path, "first")).assert_ok()

    first = read_json(folder / "run.json")
    assert first["run_id"] == "first"
    assert len(first["starts"]) == 2
    second = read_json(tmp_path / "sweep-2" / "run.json")
    assert second["run_id"] == "second"
    assert len(second["starts"]) == 1


# --- recipes/sweep.yaml


@long_form
def test_the_sweep_file_starts_a_run(text_file: Path, tmp_path: Path) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    folder = tmp_path / "sweep"
    parameters = {"learning_rate": 0.0123, "weight_decay": 0.1, "output_dir": str(folder)}
    assert parameters.keys() == SWEEP["parameters"].keys()

    values = {name: {"value": value} for name, value in parameters.items()}
    flags = create_sweep_command_args({"args": values})["args"]
    macros = {
        "${env}": ["/usr/bin/env"],
        "${interpreter}": PYTHON,
        "${program}": [SWEEP["program"]],
        "${args}": [*flags, *FLAGS, "--dataset", str(text_file)],
    }
    words: list[str] = []
    for word in create_sweep_command(SWEEP["command"]):
        words += macros.get(word, [word])

    variables = agent_variables(tmp_path, "run0", **parameters)
    variables["PATH"] = f"{BIN}:/usr/bin:/bin"
    run(words, variables).assert_ok()

    settings = read_json(folder / "run.json")["settings"]
    assert settings["learning_rate"]["value"] == 0.0123
    record = wandb_run(folder)
    assert (record.run_id, record.sweep_id) == ("run0", "sweep1")
    assert SWEEP["metric"]["name"] in metrics(folder)[-1]
