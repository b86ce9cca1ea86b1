"""The flags of the optimizer, evaluations, logs and run folder, and the settings of a recipe."""

import math
import re
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from llmtrain.config.flags import COMMAND_LINE, Affects, Config, flag, require_range, value_of
from llmtrain.console import pluralize
from llmtrain.data.config import BatchConfig
from llmtrain.errors import UserError
from llmtrain.files import JsonObject, local_path
from llmtrain.parallel.config import ParallelConfig
from llmtrain.storage import Storage, is_address


def _check_steps(config: Config, minimum: int, name: str) -> None:
    """Raise :class:`UserError` unless a flag is a number of steps, or a fraction of the run.

    A number of steps becomes an integer, as a user writes it in a file.
    :func:`llmtrain.training.layout.fit_to_rows` turns fractions into steps.

    Args:
        config: the flags.
        minimum: the smallest number of steps, 0 or 1. A fraction is always above 0.
        name: the name of the flag.
    """
    value = getattr(config, name)
    if minimum <= value < math.inf and value == int(value):  # False for NaN
        setattr(config, name, int(value))  # as a user has written it
    elif not 0 < value < 1:
        raise UserError(
            f"--{name} {value:g} is neither a whole number of steps, at least {minimum}, nor a "
            "fraction of the run, such as 0.1."
        )


