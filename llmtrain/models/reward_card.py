"""Python code for the card of a reward model, which scores an answer as training did.

A reward model is trained to score an answer at the token that ends it. Transformers scores the last
token of its input that does not pad. The two differ if the chat template writes something after
that token, such as a newline, or if that token is also used for padding.
"""

import json
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_QUESTION = {"role": "user", "content": "What is the capital of France?"}
_ANSWER = {"role": "assistant", "content": "It is Paris."}

_START = """
# Without padding, the last token of the text gives the score.
model.config.pad_token_id = None

"""

_END = """\
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    return model(input_ids=inputs.input_ids).logits.item()

"""


def scoring_code(tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Collection[int]) -> str:
    """Return code that defines ``score``, and calls it with an example.

    It needs the variables ``model`` and ``tokenizer``.

    Args:
        tokenizer: the tokenizer of the model.
        stop_token_ids: the tokens at which an answer ends, besides EOS.

    Returns:
        The code. It is empty if the chat template shows an answer differently from the way it
        prompts for it, because training then builds the text in its own way.
    """
    if tokenizer.chat_template is None:
        begins_with_bos = tokenizer.bos_token_id is not None and tokenizer.encode("")[:1] == [
            tokenizer.bos_token_id
        ]
        beginning = "tokenizer.bos_token + " if begins_with_bos else ""
        return (
            f"{_START}\n"
            "def score(prompt: str, answer: str) -> float:\n"
            '    """Return the score of an answer to a prompt."""\n'
            f"    text = {beginning}prompt + answer + tokenizer.eos_token\n"
            f"{_END}\n"
            f'print(score("{_QUESTION["content"]} ", "{_ANSWER["content"]}"))\n'
        )

    line = _ending_line(tokenizer, stop_token_ids)
    if line is None:
        return ""
    return (
        f"{_START}\n"
        "def score(messages: list[dict[str, str]]) -> float:\n"
        '    """Return the score of the last message, an answer to the messages before it."""\n'
        "    text = tokenizer.apply_chat_template(messages, tokenize=False)\n"
        f"{line}"
        f"{_END}\n"
        f'question = {{"role": "user", "content": "{_QUESTION["content"]}"}}\n'
        f'answer = {{"role": "assistant", "content": "{_ANSWER["content"]}"}}\n'
        "print(score([question, answer]))\n"
    )


def _ending_line(
    tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Collection[int]
) -> str | None:
    """Return the line of code that lets a text end with the token that ends its answer.

    Returns:
        The line; ``None`` if the chat template shows an answer differently from the way it prompts
        for it.
    """
    try:
        text = _render(tokenizer, [_QUESTION, _ANSWER])
        longer_text = _render(tokenizer, [_QUESTION, _ANSWER, _QUESTION])
        prompts = [
            _render(tokenizer, [_QUESTION], add_generation_prompt=True, **options)
            for options in ({"enable_thinking": False}, {})
        ]
    except Exception:  # a template can raise any error
        return None
    if not any(text.startswith(prompt) for prompt in prompts) or _ANSWER["content"] not in text:
        return None

    added_tokens = tokenizer.added_tokens_decoder
    ids = {tokenizer.eos_token_id, *stop_token_ids}
    stop_tokens = [re.escape(added_tokens[id].content) for id in ids if id in added_tokens]
    stop_token = f"(?:{'|'.join(stop_tokens)})+"
    shown = re.search(stop_token, text.rpartition(_ANSWER["content"])[2])
    if shown is not None:
        end = _literal(shown[0])
        return f"    text = text[: text.rindex({end})] + {end}  # without what follows the end\n"

    # The template ends an answer with the first token of the next message, or with no token.
    text = text.rstrip()
    following = None
    if longer_text.startswith(text):
        following = re.match(stop_token, longer_text[len(text) :].lstrip())
    end = _literal(str(tokenizer.eos_token) if following is None else following[0])
    return f"    text = text.rstrip() + {end}  # the template shows no end\n"


def _literal(text: str) -> str:
    """Return a text as Python code, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _render(
    tokenizer: "PreTrainedTokenizerFast", messages: list[dict[str, str]], **options: Any
) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
