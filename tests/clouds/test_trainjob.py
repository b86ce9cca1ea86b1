"""The TrainJob: Kubeflow Trainer's API reads it, and its command is run as in the pod of one node."""

import copy
import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

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
    wait,
    wait_for_log_entries,
)

# Reads objects, by name, with the API's classes, and prints them by name. The classes drop keys that
# they do not know. If they reject an object, the error is printed instead.
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


print(json.dumps({name: read(content) for name, content in json.load(sys.stdin).items()}))
"""


class Mistake(NamedTuple):
    """A key of the TrainJob, or a value, that the API does not know.

    Attributes:
        path: leads to the part of the job that has the key.
        key: the key to set there.
        value: its value.
    """

    path: list[str | int]
    key: str
    value: Any


MISTAKES = {
    "misspelled key": Mistake(["spec", "trainer"], "numNode", 2),
    "value of another type": Mistake(["spec", "trainer"], "numNodes", "two"),
    "key of another object": Mistake(["spec", "trainer"], "restartPolicy", "OnFailure"),
    "misspelled key in a list": Mistake(["spec", "trainer", "env", 0], "vale", "/runs"),
    "key of an older version": Mistake(["spec"], "podTemplateOverrides", []),
    "misspelled key of a patch": Mistake(["spec", "runtimePatches", 0], "trainingRuntime", {}),
}


def claim_and_job() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the PersistentVolumeClaim and the TrainJob of clouds/trainjob.yaml."""
    claim, job = yaml.safe_load_all((ROOT / "clouds" / "trainjob.yaml").read_text())
    return claim, job


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the patch of the pods' specification."""
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]
    return pod


# --- the API


def with_mistake(job: dict[str, Any], mistake: Mistake) -> dict[str, Any]:
    faulty_job = copy.deepcopy(job)
    part: Any = faulty_job
    for step in mistake.path:
        part = part[step]
    part[mistake.key] = mistake.value
    return faulty_job


@pytest.fixture(scope="module")
def read_objects() -> dict[str, dict[str, Any]]:
    """Let the API read the claim, the job, and for each mistake a job that has it.

    Returns:
        The results of READER. The keys are "claim", "job", and the names of the mistakes.
    """
    claim, job = claim_and_job()
    objects = {"claim": claim, "job": job}
    for name, mistake in MISTAKES.items():
        objects[name] = with_mistake(job, mistake)

    requirements = ["kubeflow-trainer-api==2.3.0"]
    python = environment_with("kubeflow-trainer-api", requirements) / "bin" / "python"
    ended = run_program([python, "-c", READER], json.dumps(objects)).assert_ok()
    results: dict[str, dict[str, Any]] = json.loads(ended.out)
    return results


@long_form
@pytest.mark.timeout(600)
def test_the_api_knows_every_key_of_the_claim_and_the_job(
    read_objects: dict[str, dict[str, Any]],
) -> None:
    claim, job = claim_and_job()
    assert read_objects["claim"] == claim
    assert read_objects["job"] == job


@long_form
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_api_drops_or_rejects_a_mistake(
    name: str, read_objects: dict[str, dict[str, Any]]
) -> None:
    _, job = claim_and_job()
    assert read_objects[name] != with_mistake(job, MISTAKES[name])


# --- the parts of the job


def test_the_claim_is_mounted_at_runs() -> None:
    claim, job = claim_and_job()
    pod = pod_of(job)
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}

    runs = volumes[mounts["/runs"]]
    assert runs["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert {*mounts.values()} == {*volumes}, "each volume is mounted, and each mount has a volume"


def test_the_variables_and_the_command_of_the_job_fit_its_pod() -> None:
    _, job = claim_and_job()
    trainer = job["spec"]["trainer"]
    variables = {variable["name"]: variable["value"] for variable in trainer["env"]}

    assert Path(variables["RUN"]).parent == Path("/runs")
    seconds_to_save = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert seconds_to_save < pod_of(job)["terminationGracePeriodSeconds"], "the pod would end first"
    words = [*trainer["command"], *trainer["args"]]
    assert "$(" not in "".join(words), "Kubernetes would replace it with the value of a variable"


# --- the command of the job


@long_form
def test_a_pod_that_is_evicted_saves_fails_and_the_next_one_resumes(
    tmp_path: Path, text_file: Path
) -> None:
    _, job = claim_and_job()
    trainer = job["spec"]["trainer"]
    recipe, *_ = trainer["args"]
    flags = f"--dataset {text_file} --max_steps 150 --save_steps 100"
    command = [*trainer["command"], recipe, *TINY, *flags.split()]
    folder = tmp_path / "runs" / "gpt"
    variables = {  # the runtime torch-distributed sets those that begin with PET_
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "29507",
        "RUN": str(folder),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110",
        "PATH": f"{BIN}:/usr/bin:/bin",
    }

    evicted = start_process(command, env=variables)
    try:
        wait_for_log_entries(evicted, folder, 3)
        evicted.send_signal(signal.SIGTERM)  # to the script only
    finally:
        ended = wait(evicted)
    assert ended.status == 1, "a pod that ended with 0 would not be started again"
    status = read_json(folder / "status.json")
    assert status["state"] == "preempted"
    assert (folder / "checkpoints" / f"step-{status['step']:08d}").is_dir()

    run(command, env=variables).assert_ok()
    record = read_json(folder / "run.json")
    assert [start["step"] for start in record["starts"]] == [0, status["step"]]
    assert record["processes"] == 2

    run(command, env=variables).assert_ok()
    run_folders = [path.name for path in folder.parent.iterdir()]
    assert run_folders == ["gpt"], "a third pod leaves the finished run as it is"
