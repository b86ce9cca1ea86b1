"""The batch script, with stand-ins for Slurm's own commands that start the real processes."""

import signal
import subprocess
from pathlib import Path

import pytest

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

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}"' TERM
status=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid" || status=$?; done
done
exit $status
"""
SCONTROL = """#!/bin/bash
case "$1" in
show) printf '127.0.0.1\\nsecond\\n' ;;
requeue) echo "requeued $2" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{BIN}:/usr/bin:/bin"
    return {
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "machine[1-2]",
        "SLURM_JOB_ID": "4321",
        "PATH": path,
    }


@long_form
def test_the_batch_script_is_told_before_the_end_saves_is_requeued_and_goes_on(
    slurm: dict[str, str], text_file: Path, tmp_path: Path
) -> None:
    command = [
        "bash",
        "-c",
        f"cd {tmp_path}; . {ROOT}/accelerate_configs/multi_node.slurm",
        "batch",
        *TINY,
    ]
    command += ["--dataset", str(text_file), "--max_steps", "40", "--save_steps", "40"]
    for name in ("recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    folder = tmp_path / "runs" / "job-4321"
    process = begin(command, env=slurm)
    try:
        wait_for_readings(process, folder, 3)
        process.send_signal(signal.SIGUSR1)  # to the script alone, as --signal=B: does
    finally:
        ended = wait(process)
    assert "requeued 4321" in ended.out
    status = read_json(folder / "status.json")
    assert (read_json(folder / "run.json")["processes"], status["state"]) == (2, "preempted")
    assert (folder / "checkpoints" / f"step-{status['step']:08d}").is_dir()
    ended = run(command, env=slurm).assert_ok()
    assert "requeued" not in ended.out
    assert [start["step"] for start in read_json(folder / "run.json")["starts"]] == [
        0,
        status["step"],
    ]
    assert read_json(folder / "status.json")["state"] == "finished"


ACCELERATE = """#!/bin/bash
echo "accelerate $*"
"""


@pytest.mark.parametrize(
    ("allocated", "processes"),
    [
        ({"SLURM_GPUS_ON_NODE": "2"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 6),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a2f1c7e,MIG-0b1d"}, 4),
        ({"SLURM_GPUS_ON_NODE": "8", "GPUS": "2"}, 4),
        ({"SLURM_GPUS_ON_NODE": "0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 2),
        ({}, 2),
    ],
    ids=str,
)
def test_each_machine_starts_a_process_for_each_gpu_that_slurm_has_allocated(
    allocated: dict[str, str], processes: int, slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "accelerate").write_text(ACCELERATE)
    (tmp_path / "accelerate").chmod(0o755)
    script = ROOT / "accelerate_configs" / "multi_node.slurm"
    ended = subprocess.run(
        ["bash", script],
        cwd=tmp_path,
        env={**slurm, **allocated},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    starts = [line for line in ended.stdout.splitlines() if line.startswith("accelerate launch")]
    assert len(starts) == 2, ended.stderr
    assert all(f"--num_machines 2 --num_processes {processes} " in start for start in starts)


@long_form
def test_a_machine_with_two_allocated_gpus_starts_two_processes(
    slurm: dict[str, str], text_file: Path, tmp_path: Path
) -> None:
    for name in ("recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = f"cd {tmp_path}; . {ROOT}/accelerate_configs/multi_node.slurm"
    command = ["bash", "-c", script, "batch", *TINY, "--dataset", str(text_file)]
    run(command, env={**slurm, "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"}).assert_ok()
    folder = tmp_path / "runs" / "job-4321"
    assert read_json(folder / "run.json")["processes"] == 2
    assert read_json(folder / "status.json")["state"] == "finished"


def test_the_batch_script_asks_to_be_told_before_the_end() -> None:
    script = ROOT / "accelerate_configs" / "multi_node.slurm"
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    directives = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    for start in ("#SBATCH --signal=B:USR1@", "#SBATCH --requeue", "#SBATCH --time="):
        assert any(line.startswith(start) for line in directives), start
