"""The TrainJob: read by the API of Kubeflow Trainer, and its command run as in the pod of one node."""

import copy
import json
import signal
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
    wait,
    wait_for_readings,
)

# Prints what the API's classes keep of each object that they get: they drop the keys that they do
# not know. An object that they reject becomes its error.
READER = """
import json
import sys

from kubeflow_trainer_api import models

CLASSES = {
    "PersistentVolumeClaim": models.IoK8sApiCoreV1PersistentVolumeClaim,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def read(content):
    try:
        return CLASSES[content["kind"]].from_dict(content).to_dict()
    except ValueError as error:
        return {"error": str(error)}


print(json.dumps([read(content) for content in json.load(sys.stdin)]))
"""
# A path to a key of the job, and another name for it or another value.
MISTAKES: list[tuple[list[str | int], str, Any]] = [
    (["spec", "trainer"], "numNode", 2),
    (["spec", "trainer"], "numNodes", "two"),
    (["spec", "trainer"], "restartPolicy", "OnFailure"),
    (["spec", "trainer", "env", 0], "vale", "/runs"),
    (["spec"], "podTemplateOverrides", []),
    (["spec", "runtimePatches", 0], "trainingRuntime", {}),
]


def objects() -> tuple[dict[str, Any], dict[str, Any]]:
    claim, job = yaml.safe_load_all((ROOT / "clouds" / "trainjob.yaml").read_text())
    return claim, job


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the patch of the pods' specification."""
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]
    return pod


@long_form
@pytest.mark.timeout(600)
def test_the_api_knows_every_key_of_the_job_and_a_misspelled_one_is_noticed() -> None:
    claim, job = objects()
    faulty = []
    for path, key, value in MISTAKES:
        content = copy.deepcopy(job)
        target: Any = content
        for step in path:
            target = target[step]
        target[key] = value
        faulty.append(content)

    python = (
        environment_with("kubeflow-trainer-api", ["kubeflow-trainer-api==2.3.0"]) / "bin" / "python"
    )
    ended = run_program([python, "-c", READER], json.dumps([claim, job, *faulty])).assert_ok()
    read_claim, read_job, *read_faulty = json.loads(ended.out)
    assert read_claim == claim
    assert read_job == job
    for mistake, content, read in zip(MISTAKES, faulty, read_faulty, strict=True):
        assert read != content, mistake


def test_the_parts_of_the_job_fit_together() -> None:
    claim, job = objects()
    trainer, pod = job["spec"]["trainer"], pod_of(job)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    folders = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claim_name = volumes[folders["/runs"]]["persistentVolumeClaim"]["claimName"]
    assert claim_name == claim["metadata"]["name"]
    assert {*folders.values()} == {*volumes}

    variables = {variable["name"]: variable["value"] for variable in trainer["env"]}
    assert Path(variables["RUN"]).parent == Path("/runs")
    grace = pod["terminationGracePeriodSeconds"]
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace, "or the pod ends first"
    # Kubernetes itself would replace this with the value of a variable.
    assert "$(" not in "".join([*trainer["command"], *trainer["args"]])


@long_form
def test_a_pod_that_is_evicted_saves_fails_and_the_next_one_resumes(
    tmp_path: Path, text_file: Path
) -> None:
    trainer = objects()[1]["spec"]["trainer"]
    recipe, *_ = trainer["args"]
    flags = [*TINY, "--dataset", str(text_file), "--max_steps", "150", "--save_steps", "100"]
    command = [*trainer["command"], recipe, *flags]
    folder = tmp_path / "runs" / "gpt"
    pod = {  # the PET_ variables are those that the runtime torch-distributed sets
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "29507",
        "RUN": str(folder),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110",
        "PATH": f"{BIN}:/usr/bin:/bin",
    }

    evicted = begin(command, env=pod)
    try:
        wait_for_readings(evicted, folder, 3)
        evicted.send_signal(signal.SIGTERM)  # to the script alone
    finally:
        ended = wait(evicted)
    assert ended.status == 1, "the pod failed, so that it is started again"
    status = read_json(folder / "status.json")
    assert status["state"] == "preempted"
    assert (folder / "checkpoints" / f"step-{status['step']:08d}").is_dir()

    run(command, env=pod).assert_ok()
    record = read_json(folder / "run.json")
    assert [start["step"] for start in record["starts"]] == [0, status["step"]]
    assert record["processes"] == 2
    run(command, env=pod).assert_ok()
    assert [path.name for path in folder.parent.iterdir()] == ["gpt"], (
        "a finished run is left alone"
    )
