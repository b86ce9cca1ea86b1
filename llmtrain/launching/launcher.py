"""Find out whether a launcher started this process, and which of its settings the user chose."""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from llmtrain.json_types import JsonObject

_ACCELERATE = (
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
)
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class Launched:
    """Whether the parent is a launcher, and the settings that the user chose.

    Attributes:
        by_launcher: whether the parent process is ``accelerate launch`` or ``torchrun``.
        on_cpu: whether the user chose the CPU, even if there is a GPU.
        processes: the number of processes that ``accelerate launch`` was asked for, if the user set
            it. A run has as many as the launcher started, which may be fewer.
    """

    by_launcher: bool
    on_cpu: bool
    processes: int | None


def launched_by() -> Launched:
    """Return whether the parent is a launcher, and which settings the user chose.

    ``accelerate launch`` does not export all of them. Its command line, its config file and the
    environment that it was started in have them. A flag takes precedence over the config file, and
    that over the environment.

    If the parent is no launcher, as behind a wrapper script, the variables of this process count.
    """
    parent = parent_launcher()
    if parent is not None:
        with contextlib.suppress(psutil.Error, OSError):  # it may have ended
            command = parent.cmdline()
            words = _without_recipe(command)
            config: JsonObject = {}
            if _program_of(command) in _ACCELERATE:
                config = _accelerate_config(words, parent.cwd())
            return _settings(words, config, parent.environ(), by_launcher=True)
    return _settings([], {}, dict(os.environ), by_launcher=False)


def parent_launcher() -> psutil.Process | None:
    """Return the parent process if it is ``accelerate launch`` or ``torchrun``."""
    # Psutil fails for another user's process, and for one that has ended.
    with contextlib.suppress(psutil.Error, OSError):
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent is not None else []
        program = _program_of(command)
        is_accelerate = program in _ACCELERATE and (program != "accelerate" or "launch" in command)
        if is_accelerate or program in _TORCHRUN:
            return parent
    return None


def _settings(
    words: list[str], config: JsonObject, environment: dict[str, str], by_launcher: bool
) -> Launched:
    """Return the settings that the user chose.

    Args:
        words: the launcher's command line, without the recipe and its flags.
        config: the content of its config file.
        environment: the environment that it was started in.
        by_launcher: whether there is a launcher.
    """

    def chosen(flag: str, variable: str = "") -> str | int | bool | None:
        typed = _value_of_flag(words, flag)
        if typed is not None:
            return typed
        configured: str | int | bool | None = config.get(flag)
        return environment.get(variable) if configured is None else configured

    has_cpu_flag = _value_of_flag(words, "cpu") is not None
    cpu = str(chosen("use_cpu", "ACCELERATE_USE_CPU")).lower()
    processes = chosen("num_processes")
    return Launched(
        by_launcher=by_launcher,
        on_cpu=has_cpu_flag or cpu in ("true", "1", "yes"),
        processes=int(processes) if processes else None,
    )


def has_launcher() -> bool:
    """Return whether a launcher started this process, which waits for its exit status."""
    is_in_group = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return is_in_group or "TORCHELASTIC_RUN_ID" in os.environ or parent_launcher() is not None


def _value_of_flag(words: Sequence[str], name: str) -> str | bool | None:
    """Return the value of a flag in a command line, however it is spelled.

    A flag may be written with dashes or underscores, and its value after ``=`` or as the next word.
    If a flag is repeated, the last value counts.

    Args:
        words: the words of the command line.
        name: the name of the flag, with underscores.

    Returns:
        The value; ``True`` for a flag without a value, and ``None`` if the flag is not there.
    """
    for i in reversed(range(len(words))):
        option, equals, value = words[i].partition("=")
        if option.replace("-", "_") != f"__{name}":
            continue
        if equals:
            return value
        is_last = i == len(words) - 1
        if is_last or words[i + 1].startswith("-"):
            return True
        return words[i + 1]
    return None


def _program_of(words: list[str]) -> str:
    """Return the name of the script or module that a Python command line runs."""
    if len(words) > 2 and words[1] == "-m":
        return words[2]
    return Path(words[1]).name if len(words) > 1 else ""


def _without_recipe(words: list[str]) -> list[str]:
    """Return a launcher's command line without the recipe and its flags.

    The command line of this process ends with the same words as the launcher's.
    """
    remaining = list(words)
    for word in reversed(sys.orig_argv):
        if remaining[-1:] != [word]:
            break
        remaining.pop()
    return remaining


def _accelerate_config(words: list[str], folder: str) -> JsonObject:
    """Return the content of the config that ``accelerate launch`` reads; empty if there is none.

    Args:
        words: the command line of the launcher.
        folder: the folder that the launcher was started in.
    """
    from accelerate.commands.config.config_args import default_config_file

    named_file = _value_of_flag(words, "config_file")
    # With --cpu, accelerate does not read its default config.
    if named_file is None and _value_of_flag(words, "cpu") is not None:
        return {}

    path = Path(folder, str(named_file or default_config_file))
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        config = yaml.safe_load(path.read_text())
        if isinstance(config, dict):
            return config
    return {}
