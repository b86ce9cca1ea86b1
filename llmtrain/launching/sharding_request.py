"""Read from the variables of the launcher how the accelerate config shards a model."""

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.errors import UserError
from llmtrain.files import shipped_config

if TYPE_CHECKING:
    from llmtrain.parallel.ranks import Sharding


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
    if not uses_fsdp and not is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
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
    from llmtrain.parallel.ranks import Sharding  # it loads torch

    return Sharding(replicas=replicas, shards=shards, cpu_offload=is_on("FSDP_OFFLOAD_PARAMS"))


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
    return is_on("ACCELERATE_USE_FSDP")


def _config_error(problem: str) -> UserError:
    return UserError(f"the accelerate config {problem}.")


def _size(name: str) -> int:
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))


def is_on(variable: str) -> bool:
    """Return whether a variable of the launcher switches something on."""
    return os.environ.get(variable, "").lower() in ("true", "1", "yes")
