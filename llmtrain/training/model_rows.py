"""Rows for a model of Hugging Face."""

from llmtrain.data.config import DataConfig, RowConfig
from llmtrain.data.prepare import tokenize
from llmtrain.data.tokenized import Tokenized
from llmtrain.models.config import ModelConfig
from llmtrain.models.packing_support import packing_support
from llmtrain.models.preference_config import PreferenceConfig


def tokenize_for_model(
    data: DataConfig,
    model: ModelConfig,
    chat: RowConfig,
    preference: PreferenceConfig | None = None,
) -> Tokenized:
    """Tokenise a data set for a model of Hugging Face.

    The model decides what the user has left open: the tokenizer, the length of the rows, and
    whether a row may hold several documents. These decisions are written to the settings, and so to
    ``run.json``.

    Args:
        data: the data set.
        model: the model.
        chat: how conversations become rows. With a :class:`PairConfig` the records are preference
            data.
        preference: the preference loss, with which the model will be trained.

    Raises:
        UserError: if the data, the tokenizer or the flags are wrong, or if the model cannot be
            trained.
    """
    model.fit_max_length()
    if preference is not None:
        preference.check_family(model)
    if not data.tokenizer:
        data.tokenizer = model.tokenizer_name or "bpe:2048"

    is_reward_model = preference is not None and preference.is_reward_model
    chat.resolve_packing(packing_support(model, is_reward_model=is_reward_model))
    rows = tokenize(
        data,
        model.max_length,
        chat=chat,
        trust_remote_code=model.trust_remote_code,
        unpaired=preference is not None and preference.is_unpaired,
        max_positions=model.max_positions(),
    )
    model.max_length = rows.metadata.block_size
    return rows
