"""What is checked and printed before the first step of a start."""

from typing import Any

import torch
from torch import nn

from llmtrain.console import note, say
from llmtrain.errors import UserError
from llmtrain.training.optim import is_made_by_flag, keeps_small_updates
from llmtrain.training.run import Run
from llmtrain.training.settings import OptimConfig


def check_wrapping(model: nn.Module) -> None:
    """Raise :class:`UserError` if a model is wrapped in a way that the loop does not support."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UserError(
            "the model is wrapped in nn.DataParallel, which this loop does not support. Do not "
            "wrap it (accelerator.prepare wraps it in DDP), and start one process per GPU with "
            "accelerate launch."
        )


def check_steps(run: Run) -> None:
    """Raise :class:`UserError` if a flag names steps that this run does not make."""
    log = run.settings.log
    last_step = run.settings.optim.max_steps
    if run.step > last_step:
        raise UserError(
            f"--max_steps {last_step} is below step {run.step}, from which this run resumes; "
            "raise it."
        )
    if log.xray_range is not None and log.xray_range[-1] > last_step:
        raise UserError(
            f"--xray_steps {log.xray_steps} goes past the last step, --max_steps {last_step}; "
            "name earlier steps."
        )


def check_model(run: Run, model: Any) -> None:
    """Raise :class:`UserError` if the model or its rows lack what the settings need."""
    sample_prompts = run.settings.eval.sample_prompts
    if sample_prompts and run.rows.tokenizer is None:
        raise UserError(
            "--sample_prompts needs a tokenizer, and the rows were made without one; leave it out."
        )
    if sample_prompts and not model.gives_outputs:
        raise UserError(
            "--sample_prompts: this model only returns a loss; give the parameter `labels` of its "
            "forward the default None, and return logits if it is None."
        )


def check_optimizer_flags(
    config: OptimConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: object = None,
) -> None:
    """Check that every flag of the optimizer that the user set has an effect.

    A recipe may bring an optimizer or a schedule of its own, and leave such a flag unread. Flags
    are compared with the optimizer, however it was made.

    Args:
        config: the flags.
        model: the model, without wrappers.
        optimizer: the optimizer, before ``accelerator.prepare``.
        schedule: the recipe's own schedule, if it has one.

    Raises:
        UserError: if a flag has no effect.
    """
    unread: list[str] = []
    if config.is_set("optim") and not is_made_by_flag(optimizer, config.optim, model):
        unread.append(f"--optim {config.optim} (the recipe makes {type(optimizer).__name__})")

    values_of_flag = {
        "weight_decay": _values(optimizer, "weight_decay"),
        "adam_beta1": _values(optimizer, "betas", 0) + _values(optimizer, "momentum"),
        "adam_beta2": _values(optimizer, "betas", 1),
        "adam_epsilon": _values(optimizer, "eps"),
    }
    for name, values in values_of_flag.items():
        value = getattr(config, name)
        if config.is_set(name) and value not in values:
            unread.append(f"--{name} {value:g} (no parameter group has this value)")

    trained = [p for group in optimizer.param_groups for p in group["params"]]
    has_bf16_weights = any(p.dtype == torch.bfloat16 for p in trained)
    if config.trained_dtype == "bfloat16" and not has_bf16_weights:
        unread.append("--dtype bfloat16 (the recipe trains other weights)")
    if has_bf16_weights and not keeps_small_updates(optimizer):
        note(
            f"the recipe's own {type(optimizer).__name__} may lose small updates of weights in "
            "bfloat16"
        )

    if schedule is not None:
        for name in ("lr_scheduler_type", "warmup_steps", "min_lr", "decay_share"):
            if config.is_set(name):
                unread.append(f"--{name} (the recipe has its own schedule)")

    if unread:
        raise UserError(f"flags without effect: {', '.join(unread)}; leave them out.")


def _values(optimizer: torch.optim.Optimizer, key: str, index: int | None = None) -> list[object]:
    """Return the values of all parameter groups under a key, or those at an index of a tuple."""
    values = [group[key] for group in optimizer.param_groups if group.get(key) is not None]
    if index is None:
        return values
    sequences = [value for value in values if isinstance(value, list | tuple)]
    return [value[index] for value in sequences if index < len(value)]


def say_changed_settings(run: Run) -> None:
    """Print which optimizer settings differ from those of the checkpoint to resume from."""
    recorded = run.resume_point.state.get("fingerprint")
    if recorded is None or run.step == run.settings.optim.max_steps:
        return
    before = recorded["optimizer"] | recorded["learning_rates"]
    now = run.fingerprint["optimizer"] | run.fingerprint["learning_rates"]
    changed_keys = [key for key in now if before.get(key) != now[key]]
    # Most settings of the groups are flags, too, which are shorter to read.
    changes = [f"{key} {before.get(key)} -> {now[key]}" for key in changed_keys if key != "groups"]
    if changed_keys == ["groups"]:
        changes = ["settings of the optimizer's parameter groups"]
    if changes:
        say("changed", ", ".join(changes))
