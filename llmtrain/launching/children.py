"""Start a recipe in processes of its own, wait for it, and end what it started."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from llmtrain.console import debugging
from llmtrain.errors import UserError, first_line

if TYPE_CHECKING:
    from llmtrain.types import Facts

Output: TypeAlias = "int | IO[bytes] | IO[str] | None"


def launcher_of(processes: int, config_file: str | None) -> list[str]:
    """Return the words before a recipe that start so many processes of it."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    if config_file:
        words = [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            config_file,
            "--num_processes",
            str(processes),
        ]
    return [sys.executable, *(words if config_file or processes > 1 else [])]


def command_of(
    recipe: list[str], forced: "Facts", processes: int, config_file: str | None = None
) -> list[str]:
    """Return the command that starts so many processes of a recipe, with its flags and then those that are forced."""
    words = [word for name, value in forced.items() for word in (f"--{name}", str(value))]
    return [*launcher_of(processes, config_file), *recipe, *words]


def run_to_end(command: list[str], on_cpu: bool, **variables: str) -> None:
    """Wait for a recipe. Raises :class:`UserError` with what it said, where it failed."""
    with tempfile.NamedTemporaryFile() as said:
        with started(command, on_cpu, said, **variables) as process:
            process.wait()
        if process.returncode:
            raise UserError(why_it_failed(Path(said.name)))


@contextlib.contextmanager
def started(
    command: list[str],
    on_cpu: bool,
    stderr: Output,
    stdout: Output = subprocess.DEVNULL,
    /,
    **variables: str,
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a command in a session of its own; where the context is left, end it and all that it started."""
    env = os.environ | ({"ACCELERATE_USE_CPU": "true"} if on_cpu else {}) | variables
    process = subprocess.Popen(
        command, env=env, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        yield process
    finally:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started; a launcher's workers lead groups of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def why_it_failed(said: Path) -> str:
    """Return what a recipe wrote on stderr, in one line where there is one; LLMTRAIN_DEBUG=1 shows all of it first."""
    text = said.read_text(errors="replace")
    if debugging():
        print(text, file=sys.stderr)
    lines = re.findall(r"error: (.*)", text)
    return str(lines[0]) if lines else text[-2000:]


def read_config(config_file: str) -> "Facts":
    """Return what an accelerate config says. Raises :class:`UserError` where the file is none."""
    import yaml

    try:
        config: Facts = yaml.safe_load(Path(config_file).read_text())
        return config | {"num_processes": int(config["num_processes"])}
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"--config_file {config_file} is no accelerate config: {first_line(error)}"
        ) from None


def gpus() -> int:
    """Return how many GPUs there are with which several processes can make a group: a Mac's is none of them."""
    import torch

    return torch.cuda.device_count()
