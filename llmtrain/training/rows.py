"""Rows of tokens for a run, what the model decides about them, and their lines in the log."""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from llmtrain.console import is_or_are, pluralize, say
from llmtrain.data.audit import COVERED_SHARE
from llmtrain.data.config import DataConfig, PairConfig, RowConfig
from llmtrain.data.prepare import cached_rows
from llmtrain.data.request import DataRequest, Scorer
from llmtrain.data.sets import joined
from llmtrain.data.sources import PythonRecords, is_set, records_source
from llmtrain.data.tokenized import Tokenized, short_names
from llmtrain.errors import UserError
from llmtrain.files import JsonObject
from llmtrain.interfaces.model import PackingSupport
from llmtrain.planning import RowsAreMade, current_plan

if TYPE_CHECKING:
    from llmtrain.models.config import ModelConfig
    from llmtrain.models.distillation import DistillConfig
    from llmtrain.models.preference import PreferenceConfig

_TASKS = {
    "text": "continued pretraining",
    "conversations": "fine-tuning on the assistant's turns",
    "preferences": "preference training",
}


def tokenize(
    data: DataConfig,
    max_length: int | Literal["auto"] | None = None,
    chat: RowConfig | None = None,
    model: "ModelConfig | None" = None,
    preference: "PreferenceConfig | None" = None,
    distill: "DistillConfig | None" = None,
    *,
    records: PythonRecords | None = None,
    records_fingerprint: str | None = None,
    unpaired: bool = False,
) -> Tokenized:
    """Return the rows of a data set, from the cache if they were made before.

    Every process calls this before the process group exists. One of them makes the rows, while the
    others wait for its lock. If anything fails, the cache stays as it was.

    A model of Hugging Face decides what is ``None``: the tokenizer, the length of the rows, and
    whether a row may hold several documents. The arguments stay as they are: ``decided`` of the
    result has the values, which ``place`` writes to the settings of the run.

    Args:
        data: the data sets and the tokenizer. ``dataset`` may be empty if there is eval data. A
            recipe that fine-tunes sets ``tokenizer=None``, to train with the model's own.
        max_length: the length of the rows; by default that of ``model``. A row of text or
            conversations holds one token more, because its last token predicts nothing. A row of
            preference data holds twice as many, for two answers with their prompts. ``auto``
            chooses a length that holds 99.5 % of the examples.
        chat: how conversations become rows. With a :class:`PairConfig` the records are preference
            data. ``None``: the records are plain text.
        model: the model of Hugging Face to train, if it is one.
        preference: the preference loss, with which the model will be trained.
        distill: the distillation, if the model will learn from a teacher.
        records: the records of a recipe that has its own data: a ``datasets.Dataset``, a list of
            texts or of dictionaries of fields, or a function that yields them, always the same
            records in the same order. Then ``data.dataset`` is not read.
        records_fingerprint: a name of your choice for what a function yields, such as "v3". Change
            it whenever the records change. Without it, each process reads all records at each
            start, to notice that they have changed. Lists and data sets need none.
        unpaired: the loss takes single answers with a label, not only pairs; ``preference`` says
            so, too.

    Raises:
        UserError: if the data, the tokenizer or the flags are wrong, or if the model cannot be
            trained.
    """
    decided: dict[str, Any] = {}
    support: PackingSupport | None = None
    max_positions: int | None = None
    if model is not None:
        from llmtrain.models.model_classes import packing_support  # imports torch

        model = copy.copy(model)
        model.max_length = max_length or model.max_length
        model.fit_max_length()
        max_length = model.max_length
        if not model.is_set("max_length") and any(map(is_set, data.dataset + data.eval_dataset)):
            max_length = "auto"  # that of the set
        base = model.of_base()
        is_reward_model = preference is not None and preference.is_reward_model
        support = packing_support(base, is_reward_model=is_reward_model)
        max_positions = base.max_positions()
        decided["model_name_or_path"] = model.model_name_or_path
        decided["from_config"] = model.from_config
        decided["tokenizer"] = data.tokenizer or model.tokenizer_name or "bpe:2048"
    has_rounds = distill is not None and distill.rounds > 0
    if has_rounds and chat is not None:
        chat = _unpacked(chat)
    if max_length is None:
        raise UserError("tokenize: name a model, or the max_length of the rows.")

    plan = current_plan()
    takes_rows = plan is not None and plan.take_rows is not None
    scorer: Scorer | None = None
    if takes_rows and distill is not None and distill.loss_top_k:
        from llmtrain.training.teacher_scorer import TeacherScorer  # imports torch

        scorer = TeacherScorer(distill, model)
    request = DataRequest(
        data.with_values(decided),
        max_length,
        chat=chat,
        support=support,
        trust_remote_code=model is not None and model.trust_remote_code,
        own_source=None if records is None else records_source(records, records_fingerprint),
        unpaired=unpaired or (preference is not None and preference.is_unpaired),
        max_positions=max_positions,
        scorer=scorer,
        takes_prompts=has_rounds,
    )
    if plan is not None and plan.take_rows is not None:
        plan.take_rows(request)
        raise RowsAreMade
    if distill is not None:
        _check_distillation(distill, request)

    entry, is_cached = cached_rows(request) if request.recorded else (None, True)
    if entry is None or len(request.recorded) < len(request.sources):
        entry = joined(request, entry)
    metadata = replace(
        entry.metadata, dataset=" ".join(request.train_names), tokenizer=request.spec
    )
    decided["dataset"] = request.train_names
    if model is not None:
        decided["max_length"] = metadata.block_size
    if request.chat is not None:
        decided["packing"] = request.chat.packing
    if isinstance(request.chat, PairConfig):
        decided["share_prompts"] = request.chat.share_prompts
    rows = replace(
        entry.ordered(data.mixture, data.shuffle_window),
        metadata=metadata,
        new_tokens=request.new_tokens,
        eval_names=[each.name for each in request.sources if each.only_split != "train"],
        decided=decided,
    )
    _describe(request, rows, is_cached)
    return rows


