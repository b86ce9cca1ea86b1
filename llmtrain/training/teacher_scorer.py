"""A teacher's scores of the targets of rows, for ``llmtrain tokenize`` with ``--loss_top_k``.

The scores are columns of the rows. Training on them needs no teacher.
"""

import functools
from collections.abc import Iterator, Mapping
from contextvars import Context
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from llmtrain.console import can_show_bars
from llmtrain.data.loader import LocalBatches
from llmtrain.data.order import Slot
from llmtrain.data.shards import Column, token_dtype
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.files import JsonObject
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.interfaces.model import ModelBundle
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.config import ModelConfig
from llmtrain.models.distillation import DistillConfig
from llmtrain.models.distillation_objective import LEAST_LOGP, log_probabilities
from llmtrain.models.hub_models import cast_weights, local_folder, origin_of
from llmtrain.models.loss import targets_of
from llmtrain.models.teacher import load_teacher
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.ranks import TrainingAccelerator

# The same rows share a pass however the shards are divided, so that all get the same numbers.
_ROWS_PER_PASS = 4
_POSITIONS_PER_CHUNK = 1024  # whose logits are in memory at a time


class TeacherScorer:
    """Scores rows with a teacher, which is loaded when the first rows are scored.

    A row has a value, or k values, for each of its T labels. They are 0 if the label is -100.

    ============= ================== =============================================================
    teacher_ids   [T, k]             the teacher's k likeliest tokens, the likeliest first
    teacher_logps float16 [T, k]     their log-probabilities at ``--temperature``
    teacher_rest  float32 [T]        the log of the probability of all other tokens, at the same
    teacher_logp  float32 [T]        the log-probability of the label, always at temperature 1
    ============= ================== =============================================================

    No log-probability is below -10,000. If the teacher's head has more rows than the tokenizer has
    tokens, these rows count as other tokens.

    Args:
        distill: the teacher, the temperature and k.
        student: how the model that learns from the rows is used.

    Attributes:
        precision: see :class:`llmtrain.data.request.Scorer`.
    """

    def __init__(self, distill: DistillConfig, student: ModelConfig | None) -> None:
        if distill.teacher_model_name_or_path is None:
            raise UserError("--loss_top_k needs --teacher_model_name_or_path, to score the rows.")
        self.distill = distill
        self.student = student or ModelConfig()
        self.precision = ""
        self._loaded: tuple[TrainingAccelerator, ModelBundle] | None = None

    @functools.cached_property
    def fingerprint(self) -> JsonObject:
        """What the scores depend on: the weights of the teacher, the temperature and k."""
        config = ModelConfig(model_name_or_path=self.distill.teacher_model_name_or_path)
        config.resolve_runs()
        Context().run(config.merge_adapter)  # a plan would only write its outline
        name = str(config.model_name_or_path)
        revision = self.distill.teacher_model_revision
        local_folder(name, revision)  # reports a name that is wrong
        return {
            "weights": origin_of(name, revision),
            "temperature": self.distill.temperature,
            "loss_top_k": self.distill.loss_top_k,
        }

    def columns(self, width: int, vocabulary: int) -> Mapping[str, Column]:
        """Return the columns that are added to rows.

        Args:
            width: the number of tokens in a row.
            vocabulary: the number of tokens of the tokenizer.

        Raises:
            UserError: if k is larger than the vocabulary.
        """
        k = self.distill.loss_top_k
        if k > vocabulary:
            raise UserError(
                f"--loss_top_k {k} is more than the vocabulary has: {vocabulary:,} tokens."
            )
        return {
            "teacher_ids": Column(token_dtype(vocabulary), [width, k]),
            "teacher_logps": Column("float16", [width, k]),
            "teacher_rest": Column("float32", [width]),
            "teacher_logp": Column("float32", [width]),
        }

    @torch.no_grad()
    def score(self, rows: Tokenized) -> Iterator[dict[str, np.ndarray]]:
        """Yield the columns of a few rows at a time, in the stored order.

        Raises:
            UserError: if the teacher does not fit the rows, or if a score is not finite.
        """
        if not len(rows.train):
            return
        if self._loaded is None:
            # The recipe is planned here, and plans have no weights. An empty context has no plan.
            self._loaded = Context().run(self._load, rows)
        accelerator, teacher = self._loaded
        columns = self.columns(rows.positions + 1, rows.vocabulary)
        batches = LocalBatches(rows.train, _ROWS_PER_PASS, prepare=teacher.prepare_batch)
        compute = functools.partial(self._scores, rows.vocabulary)
        starts = range(0, len(rows.train), _ROWS_PER_PASS)
        for start in tqdm(starts, desc="teacher", leave=False, disable=not can_show_bars()):
            stop = min(start + _ROWS_PER_PASS, len(rows.train))
            slots = [Slot(row, row) for row in range(start, stop)]
            (batch,) = batches.__getitems__(slots).to(accelerator.device).batches
            with accelerator.autocast():
                scores = teacher.model(**batch, compute=compute)
            if not scores[-1].isfinite().all():
                raise UserError("the teacher's log-probabilities are not finite; check the model.")

            labels = batch["labels"].cpu().numpy()
            is_target = labels != IGNORED
            is_target[:, 0] = False  # nothing predicts it
            values = {}
            for (name, column), score in zip(columns.items(), scores, strict=True):
                values[name] = np.zeros((len(slots), *column.shape), column.dtype)
                values[name][:, : labels.shape[1]][is_target] = score.cpu().numpy()
            yield values

    def _load(self, rows: Tokenized) -> tuple[TrainingAccelerator, ModelBundle]:
        """Load the teacher to a GPU, or else to the CPU."""
        accelerator = start_accelerator()
        self.precision = accelerator.mixed_precision
        student = self.student.with_values({"max_length": rows.metadata.block_size})
        teacher = load_teacher(self.distill, student, rows, seed=0)
        if self.precision == "bf16":
            cast_weights(teacher.model, torch.bfloat16, with_frozen=True)
        move_to_devices(accelerator.ranks, teacher, label="teacher")
        teacher.model.eval()
        return accelerator, teacher

    def _scores(self, vocabulary: int, model: Any, batch: Batch) -> list[Tensor]:
        """Return the scores of the N targets of a micro-batch, [N] or [N, k], column by column."""
        targets = targets_of(batch["labels"])
        ids = targets[targets != IGNORED]
        batch["target_positions"] = (targets != IGNORED).flatten().nonzero()[:, 0]
        hidden, logits_of = model.deferred_logits(**batch)

        chunks = []
        for start in range(0, max(len(ids), 1), _POSITIONS_PER_CHUNK):
            chunk = slice(start, start + _POSITIONS_PER_CHUNK)
            logits = logits_of(hidden[chunk]).float()
            logp = log_probabilities(logits).gather(1, ids[chunk, None])[:, 0]
            logps = log_probabilities(logits / self.distill.temperature)
            top = logps[:, :vocabulary].topk(self.distill.loss_top_k)
            others = logps.scatter(1, top.indices, -torch.inf)
            rest = others.logsumexp(1).clamp(min=LEAST_LOGP)
            chunks.append((top.indices, top.values, rest, logp))
        return [torch.cat(parts) for parts in zip(*chunks, strict=True)]
