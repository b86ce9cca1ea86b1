"""Decide how rows are packed for a model, before they are made."""

from llmtrain.data.config import PairConfig
from llmtrain.models.meta_models import check_causal_lm_class
from llmtrain.models.packing_support import packing_support
from llmtrain.training.settings import AnySettings


def resolve_packing(settings: AnySettings) -> None:
    """Set ``--packing`` and ``--share_prompts`` to what the model can do, unless the user set them.

    Call it before :func:`llmtrain.tokenize`. A class that lets packed documents see each other is
    trained with one document in each row, and :func:`llmtrain.tokenize` logs that if the data have
    conversations.

    Args:
        settings: settings with a ``ModelConfig``, and with chat or preference data.

    Raises:
        UserError: if transformers has no class by which the model could be trained.
    """
    is_reward_model = settings.preference is not None and settings.preference.is_reward_model
    if not is_reward_model:
        check_causal_lm_class(settings.model)

    chat = settings.chat
    if chat is None:
        return
    is_packing_open = chat.packing is None
    is_sharing_open = isinstance(chat, PairConfig) and chat.share_prompts is None
    if not is_packing_open and not (is_sharing_open and chat.is_packed):
        return

    support = packing_support(settings.model)
    if support is None:
        return

    if is_packing_open:
        chat.packing = support.packs
        rows = "pairs" if isinstance(chat, PairConfig) else "conversations"
        if support.problem:
            chat.packing_notes.append(
                f"{rows} are not packed: it is not known whether {support.class_name} keeps packed "
                f"documents apart, because {support.problem} (--packing packs them)"
            )
        elif not support.packs:
            chat.packing_notes.append(
                f"{rows} are not packed: {support.class_name} lets the documents of a packed row "
                "see each other"
            )

    if isinstance(chat, PairConfig) and is_sharing_open:
        chat.share_prompts = support.shares_prompts
        if chat.is_packed and not chat.shares_prompts:
            reason = f"{support.class_name} cannot share it between two answers"
            if support.problem:
                reason = (
                    f"it is not known whether {support.class_name} can share it between two "
                    f"answers, because {support.problem} (--share_prompts shares it)"
                )
            chat.packing_notes.append(f"each answer has its own copy of the prompt: {reason}")
