"""The batch script, on a real Slurm of two nodes on this machine."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import TINY, long_form, metrics, read_json
from tests.slurm import NODES, SCRIPT, Cluster, Job, UnavailableError, slurm_cluster
from tests.waiting import wait_until

FLAGS = [*TINY, "--logging_steps", "1"]
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
    yield running_cluster
    running_cluster.cancel_all()


def submit(
    cluster: Cluster,
    folder: Path,
    text_file: Path,
    options: list[str],
    *,
    steps: int = 60,
    save_steps: int = 1000,
    pause: str = "0.3",
) -> Job:
    folder.mkdir(exist_ok=True)
    (folder / "pause").write_text(pause)
    flags = ["--max_steps", str(steps), "--save_steps", str(save_steps)]
    return cluster.submit(folder, options, [*FLAGS, *flags, "--dataset", str(text_file)])


def wait_for_steps(job: Job, count: int) -> None:
    path = job.run_folder / "metrics.jsonl"

    def are_made() -> bool:
        return path.exists() and len(metrics(job.run_folder)) >= count

    wait_until(are_made, 90)


def checkpoints(job: Job) -> list[int]:
    paths = (job.run_folder / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in paths)


def status(job: Job) -> dict:
    return read_json(job.run_folder / "status.json")


@long_form
def test_a_run_resumes_after_usr1_and_after_the_death_of_a_node(
    cluster: Cluster, text_file: Path, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, text_file, ["--nodes=2"], steps=100, save_steps=2)
    wait_for_steps(job, 3)
    # To the script alone, as --signal=B:USR1@120 does.
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_until_requeued()

    step = status(job)["step"]
    assert status(job)["state"] == "preempted"
    assert checkpoints(job)[-1] == step
    assert f"asked to stop by SIGUSR1: step {step} is saved" in job.log
    assert f"requeue after step-{step:08d}" in job.log
    assert "Traceback" not in job.log
    assert "srun: error" not in job.log

    job.begin_now()
    wait_for_steps(job, step + 6)
    cluster.kill_node(NODES[1])
    job.wait_until_requeued(times=2)
    step_after_death = checkpoints(job)[-1]

    cluster.start_node(NODES[1])
    wait_until(cluster.is_idle, 60)
    (tmp_path / "pause").write_text("0")
    job.begin_now()
    job.wait_for_state("COMPLETED")
    record = read_json(job.run_folder / "run.json")
    assert [start["step"] for start in record["starts"]] == [0, step, step_after_death]
    assert step < step_after_death
    assert record["processes"] == 2
    assert status(job)["state"] == "finished"


@long_form
def test_a_job_is_requeued_at_its_time_limit_if_it_has_made_progress(
    cluster: Cluster, text_file: Path, tmp_path: Path
) -> None:
    options = ["--nodes=1", "--time=30", "--signal=B:USR1@15"]
    saves = submit(cluster, tmp_path / "saves", text_file, options, steps=5000)
    hangs = submit(cluster, tmp_path / "hangs", text_file, options, steps=5000, save_steps=1)
    makes_nothing = submit(
        cluster, tmp_path / "nothing", text_file, options, pause=LONGER_THAN_THE_TEST
    )

    wait_for_steps(saves, 1)
    wait_until(lambda: checkpoints(hangs) != [], 90)
    # Like the third job, it no longer finishes its step when it is asked to save: Slurm kills both.
    (hangs.submitted_from / "pause").write_text(LONGER_THAN_THE_TEST)
    for job in (saves, hangs, makes_nothing):
        job.end_soon(seconds=20)

    saves.wait_until_requeued()
    assert status(saves)["state"] == "preempted"
    assert checkpoints(saves) == [status(saves)["step"]]
    assert f"requeue after step-{status(saves)['step']:08d}" in saves.log

    hangs.wait_until_requeued()
    # Slurm kills it. If USR1 came some seconds before TERM, TERM stops it first.
    how_it_ended = (status(hangs)["state"], status(hangs)["reason"])
    assert how_it_ended in (("running", ""), ("failed", "stopped at once by a second signal"))
    assert f"requeue after step-{checkpoints(hangs)[-1]:08d}" in hangs.log
    assert "DUE TO TIME LIMIT" in hangs.log

    makes_nothing.wait_for_state("TIMEOUT")
    assert "not requeued: the run has saved no checkpoint" in makes_nothing.log


@long_form
def test_two_tasks_on_a_node_are_two_processes_and_scancel_saves_and_ends_the_job(
    cluster: Cluster, text_file: Path, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, text_file, ["--nodes=1", "--ntasks-per-node=2"])
    wait_for_steps(job, 3)
    cluster.call("scancel", job.id)
    job.wait_for_state("CANCELLED")

    step = status(job)["step"]
    assert read_json(job.run_folder / "run.json")["processes"] == 2
    assert status(job)["state"] == "preempted"
    assert checkpoints(job) == [step]
    assert "requeue" not in job.log
    assert job.field("Restarts") == "0"


ACCELERATE = """#!/bin/bash
echo "accelerate $*"
"""


@long_form
def test_each_machine_starts_a_process_for_each_gpu_or_task(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "accelerate").write_text(ACCELERATE)
    (tmp_path / "accelerate").chmod(0o755)
    no_gres = "unset SLURM_GPUS_ON_NODE; export CUDA_VISIBLE_DEVICES="
    cases = [
        (["--gpus-per-node=2"], "", 4),
        (["--gpus-per-node=4"], "GPUS=3", 6),
        (["--ntasks-per-node=3", "--gpus-per-node=2"], "", 4),
        (["--ntasks-per-node=2"], "", 4),
        ([], f"{no_gres}0,1,2", 6),
        ([], f"{no_gres}GPU-8a2f1c7e,MIG-0b1d", 4),
        ([], f"{no_gres}NoDevFiles", 2),
        ([], "", 2),
    ]
    jobs = []
    for options, setup, _ in cases:
        lines = f"PATH={tmp_path}:$PATH; {setup}"
        jobs.append(cluster.submit(tmp_path, ["--nodes=2", *options], setup=lines))
    for job, case in zip(jobs, cases, strict=True):
        job.wait_for_state("COMPLETED")
        starts = [line for line in job.log.splitlines() if line.startswith("accelerate launch")]
        assert len(starts) == 2, (case, job.log)
        for start in starts:
            assert f"--num_machines 2 --num_processes {case[2]} " in start, case


def test_the_batch_script_asks_to_be_told_before_the_end() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=10)
    directives = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    for start in ("#SBATCH --signal=B:USR1@", "#SBATCH --requeue", "#SBATCH --time="):
        assert any(line.startswith(start) for line in directives), start