@dataclass
class OptimConfig(Config):
    """The optimizer, its learning rate, the number of steps, and the seed. Each field is a flag."""

    group: ClassVar[str] = "optimization"
    affects: ClassVar[Affects] = "numbers"

    optim: Literal["adamw", "adamw_torch_8bit", "muon"] = flag(
        "adamw",
        "optimizer; adamw_torch_8bit is AdamW with its state in 8 bits, which saves 6 bytes per "
        "weight; muon trains the matrices of hidden layers with Muon, and all other weights with "
        "AdamW",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto",
        "dtype of the weights that are trained; auto is float32; bfloat16 saves 2 bytes per weight "
        "for weights and 2 for gradients, and the optimizer keeps what rounding cuts off, in 2 "
        "bytes",
    )
    num_train_epochs: float | None = flag(
        None,
        "number of passes over the training rows, which may be a fraction; --max_steps overrides "
        "it (default: if you name a data set, 3 in finetune.py and 1 in preference.py; otherwise "
        "--max_steps decides)",
        affects="nothing",  # max_steps then says how many steps these are
    )
    max_steps: int = flag(400, "number of optimizer steps; overrides --num_train_epochs")
    max_tokens: float = flag(
        0,
        "number of tokens to train on, such as 2e9, instead of --max_steps and --num_train_epochs; "
        "every position of a row counts, also padding; 0: one of those decides",
        affects="nothing",  # max_steps then says how many steps these are
        hidden=True,
    )
    learning_rate: float = flag(1e-3, "peak learning rate")
    lr_scheduler_type: Literal[
        "cosine", "cosine_with_min_lr", "linear", "constant", "warmup_stable_decay"
    ] = flag(
        "cosine",
        "learning-rate schedule after the warmup; all but constant end at --min_lr, which is 0 by "
        "default",
    )
    min_lr: float = flag(
        0.0,
        "learning rate at which the schedule ends; parameter groups with another peak keep their "
        "proportions",
        hidden=True,
    )
    # Hägele et al. 2024, arXiv:2405.18392, section 3, recommend a fifth.
    decay_share: float = flag(
        0.2,
        "share of the run over which the learning rate falls at its end, with --lr_scheduler_type "
        "warmup_stable_decay",
        hidden=True,
    )
    warmup_steps: float = flag(
        0.1,
        "steps over which the learning rate rises from 0 to its peak; below 1: a fraction of the "
        "run",
        metavar="STEPS",
    )
    weight_decay: float = flag(
        0.1,
        "decoupled weight decay of matrices; biases and the weights of norms do not decay",
        hidden=True,
    )
    adam_beta1: float = flag(
        0.9, "decay of the running mean of gradients, for AdamW and Muon", hidden=True
    )
    adam_beta2: float = flag(
        0.95, "decay of AdamW's running mean of squared gradients", hidden=True
    )
    adam_epsilon: float = flag(
        1e-8,
        "number that AdamW adds to the root of the mean squared gradient, by which it divides",
        hidden=True,
    )
    max_grad_norm: float = flag(
        1.0,
        "clip the gradient of each step to this norm, over all weights together",
        hidden=True,
    )
    skip_nonfinite: int = flag(
        0,
        "how many steps with a NaN or infinite gradient are skipped before the run stops with an "
        "error",
        hidden=True,
    )
    seed: int = flag(
        0,
        "random seed of the initial weights, the data order and dropout",
        affects="data",
    )

    def __post_init__(self) -> None:
        require_range(self, "max_steps", at_least=1)
        require_range(self, "max_tokens", at_least=0, at_most=10**15)  # exact as a float
        self.max_tokens = math.ceil(self.max_tokens)
        require_range(self, "learning_rate", at_least=0, at_most=1_000_000)  # a float32 overflows
        require_range(self, "min_lr", "weight_decay", "adam_epsilon", "skip_nonfinite", at_least=0)
        require_range(self, "seed", at_least=0, at_most=2**63 - 1)
        require_range(self, "max_grad_norm", above=0)
        require_range(self, "decay_share", above=0, at_most=1)
        require_range(self, "adam_beta1", "adam_beta2", at_least=0, below=1)
        if self.num_train_epochs is not None:
            require_range(self, "num_train_epochs", above=0, at_most=1_000_000)
        _check_steps(self, 0, "warmup_steps")
        schedule = self.lr_scheduler_type
        if schedule == "constant" and self.min_lr > 0:
            raise UserError(
                f"--min_lr {self.min_lr:g} needs a schedule that falls, and --lr_scheduler_type "
                "constant does not; set --min_lr 0, or choose another schedule."
            )
        if schedule == "cosine_with_min_lr" and self.min_lr == 0:
            raise UserError(
                "--lr_scheduler_type cosine_with_min_lr needs --min_lr, the learning rate at which "
                "it ends; set it, or use cosine, which ends at 0."
            )

    def check_given(self) -> None:
        if self.deciding_flag == "max_steps" and self.is_set("max_steps"):
            self.check_warmup()
        has_decay = self.lr_scheduler_type == "warmup_stable_decay"
        is_changed = self.is_set("decay_share") and self.decay_share != OptimConfig.decay_share
        if is_changed and not has_decay:
            raise UserError(
                f"--decay_share {self.decay_share:g} has no effect with --lr_scheduler_type "
                f"{self.lr_scheduler_type}; leave it out, or use warmup_stable_decay."
            )

    def check_warmup(self) -> None:
        """Raise :class:`UserError` if the user asked for a warmup that is as long as the run.

        ``max_steps`` is the length of the run.
        """
        if self.is_set("warmup_steps") and self.warmup_steps >= self.max_steps:
            raise UserError(
                f"--warmup_steps {self.warmup_steps:g} leaves no step after the warmup: the run "
                f"has {pluralize(self.max_steps, 'step')}. Use at most {self.max_steps - 1}, or a "
                "fraction of the run such as 0.1."
            )

    @property
    def deciding_flag(self) -> str:
        """The flag that decides how many steps a run has.

        The command line takes precedence over files, and both over the recipe. ``--max_steps``
        overrides ``--num_train_epochs``.

        Raises:
            UserError: if the user set ``--max_tokens`` and one of these.
        """
        flags = ("max_tokens", "max_steps", "num_train_epochs")
        given = [name for name in flags if getattr(self, name) and self.is_set(name)]
        decisive = [name for name in given if self.origins[name] == COMMAND_LINE] or given
        if decisive[:1] == ["max_tokens"] and len(decisive) > 1:
            raise UserError(
                f"--max_tokens {self.max_tokens} and --{decisive[1]} both say how long the run is; "
                "set one of them."
            )
        defaults = ("max_tokens", "num_train_epochs", "max_steps")
        return next(name for name in (*decisive, *defaults) if getattr(self, name))

    @property
    def fingerprint(self) -> JsonObject:
        """The settings of the optimizer that the steps of a run depend on, for its fingerprint.

        ``num_train_epochs`` and ``max_tokens`` are left out, because ``max_steps`` has the steps
        that follow from them. The fingerprint of a run has the seed in a place of its own.
        """
        values = asdict(self)
        for name in ("num_train_epochs", "max_tokens", "skip_nonfinite", "seed"):
            del values[name]
        values["dtype"] = self.trained_dtype
        return values

    @property
    def trained_dtype(self) -> str:
        """The dtype of the weights that are trained: ``float32`` or ``bfloat16``."""
        return "float32" if self.dtype == "auto" else self.dtype


