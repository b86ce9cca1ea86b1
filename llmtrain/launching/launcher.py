"""The options that the user passed to the launcher, and a check that they took effect."""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import yaml

from llmtrain.errors import UserError
from llmtrain.json_types import JsonObject
from llmtrain.shipped import shipped_config

if TYPE_CHECKING:
    from llmtrain.parallel.sharding import Sharding

_ACCELERATE = (
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
)
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class Launcher:
    """The options that the user passed to the launcher, as far as this process can see them.

    Launchers pass their defaults on in the environment, where they look like the user's options:
    ``accelerate launch`` sets precision "no" and 1 thread if the user set neither. Only the command
    line of the launcher, the config file that it read, and the environment that it was started in
    show what the user chose.

    Attributes:
        words: the launcher's command line, without the recipe and its flags. Empty if this process
            has no launcher.
        command: the launcher's whole command line, with the recipe and its flags.
        config: the content of the accelerate config.
        environment: the environment that the launcher was started in. Without a launcher, that of
            this process.
        config_file: the path of the accelerate config, if there is one.
    """

    words: list[str] = field(default_factory=list)
    config: JsonObject = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    config_file: Path | None = None
    command: list[str] = field(default_factory=list)

    @classmethod
    def find(cls) -> "Launcher":
        """Return the launcher that started this process.

        The launcher is the parent process, if that is ``accelerate launch`` or ``torchrun``.
        Otherwise the result holds only the environment of this process.
        """
        no_launcher = cls(environment=dict(os.environ))
        try:
            parent = psutil.Process().parent()
            if parent is None:
                return no_launcher
            command = parent.cmdline()
            program = _program_of(command)
            is_accelerate = program in _ACCELERATE and (
                program != "accelerate" or "launch" in command
            )
            if not is_accelerate and program not in _TORCHRUN:
                return no_launcher

            words = _without_recipe(command)
            config: JsonObject = {}
            config_file: Path | None = None
            if is_accelerate:
                config, config_file = _accelerate_config(words, parent.cwd())
            return cls(
                words=words,
                config=config,
                environment=parent.environ(),
                config_file=config_file,
                command=command,
            )
        except (psutil.Error, OSError):  # another user's process, or one that has ended
            return no_launcher

    @classmethod
    def from_flags(cls, words: list[str]) -> "Launcher":
        """Return what :meth:`find` would return after ``accelerate launch`` with these flags."""
        config, config_file = _accelerate_config(words, ".")
        return cls(
            words=words,
            config=config,
            environment=dict(os.environ),
            config_file=config_file,
        )

    def option(self, flag: str, variable: str = "") -> str | int | bool | None:
        """Return the user's value of an option, or ``None`` if the user did not set it.

        A flag on the command line takes precedence over the config file, and the config file over
        the environment. If a flag is repeated, the last value counts.

        Args:
            flag: the name of a flag of ``accelerate launch``, which is also its key in the config.
            variable: the name of the environment variable.

        Returns:
            The value; ``True`` for a flag that takes no value.
        """
        typed = value_of_flag(self.words, flag)
        if typed is not None:
            return typed
        configured: str | int | bool | None = self.config.get(flag)
        return self.environment.get(variable) if configured is None else configured

    def wants_cpu(self) -> bool:
        """Return whether the user chose the CPU, even if there is a GPU."""
        if value_of_flag(self.words, "cpu") is not None:
            return True
        return str(self.option("use_cpu", "ACCELERATE_USE_CPU")).lower() in ("true", "1", "yes")


def value_of_flag(words: Sequence[str], name: str) -> str | bool | None:
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


def has_launcher() -> bool:
    """Return whether a launcher started this process, which waits for its exit status."""
    is_in_group = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return is_in_group or "TORCHELASTIC_RUN_ID" in os.environ or bool(Launcher.find().words)


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


def _accelerate_config(words: list[str], folder: str) -> tuple[JsonObject, Path | None]:
    """Return the content and the path of the config that ``accelerate launch`` reads.

    The content is empty if the file cannot be read. The path is ``None`` if accelerate reads none.

    Args:
        words: the command line of the launcher.
        folder: the folder that the launcher was started in.
    """
    from accelerate.commands.config.config_args import default_config_file

    named_file = Launcher(words).option("config_file")
    path = Path(folder, str(named_file or default_config_file))
    # With --cpu, accelerate does not read its default config.
    wants_cpu = value_of_flag(words, "cpu") is not None
    if not named_file and (wants_cpu or not path.is_file()):
        return {}, None

    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        config = yaml.safe_load(path.read_text())
        if isinstance(config, dict):
            return config, path
    return {}, path


# What an accelerate config can enable and llmtrain does not support, by the launcher's variable.
_UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def check_launch() -> None:
    """Check that this process was started as the user asked, before any work is done.

    Raises:
        UserError: if the number of processes is not as requested, or if the accelerate config asks
            for something unsupported.
    """
    launcher = Launcher.find()
    world_size = os.environ.get("WORLD_SIZE")
    recipe = shlex.join(sys.argv)

    requested_sharding(int(world_size or 1))
    _check_unsupported(recipe)
    if world_size is None:
        _check_process_count(launcher, recipe)
    if int(world_size or 1) > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise UserError(
            f"WORLD_SIZE is {world_size}, but RANK, MASTER_ADDR or MASTER_PORT is not set; "
            "unset WORLD_SIZE, or use: "
            f"accelerate launch --multi_gpu --num_processes {world_size} {recipe}"
        )
    accumulation_steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation_steps not in ("1", ""):
        raise UserError(
            f"the accelerate config sets gradient_accumulation_steps to {accumulation_steps}; "
            "leave it out: llmtrain derives it from --global_batch_size and "
            "--per_device_train_batch_size."
        )


