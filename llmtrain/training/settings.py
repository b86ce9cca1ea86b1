"""All settings of a run in one object, and those of the loop and of the run's folder."""

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from llmtrain.config import Config, flag, require_at_least
from llmtrain.data.config import BatchConfig, ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig, LoraConfig, ModelConfig, PreferenceConfig
from llmtrain.parallel.config import ParallelConfig, PipelineConfig


@dataclass
class OptimConfig(Config):
    """How long a run updates its weights, how fast, and by which rule. Each field is a flag of the recipe."""

    _argument_group_name: ClassVar[str] = "optimization"
    acts: ClassVar[str] = "update"

    optim: Literal["adamw", "muon"] = flag(
        "adamw", "muon: for the matrices of hidden layers, with AdamW for the rest"
    )
    max_steps: int = flag(400, "updates in the run")
    learning_rate: float = flag(1e-3, "peak learning rate")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = flag(
        "cosine", "the learning rate after the warm-up; all but constant end at zero"
    )
    warmup_steps: int = flag(50, "updates over which the learning rate rises from zero")
    weight_decay: float = flag(
        0.1, "decoupled weight decay of matrices; biases and norms have none"
    )
    adam_beta1: float = flag(0.9, "decay of the mean of gradients, AdamW's and Muon's", hidden=True)
    adam_beta2: float = flag(0.95, "decay of AdamW's mean of squared gradients", hidden=True)
    max_grad_norm: float = flag(1.0, "the global gradient norm is clipped to this")

    def __post_init__(self) -> None:
        require_at_least(self, 1, "max_steps")
        require_at_least(self, 0, "learning_rate", "warmup_steps", "weight_decay")
        for name in ("adam_beta1", "adam_beta2"):
            beta = getattr(self, name)
            if not 0 <= beta < 1:
                raise UserError(f"--{name} {beta} must be at least 0 and below 1.")
        if not self.max_grad_norm > 0:  # so that NaN is refused, too
            raise UserError(f"--max_grad_norm {self.max_grad_norm} must be above 0.")


@dataclass
class LoopConfig(Config):
    """Settings of the loop: how updates are computed, and what is done beside them. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "loop"

    seed: int = flag(0, "of weights, data order and dropout", acts="seed")
    logging_steps: int = flag(10, "updates between two readings of the training loss")
    eval_steps: int = flag(
        100,
        "updates between two evaluations, beside one before the first update and one at the end; 0: never",
    )
    early_stopping_patience: int = flag(
        0,
        "stop after so many evaluations in a row that are no better, each of which makes a checkpoint; model/ is the "
        "best; 0: never",
        acts="update",
    )
    metric_for_best_model: str = flag(
        "eval/loss",
        "what --early_stopping_patience looks at; higher is better, except for a loss, perplexity or bits",
        acts="update",
    )
    sample_prompts: list[str] = flag(
        [], "texts that the model goes on from, or answers, at every evaluation"
    )
    max_hours: float | None = flag(
        None, "save and stop before this time has passed since the start"
    )
    bitwise: bool = flag(
        False,
        "add gradients in one fixed order: 1, 2, 4, ... processes give the same bits, slower",
        acts="layout",
    )
    torch_compile: Literal["auto", "always", "never"] | None = flag(
        None,
        "compile the model's blocks; auto, the default on a GPU: where the run is long enough and gains by it, and not "
        "with --bitwise",
        acts="layout",
    )
    dry_run: bool = flag(False, "go up to the first update, and show what would be trained on")
    skip_nonfinite: int = flag(
        0,
        "updates with a gradient that is not finite, to skip before the run stops",
        acts="update",
        hidden=True,
    )
    xray_steps: str | None = flag(
        None, "A:B records the updates A to B, in the run's folder xray/", hidden=True
    )
    log_rows: bool = flag(False, "write the rows of every update to rows.jsonl", hidden=True)
    replay_step: int | None = flag(
        None, "stop after this update and write its rows' losses: see replay", hidden=True
    )

    def __post_init__(self) -> None:
        require_at_least(self, 1, "logging_steps")
        require_at_least(self, 0, "eval_steps", "skip_nonfinite", "early_stopping_patience")
        can_stop_early = self.early_stopping_patience > 0
        if can_stop_early and not self.eval_steps:
            raise UserError("--early_stopping_patience needs evaluations: --eval_steps above 0.")
        if self.metric_for_best_model != "eval/loss" and not can_stop_early:
            raise UserError(
                "--metric_for_best_model is what --early_stopping_patience looks at; give that too."
            )
        if self.replay_step is not None and self.replay_step < 1:
            raise UserError(f"--replay_step {self.replay_step} must be above 0.")
        if self.max_hours is not None and not self.max_hours > 0:  # so that NaN is refused, too
            raise UserError(f"--max_hours {self.max_hours} must be above 0.")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed} is out of range: it must be from 0 to 2**63 - 1.")
        _parse_xray_steps(self.xray_steps)

    @property
    def xray_range(self) -> range | None:
        """The steps to record, counted from 1."""
        return _parse_xray_steps(self.xray_steps)


def _parse_xray_steps(text: str | None) -> range | None:
    """Return the steps that ``A:B`` names, both included."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d*):(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise UserError(
            f"--xray_steps {text}: write two updates, such as 6:8; the first of a run is 1."
        )
    return range(int(match[1]), int(match[2]) + 1)


