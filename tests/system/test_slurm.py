"""The batch script, with stand-ins for Slurm's own commands that start the real processes."""

import subprocess
from pathlib import Path

from tests.launching import BIN, ROOT, TINY, read_json, run

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] || exit 2
printf '127.0.0.1\\nsecond\\n'
"""


def test_the_batch_script_starts_a_launcher_on_every_node(text_file: Path, tmp_path: Path) -> None:
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{BIN}:/usr/bin:/bin"
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "machine[1-2]", "SLURM_JOB_ID": "4321", "PATH": path}
    flags = [*TINY, "--max_steps", "2", "--dataset", str(text_file), "--output_dir", str(tmp_path / "run")]
    run(["bash", "accelerate_configs/multi_node.slurm", *flags], env=slurm).assert_ok()
    assert read_json(tmp_path / "run" / "run.json")["processes"] == 2
    assert read_json(tmp_path / "run" / "status.json")["state"] == "finished"


def test_the_batch_script_asks_to_be_told_before_the_end_and_to_be_requeued() -> None:
    script = ROOT / "accelerate_configs" / "multi_node.slurm"
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    directives = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --requeue" in directives
    assert any(line.startswith("#SBATCH --signal=TERM@") for line in directives)