def _check_unsupported(recipe: str) -> None:
    for variable, name in _UNSUPPORTED.items():
        if not _is_on(variable):
            continue
        import torch  # not earlier: mistakes in flags are reported without loading torch

        ignored = ""
        if not torch.accelerator.is_available():
            ignored = " (which accelerate silently ignores on a CPU)"
        config_file = shlex.quote(str(shipped_config("multi_gpu")))
        raise UserError(
            f"the accelerate config enables {name}{ignored}, which llmtrain does not support yet; "
            f"use: accelerate launch --config_file {config_file} {recipe}"
        )


def _check_process_count(launcher: Launcher, recipe: str) -> None:
    """Check that accelerate did not start a single process although the user wanted several."""
    # Accelerate sets an address if the user wanted several processes.
    if not {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        return
    # The launcher's command line may be hidden, behind a wrapper script for example.
    processes = None
    if launcher.words:
        processes = int(launcher.option("num_processes") or 1)
    if processes == 1:
        return
    raise UserError(
        f"{processes or 'several'} processes were requested, but accelerate started one (as it "
        "does for CPU configs); use: "
        f"accelerate launch --multi_gpu --num_processes {processes or 2} {recipe}"
    )


# --- how the accelerate config shards a model


class _Supported(NamedTuple):
    """The values that one setting of an accelerate config may have."""

    values: str  # a regular expression
    otherwise: str  # the end of the message for any other value


_OWN_BLOCKS = "; leave it out: llmtrain finds the blocks in the model"
_ROW_SHARDING = (
    ": rows are not sharded over processes (torch can do so only on GPUs); leave it out, and use "
    "--gradient_checkpointing for long rows"
)
# The values that an accelerate config may have for sharding, by the launcher's variable.
_SUPPORTED = {
    "FSDP_VERSION": _Supported(
        values="2",
        otherwise=", which is not supported; set fsdp_version: 2 in its fsdp_config",
    ),
    "FSDP_AUTO_WRAP_POLICY": _Supported(
        values="|TRANSFORMER_BASED_WRAP",
        otherwise=_OWN_BLOCKS,
    ),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": _Supported(values="", otherwise=_OWN_BLOCKS),
    "FSDP_IGNORED_MODULES": _Supported(values="", otherwise=_OWN_BLOCKS),
    "FSDP_RESHARD_AFTER_FORWARD": _Supported(
        values="true|false",
        otherwise=", which is a value of FSDP 1; write true or false",
    ),
    # Accelerate's checkpointing would not repeat the same dropout.
    "FSDP_ACTIVATION_CHECKPOINTING": _Supported(
        values="false",
        otherwise="; leave it out, and use --gradient_checkpointing",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": _Supported(
        values="false",
        otherwise=", which is not supported; leave it out",
    ),
    "PARALLELISM_CONFIG_TP_SIZE": _Supported(
        values="1",
        otherwise=(
            ", but tensor parallelism is not supported; shard the model with FSDP2 instead: "
            f"accelerate launch --config_file {shipped_config('fsdp2')}"
        ),
    ),
    "PARALLELISM_CONFIG_CP_SIZE": _Supported(values="1", otherwise=_ROW_SHARDING),
    "PARALLELISM_CONFIG_SP_SIZE": _Supported(values="1", otherwise=_ROW_SHARDING),
}


def requested_sharding(processes: int) -> "Sharding | None":
    """Return how to shard the model, as the launcher passes it on from the accelerate config.

    Args:
        processes: the number of processes of the run.

    Returns:
        ``None`` if every process holds the full model.

    Raises:
        UserError: if the sharding is not supported, or does not fit the number of processes.
    """
    uses_fsdp = is_sharding_requested()
    if not uses_fsdp and not _is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    _check_supported(uses_fsdp)
    if not uses_fsdp:
        raise _config_error(f"has a parallelism config without FSDP; see {shipped_config('hsdp')}")
    if processes == 1:
        return None

    replicas = _size("DP_REPLICATE")
    shards = _size("DP_SHARD")
    if replicas == shards == 1:
        shards = processes  # by default FSDP shards over all processes
    if replicas * shards != processes:
        raise _config_error(
            f"has {replicas} replicas (parallelism_config_dp_replicate_size) of {shards} processes "
            f"(parallelism_config_dp_shard_size), but {processes} processes were started"
        )
    if shards == 1:
        return None
    from llmtrain.parallel.sharding import Sharding  # it loads torch

    return Sharding(replicas=replicas, shards=shards, cpu_offload=_is_on("FSDP_OFFLOAD_PARAMS"))


def _check_supported(uses_fsdp: bool) -> None:
    """Raise :class:`UserError` if a setting has a value that llmtrain does not support."""
    settings = {"FSDP_VERSION": "1"} | os.environ
    for variable, supported in _SUPPORTED.items():
        # The launcher always sets the defaults of FSDP, even if FSDP is not used.
        is_unused = variable.startswith("FSDP") and not uses_fsdp
        if is_unused or variable not in settings:
            continue
        value = settings[variable]
        if not re.fullmatch(supported.values, value, re.IGNORECASE):
            raise _config_error(f"has {_config_key(variable)} {value}{supported.otherwise}")


def _config_key(variable: str) -> str:
    """Return the key of an accelerate config that sets an environment variable."""
    key = variable.lower().removeprefix("parallelism_config_")
    return key.replace("transformer_cls", "transformer_layer_cls")


def is_sharding_requested() -> bool:
    """Return whether the accelerate config asks for FSDP."""
    return _is_on("ACCELERATE_USE_FSDP")


def _config_error(problem: str) -> UserError:
    return UserError(f"the accelerate config {problem}.")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "1", "yes")


def _size(name: str) -> int:
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
