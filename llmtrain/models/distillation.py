"""Settings of distillation: the teacher, the divergence, and the rounds of the student's answers.

``--help`` lists the flags, so this module imports no torch.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain.config.flags import Affects, Config, flag, flags_of, require_range
from llmtrain.errors import UserError
from llmtrain.model_folders import model_folder


@dataclass
class DistillConfig(Config):
    """What a student learns from a teacher. Each field is a flag."""

    group: ClassVar[str] = "distillation"
    affects: ClassVar[Affects] = "numbers"

    teacher_model_name_or_path: str | None = flag(
        None,
        "causal LM that teaches: the folder of a run, a checkpoint or a model, or a hub name; it "
        "needs the tokenizer of the student; a LoRA adapter is merged into its base (default: the "
        "rows were scored before, by llmtrain tokenize with --loss_top_k)",
    )
    teacher_model_revision: str = flag(
        "main",
        "branch, tag or commit of the hub model in --teacher_model_name_or_path",
        hidden=True,
    )
    beta: float = flag(
        0.0,
        "divergence between the two distributions of the next token: 0 is the forward KL, 1 the "
        "reverse KL, and between them is the generalised Jensen-Shannon divergence, which is near "
        "0 at both ends",
    )
    temperature: float = flag(
        1.0, "logits of both models are divided by it in the divergence", hidden=True
    )
    sft_share: float = flag(
        0.0,
        "share S of the negative log-likelihood in the loss: (1 - S) x divergence + S x nll of the "
        "targets",
        hidden=True,
    )
    loss_top_k: int = flag(
        0,
        "for llmtrain tokenize: write the teacher's K largest log-probabilities of each target to "
        "the rows, so that training needs no teacher",
        metavar="K",
        affects="data",
        hidden=True,
    )
    rounds: int = flag(
        0,
        "train on the student's own answers, in so many rounds: it answers prompts of the data, "
        "the teacher scores the answers, and the student makes one pass over them; 0: train on the "
        "answers in the data",
    )
    prompts_per_round: int = flag(
        512, "prompts that the student answers in each of the --rounds", metavar="N", hidden=True
    )
    max_new_tokens: int = flag(256, "longest answer in --rounds, in tokens", hidden=True)
    round_loss: Literal["sampled_reverse_kl", "full"] = flag(
        "sampled_reverse_kl",
        "loss in --rounds: sampled_reverse_kl compares the two models at the tokens that the "
        "student has sampled; full is the divergence of --beta, over the whole vocabulary",
        hidden=True,
    )

    def __post_init__(self) -> None:
        require_range(self, "beta", "sft_share", at_least=0, at_most=1)
        require_range(self, "temperature", above=0, at_most=1_000)
        require_range(self, "loss_top_k", "rounds", at_least=0, at_most=1_000_000)
        require_range(self, "prompts_per_round", "max_new_tokens", at_least=1, at_most=10_000_000)
        if self.teacher_model_name_or_path is not None:
            try:
                model_folder(self.teacher_model_name_or_path)
            except UserError as error:
                raise UserError(f"--teacher_model_name_or_path {error}") from None

    def check_given(self) -> None:
        for name in ("prompts_per_round", "max_new_tokens", "round_loss"):
            is_changed = getattr(self, name) != flags_of(self)[name].default
            if is_changed and not self.rounds:
                raise UserError(f"--{name} has no effect without --rounds; leave it out.")
        if not self.rounds:
            return
        if self.teacher_model_name_or_path is None:
            raise UserError(
                "--rounds needs --teacher_model_name_or_path, which scores the answers."
            )
        if self.sft_share:
            raise UserError(
                "--sft_share has no use with --rounds, whose targets are the student's own "
                "answers; leave it out."
            )
        is_sampled = self.round_loss == "sampled_reverse_kl"
        if is_sampled and (self.beta or self.temperature != 1):
            raise UserError(
                "--round_loss sampled_reverse_kl is the reverse KL at temperature 1; leave --beta "
                "and --temperature out, or use --round_loss full."
            )
