"""Rows of tokens for a run, and what the model decides about them."""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.data.config import DataConfig, RowConfig
from llmtrain.data.prepare import cached_rows
from llmtrain.data.request import DataRequest
from llmtrain.data.sources import PythonRecords, records_source
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.interfaces.packing_support import PackingSupport

if TYPE_CHECKING:
    from llmtrain.models.config import ModelConfig
    from llmtrain.models.preference_config import PreferenceConfig


def tokenize(
    data: DataConfig,
    max_length: int | Literal["auto"] | None = None,
    chat: RowConfig | None = None,
    model: "ModelConfig | None" = None,
    preference: "PreferenceConfig | None" = None,
    *,
    records: PythonRecords | None = None,
    records_fingerprint: str | None = None,
    unpaired: bool = False,
) -> Tokenized:
    """Return the rows of a data set, from the cache if they were made before.

    Every process calls this before the process group exists. One of them makes the rows, while the
    others wait for its lock. If anything fails, the cache stays as it was.

    A model of Hugging Face decides what the user has left open: the tokenizer, the length of the
    rows, and whether a row may hold several documents. The arguments stay as they are:
    ``decided`` of the result has the values, which ``place`` writes to the settings of the run.

    Args:
        data: the data sets and the tokenizer. ``dataset`` may be empty if there is eval data.
        max_length: the length of the rows; by default that of ``model``. A row of text or
            conversations holds one token more, because its last token predicts nothing. A row of
            preference data holds twice as many, for two answers with their prompts. ``auto``
            chooses a length that holds 99.5 % of the examples.
        chat: how conversations become rows. With a :class:`PairConfig` the records are preference
            data. ``None``: the records are plain text.
        model: the model of Hugging Face to train, if it is one.
        preference: the preference loss, with which the model will be trained.
        records: the records of a recipe that has its own data: a ``datasets.Dataset``, a list of
            texts or of dictionaries of fields, or a function that yields them, always the same
            records in the same order. Then ``data.dataset`` is not read.
        records_fingerprint: a name of your choice for the content of ``records``, such as "v3".
            Change it whenever the records change. Without it, one process on each machine reads
            all records at each start, to notice that they have changed.
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
        from llmtrain.models.packing_support import packing_support  # imports torch

        model = copy.copy(model)
        model.max_length = max_length or model.max_length
        model.fit_max_length()
        max_length = model.max_length
        base = model.of_base()
        if preference is not None:
            preference.check_family(base)
        is_reward_model = preference is not None and preference.is_reward_model
        support = packing_support(base, is_reward_model=is_reward_model)
        max_positions = base.max_positions()
        decided["model_name_or_path"] = model.model_name_or_path
        decided["from_config"] = model.from_config
        decided["tokenizer"] = data.tokenizer or model.tokenizer_name or "bpe:2048"
    if max_length is None:
        raise UserError("tokenize: name a model, or the max_length of the rows.")

    request = DataRequest(
        data.with_values(decided),
        max_length,
        chat=chat,
        support=support,
        trust_remote_code=model is not None and model.trust_remote_code,
        own_source=None if records is None else records_source(records, records_fingerprint),
        unpaired=unpaired or (preference is not None and preference.is_unpaired),
        max_positions=max_positions,
    )
    rows = cached_rows(request)
    if model is not None:
        decided["max_length"] = rows.metadata.block_size
    return replace(rows, decided={**decided, **rows.decided})
