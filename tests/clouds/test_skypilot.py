"""The SkyPilot task: SkyPilot reads it, and its script is run on machines without a GPU."""

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clouds.programs import run_program
from tests.environments import environment_with
from tests.launching import (
    BIN,
    ROOT,
    TINY,
    long_form,
    read_json,
    run,
    start_process,
    stop_group,
    wait,
    wait_for_log_entries,
)
from tests.machines import ADDRESS, UnavailableError, on_machine, two_machines

TASK = ROOT / "clouds" / "skypilot.yaml"
# Reads the texts of several tasks, by name. Prints by name what SkyPilot makes of each: the resources
# that it asks for, or an error.
READER = """
import json
import sys

import sky
import yaml


def read(text):
    config = yaml.safe_load(text)
    try:
        task = sky.Task.from_yaml_config(config, env_overrides=[("BUCKET", "my-bucket")])
    except (sky.exceptions.InvalidSkyPilotConfigError, ValueError) as error:
        return {"error": str(error)}
    (resources,) = task.resources
    return {
        "nodes": task.num_nodes,
        "accelerators": resources.accelerators,
        "spot": resources.use_spot,
        "recovery": resources.job_recovery,
        "buckets": {
            folder: [storage.name, storage.mode.value, storage.persistent]
            for folder, storage in task.storage_mounts.items()
        },
        "run": task.run,
    }


print(json.dumps({name: read(text) for name, text in json.load(sys.stdin).items()}))
"""
MISSPELLINGS = {
    "num_nodes:": "num_node:",
    "use_spot:": "use_sport:",
    "mode: MOUNT_CACHED": "mode: MOUNT_CACHE",
    "file_mounts:": "file_mount:",
}


def task() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(TASK.read_text())
    return content


# --- SkyPilot itself


@pytest.fixture(scope="module")
def read_tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Let SkyPilot read the task, and for each misspelling a task that has it.

    Returns:
        The results of READER. The keys are "task", and the misspelled words.
    """
    text = TASK.read_text()
    texts = {"task": text}
    for right, wrong in MISSPELLINGS.items():
        texts[wrong] = text.replace(right, wrong, 1)

    python = environment_with("skypilot", ["skypilot==0.14.1"]) / "bin" / "python"
    home = tmp_path_factory.mktemp("home")
    ended = run_program([python, "-c", READER], json.dumps(texts), home).assert_ok()
    results: dict[str, dict[str, Any]] = json.loads(ended.out.splitlines()[-1])
    return results


@long_form
@pytest.mark.timeout(600)
def test_skypilot_reads_the_task(read_tasks: dict[str, dict[str, Any]]) -> None:
    read_task = read_tasks["task"]
    assert read_task["run"] == task()["run"]
    assert read_task["nodes"] == 2
    assert read_task["accelerators"] == {"H100": 8}
    assert read_task["spot"] is True
    assert read_task["recovery"]["max_restarts_on_errors"] == 3

    folder = task()["envs"]["BUCKET_FOLDER"]
    is_kept_after_the_job = True
    assert read_task["buckets"] == {folder: ["my-bucket", "MOUNT_CACHED", is_kept_after_the_job]}


@long_form
@pytest.mark.timeout(600)
@pytest.mark.parametrize("misspelling", MISSPELLINGS.values())
def test_skypilot_rejects_a_misspelled_task(
    misspelling: str, read_tasks: dict[str, dict[str, Any]]
) -> None:
    assert "Invalid" in read_tasks[misspelling].get("error", "")


# --- the scripts


@pytest.mark.parametrize("part", ["setup", "run"])
def test_the_scripts_of_the_task_are_bash(part: str) -> None:
    subprocess.run(["bash", "-n"], input=task()[part], text=True, check=True, timeout=10)


@pytest.mark.parametrize("part", ["setup", "run"])
@pytest.mark.parametrize("word", ["exit", "exec", "set -e"])
def test_the_scripts_of_the_task_do_not_end_before_the_lines_that_skypilot_adds(
    part: str, word: str
) -> None:
    lines = task()[part].splitlines()
    commands = [line for line in lines if not line.lstrip().startswith("#")]
    assert word not in "\n".join(commands)


@pytest.fixture
def variables(tmp_path: Path, text_file: Path) -> dict[str, str]:
    """Return the variables of a job on one machine without GPUs, and prepare its folder."""
    for name in ("recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    flags = f"--dataset {text_file} --max_steps 120"
    return {
        **task()["envs"],
        "BUCKET": "my-bucket",
        "BUCKET_FOLDER": str(bucket),
        "FLAGS": " ".join([*TINY, flags]),
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "PATH": f"{BIN}:/usr/bin:/bin",
    }


def job(folder: Path) -> list[str]:
    """Return a command that runs the task's script in a folder."""
    return ["bash", "-c", f"cd {folder}\n{task()['run']}"]


