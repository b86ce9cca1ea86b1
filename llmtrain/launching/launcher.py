"""The wishes that a person told the launcher, and a check that they are what was started."""

import contextlib
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import yaml

from llmtrain.errors import UserError
from llmtrain.shipped import shipped_config
from llmtrain.types import Facts

if TYPE_CHECKING:
    from llmtrain.parallel.mesh import Sharding

_ACCELERATE = (
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
)
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class Launcher:
    """The wishes that a person told the launcher, as far as this process can see.

    Launchers fill in defaults and pass them on in the environment, where they look like wishes: ``accelerate launch``
    says precision "no" and 1 thread to whoever said nothing. What was truly said stands on the launcher's command
    line, in the config file that it read, and in the environment that it was started with.
    """

    words: list[str] = field(default_factory=list)
    config: Facts = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    config_file: Path | None = None

    @classmethod
    def find(cls) -> "Launcher":
        """Find it in the parent process, if that is ``accelerate launch`` or ``torchrun``; else in the environment."""
        own = cls(environment=dict(os.environ))
        try:
            parent = psutil.Process().parent()
            words = parent.cmdline() if parent is not None else []
            entry = (
                words[2] if words[1:2] == ["-m"] else Path(words[1]).name if len(words) > 1 else ""
            )
            is_accelerate = entry in _ACCELERATE and (entry != "accelerate" or "launch" in words)
            if parent is None or not (is_accelerate or entry in _TORCHRUN):
                return own
            for word in reversed(
                sys.orig_argv
            ):  # which ends as the launcher's do: with the recipe and its flags
                if words[-1:] != [word]:
                    break
                words.pop()
            config, path = _accelerate_config(words, parent.cwd()) if is_accelerate else ({}, None)
            return cls(words, config, parent.environ(), path)
        except (psutil.Error, OSError):  # another user's process, or one that is gone
            return own

    @classmethod
    def to_come(cls, words: list[str]) -> "Launcher":
        """Return what ``accelerate launch`` would go by, were it started here with these flags."""
        config, path = _accelerate_config(words, ".")
        return cls(words, config, dict(os.environ), path)

    def said(self, flag: str, variable: str = "") -> str | int | bool | None:
        """Return the value given for an ``accelerate launch`` flag, config key or environment variable, or ``None``.

        It is ``True`` for a flag that takes no value.
        """
        for word, following in reversed(
            [*zip(self.words, [*self.words[1:], "-"], strict=False)]
        ):  # the last counts
            name, equals, value = word.partition("=")
            if name.replace("-", "_") == f"__{flag}":
                return value if equals else (following if following[:1] != "-" else True)
        configured: str | int | bool | None = self.config.get(flag)
        return self.environment.get(variable) if configured is None else configured

    def wants_cpu(self) -> bool:
        """Return whether the CPU was asked for, even where there is a GPU."""
        return "--cpu" in self.words or str(self.said("use_cpu", "ACCELERATE_USE_CPU")).lower() in (
            "true",
            "1",
            "yes",
        )


def _accelerate_config(words: list[str], folder: str) -> tuple[Facts, Path | None]:
    """Return what the config file of a launcher with these words says, and where it is."""
    from accelerate.commands.config.config_args import default_config_file

    named = Launcher(words).said("config_file")
    path = Path(folder, str(named or default_config_file))
    if not named and (
        "--cpu" in words or not path.is_file()
    ):  # with --cpu accelerate reads no default
        return {}, None
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        if isinstance(config := yaml.safe_load(path.read_text()), dict):
            return config, path
    return {}, path


# What accelerate can be told to use and this loop does not: variable that its launcher sets -> its name
_UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def check_launch() -> None:
    """Stop where what was launched is not what was asked for, before any work is done. Raises :class:`UserError`."""
    launcher, world, recipe = Launcher.find(), os.environ.get("WORLD_SIZE"), shlex.join(sys.argv)
    asked_sharding(int(world or 1))
    for variable, name in _UNSUPPORTED.items():
        if _is_on(variable):
            import torch  # not before: what is wrong with a flag is said without it

            ignored = (
                ""
                if torch.accelerator.is_available()
                else " (which accelerate silently ignores on a CPU)"
            )
            raise UserError(
                f"the accelerate config asks for {name}{ignored}, which llmtrain does not support yet; use: "
                f"accelerate launch --config_file {shlex.quote(str(shipped_config('multi_gpu')))} {recipe}"
            )
    if world is None and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        # accelerate names an address where it was asked for more than one; its command line may be hidden from us
        asked = int(launcher.said("num_processes") or 1) if launcher.words else None
        if asked != 1:
            raise UserError(
                f"{asked or 'several'} processes were asked for and accelerate started one (it does so for CPU "
                f"configs); use: accelerate launch --multi_gpu --num_processes {asked or 2} {recipe}"
            )
    if int(world or 1) > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise UserError(
            f"WORLD_SIZE is {world} and no launcher says which rank this is; unset WORLD_SIZE, or use: "
            f"accelerate launch --multi_gpu --num_processes {world} {recipe}"
        )
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", ""):
        raise UserError(
            f"the accelerate config sets gradient_accumulation_steps to {steps}; leave it out: llmtrain derives it "
            "from --global_batch_size and --per_device_train_batch_size."
        )