def _unpacked(chat: RowConfig) -> RowConfig:
    """Return the config of rows with one prompt each, for ``--rounds``."""
    if chat.is_set("packing") and chat.packing:
        raise UserError(
            "--packing has no effect with --rounds, whose rows have one prompt each; leave it out."
        )
    return chat.with_values({"packing": False})


def _check_distillation(distill: "DistillConfig", request: DataRequest) -> None:
    """Raise :class:`UserError` if prompts, or rows that a teacher has scored, do not fit."""
    for source in request.sources:
        has_eval_rows = source.only_split == "eval" or request.config.eval_fraction > 0
        if source.format == "prompts" and source.only_split != "train" and has_eval_rows:
            raise UserError(
                f"{source.flag} {source.name} has prompts without answers to evaluate on; name "
                "conversations with --eval_dataset, or set --eval_fraction 0."
            )

    teachers: dict[str, JsonObject | None] = {}
    for source in request.sources:
        made_from = {} if source.rows is None else source.rows.made_from
        teachers[f"{source.flag} {source.name}"] = made_from.get("teacher")
    scored = {place: teacher for place, teacher in teachers.items() if teacher is not None}
    if not scored:
        if distill.loss_top_k:
            raise UserError(
                "--loss_top_k is for llmtrain tokenize, which scores rows before a run; leave it "
                "out, or train on such a set."
            )
        return

    place, teacher = next(iter(scored.items()))
    for other_place, other_teacher in teachers.items():
        if other_teacher != teacher:
            raise UserError(
                f"{other_place} and {place} were not scored by the same teacher, with the same "
                "--temperature and --loss_top_k; make the sets again, with llmtrain tokenize."
            )
    if distill.teacher_model_name_or_path is not None:
        raise UserError(
            f"{place} has the scores of its teacher, so training loads none; leave "
            "--teacher_model_name_or_path out, or name the records of the set."
        )
    temperature = teacher["temperature"]
    k = teacher["loss_top_k"]
    if distill.temperature != temperature or distill.loss_top_k not in (0, k):
        raise UserError(
            f"{place} was scored with --temperature {temperature:g} --loss_top_k {k}; set the "
            "same, or make the set again."
        )
    if distill.beta:
        raise UserError(
            f"--beta {distill.beta:g} needs the teacher's probabilities of all tokens that the "
            f"student may prefer, and {place} has {k} for each target; leave "
            "--beta out, or train on the records with --teacher_model_name_or_path."
        )


# --- the lines about the data in the start-up log


def _describe(request: DataRequest, rows: Tokenized, is_cached: bool) -> None:
    """Print the lines about the data in the start-up log.

    Args:
        request: the rows that the recipe asked for.
        rows: the rows.
        is_cached: whether they are from the cache.
    """
    metadata = rows.metadata
    outcome = "from the cache" if is_cached else "tokenised"
    if not request.recorded:
        outcome = "prepared before"
    say(
        "data",
        f"{metadata.dataset or ' '.join(rows.eval_names)}: "
        f"{pluralize(metadata.records, 'record')}, {metadata.train_tokens:,} train tokens, "
        f"{metadata.eval_tokens:,} eval tokens, vocabulary {metadata.vocabulary:,} "
        f"({metadata.tokenizer}); {outcome}",
    )
    if request.takes_conversations and request.train_names:
        formats = dict.fromkeys(source.format for source in request.sources)
        say("task", f"{_TASKS[metadata.task]}: the records are {', '.join(formats)}")
    if request.max_length == "auto":
        say("lengths", f"--max_length auto is {metadata.block_size:,}")
    audit = metadata.audit
    if audit is not None:
        for line in audit.lines():
            say("audit", line)
        if audit.overlong > (1 - COVERED_SHARE) * audit.examples:
            overlong = f"{audit.overlong:,} of {audit.examples:,} {is_or_are(audit.overlong)}"
            say(
                "lengths",
                f"{overlong} longer than --max_length {metadata.block_size:,}; "
                f"--max_length auto holds {COVERED_SHARE:.1%}",
            )
    eval_audit = metadata.eval_audit
    if eval_audit and (eval_audit.bad or eval_audit.overlong or eval_audit.untrained):
        say("eval", eval_audit.left_out())
    _describe_shares(rows, request.train_names)


def _describe_shares(rows: Tokenized, names: list[str]) -> None:
    """Print each data set's share of the rows that a run draws, and of their target tokens.

    The two differ, because rows of text are full of targets and rows of conversations are not.
    """
    metadata = rows.metadata
    if len(metadata.source_rows) < 2:
        return

    # Without a mixture every row is drawn once per epoch.
    drawn_rows = metadata.source_rows if rows.mixture is None else rows.mixture.counts
    targets_per_row = np.array(metadata.source_targets) / metadata.source_rows
    row_shares = np.array(drawn_rows) / sum(drawn_rows)
    target_shares = row_shares * targets_per_row / np.dot(row_shares, targets_per_row)
    shares = [
        f"{name} {drawn:.1%} of rows, {targets:.1%} of target tokens"
        for name, drawn, targets in zip(short_names(names), row_shares, target_shares, strict=True)
    ]
    say("mixture", "; ".join(shares))