@long_form
def test_a_preempted_job_resumes_and_a_finished_one_makes_no_second_run(
    variables: dict[str, str], tmp_path: Path
) -> None:
    variables["FLAGS"] += " --save_steps 5"
    folder = tmp_path / "bucket" / "gpt"

    preempted = start_process(job(tmp_path), env=variables)
    try:
        wait_for_log_entries(preempted, folder, 12)
    finally:
        stop_group(preempted)
    run(job(tmp_path), env=variables).assert_ok()

    first, second = read_json(folder / "run.json")["starts"]
    assert first["step"] == 0
    assert second["step"] >= 5
    assert read_json(folder / "status.json")["state"] == "finished"

    after_end = run(job(tmp_path), env=variables).assert_ok()
    assert "gpt is finished already" in after_end.out
    assert [path.name for path in (tmp_path / "bucket").iterdir()] == ["gpt"]


@long_form
def test_a_job_that_stops_before_its_end_fails_so_that_skypilot_starts_it_again(
    variables: dict[str, str], tmp_path: Path
) -> None:
    variables["FLAGS"] += " --max_steps 100000 --max_hours 0.0005"
    ended = run(job(tmp_path), env=variables)
    assert read_json(tmp_path / "bucket" / "gpt" / "status.json")["state"] == "preempted"
    assert ended.status == 1


@long_form
def test_two_machines_train_a_sharded_model_and_only_the_first_writes_to_the_bucket(
    variables: dict[str, str], tmp_path: Path
) -> None:
    # hsdp.yaml has two replicas. With two processes, one replica leaves two shards.
    text = (ROOT / "accelerate_configs" / "hsdp.yaml").read_text()
    config = tmp_path / "sharded.yaml"
    config.write_text(text.replace("dp_replicate_size: 2", "dp_replicate_size: 1"))
    variables["CONFIG"] = str(config)
    variables["FLAGS"] += " --max_steps 6"
    variables["GLOO_SOCKET_IFNAME"] = "cable0"

    with contextlib.ExitStack() as cleanup:
        try:
            machines = cleanup.enter_context(two_machines())
        except UnavailableError as error:
            pytest.skip(str(error))

        processes = []
        for rank, machine in enumerate(machines):
            clone = tmp_path / f"clone{rank}"
            clone.mkdir()
            (clone / "recipes").symlink_to(ROOT / "recipes")
            variables_of_node = {
                **variables,
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NODE_RANK": str(rank),
                "SKYPILOT_NODE_IPS": "\n".join(ADDRESS[name] for name in machines),
            }
            process = start_process(on_machine(machine, job(clone)), env=variables_of_node)
            cleanup.callback(stop_group, process)
            processes.append(process)
        for process in processes:
            wait(process).assert_ok()

    folder = tmp_path / "bucket" / "gpt"
    assert read_json(folder / "status.json")["state"] == "finished"
    (start,) = read_json(folder / "run.json")["starts"]
    assert start["processes"] == 2
    assert start["sharded"] == "1x2"
    weights = [path.name for path in (folder / "model").glob("*.safetensors")]
    assert weights == ["model.safetensors"], "each machine that sees the folder writes a file"
