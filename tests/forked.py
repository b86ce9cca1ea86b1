"""Starting recipes without waiting for imports, which are four of the five seconds of a start: the processes are forked
from one that has imported everything. For tests of what processes compute; those of launchers, signals and ends start
real ones."""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from tqdm import tqdm

from tests.launching import PYTHON, ROOT, Ended

IMPORTED = [
    "torch._dynamo",
    "llmtrain.launching.accelerator",
    "llmtrain.launching.process",
    "llmtrain.training.loop",
    "llmtrain.training.summary",
]
IMPORTED += [
    "llmtrain.data.prepare",
    "llmtrain.models.gpt",
    "llmtrain.models.pretrained",
    "llmtrain.record.publish",
]
IMPORTED += [
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "pytest",
    __name__,
]


def run_forked(
    command: list[str], env: dict[str, str] | None = None, timeout: float = 240
) -> Ended:
    """What ``run`` gives, of a script under ``python``, ``torchrun`` or ``accelerate launch`` with several processes.
    Where one fails, the others are killed, and its status is that of all."""
    count, words, told = _as_launched(command)
    environment = {**os.environ, **told, "PYTHONPATH": str(ROOT), **(env or {})}
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(IMPORTED)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # as torchrun has one
    with tempfile.TemporaryDirectory() as folder:
        ends = [Path(folder, name) for name in ("out", "err")]
        ranks = [_of_rank(rank, count, store.port) if count > 1 else {} for rank in range(count)]
        processes: list[Any] = [
            forks.Process(target=_live, args=(words, environment | rank, ends)) for rank in ranks
        ]
        for process in processes:
            process.start()
        until = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and not any(
            process.exitcode for process in processes
        ):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        statuses = [process.exitcode for process in processes]
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        ended = Ended(
            max(abs(status or 0) for status in statuses), *(path.read_text() for path in ends)
        )
    assert ended.status or None not in statuses, (
        f"{command} takes more than {timeout} s\n{ended.out}\n{ended.err}"
    )
    return ended


def _as_launched(command: list[str]) -> tuple[int, list[str], dict[str, str]]:
    """How many processes, what each runs, and what the launcher puts into their environment but for their ranks."""
    if command[: len(PYTHON)] == PYTHON:
        return 1, command[len(PYTHON) :], {}
    name, *words = command
    if Path(name).name == "torchrun":
        assert words[:2] == ["--standalone", "--nproc-per-node"]
        return int(words[2]), words[3:], {}
    arguments = launch_command_parser().parse_args(words[1:])
    arguments, *_ = _validate_launch_command(arguments)
    assert arguments.num_machines in (None, 1)
    assert arguments.num_processes > 1
    script = [arguments.training_script, *arguments.training_script_args]
    return arguments.num_processes, script, prepare_multi_gpu_env(arguments)


def _of_rank(rank: int, count: int, port: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_PORT": port,
    }
    store = {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return {name: str(number) for name, number in numbers.items()} | store


def _live(words: list[str], environment: dict[str, str], ends: list[Path]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, path in enumerate(ends, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    tqdm.set_lock(
        threading.RLock()
    )  # its own lock, of many processes, is left behind by those that end at once
    sys.argv = words
    sys.path[:0] = [str(Path(words[0]).resolve().parent), str(ROOT)]
    runpy.run_path(words[0], run_name="__main__")
