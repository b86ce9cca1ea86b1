"""Check that the processes of a run were started as the user asked."""

import os
import shlex
import sys

from llmtrain.errors import UserError
from llmtrain.files import shipped_config
from llmtrain.launching.launcher import launched_by
from llmtrain.launching.sharding_request import is_on, requested_sharding

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
    world_size = os.environ.get("WORLD_SIZE")
    recipe = shlex.join(sys.argv)

    requested_sharding(int(world_size or 1))
    _check_unsupported(recipe)
    if world_size is None:
        _check_process_count(recipe)
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
        if not is_on(variable):
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


def _check_process_count(recipe: str) -> None:
    """Check that accelerate did not start a single process although the user wanted several."""
    # Accelerate's launcher always sets the first, and the second if it was asked for several
    # processes. The user may have set the second too.
    if not {"ACCELERATE_DYNAMO_MODE", "MASTER_ADDR"} <= os.environ.keys():
        return
    launched = launched_by()
    if launched.by_launcher and launched.processes in (None, 1):
        return

    # Behind a wrapper script, the launcher's command line is hidden.
    remedy = "" if launched.by_launcher else "for one process, unset MASTER_ADDR; for several, "
    raise UserError(
        f"{launched.processes or 'several'} processes were requested, but accelerate started one "
        f"(as it does for CPU configs); {remedy}use: accelerate launch --multi_gpu "
        f"--num_processes {launched.processes or 2} {recipe}"
    )