@dataclass
class EvalConfig(Config):
    """The evaluations, and what follows from their results. Each field is a flag."""

    group: ClassVar[str] = "evaluation and logging"
    affects: ClassVar[Affects] = "nothing"

    eval_steps: float = flag(
        100,
        "steps between two evaluations, in addition to one before the first step and one after the "
        "last; below 1: a fraction of the run; 0: no evaluations",
        metavar="STEPS",
    )
    load_best_model_at_end: bool = flag(
        False,
        "give the finished model the weights of the best evaluation, by --metric_for_best_model, "
        "instead of the last ones; each evaluation then saves a checkpoint",
    )
    early_stopping_patience: int = flag(
        0,
        "stop after this many evaluations in a row without improvement, and keep the best weights "
        "as the finished model; each evaluation then saves a checkpoint; 0: no early stopping",
        affects="numbers",
    )
    metric_for_best_model: str = flag(
        "eval/loss",
        "eval metric that --load_best_model_at_end and --early_stopping_patience compare; lower is "
        "better if its name contains loss, perplexity or bits, otherwise higher is better",
        affects="numbers",
        hidden=True,
    )
    sample_prompts: list[str] = flag(
        [],
        "prompts that the model continues at every evaluation, or answers if the tokenizer has a "
        "chat template; the texts go to samples.jsonl in the run folder",
        hidden=True,
    )

    def __post_init__(self) -> None:
        _check_steps(self, 0, "eval_steps")
        require_range(self, "early_stopping_patience", at_least=0)
        if self.metric_for_best_model.startswith("eval_"):  # as in transformers
            self.metric_for_best_model = "eval/" + self.metric_for_best_model.removeprefix("eval_")
        if (self.keeps_best or self.sample_prompts) and not self.eval_steps:
            raise UserError(
                "the best model (--load_best_model_at_end, --early_stopping_patience) and samples "
                "(--sample_prompts) need evaluations; set --eval_steps above 0."
            )
        if self.metric_for_best_model != "eval/loss" and not self.keeps_best:
            raise UserError(
                "--metric_for_best_model has no effect without --early_stopping_patience or "
                "--load_best_model_at_end; set one of them, too."
            )

    @property
    def keeps_best(self) -> bool:
        """Whether the finished model gets the weights of the best evaluation."""
        return self.load_best_model_at_end or self.early_stopping_patience > 0


@dataclass
class LogConfig(Config):
    """What is logged and recorded of the steps. Each field is a flag."""

    group: ClassVar[str] = "evaluation and logging"
    affects: ClassVar[Affects] = "nothing"

    logging_steps: float = flag(
        10,
        "steps between two log entries of the train loss; below 1: a fraction of the run; if "
        "stderr is no terminal, the default prints a line every ten seconds at most, and a value "
        "that you set prints every entry",
        metavar="STEPS",
    )
    xray_steps: str | None = flag(
        None,
        "A:B records steps A to B; llmtrain xray RUN draws them",
        hidden=True,
    )
    log_rows: bool = flag(
        False,
        "write to rows.jsonl which rows each step trains on, and log how often each step reduces "
        "gradients",
        hidden=True,
    )

    def __post_init__(self) -> None:
        _check_steps(self, 1, "logging_steps")
        if self.xray_range == range(0):
            raise UserError(
                f"--xray_steps {self.xray_steps} is not a range of steps; write two numbers such "
                "as 6:8, counted from 1."
            )

    @property
    def xray_range(self) -> range | None:
        """The steps to record, counted from 1; empty if ``--xray_steps`` is no range of steps."""
        if self.xray_steps is None:
            return None
        match = re.fullmatch(r"([1-9]\d*):(\d+)", self.xray_steps)
        return range(int(match[1]), int(match[2]) + 1) if match else range(0)


