"""Start recipes in child processes, wait for them, and end everything that they started."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from llmtrain.console import debugging
from llmtrain.errors import UserError, first_line
from llmtrain.record.stopping import stop_signals

if TYPE_CHECKING:
    from llmtrain.files import JsonObject

Output: TypeAlias = "int | IO[bytes] | IO[str] | None"


def launcher_command(processes: int, config_file: str | None) -> list[str]:
    """Return the start of a command that runs a recipe in ``processes`` processes.

    Args:
        processes: the number of processes.
        config_file: an accelerate config. With one, ``accelerate launch`` starts the processes.
            Without one, ``torchrun`` starts them, or Python itself a single process.
    """
    launcher: list[str] = []
    if config_file:
        launcher = ["-m", "accelerate.commands.launch", "--config_file", config_file]
        launcher += ["--num_processes", str(processes)]
    elif processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(processes)]
    return [sys.executable, *launcher]


def recipe_command(
    recipe: list[str], forced: "JsonObject", processes: int, config_file: str | None = None
) -> list[str]:
    """Return the command that runs a recipe in ``processes`` processes.

    Args:
        recipe: the path of the recipe and its flags.
        forced: further flags by name. They come last, so they override the flags of the recipe.
        processes: the number of processes.
        config_file: an accelerate config.
    """
    command = [*launcher_command(processes, config_file), *recipe]
    for name, value in forced.items():
        command += [f"--{name}", str(value)]
    return command


def short_run_flags(steps: int, flags: list[str]) -> "JsonObject":
    """Return the flags of a short run of a recipe.

    A warmup that the user has set for a longer run would be as long as the short one, which is an
    error. It is not replaced if no flag may have set it: a recipe with its own schedule has none.
    ``--max_tokens`` would contradict the number of steps.

    Args:
        steps: the number of steps.
        flags: the user's flags.
    """
    forced: JsonObject = {"max_steps": steps, "report_to": "none"}
    if any(flag.startswith(("--warmup_steps", "--config")) for flag in flags):
        forced["warmup_steps"] = 0.5
    if any(flag.startswith("--max_tokens") for flag in flags):
        forced["max_tokens"] = 0
    return forced


def run_command(command: list[str], on_cpu: bool) -> str:
    """Run a command, wait until it ends, and return what it printed on stdout.

    Args:
        command: the words of the command.
        on_cpu: use the CPU even if there is a GPU.

    Raises:
        UserError: with the command's own message, if it failed.
    """
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        with start_command(command, on_cpu, stderr, stdout) as process:
            process.wait()
        if process.returncode:
            raise UserError(failure_message(Path(stderr.name)))
        return Path(stdout.name).read_text(errors="replace")


def run_to_end(
    command: list[str], on_cpu: bool, stdout: Output = None
) -> tuple[int, signal.Signals | None]:
    """Run a command as if the user had started it, and wait until it ends.

    It writes to the stderr of this process. The signals that stop a run are passed on to its
    process group, as a terminal does with Ctrl-C, so that a recipe saves before it ends. A second
    signal, some seconds later, kills it.

    Args:
        command: the words of the command.
        on_cpu: use the CPU even if there is a GPU.
        stdout: where it prints; ``None`` for the stdout of this process.

    Returns:
        Its exit status, or 128 plus the number of the signal that killed it; and the signal that
        was passed on to it, if there was one.

    Raises:
        KeyboardInterrupt: after the second signal.
    """
    received: list[signal.Signals] = []
    with start_command(command, on_cpu, None, stdout) as process:

        def pass_on(_: str, stop_signal: signal.Signals) -> None:
            received.append(stop_signal)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, stop_signal)

        with stop_signals(pass_on):
            status = process.wait()
    stop_signal = received[0] if received else None
    return status if status >= 0 else 128 - status, stop_signal


@contextlib.contextmanager
def start_command(
    command: list[str],
    on_cpu: bool,
    stderr: Output,
    stdout: Output = subprocess.DEVNULL,
    /,
    **variables: str,
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a command in its own session while the context is open.

    When the context closes, the command and everything that it started is killed.
    """
    env = dict(os.environ)
    if on_cpu:
        env["ACCELERATE_USE_CPU"] = "true"
    env |= variables
    process = subprocess.Popen(
        command,
        env=env,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_tree(process)


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and everything that it started, and wait for its end.

    The children are found one by one, because a launcher puts each worker into its own group.
    """
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def failure_message(stderr: Path) -> str:
    """Return the error message that a recipe wrote to a file.

    That is its ``error:`` line, or the end of the file if there is none. If LLMTRAIN_DEBUG=1, the
    content of the file is printed first.
    """
    text = stderr.read_text(errors="replace")
    if debugging():
        print(text, file=sys.stderr)
    messages = re.findall(r"error: (.*)", text)
    return str(messages[0]) if messages else text[-2000:]


def read_accelerate_config(config_file: str) -> "JsonObject":
    """Return the content of an accelerate config.

    Raises:
        UserError: if the file cannot be read, or has no number of processes.
    """
    import yaml

    try:
        config: JsonObject = yaml.safe_load(Path(config_file).read_text())
        if "num_processes" not in config:
            raise UserError(f"--config_file {config_file} has no num_processes; add it.")
        return config | {"num_processes": int(config["num_processes"])}
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        raise UserError(
            f"--config_file {config_file} is not an accelerate config: {first_line(error)}"
        ) from None


def process_count(requested: int | None, config_file: str | None, default: int) -> int:
    """Return how many processes to start: those of ``--processes`` or of the accelerate config.

    Args:
        requested: the value of ``--processes``; ``None`` without it.
        config_file: an accelerate config; ``None`` without one.
        default: the number if the user has given neither.

    Raises:
        UserError: if the user asked for none.
    """
    if requested is not None:
        processes = requested
    elif config_file:
        processes = read_accelerate_config(config_file)["num_processes"]
    else:
        processes = default

    if processes < 1:
        raise UserError(f"--processes {processes}: start at least one process.")
    return processes


def has_too_few_gpus(processes: int, config_file: str | None = None) -> bool:
    """Return whether processes have to use the CPU, because there are fewer GPUs than processes.

    Args:
        processes: the number of processes.
        config_file: an accelerate config, which itself says what they use.
    """
    return not config_file and processes > gpu_count()


def gpu_count() -> int:
    """Return the number of GPUs that can form a process group; the GPU of a Mac cannot."""
    import torch

    return torch.cuda.device_count()
