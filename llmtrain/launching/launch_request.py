"""Which launcher started this process, and what the user asked it for.

``accelerate launch`` passes that on in environment variables.
"""

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from llmtrain.errors import UserError
from llmtrain.files import shipped_config

if TYPE_CHECKING:
    from llmtrain.parallel.ranks import Sharding

_LAUNCHERS = {
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
}

# The values that some settings of accelerate may have. llmtrain itself finds the blocks in a model.
# Accelerate's checkpointing would not repeat the same dropout, as --gradient_checkpointing does.
_SUPPORTED = {
    "FSDP_VERSION": ("2",),
    "FSDP_AUTO_WRAP_POLICY": ("", "transformer_based_wrap"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("",),
    "FSDP_IGNORED_MODULES": ("",),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false",),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false",),
    "PARALLELISM_CONFIG_TP_SIZE": ("1",),
    "PARALLELISM_CONFIG_CP_SIZE": ("1",),
    "PARALLELISM_CONFIG_SP_SIZE": ("1",),
}


def check_launch() -> None:
    """Check that this process was started as the user asked, before any work is done.

    Raises:
        UserError: if the number of processes is not as requested, or if the accelerate config asks
            for something unsupported.
    """
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    recipe = shlex.join(sys.argv)

    requested_sharding(processes)
    # Accelerate's launcher always sets the first, and the second if it was asked for several
    # processes.
    is_asked_for_several = {"ACCELERATE_DYNAMO_MODE", "MASTER_ADDR"} <= os.environ.keys()
    if is_asked_for_several and "WORLD_SIZE" not in os.environ:
        raise UserError(
            "several processes were requested, but accelerate started one (as it does for CPU "
            "configs); for one process, unset MASTER_ADDR; for several, use: accelerate launch "
            f"--multi_gpu --num_processes 2 {recipe}"
        )
    if processes > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise UserError(
            f"WORLD_SIZE is {processes}, but RANK, MASTER_ADDR or MASTER_PORT is not set; "
            "unset WORLD_SIZE, or use: "
            f"accelerate launch --multi_gpu --num_processes {processes} {recipe}"
        )


def requested_sharding(processes: int) -> "Sharding | None":
    """Return how to shard the model, as the launcher passes it on from the accelerate config.

    Args:
        processes: the number of processes of the run.

    Returns:
        ``None`` if every process holds the full model.

    Raises:
        UserError: if the sharding is not supported, or does not fit the number of processes.
    """
    uses_fsdp = is_on("ACCELERATE_USE_FSDP")
    _check_supported(uses_fsdp)
    if not uses_fsdp and is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise _config_error(f"has a parallelism config without FSDP; see {shipped_config('hsdp')}")
    if not uses_fsdp or processes == 1:
        return None

    replicas = int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
    shards = int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1"))
    if replicas == shards == 1:
        shards = processes  # by default FSDP shards over all processes
    if replicas * shards != processes:
        raise _config_error(
            f"has {replicas} replicas (parallelism_config_dp_replicate_size) of {shards} processes "
            f"(parallelism_config_dp_shard_size), but {processes} processes were started"
        )
    if shards == 1:
        return None
    from llmtrain.parallel.ranks import Sharding  # it loads torch

    return Sharding(replicas=replicas, shards=shards, cpu_offload=is_on("FSDP_OFFLOAD_PARAMS"))


def _check_supported(uses_fsdp: bool) -> None:
    """Raise :class:`UserError` if a setting has a value that llmtrain does not support."""
    for name in ("DEEPSPEED", "MEGATRON_LM"):
        if is_on(f"ACCELERATE_USE_{name}"):
            raise _config_error(
                f"has the distributed_type {name}, which is not supported; use "
                f"{shipped_config('multi_gpu')} or {shipped_config('fsdp2')}"
            )
    settings = {"FSDP_VERSION": "1"} | os.environ
    for variable, values in _SUPPORTED.items():
        # The launcher always sets the defaults of FSDP, even if FSDP is not used.
        is_unused = variable.startswith("FSDP") and not uses_fsdp
        if is_unused or settings.get(variable, values[0]).lower() in values:
            continue
        key = variable.lower().removeprefix("accelerate_").removeprefix("parallelism_config_")
        key = key.replace("transformer_cls", "transformer_layer_cls")
        remedy = f"use {' or '.join(values)}" if values[0] else "leave it out"
        raise _config_error(
            f"has {key} {settings[variable]}, which is not supported; {remedy}; see "
            f"{shipped_config('fsdp2')}"
        )


def _config_error(problem: str) -> UserError:
    return UserError(f"the accelerate config {problem}.")


def is_on(variable: str) -> bool:
    """Return whether a variable of the launcher switches something on."""
    return os.environ.get(variable, "").lower() in ("true", "1", "yes")


def parent_launcher() -> str | None:
    """Return the program of the parent process if it is ``accelerate launch`` or ``torchrun``."""
    # Psutil fails for another user's process, and for one that has ended.
    with contextlib.suppress(psutil.Error, OSError):
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent is not None else []
        # The command is python, perhaps -m, and the program.
        for word in command[1:3]:
            program = Path(word).name
            if program in _LAUNCHERS:
                return program
    return None


def has_launcher() -> bool:
    """Return whether a launcher started this process, which waits for its exit status."""
    is_in_group = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return is_in_group or "TORCHELASTIC_RUN_ID" in os.environ or parent_launcher() is not None