@dataclass
class RunConfig(Config):
    """A run's folder, what is kept in it, and who else is told. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "run"

    output_dir: str = flag(
        "runs/run", "the run's folder; where it is taken by another run, the next free name"
    )
    run_name: str | None = flag(None, "name shown by trackers; the folder's name where left out")
    save_steps: int = flag(100, "updates between two checkpoints; there is one at the end")
    save_total_limit: int = flag(
        2, "checkpoints that are kept, at least 2, beside the one with the best held-out loss"
    )
    async_save: bool = flag(
        False, "write checkpoints in the background, from a copy in the host's memory"
    )
    resume_from_checkpoint: str = flag(
        "auto",
        "auto: go on with an unfinished run of the same settings; never; or a run's or checkpoint's folder",
    )
    push_to_hub: str | None = flag(
        None, "upload the finished model to this hub repository; a new one is private"
    )
    report_to: list[str] = flag(["wandb"], "trackers: wandb, tensorboard, or none")

    def __post_init__(self) -> None:
        require_at_least(self, 1, "save_steps")
        require_at_least(self, 2, "save_total_limit")
        if not self.output_dir.strip():
            raise UserError("--output_dir is empty: name a folder for the run.")
        _check_trackers(self.report_to)

    @property
    def trackers(self) -> list[str]:
        """The trackers that the run reports to."""
        return [name for name in self.report_to if name != "none"]


def _check_trackers(names: list[str]) -> None:
    """Raise :class:`UserError` for a tracker that is unknown or not installed."""
    for name in names:
        if name not in ("wandb", "tensorboard", "none"):
            raise UserError(f"--report_to {name}: llmtrain reports to wandb, tensorboard or none.")
    trackers = [name for name in names if name != "none"]
    if trackers and "none" in names:
        raise UserError(f"--report_to none and {' '.join(trackers)} contradict each other.")
    if "tensorboard" in trackers and not any(map(find_spec, ("tensorboard", "tensorboardX"))):
        raise UserError(
            "--report_to tensorboard needs it installed: pip install 'llmtrain[tensorboard]'."
        )


M = TypeVar("M")
D = TypeVar("D", bound=BatchConfig)


@dataclass
class Settings(Generic[M, D]):
    """Everything that a recipe can be told. Each part belongs to the room that reads it.

    A recipe without a model of this package's leaves out ``model``; one with rows of its own gives a ``BatchConfig``.
    """

    data: D
    model: M = None  # type: ignore[assignment]  # of recipes that have a model config
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    run: RunConfig = field(default_factory=RunConfig)
    chat: RowConfig | None = None
    preference: PreferenceConfig | None = None
    lora: LoraConfig | None = None


AnySettings: TypeAlias = Settings[Any, Any]
CONFIGS: tuple[type[Config], ...] = (
    GPTConfig,
    ModelConfig,
    LoraConfig,
    DataConfig,
    ChatConfig,
    PairConfig,
    PreferenceConfig,
    OptimConfig,
    PipelineConfig,
    LoopConfig,
    RunConfig,
)
