"""The teacher of a distillation, beside the student that learns from it."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Literal

from llmtrain.errors import UserError, short_repr
from llmtrain.interfaces.model import ModelBundle
from llmtrain.model_folders import tokenizer_of
from llmtrain.models.config import ModelConfig
from llmtrain.models.distillation import DistillConfig
from llmtrain.models.distillation_objective import SCORED_COLUMNS, DistillationObjective
from llmtrain.models.export import MODULE_CLASS, folder_config, gives_scores, how_to_load
from llmtrain.models.pretrained import PreparedRows, load_model
from llmtrain.planning import current_plan


def with_teacher(
    student: ModelBundle,
    distill: DistillConfig,
    config: ModelConfig,
    rows: PreparedRows,
    seed: int,
) -> ModelBundle:
    """Return a student whose objective is to predict as a teacher does.

    The teacher becomes a frozen model of the result, unless the rows have its scores.

    Args:
        student: the model that is trained.
        distill: the teacher, and what the student learns from it.
        config: how the student is used.
        rows: the rows that both models read.
        seed: of the run.

    Raises:
        UserError: if there is neither a teacher nor rows with scores, or if the teacher has no
            logits, or another vocabulary than the rows.
    """
    source = _teacher_source(distill, rows)
    frozen = {}
    if source != "rows":
        decided = config.with_values(rows.decided).of_base()
        frozen["teacher"] = load_teacher(distill, decided, rows, seed)
    return replace(student, objective=DistillationObjective(distill, source), frozen=frozen)


def load_teacher(
    distill: DistillConfig, student: ModelConfig, rows: PreparedRows, seed: int
) -> ModelBundle:
    """Build the teacher of a distillation, whose weights are read when it is placed.

    Args:
        distill: names the teacher.
        student: how the student is used.
        rows: the rows that both models read.
        seed: of the run.

    Raises:
        UserError: if there is no such model, or if it has another vocabulary than the rows.
    """
    config = copy.copy(student)
    config.model_name_or_path = distill.teacher_model_name_or_path
    config.model_revision = distill.teacher_model_revision
    config.from_config = None
    config.freeze = None
    config.load_in_4bit = False
    config.gradient_checkpointing = False
    undecided = copy.copy(rows)
    undecided.decided = {}  # the decisions are about the student
    try:
        config.resolve_runs()
        config.merge_adapter()
        folder = Path(str(config.model_name_or_path))
        values = folder_config(folder)
        if MODULE_CLASS in values or gives_scores(values):
            raise UserError(
                f"--model_name_or_path {folder} gives no logits ({how_to_load(folder)}); name a "
                "causal language model."
            )
        if current_plan() is None:
            _check_vocabulary(config, rows)
        return load_model(config, None, undecided, seed, precision="no")
    except UserError as error:
        # The same checks as for the student, whose flags have other names.
        message = str(error).replace("--model_", "--teacher_model_")
        if "--teacher_model_" not in message:
            message = f"--teacher_model_name_or_path: {message}"
        raise UserError(message) from error


def _check_vocabulary(config: ModelConfig, rows: PreparedRows) -> None:
    """Raise :class:`UserError` unless a teacher has the tokens of the rows, under the same ids."""
    if rows.tokenizer is None:
        return
    name = str(config.tokenizer_name)
    own = {id: token for token, id in tokenizer_of(name).get_vocab().items()}
    wanted = {id: token for token, id in rows.tokenizer.get_vocab().items()}
    for id in sorted({*own, *wanted}):
        if own.get(id) != wanted.get(id):
            raise UserError(
                f"--model_name_or_path {name} has another vocabulary than the rows: token {id} is "
                f"{short_repr(own.get(id))} there, and {short_repr(wanted.get(id))} in the rows; a "
                "teacher needs the tokenizer of the student."
            )


def _teacher_source(
    distill: DistillConfig, rows: PreparedRows
) -> Literal["teacher", "rows", "samples"]:
    """Return where the teacher's distributions come from.

    Raises:
        UserError: if there is neither a teacher nor rows that were scored before.
    """
    if set(SCORED_COLUMNS) <= set(rows.column_names):
        return "rows"
    if distill.teacher_model_name_or_path is None:
        raise UserError(
            "name a teacher with --teacher_model_name_or_path, or a data set that was scored with "
            "--loss_top_k."
        )
    is_sampled = distill.rounds > 0 and distill.round_loss == "sampled_reverse_kl"
    return "samples" if is_sampled else "teacher"