@dataclass
class RunConfig(Config):
    """The run folder, its checkpoints, trackers, and when a run stops. Each field is a flag."""

    group: ClassVar[str] = "run folder and checkpoints"
    affects: ClassVar[Affects] = "nothing"

    output_dir: str = flag(
        "runs/run",
        "folder for the run's metrics, checkpoints and finished model; if another run has it, a "
        "number is appended (run-2); {NAME} is the value of the flag --NAME",
    )
    run_name: str | None = flag(
        None,
        "name of the run in trackers, with placeholders as in --output_dir (default: the name of "
        "the run folder)",
        hidden=True,
        group="evaluation and logging",
    )
    save_steps: float = flag(
        100,
        "steps between two checkpoints, in addition to one after the last step; below 1: a "
        "fraction of the run",
        metavar="STEPS",
    )
    save_total_limit: int = flag(
        2,
        "number of checkpoints to keep, at least 2, in addition to the one with the best eval loss",
        hidden=True,
    )
    async_save: bool = flag(
        False,
        "write checkpoints in the background while training continues, from a copy in host memory",
        hidden=True,
    )
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto",
        "dtype of the finished model's weights; auto: that of the model that training started "
        "from, and float32 for an adapter or a model with random weights; checkpoints always have "
        "the weights that are trained",
        hidden=True,
    )
    resume_from_checkpoint: str = flag(
        "auto",
        "auto: resume an unfinished run with the same settings, if there is one; never: start a "
        "new run; or the folder or address (s3://...) of a run or of a checkpoint to resume from",
        metavar="RUN",
    )
    mirror: str | None = flag(
        None,
        "address, such as s3://bucket/gpt, that gets a copy of the run while it goes on",
        metavar="URL",
        hidden=True,
    )
    push_to_hub: str | None = flag(
        None,
        "upload the finished model to this repository on the Hugging Face hub; a new repository is "
        "private",
        metavar="NAME/MODEL",
    )
    report_to: list[str] = flag(
        ["auto"],
        "trackers that get the metrics: auto (wandb if you are logged in), wandb (offline without "
        "a login), tensorboard, mlflow, trackio, aim, clearml, comet_ml, dvclive, swanlab, or none",
        metavar="TRACKER",
        group="evaluation and logging",
    )
    max_hours: float | None = flag(
        None,
        "save and stop before this many hours have passed since the process started",
        hidden=True,
    )
    dry_run: bool = flag(
        False,
        "stop before the first step, after all checks; llmtrain rows RECIPE prints the rows",
        group="data",
    )

    def __post_init__(self) -> None:
        _check_steps(self, 1, "save_steps")
        # A resume finds an intact checkpoint if the newest one is damaged.
        require_range(self, "save_total_limit", at_least=2)
        if self.max_hours is not None:
            require_range(self, "max_hours", above=0)
        if not self.output_dir.strip():
            raise UserError("--output_dir is empty; name a folder for the run.")
        bucket = ", and the bucket with --mirror"
        local_path(self.output_dir, "--output_dir ", remedy=bucket)
        if self.mirror is not None:
            # This checks the address.
            self.mirror = str(Storage(self.mirror, "--mirror ", writable=True))
        if is_address(self.resume_from_checkpoint):
            storage = Storage(self.resume_from_checkpoint, "--resume_from_checkpoint ")
            self.resume_from_checkpoint = str(storage)
        else:
            local_path(self.resume_from_checkpoint, "--resume_from_checkpoint ")
        if (self.push_to_hub or "").lower() in ("true", "false"):  # a switch in transformers
            raise UserError(
                f"--push_to_hub {self.push_to_hub}: name the repository, such as NAME/MODEL, or "
                "leave the flag out."
            )
        if not {"auto", "wandb", "none"}.issuperset(self.report_to) or len(self.report_to) > 1:
            # This imports Accelerate, which takes seconds.
            from llmtrain.record.trackers.tracker import check_trackers

            check_trackers(self.report_to)

    @property
    def trackers(self) -> list[str]:
        """The trackers that the run reports to."""
        return [name for name in dict.fromkeys(self.report_to) if name != "none"]


@dataclass(kw_only=True)
class Settings:
    """The settings of a recipe, in sections. Each section is defined by the package that reads it.

    A recipe adds sections of its own in a subclass: a model, LoRA adapters, a loss.

    Attributes:
        data: the data set and the batch sizes. A recipe that makes its own rows uses a
            ``BatchConfig``.
        optim: the optimizer.
        parallel: how processes share the work, and how a step is computed.
        eval: the evaluations.
        log: what is logged.
        run: the run folder, its checkpoints, and trackers.
    """

    # --help shows the flags in this order, after those of a subclass.
    data: BatchConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def default_epochs(self, epochs: float) -> None:
        """Train for this many epochs if the user named a data set, but no length of the run.

        Without a data set, a recipe trains on its demo for its own ``max_steps``.
        """
        has_length = self.optim.is_set("max_steps") or self.optim.is_set("max_tokens")
        has_length = has_length or value_of(self, "rounds", default=0)
        if self.data.is_set("dataset") and not has_length:
            self.optim.set_default("num_train_epochs", epochs, "default for your own data")
