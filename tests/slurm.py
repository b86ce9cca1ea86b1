"""A real Slurm with two nodes on this machine: munged, slurmctld and two slurmd.

All its files are in one folder. It needs the Debian packages slurm-wlm and munge, and must be
started as root. Each node is named after an address of the loopback interface, so that the
processes of a run find each other by the names of their nodes.
"""

import contextlib
import math
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.launching import BIN, ROOT, WARNING_FILTERS
from tests.waiting import wait_until

NODES = ("127.0.0.1", "127.0.0.2")
SCRIPT = ROOT / "accelerate_configs" / "multi_node.slurm"
DAEMONS = ("munged", "slurmctld", "slurmd")
END_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

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


class UnavailableError(Exception):
    """Slurm cannot run here."""


@dataclass
class Cluster:
    """A running Slurm.

    Attributes:
        folder: holds its configuration, its state and its logs.
        daemons: the running daemons. The keys are "munged", "slurmctld", and for each slurmd the
            name of its node.
    """

    folder: Path
    daemons: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": ",".join(WARNING_FILTERS),
        }

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

    def submit(
        self,
        folder: Path,
        options: Sequence[str],
        flags: Sequence[str] = (),
        setup: str = "",
    ) -> "Job":
        """Submit multi_node.slurm from a folder. The recipe is slow_gpt.py.

        Args:
            folder: the folder in which the job runs.
            options: options of sbatch.
            flags: flags of the recipe.
            setup: shell commands for the place at which users set up their environment.
        """
        for name in ("recipes", "accelerate_configs", "tests"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)

        text = SCRIPT.read_text()
        text = text.replace("RECIPE=recipes/gpt.py", "RECIPE=tests/system/slow_gpt.py")
        text = text.replace("# module load cuda", setup)
        script = folder / SCRIPT.name
        script.write_text(text)

        command = ["sbatch", "--parsable", *options, str(script), *flags]
        job_id = self.call(*command, cwd=folder).strip()
        return Job(cluster=self, submitted_from=folder, id=job_id)

    def start_node(self, node: str) -> None:
        self.daemons[node] = self._begin("slurmd", ["-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """Kill everything that runs on a node, as a power cut does."""
        self.daemons[node].kill()
        self.daemons[node].wait()

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

    def _begin(self, daemon: str, arguments: Sequence[str]) -> subprocess.Popen:
        program = _path_of(daemon)
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

    def _start(self) -> None:
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o700)
        self._write_config()
        self._start_munged()
        self.daemons["slurmctld"] = self._begin("slurmctld", ["-D", "-c"])
        for node in NODES:
            self.start_node(node)
        wait_until(self.is_idle, 30)

    def _start_munged(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(random.randbytes(1024))
        key.chmod(0o600)

        options = [
            "--foreground",
            "--force",  # the folders above this one may be writable for a group
            f"--key-file={key}",
            f"--socket={folder}/socket",
            f"--pid-file={folder}/pid",
            f"--log-file={folder}/log",
            f"--seed-file={folder}/seed",
        ]
        self.daemons["munged"] = self._begin("munged", options)
        wait_until((folder / "socket").exists)

    def _write_config(self) -> None:
        with contextlib.ExitStack() as sockets:
            ports = []
            for _ in range(3):
                server = sockets.enter_context(socket.socket())
                server.bind(("127.0.0.1", 0))
                ports.append(server.getsockname()[1])

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

    def is_idle(self) -> bool:
        """Return whether all nodes answer and are free."""
        try:
            states = self.call("sinfo", "--noheader", "--Node", "--format=%T").split()
        except AssertionError:  # slurmctld does not answer yet
            return False
        return states == ["idle"] * len(NODES)

    def cancel_all(self) -> None:
        """End all jobs at once, so that they have no time to save."""
        kill_running_jobs = "scancel --user=root --state=RUNNING --signal=KILL --full"
        cancel_jobs = "scancel --user=root"
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.call(*kill_running_jobs.split())
            self.call(*cancel_jobs.split())

    def _end(self) -> None:
        """End all jobs and daemons."""
        self.cancel_all()

        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=5)

        for process in [*self.processes()]:
            with contextlib.suppress(psutil.Error):
                process.kill()


@dataclass
class Job:
    """A job that a test has submitted to a cluster from a folder of its own."""

    cluster: Cluster
    submitted_from: Path
    id: str

    @property
    def run_folder(self) -> Path:
        return self.submitted_from / "runs" / f"job-{self.id}"

    @property
    def log(self) -> str:
        path = self.submitted_from / f"slurm-{self.id}.out"
        return path.read_text() if path.exists() else ""

    def field(self, name: str) -> str:
        """Return a field of ``scontrol show job``, such as JobState or Restarts."""
        output = self.cluster.call("scontrol", "show", "job", self.id)
        values = [
            word.removeprefix(f"{name}=") for word in output.split() if word.startswith(f"{name}=")
        ]
        return values[0]

    def wait_for_state(self, state: str, seconds: float = 120) -> None:
        """Wait until the job is in a state, such as PENDING.

        Raises:
            AssertionError: if the job ends in another state, or if the time is over.
        """

        def has_arrived() -> bool:
            current = self.field("JobState")
            if current != state:
                assert current not in END_STATES, f"{current}, not {state}\n{self.log}"
            return current == state

        wait_until(has_arrived, seconds)

    def wait_until_requeued(self, times: int = 1) -> None:
        """Wait until the job is pending again, after a number of restarts in all."""
        wait_until(lambda: self.field("Restarts") == str(times), 150)
        self.wait_for_state("PENDING")

    def hold(self) -> None:
        """Keep a pending job from starting."""
        self.cluster.call("scontrol", "hold", self.id)

    def end_soon(self, seconds: int) -> None:
        """Let the job reach its time limit in the given seconds, or up to a minute later.

        Slurm counts the limit in full minutes.
        """
        hours, minutes, remaining_seconds = map(int, self.field("RunTime").split(":"))
        elapsed = 3600 * hours + 60 * minutes + remaining_seconds
        limit_minutes = math.ceil((elapsed + seconds) / 60)
        self._update(TimeLimit=str(limit_minutes))

    def begin_now(self) -> None:
        """Start a requeued job at once. Slurm would let it wait for two minutes."""
        # slurmd mistakes a job that starts in the second of its last end for the ended one.
        time.sleep(2)
        self._update(StartTime="now")

    def _update(self, **fields: str) -> None:
        assignments = [f"{name}={value}" for name, value in fields.items()]
        self.cluster.call("scontrol", "update", f"JobId={self.id}", *assignments)


def _path_of(daemon: str) -> str | None:
    """Return the path of a daemon's program, which may be in a folder for root alone."""
    return shutil.which(daemon, path=f"/usr/sbin:{os.environ['PATH']}")


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Start Slurm with all its files in a folder. At the end, end everything that it has started.

    Raises:
        UnavailableError: if this machine cannot run Slurm.
    """
    missing = [daemon for daemon in DAEMONS if _path_of(daemon) is None]
    if missing:
        raise UnavailableError(f"a real Slurm needs {missing[0]}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        raise UnavailableError("a real Slurm must be started as root")

    cluster = Cluster(folder)
    try:
        try:
            cluster._start()
        except AssertionError:
            lines = (folder / "daemons.log").read_text().splitlines()
            raise UnavailableError(f"Slurm does not start here: {lines[-1:]}") from None
        yield cluster
    finally:
        cluster._end()