# --- how a model is to be sharded

_OWN_UNITS = "; leave it out: blocks are found from the model"
_ROWS = (
    ": rows are not sharded over processes here (torch does so on GPUs alone); leave it out, and use "
    "--gradient_checkpointing for long rows"
)
# What an accelerate config may say of sharding: variable that the launcher sets -> values that are fine, why not others
_LIMITS = {
    "FSDP_VERSION": ("2", ", which is not supported; set fsdp_version: 2 in its fsdp_config"),
    "FSDP_AUTO_WRAP_POLICY": ("|TRANSFORMER_BASED_WRAP", _OWN_UNITS),
    **dict.fromkeys(("FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_IGNORED_MODULES"), ("", _OWN_UNITS)),
    "FSDP_RESHARD_AFTER_FORWARD": (
        "true|false",
        ", which is a value of FSDP 1; write true or false",
    ),
    # it would not draw the same dropout again
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "; leave it out, and use --gradient_checkpointing"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false", ", which is not supported; leave it out"),
    **dict.fromkeys(("PARALLELISM_CONFIG_CP_SIZE", "PARALLELISM_CONFIG_SP_SIZE"), ("1", _ROWS)),
}


def asked_sharding(processes: int, stages: int = 1) -> "Sharding | None":
    """Return how a model is to be sharded, as the accelerate config asks and its launcher passes on.

    It is ``None`` where the config does not ask, or where there is one process. Raises :class:`UserError` for what this
    package does not do.
    """
    fsdp, asked = _is_on("ACCELERATE_USE_FSDP"), sharding_is_asked()
    if not asked and stages == 1:
        if _is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
            raise _refused(f"has a parallelism config without FSDP; see {shipped_config('hsdp')}")
        return None
    from llmtrain.parallel.mesh import Sharding

    if stages > 1:
        if asked:
            raise UserError("--pipeline_stages is for a DDP config; this one shards the model.")
        if processes % stages:
            raise UserError(
                f"--pipeline_stages {stages} needs as many processes, or a multiple; {processes} started. Use: "
                f"accelerate launch --multi_gpu --num_processes {stages}"
            )
        return Sharding(processes // stages, 1, stages=stages)
    said = {"FSDP_VERSION": "1"} | os.environ
    for name, (fine, why) in _LIMITS.items():
        unused = name.startswith("FSDP") and not fsdp  # whose defaults are always there
        if not unused and name in said and not re.fullmatch(fine, said[name], re.IGNORECASE):
            key = (
                name.lower()
                .removeprefix("parallelism_config_")
                .replace("transformer_cls", "transformer_layer_cls")
            )
            raise _refused(f"has {key} {said[name]}{why}")
    if processes == 1:  # a test of sharding on one device asks by this variable
        return (
            Sharding(1, 1, fsdp and _is_on("FSDP_OFFLOAD_PARAMS"))
            if _is_on("LLMTRAIN_SHARD_ALONE")
            else None
        )
    replicas, shards, tensor = _size("DP_REPLICATE"), _size("DP_SHARD"), _size("TP")
    if replicas == shards == 1 and processes % tensor == 0:
        replicas, shards = (1, processes // tensor) if fsdp else (processes // tensor, 1)
    if replicas * shards * tensor != processes:
        matrices = f" x {tensor} (parallelism_config_tp_size)" if tensor > 1 else ""
        raise _refused(
            f"has {replicas} replicas (parallelism_config_dp_replicate_size) of {shards} processes "
            f"(parallelism_config_dp_shard_size){matrices}, and {processes} processes were started"
        )
    offload = fsdp and _is_on("FSDP_OFFLOAD_PARAMS")
    if offload and tensor > 1:
        raise _refused(
            "offloads parameters beside tensor parallelism, which is not supported; leave one out"
        )
    return Sharding(replicas, shards, offload, tensor) if shards * tensor > 1 else None


def sharding_is_asked() -> bool:
    """Return whether the accelerate config asks for FSDP or tensor parallelism."""
    return _is_on("ACCELERATE_USE_FSDP") or (
        _is_on("ACCELERATE_USE_PARALLELISM_CONFIG") and _size("TP") > 1
    )


def _refused(why: str) -> UserError:
    return UserError(f"the accelerate config {why}.")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "1", "yes")


def _size(name: str) -> int:
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
