"""Start recipes without the imports, which take four of the five seconds of a start.

The processes are forked from one that has imported everything. Use it for tests about the results
of processes. Tests about launchers, signals and exits start real processes.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from tqdm import tqdm

from tests import failing_calls
from tests.launching import PYTHON, ROOT, Ended

IMPORTED = [
    "torch._dynamo",
    "llmtrain.launching.accelerator",
    "llmtrain.launching.process",
    "llmtrain.training.train",
    "llmtrain.training.summary",
    "llmtrain.data.prepare",
    "llmtrain.models.gpt",
    "llmtrain.models.pretrained",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "pytest",
    __name__,
]

GRACE = 30  # seconds between SIGTERM and SIGKILL, as torchrun has it


def run_forked(
    command: list[str],
    env: dict[str, str] | None = None,
    timeout: float = 240,
    folder: Path = ROOT,
) -> Ended:
    """Run a command in forked processes, and wait for them to end.

    If a process fails, the others get SIGTERM, and the result has its exit status.

    Args:
        command: begins with ``python``, ``torchrun`` or ``accelerate launch``. A single process has
            no variables of its launcher.
        env: variables to add to the environment.
        timeout: seconds after which the test fails.
        folder: the working directory of the processes.
    """
    launch = _parse_launch(command)
    environment = {**os.environ, **launch.variables, "PYTHONPATH": str(ROOT), **(env or {})}
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(IMPORTED)
    # torchrun has such a store for its workers.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    with tempfile.TemporaryDirectory() as output_folder:
        outputs = [Path(output_folder, "out"), Path(output_folder, "err")]
        processes: list[Any] = []
        for rank in range(launch.processes):
            variables = dict(environment)
            if launch.processes > 1:
                variables |= _rank_variables(rank, launch.processes, store.port)
            arguments = (launch.script, variables, outputs, folder)
            processes.append(forkserver.Process(target=_run_script, args=arguments))

        # The first start begins the server. LD_PRELOAD has an effect only when a program begins.
        with mock.patch.dict(os.environ, failing_calls.preloaded()):
            for process in processes:
                process.start()
        statuses = _wait(processes, timeout)
        out, err = [path.read_text() for path in outputs]

    has_timed_out = None in statuses and not any(statuses)
    assert not has_timed_out, f"{command} takes more than {timeout} s\n{out}\n{err}"
    return Ended(max(abs(status or 0) for status in statuses), out, err)


class _Launch(NamedTuple):
    """A command as its launcher reads it."""

    processes: int
    script: list[str]  # with its arguments
    variables: dict[str, str]  # for all processes


def _parse_launch(command: list[str]) -> _Launch:
    if command[: len(PYTHON)] == PYTHON:
        return _Launch(processes=1, script=command[len(PYTHON) :], variables={})

    launcher, *words = command
    if Path(launcher).name == "torchrun":
        standalone, option, processes, *script = words
        assert (standalone, option) == ("--standalone", "--nproc-per-node")
        return _Launch(int(processes), script, variables={})

    _, *flags = words  # the first is "launch"
    arguments = launch_command_parser().parse_args(flags)
    arguments, *_ = _validate_launch_command(arguments)
    assert arguments.num_machines in (None, 1)
    script = [arguments.training_script, *arguments.training_script_args]
    if arguments.num_processes <= 1:
        return _Launch(processes=1, script=script, variables={})
    return _Launch(arguments.num_processes, script, prepare_multi_gpu_env(arguments))


def _rank_variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(processes: list[Any], timeout: float) -> list[int | None]:
    """Wait until all processes have ended, one has failed, or the time is over. End the rest.

    Returns:
        The exit statuses at that moment. That of a process that was still running is None.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        is_running = any(process.is_alive() for process in processes)
        has_failed = any(process.exitcode for process in processes)
        if has_failed or not is_running:
            break
        time.sleep(0.01)

    statuses = [process.exitcode for process in processes]
    if time.monotonic() < deadline:
        # As torchrun does it: after a failure, the others can still write what they have to.
        _send(signal.SIGTERM, processes)
        end_of_grace = time.monotonic() + GRACE
        for process in processes:
            process.join(max(0, end_of_grace - time.monotonic()))

    _send(signal.SIGKILL, processes)
    for process in processes:
        process.join()
    return statuses


def _send(signal_number: int, processes: list[Any]) -> None:
    """Send a signal to the processes that are still running."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal_number)


def _run_script(
    script: list[str], environment: dict[str, str], outputs: list[Path], folder: Path
) -> None:
    """Become a process that runs a script in a folder."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    # tqdm's own lock is shared by processes. One that ends at once would leave it locked.
    tqdm.set_lock(threading.RLock())

    sys.argv = script
    sys.path[:0] = [str(Path(script[0]).resolve().parent), str(ROOT)]
    runpy.run_path(script[0], run_name="__main__")
