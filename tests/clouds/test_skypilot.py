"""The SkyPilot task: read by SkyPilot itself, and its script run as on one machine without a GPU."""

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
    begin,
    long_form,
    read_json,
    run,
    stop_group,
    wait,
    wait_for_readings,
)
from tests.machines import ADDRESS, UnavailableError, on_machine, two_machines

TASK = ROOT / "clouds" / "skypilot.yaml"
# Prints, for each of the texts that it gets, the error of SkyPilot or what the task asks for.
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


print(json.dumps([read(text) for text in json.load(sys.stdin)]))
"""
MISSPELLED = {
    "num_nodes:": "num_node:",
    "use_spot:": "use_sport:",
    "mode: MOUNT_CACHED": "mode: MOUNT_CACHE",
    "file_mounts:": "file_mount:",
}


def task() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(TASK.read_text())
    return content


@long_form
@pytest.mark.timeout(600)
def test_skypilot_reads_the_task_and_rejects_a_misspelled_one(tmp_path: Path) -> None:
    python = environment_with("skypilot", ["skypilot==0.14.1"]) / "bin" / "python"
    text = TASK.read_text()
    texts = [text, *(text.replace(right, wrong, 1) for right, wrong in MISSPELLED.items())]
    ended = run_program([python, "-c", READER], json.dumps(texts), home=tmp_path).assert_ok()
    read, *misspelled = json.loads(ended.out.splitlines()[-1])

    assert read["run"] == task()["run"]
    assert (read["nodes"], read["accelerators"], read["spot"]) == (2, {"H100": 8}, True)
    assert read["recovery"]["max_restarts_on_errors"] == 3
    folder = task()["envs"]["BUCKET_FOLDER"]
    assert read["buckets"] == {folder: ["my-bucket", "MOUNT_CACHED", True]}, "it outlives the job"
    for content, wrong in zip(misspelled, MISSPELLED.values(), strict=True):
        assert "Invalid" in content.get("error", ""), wrong


@pytest.mark.parametrize("part", ["setup", "run"])
def test_the_scripts_of_the_task_are_bash(part: str) -> None:
    script = task()[part]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    commands = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    for word in ("exit", "exec", "set -e"):
        assert word not in "\n".join(commands), "what SkyPilot adds after the script would not run"


@pytest.fixture
def machine(tmp_path: Path, text_file: Path) -> dict[str, str]:
    """The variables of a job on one machine without GPUs, in a folder like a clone."""
    for name in ("recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    return {
        **task()["envs"],
        "BUCKET": "my-bucket",
        "BUCKET_FOLDER": str(bucket),
        "FLAGS": " ".join([*TINY, "--dataset", str(text_file), "--max_steps", "120"]),
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "PATH": f"{BIN}:/usr/bin:/bin",
    }


def job(folder: Path) -> list[str]:
    return ["bash", "-c", f"cd {folder}\n{task()['run']}"]


@long_form
def test_a_preempted_job_resumes_and_a_finished_one_makes_no_second_run(
    machine: dict[str, str], tmp_path: Path
) -> None:
    machine["FLAGS"] += " --save_steps 5"
    folder = tmp_path / "bucket" / "gpt"
    preempted = begin(job(tmp_path), env=machine)
    try:
        wait_for_readings(preempted, folder, 12)
    finally:
        stop_group(preempted)
    run(job(tmp_path), env=machine).assert_ok()
    starts = [start["step"] for start in read_json(folder / "run.json")["starts"]]
    assert len(starts) == 2
    assert starts[1] >= 5
    assert read_json(folder / "status.json")["state"] == "finished"

    ended = run(job(tmp_path), env=machine).assert_ok()
    assert "gpt is finished already" in ended.out
    assert [path.name for path in (tmp_path / "bucket").iterdir()] == ["gpt"]


@long_form
def test_a_job_that_was_stopped_before_its_end_fails_so_that_skypilot_starts_it_again(
    machine: dict[str, str], tmp_path: Path
) -> None:
    machine["FLAGS"] += " --max_steps 100000 --max_hours 0.0005"
    ended = run(job(tmp_path), env=machine)
    assert read_json(tmp_path / "bucket" / "gpt" / "status.json")["state"] == "preempted"
    assert ended.status == 1


@long_form
def test_two_machines_train_one_sharded_model_and_only_the_first_one_writes_to_the_bucket(
    machine: dict[str, str], tmp_path: Path
) -> None:
    config = tmp_path / "sharded.yaml"
    text = (ROOT / "accelerate_configs" / "hsdp.yaml").read_text()
    config.write_text(text.replace("dp_replicate_size: 2", "dp_replicate_size: 1"))
    machine["CONFIG"] = str(config)
    machine["FLAGS"] += " --max_steps 6"
    machine["GLOO_SOCKET_IFNAME"] = "cable0"

    with contextlib.ExitStack() as cleanup:
        try:
            names = cleanup.enter_context(two_machines())
        except UnavailableError as error:
            pytest.skip(str(error))
        nodes = []
        for rank, name in enumerate(names):
            clone = tmp_path / f"clone{rank}"
            clone.mkdir()
            (clone / "recipes").symlink_to(ROOT / "recipes")
            variables = {
                **machine,
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NODE_RANK": str(rank),
                "SKYPILOT_NODE_IPS": "\n".join(ADDRESS[node] for node in names),
            }
            nodes.append(begin(on_machine(name, job(clone)), env=variables))
            cleanup.callback(stop_group, nodes[-1])
        for node in nodes:
            wait(node).assert_ok()

    folder = tmp_path / "bucket" / "gpt"
    assert read_json(folder / "status.json")["state"] == "finished"
    (start,) = read_json(folder / "run.json")["starts"]
    assert (start["processes"], start["sharded"]) == (2, "1x2")
    weights = [path.name for path in (folder / "model").glob("*.safetensors")]
    assert weights == ["model.safetensors"], (
        "a machine that sees the folder writes a file of its own"
    )
