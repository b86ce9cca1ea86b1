"""The chat template of a tokenizer: read it, set it, and check that it shows conversations."""

from pathlib import Path

from llmtrain.data.jinja_template import JinjaTemplate, trial
from llmtrain.data.messages import BadRecord
from llmtrain.data.template_properties import EXAMPLE
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos
from llmtrain.errors import UserError, first_line

DEFAULT_TEMPLATE = "chatml"  # of conversations, if the tokenizer has no template
NO_TEMPLATE = "none"  # the value of --chat_template that trains plain text without a template
_CHATML = Path(__file__).with_name("chatml.jinja")


def template_text(name: str) -> str:
    """Read the template of ``--chat_template``; ``none`` is an empty one.

    Raises:
        UserError: if there is no such template.
    """
    if name == NO_TEMPLATE:
        return ""
    try:
        path = _CHATML if name == "chatml" else Path(name).expanduser()
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--chat_template {name} is neither chatml, none nor a readable file "
            f"({first_line(error)})."
        ) from None


def set_template(
    tokenizer: FastTokenizer, chat_template: str | None, is_plain_text: bool = False
) -> list[int]:
    """Set the chat template of a tokenizer, and check that it can show a conversation.

    Args:
        tokenizer: the tokenizer.
        chat_template: the value of ``--chat_template``: ``chatml`` or a file; ``none`` removes the
            tokenizer's own template, and ``None`` keeps it, or sets chatml if it has none.
        is_plain_text: the data are prompts and completions of plain text, which can be trained
            without a template.

    Returns:
        The tokens that were added to the vocabulary. A model needs rows for them.

    Raises:
        UserError: if there is no such template, or if it cannot show a conversation.
    """
    if chat_template == NO_TEMPLATE:
        tokenizer.chat_template = None
        return []
    if chat_template is None and tokenizer.chat_template is None:
        if is_plain_text:
            return []
        chat_template = DEFAULT_TEMPLATE

    vocabulary_before = tokenizer.get_vocab()
    name = "the tokenizer's own chat template"
    if chat_template is not None:
        name = f"--chat_template {chat_template}"
        tokenizer.chat_template = template_text(chat_template)

    if chat_template == "chatml":
        # A model that was trained with a BOS before each text gets one before a conversation, too.
        if begins_with_bos(tokenizer):
            tokenizer.chat_template = "{{- bos_token -}}" + template_text(chat_template)
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)

    template = JinjaTemplate(tokenizer)
    try:
        with trial(name):
            text = template.render(template.plain_data(EXAMPLE, tools=None)).text
    except BadRecord as error:
        raise UserError(f"{name} cannot show two questions and two answers: {error}.") from None
    if any(message["content"] not in text for message in EXAMPLE):
        raise UserError(f"{name} does not show the content of messages; use another one.")

    vocabulary = tokenizer.get_vocab()
    return sorted(id for token, id in vocabulary.items() if token not in vocabulary_before)
