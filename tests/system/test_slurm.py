"""The batch script, on a real Slurm with two nodes on this machine: munged, slurmctld and two slurmd.

It needs the Debian packages slurm-wlm and munge, and must be started as root. Each node is named
after an address of the loopback interface, so that the processes of a run find each other by the
names of their nodes.
"""

import contextlib
import math
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.launching import BIN, ROOT, TINY, WARNING_FILTERS, long_form, metrics, read_json
from tests.waiting import wait_until

SCRIPT = ROOT / "accelerate_configs" / "multi_node.slurm"
NODES = ("127.0.0.1", "127.0.0.2")
# Daemons may be in a folder for root alone, and accelerate is the one of these tests.
PATH = f"{BIN}:/usr/sbin:{os.environ['PATH']}"
END_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
LONGER_THAN_THE_TEST = "1000"

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
FirstJobId={first_job}
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=6
KillWait=10
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:4
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


class Cluster:
    """A running Slurm, with all its files in a folder.

    Attributes:
        slurmd: the daemon of each node.
    """

    def __init__(self, folder: Path, text_file: Path) -> None:
        self.folder = folder
        self.text_file = text_file
        self.slurmd: dict[str, subprocess.Popen] = {}
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": PATH,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": ",".join(WARNING_FILTERS),
            "FAULT": "pauses",
        }

    def start(self) -> None:
        (self.folder / "state").mkdir(mode=0o700)
        self._write_config()
        self._start_munged()
        self._begin("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        wait_until(self.is_idle, 30)

    def _write_config(self) -> None:
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [server.getsockname()[1] for server in servers]
        for server in servers:
            server.close()

        config = CONFIG.format(
            folder=self.folder,
            host=socket.gethostname().partition(".")[0],
            ports=ports,
            nodes=NODES,
            # The script derives the port of a run from the id of its job. Two runs of these tests
            # must not meet there.
            first_job=random.SystemRandom().randrange(1, 10_000) * 20,
        )
        (self.folder / "slurm.conf").write_text(config)

        for number in range(4):
            (self.folder / f"gpu{number}").touch()
        gres = f"NodeName={','.join(NODES)} Name=gpu File={self.folder}/gpu[0-3]\n"
        (self.folder / "gres.conf").write_text(gres)

    def _start_munged(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o700)
        key = folder / "key-file"
        key.write_bytes(random.randbytes(1024))
        key.chmod(0o600)
        files = ["key-file", "socket", "pid-file", "log-file", "seed-file"]
        options = [f"--{name}={folder}/{name}" for name in files]
        # With --force, the folders above this one may be writable for a group.
        self._begin("munged", "--foreground", "--force", *options)
        wait_until((folder / "socket").exists)

    def _begin(self, daemon: str, *arguments: str) -> subprocess.Popen:
        program = shutil.which(daemon, path=PATH)
        assert program is not None
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                [program, *arguments],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start_node(self, node: str) -> None:
        self.slurmd[node] = self._begin("slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill everything that runs on a node, as a power cut does."""
        self.slurmd[node].kill()
        self.slurmd[node].wait()

        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") != node:
                    continue
                for ancestor in process.parents():
                    if ancestor.name().startswith("slurmstepd"):
                        ancestor.kill()
                process.kill()

    def processes(self) -> Iterator[psutil.Process]:
        """Yield the daemons of this cluster, and all processes that they have started."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # slurmstepd hides its environment, but runs in the folder of its slurmd.
                if process.name().startswith("slurmstepd"):
                    is_ours = process.cwd() == str(self.folder)
                else:
                    is_ours = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if is_ours:
                    yield process

    def call(self, *command: str, cwd: Path = ROOT) -> str:
        """Run a command of Slurm, and return its output."""
        result = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert result.returncode == 0, (command, result.stdout, result.stderr)
        return result.stdout

    def is_idle(self) -> bool:
        """Return whether all nodes answer and are free."""
        try:
            states = self.call("sinfo", "--noheader", "--Node", "--format=%T").split()
        except AssertionError:  # slurmctld does not answer yet
            return False
        return states == ["idle"] * len(NODES)

    def end(self) -> None:
        """End all daemons and jobs at once."""
        for process in [*self.processes()]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def submit(
        self,
        folder: Path,
        options: str,
        *,
        setup: str = "",
        steps: int = 60,
        save_steps: int = 1000,
        pause: str = "0.3",
    ) -> "Job":
        """Submit the batch script from a folder. The recipe is faulty_gpt.py.

        Args:
            folder: the folder in which the job runs.
            options: options of sbatch.
            setup: shell commands for the place at which users set up their environment.
            steps: the value of ``--max_steps``.
            save_steps: the value of ``--save_steps``.
            pause: seconds that the run waits after each step.
        """
        folder.mkdir(exist_ok=True)
        for name in ("recipes", "accelerate_configs", "tests"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "pause").write_text(pause)
        text = SCRIPT.read_text()
        text = text.replace("RECIPE=recipes/gpt.py", "RECIPE=tests/system/faulty_gpt.py")
        text = text.replace("# module load cuda", setup)
        script = folder / SCRIPT.name
        script.write_text(text)

        flags = [*TINY, "--max_steps", str(steps), "--save_steps", str(save_steps)]
        flags += ["--dataset", str(self.text_file)]
        command = ["sbatch", "--parsable", *options.split(), str(script), *flags]
        return Job(cluster=self, folder=folder, id=self.call(*command, cwd=folder).strip())


@dataclass
class Job:
    """A job that a test has submitted to a cluster from a folder of its own."""

    cluster: Cluster
    folder: Path
    id: str

    @property
    def run(self) -> Path:
        return self.folder / "runs" / f"job-{self.id}"

    @property
    def log(self) -> str:
        path = self.folder / f"slurm-{self.id}.out"
        return path.read_text() if path.exists() else ""

    @property
    def status(self) -> dict:
        return read_json(self.run / "status.json")

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the saved checkpoints."""
        paths = (self.run / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in paths)

    def pause(self, seconds: str) -> None:
        (self.folder / "pause").write_text(seconds)

    def field(self, name: str) -> str:
        """Return a field of ``scontrol show job``, such as JobState or Restarts."""
        words = self.cluster.call("scontrol", "show", "job", self.id).split()
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        return fields[name]

    def wait_for_steps(self, count: int) -> None:
        path = self.run / "metrics.jsonl"
        wait_until(lambda: path.exists() and len(metrics(self.run)) >= count, 240)

    def wait_for_state(self, state: str) -> None:
        """Wait until the job is in a state, such as PENDING. It must not end in another one."""

        def has_arrived() -> bool:
            current = self.field("JobState")
            if current != state:
                assert current not in END_STATES, f"{current}, not {state}\n{self.log}"
            return current == state

        wait_until(has_arrived, 120)

    def wait_until_requeued(self, times: int = 1) -> None:
        """Wait until the job is pending again, after a number of restarts in all."""
        wait_until(lambda: self.field("Restarts") == str(times), 150)
        self.wait_for_state("PENDING")

    def end_soon(self, seconds: int) -> None:
        """Let the job reach its time limit in the given seconds, or up to a minute later.

        Slurm counts the limit in full minutes.
        """
        hours, minutes, remaining_seconds = map(int, self.field("RunTime").split(":"))
        elapsed = 3600 * hours + 60 * minutes + remaining_seconds
        self.update("TimeLimit", str(math.ceil((elapsed + seconds) / 60)))

    def begin_now(self) -> None:
        """Start a requeued job at once. Slurm would let it wait for two minutes."""
        # slurmd mistakes a job that starts in the second of its last end for the ended one.
        time.sleep(2)
        self.update("StartTime", "now")

    def update(self, name: str, value: str) -> None:
        self.cluster.call("scontrol", "update", f"JobId={self.id}", f"{name}={value}")


@pytest.fixture(scope="module")
def cluster(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    for daemon in ("munged", "slurmctld", "slurmd"):
        if shutil.which(daemon, path=PATH) is None:
            pytest.skip(f"a real Slurm needs {daemon}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("a real Slurm must be started as root")

    cluster = Cluster(tmp_path_factory.mktemp("slurm"), text_file)
    try:
        try:
            cluster.start()
        except AssertionError:
            lines = (cluster.folder / "daemons.log").read_text().splitlines()
            pytest.skip(f"Slurm does not start here: {lines[-1:]}")
        yield cluster
    finally:
        cluster.end()


@long_form
def test_a_run_resumes_after_usr1_and_after_the_death_of_a_node(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = cluster.submit(tmp_path, "--nodes=2", steps=100, save_steps=2)

    # Like --signal=B:USR1@120, this sends the signal to the script only.
    job.wait_for_steps(3)
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_until_requeued()
    preempted_step = job.status["step"]
    assert job.status["state"] == "preempted"
    assert job.checkpoints[-1] == preempted_step
    assert f"asked to stop by SIGUSR1: step {preempted_step} is saved" in job.log
    assert f"requeue after step-{preempted_step:08d}" in job.log
    # Launchers that got a signal would have one of these. A traceback alone says nothing: a launcher
    # of torch logs one if the machine with its store ends a moment before it, and still succeeds.
    assert "SignalException" not in job.log
    assert "srun: error" not in job.log

    job.begin_now()
    job.wait_for_steps(preempted_step + 6)
    cluster.kill_node(NODES[1])
    job.wait_until_requeued(times=2)
    last_step_before_death = job.checkpoints[-1]
    assert last_step_before_death > preempted_step

    cluster.start_node(NODES[1])
    wait_until(cluster.is_idle, 60)
    job.pause("0")
    job.begin_now()
    job.wait_for_state("COMPLETED")
    record = read_json(job.run / "run.json")
    resumed_steps = [start["step"] for start in record["starts"]]
    assert resumed_steps == [0, preempted_step, last_step_before_death]
    assert record["processes"] == 2
    assert job.status["state"] == "finished"


@long_form
def test_a_job_that_reaches_its_time_limit_is_requeued_if_it_has_made_progress(
    cluster: Cluster, tmp_path: Path
) -> None:
    """One makes steps until it has to save, one hangs after a checkpoint, one never makes a step."""

    def submit(name: str, **settings: object) -> Job:
        options = "--nodes=1 --time=30 --signal=B:USR1@15"
        return cluster.submit(tmp_path / name, options, steps=5000, **settings)

    saves = submit("saves")
    hangs = submit("hangs", save_steps=1)
    makes_nothing = submit("nothing", pause=LONGER_THAN_THE_TEST)
    saves.wait_for_steps(1)
    wait_until(lambda: hangs.checkpoints != [], 240)
    # It cannot finish its next step in time to save, so Slurm kills it, and the third job too.
    hangs.pause(LONGER_THAN_THE_TEST)
    for job in (saves, hangs, makes_nothing):
        job.end_soon(seconds=20)
    for job in (saves, hangs):
        job.wait_until_requeued()
        cluster.call("scontrol", "hold", job.id)
        assert job.field("Restarts") == "1"
        assert f"requeue after step-{job.checkpoints[-1]:08d}" in job.log
    makes_nothing.wait_for_state("TIMEOUT")

    assert saves.status["state"] == "preempted"
    assert saves.checkpoints == [saves.status["step"]]
    assert "DUE TO TIME LIMIT" in hangs.log
    # If USR1 came some seconds before TERM, TERM stops the run. Otherwise Slurm kills it.
    state_and_reason = (hangs.status["state"], hangs.status["reason"])
    stopped_by_term = ("failed", "stopped at once by a second signal")
    assert state_and_reason in [("running", ""), stopped_by_term]
    assert "not requeued: the run has saved no checkpoint" in makes_nothing.log


@long_form
def test_two_tasks_on_a_node_are_two_processes_and_scancel_saves_and_ends_the_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = cluster.submit(tmp_path, "--nodes=1 --ntasks-per-node=2")
    job.wait_for_steps(3)
    cluster.call("scancel", job.id)
    job.wait_for_state("CANCELLED")

    assert read_json(job.run / "run.json")["processes"] == 2
    assert job.status["state"] == "preempted"
    assert job.checkpoints == [job.status["step"]]
    assert "requeue" not in job.log
    assert job.field("Restarts") == "0"


# Options of sbatch, commands of the user, and how many processes two machines start.
PROCESSES = [
    ("--gpus-per-node=2", "", 4),
    ("--gpus-per-node=4", "GPUS=3", 6),
    ("--ntasks-per-node=3 --gpus-per-node=2", "", 4),
    ("--ntasks-per-node=2", "", 4),
    ("", "", 2),
    # As on a cluster that does not track GPUs, on which Slurm sets no number of GPUs.
    ("", "unset SLURM_GPUS_ON_NODE; export CUDA_VISIBLE_DEVICES=0,1,2", 6),
    ("", "unset SLURM_GPUS_ON_NODE; export CUDA_VISIBLE_DEVICES=GPU-8a2f1c7e,MIG-0b1d", 4),
    ("", "unset SLURM_GPUS_ON_NODE; export CUDA_VISIBLE_DEVICES=NoDevFiles", 2),
]


@long_form
def test_each_machine_starts_a_process_for_each_gpu_or_task(
    cluster: Cluster, tmp_path: Path
) -> None:
    # Takes the place of accelerate, and prints the words that it gets.
    accelerate = tmp_path / "accelerate"
    accelerate.write_text('#!/bin/bash\necho "accelerate $*"\n')
    accelerate.chmod(0o755)

    jobs = []
    for number, (options, setup, _) in enumerate(PROCESSES):
        commands = f"PATH={tmp_path}:$PATH; {setup}"
        jobs.append(cluster.submit(tmp_path / str(number), f"--nodes=2 {options}", setup=commands))
    for job, (options, setup, processes) in zip(jobs, PROCESSES, strict=True):
        job.wait_for_state("COMPLETED")
        commands = [line for line in job.log.splitlines() if line.startswith("accelerate launch")]
        assert len(commands) == 2, job.log
        for command in commands:
            assert f"--num_machines 2 --num_processes {processes} " in command, (options, setup)


def test_the_batch_script_is_bash_and_lets_a_run_save_and_resume() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=10)
    lines = SCRIPT.read_text().splitlines()
    for option in ("--signal=B:USR1@", "--requeue", "--time="):
        assert any(line.startswith(f"#SBATCH {option}") for line in lines), option
