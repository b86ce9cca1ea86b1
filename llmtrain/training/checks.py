"""What is checked and printed before the first step of a start."""

from dataclasses import fields

from accelerate import Accelerator
from torch import nn

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.sharding import TrainingAccelerator
from llmtrain.training.optim import lr_at
from llmtrain.training.run import Run
from llmtrain.training.settings import OptimConfig


def check_wrapping(accelerator: Accelerator, model: nn.Module) -> None:
    """Check that the loop supports the accelerator and the wrapping of the model.

    Raises:
        UserError: if it does not.
    """
    if not isinstance(accelerator, TrainingAccelerator):
        raise UserError("this loop needs the Accelerator that llmtrain.start() makes.")
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
    steps_to_make = range(run.step + 1, last_step + 1)
    if log.replay_step is not None and log.replay_step not in steps_to_make:
        raise UserError(
            f"--replay_step {log.replay_step}: this run makes steps {run.step + 1} to "
            f"{last_step}; name one of these."
        )
    if log.xray_range is not None and log.xray_range[-1] > last_step:
        raise UserError(
            f"--xray_steps {log.xray_steps} goes past the last step, --max_steps {last_step}; "
            "name earlier steps."
        )


def check_engine(run: Run, engine: Engine) -> None:
    """Raise :class:`UserError` if the model or its rows lack what the settings need."""
    sample_prompts = run.settings.eval.sample_prompts
    if sample_prompts and run.rows.tokenizer is None:
        raise UserError(
            "--sample_prompts needs a tokenizer, and the rows were made without one; leave it out."
        )
    if sample_prompts and not engine.unwrapped.gives_outputs:
        raise UserError(
            "--sample_prompts: this model only returns a loss; give the parameter `labels` of its "
            "forward the default None, and return logits if it is None."
        )


def say_if_xray_is_missed(run: Run) -> None:
    """Print a line if the first step that ``--xray_steps`` records was made before the checkpoint.

    Steps are counted from 1, and ``run.step`` steps are made.
    """
    recorded_steps = run.settings.log.xray_range
    if recorded_steps is not None and run.step >= recorded_steps.start:
        say(
            "x-ray",
            f"none: --xray_steps begins with step {recorded_steps.start}, but this run resumes "
            f"with step {run.step + 1}",
        )


def say_changed_settings(run: Run) -> None:
    """Print which optimizer settings differ from those of the checkpoint to resume from."""
    recorded = run.resume_point.optim_settings
    current = run.settings.optim.fingerprint
    if recorded is None or recorded == current:
        return
    changes = ", ".join(
        f"{key} {recorded.get(key)} -> {value}"
        for key, value in current.items()
        if recorded.get(key) != value
    )

    # A recipe may have recorded optimizer settings that OptimConfig does not have.
    names = {field.name for field in fields(OptimConfig)}
    recorded_config = OptimConfig(
        **{name: value for name, value in recorded.items() if name in names}
    )
    last_rate = lr_at(run.step - 1, recorded_config)
    next_rate = lr_at(run.step, run.settings.optim)
    say(
        "changed",
        f"{changes}; the learning rate goes from {last_rate:.3g} in step {run.step} "
        f"to {next_rate:.3g} in step {run.step + 1}",
    )
