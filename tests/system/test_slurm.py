"""The batch script, on a real Slurm with two nodes on this machine."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launching import TINY, long_form, metrics, read_json
from tests.slurm import NODES, SCRIPT, Cluster, Job, UnavailableError, slurm_cluster
from tests.waiting import wait_until

LONGER_THAN_THE_TEST = "1000"


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
            yield running
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """Return the running cluster. At the end of the test, its jobs are cancelled."""
    yield running_cluster
    running_cluster.cancel_all()


def submit(
    cluster: Cluster,
    folder: Path,
    text_file: Path,
    options: str,
    *,
    steps: int = 60,
    save_steps: int = 1000,
    pause: str = "0.3",
) -> Job:
    """Submit a small run.

    Args:
        cluster: the Slurm that runs it.
        folder: the folder from which the job is submitted.
        text_file: the text to train on.
        options: options of sbatch.
        steps: the value of ``--max_steps``.
        save_steps: the value of ``--save_steps``.
        pause: seconds that the run waits after each step.
    """
    folder.mkdir(exist_ok=True)
    (folder / "pause").write_text(pause)
    flags = f"--logging_steps 1 --max_steps {steps} --save_steps {save_steps} --dataset {text_file}"
    return cluster.submit(folder, options.split(), [*TINY, *flags.split()])


def wait_for_steps(job: Job, count: int) -> None:
    path = job.run_folder / "metrics.jsonl"

    def has_made_steps() -> bool:
        return path.exists() and len(metrics(job.run_folder)) >= count

    wait_until(has_made_steps, 90)


def checkpoints(job: Job) -> list[int]:
    """Return the steps of the saved checkpoints."""
    paths = (job.run_folder / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in paths)


def status(job: Job) -> dict:
    return read_json(job.run_folder / "status.json")


@long_form
def test_a_run_resumes_after_usr1_and_after_the_death_of_a_node(
    cluster: Cluster, text_file: Path, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, text_file, "--nodes=2", steps=100, save_steps=2)

    # Like --signal=B:USR1@120, this sends the signal to the script only.
    wait_for_steps(job, 3)
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_until_requeued()
    preempted_step = status(job)["step"]
    assert status(job)["state"] == "preempted"
    assert checkpoints(job)[-1] == preempted_step
    assert f"asked to stop by SIGUSR1: step {preempted_step} is saved" in job.log
    assert f"requeue after step-{preempted_step:08d}" in job.log
    # Launchers that got a signal would have one of these. A traceback alone says nothing: a launcher
    # of torch logs one if the machine with its store ends a moment before it, and still succeeds.
    assert "SignalException" not in job.log
    assert "srun: error" not in job.log

    job.begin_now()
    wait_for_steps(job, preempted_step + 6)
    cluster.kill_node(NODES[1])
    job.wait_until_requeued(times=2)
    last_step_before_death = checkpoints(job)[-1]
    assert last_step_before_death > preempted_step

    cluster.start_node(NODES[1])
    wait_until(cluster.is_idle, 60)
    (tmp_path / "pause").write_text("0")
    job.begin_now()
    job.wait_for_state("COMPLETED")
    record = read_json(job.run_folder / "run.json")
    resumed_steps = [start["step"] for start in record["starts"]]
    assert resumed_steps == [0, preempted_step, last_step_before_death]
    assert record["processes"] == 2
    assert status(job)["state"] == "finished"


# --- the time limit


class JobsAtLimit(NamedTuple):
    """Jobs that have reached their time limit.

    Attributes:
        saves: made steps until it was asked to save.
        hangs: saved a checkpoint, and then made no further step.
        makes_nothing: saved no checkpoint, and made no step.
    """

    saves: Job
    hangs: Job
    makes_nothing: Job


@pytest.fixture(scope="module")
def jobs_at_limit(
    running_cluster: Cluster, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JobsAtLimit]:
    """Submit three jobs, and wait until their time limit has ended them."""
    folder = tmp_path_factory.mktemp("limit")
    options = "--nodes=1 --time=30 --signal=B:USR1@15"
    jobs = JobsAtLimit(
        saves=submit(running_cluster, folder / "saves", text_file, options, steps=5000),
        hangs=submit(
            running_cluster, folder / "hangs", text_file, options, steps=5000, save_steps=1
        ),
        makes_nothing=submit(
            running_cluster, folder / "nothing", text_file, options, pause=LONGER_THAN_THE_TEST
        ),
    )

    try:
        wait_for_steps(jobs.saves, 1)
        wait_until(lambda: checkpoints(jobs.hangs) != [], 90)
        # It cannot finish its next step in time to save, so Slurm kills it, and the third job too.
        (jobs.hangs.submitted_from / "pause").write_text(LONGER_THAN_THE_TEST)
        for job in jobs:
            job.end_soon(seconds=20)

        for job in (jobs.saves, jobs.hangs):
            job.wait_until_requeued()
            job.hold()
        jobs.makes_nothing.wait_for_state("TIMEOUT")
        yield jobs
    finally:
        running_cluster.cancel_all()


@long_form
def test_a_job_that_saves_before_its_time_limit_is_requeued(jobs_at_limit: JobsAtLimit) -> None:
    job = jobs_at_limit.saves
    step = status(job)["step"]
    assert job.field("Restarts") == "1"
    assert status(job)["state"] == "preempted"
    assert checkpoints(job) == [step]
    assert f"requeue after step-{step:08d}" in job.log


@long_form
def test_a_job_that_slurm_kills_at_its_limit_is_requeued_if_it_has_made_progress(
    jobs_at_limit: JobsAtLimit,
) -> None:
    job = jobs_at_limit.hangs
    assert job.field("Restarts") == "1"
    assert f"requeue after step-{checkpoints(job)[-1]:08d}" in job.log
    assert "DUE TO TIME LIMIT" in job.log

    # If USR1 came some seconds before TERM, TERM stops the run. Otherwise Slurm kills it.
    state_and_reason = (status(job)["state"], status(job)["reason"])
    stopped_by_term = ("failed", "stopped at once by a second signal")
    assert state_and_reason in [("running", ""), stopped_by_term]


@long_form
def test_a_job_without_a_checkpoint_is_not_requeued(jobs_at_limit: JobsAtLimit) -> None:
    job = jobs_at_limit.makes_nothing
    assert job.field("JobState") == "TIMEOUT"
    assert "not requeued: the run has saved no checkpoint" in job.log


# --- processes


@long_form
def test_two_tasks_on_a_node_are_two_processes_and_scancel_saves_and_ends_the_job(
    cluster: Cluster, text_file: Path, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, text_file, "--nodes=1 --ntasks-per-node=2")
    wait_for_steps(job, 3)
    cluster.call("scancel", job.id)
    job.wait_for_state("CANCELLED")

    step = status(job)["step"]
    assert read_json(job.run_folder / "run.json")["processes"] == 2
    assert status(job)["state"] == "preempted"
    assert checkpoints(job) == [step]
    assert "requeue" not in job.log
    assert job.field("Restarts") == "0"


# Takes the place of accelerate, and prints the words that it gets.
PRINT_WORDS = """#!/bin/bash
echo "accelerate $*"
"""
# As on a cluster that does not track GPUs, on which Slurm sets no such variable.
WITHOUT_GPU_COUNT = "unset SLURM_GPUS_ON_NODE; "


@long_form
@pytest.mark.parametrize(
    ("options", "setup", "processes"),
    [
        pytest.param("--gpus-per-node=2", "", 4, id="allocated GPUs"),
        pytest.param("--gpus-per-node=4", "GPUS=3", 6, id="number set by the user"),
        pytest.param(
            "--ntasks-per-node=3 --gpus-per-node=2", "", 4, id="allocated GPUs instead of tasks"
        ),
        pytest.param("--ntasks-per-node=2", "", 4, id="tasks"),
        pytest.param(
            "",
            f"{WITHOUT_GPU_COUNT}export CUDA_VISIBLE_DEVICES=0,1,2",
            6,
            id="visible GPUs by number",
        ),
        pytest.param(
            "",
            f"{WITHOUT_GPU_COUNT}export CUDA_VISIBLE_DEVICES=GPU-8a2f1c7e,MIG-0b1d",
            4,
            id="visible GPUs by name",
        ),
        pytest.param(
            "",
            f"{WITHOUT_GPU_COUNT}export CUDA_VISIBLE_DEVICES=NoDevFiles",
            2,
            id="no visible GPU",
        ),
        pytest.param("", "", 2, id="one task"),
    ],
)
def test_each_machine_starts_a_process_for_each_gpu_or_task(
    options: str, setup: str, processes: int, cluster: Cluster, tmp_path: Path
) -> None:
    accelerate = tmp_path / "accelerate"
    accelerate.write_text(PRINT_WORDS)
    accelerate.chmod(0o755)

    job = cluster.submit(
        tmp_path, ["--nodes=2", *options.split()], setup=f"PATH={tmp_path}:$PATH; {setup}"
    )
    job.wait_for_state("COMPLETED")

    commands = [line for line in job.log.splitlines() if line.startswith("accelerate launch")]
    assert len(commands) == 2, job.log
    for command in commands:
        assert f"--num_machines 2 --num_processes {processes} " in command


# --- the script itself


def test_the_batch_script_is_bash() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=10)


@pytest.mark.parametrize("option", ["--signal=B:USR1@", "--requeue", "--time="])
def test_the_batch_script_sets_the_options_that_let_a_run_save_and_resume(option: str) -> None:
    lines = SCRIPT.read_text().splitlines()
    assert any(line.startswith(f"#SBATCH {option}") for line in lines)
