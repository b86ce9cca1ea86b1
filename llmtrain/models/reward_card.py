"""Python code for the card of a reward model, which scores an answer as training did.

A reward model is trained to score an answer at the token that ends it. Transformers scores the last
token of its input that does not pad. The two differ if the chat template writes something after
that token, such as a newline, or if that token is also used for padding.
"""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from llmtrain.files import json_text

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


class _Example(NamedTuple):
    """An example conversation, as the chat template renders it.

    Attributes:
        prompts: the question, with the beginning of an answer; one text for each way to prompt.
        text: the question and the answer.
        longer_text: the question, the answer and another question.
    """

    prompts: list[str]
    text: str
    longer_text: str

    @property
    def continues_a_prompt(self) -> bool:
        """Whether the answer is shown behind its prompt, so that training builds the same text."""
        return any(self.text.startswith(prompt) for prompt in self.prompts)

    @property
    def after_answer(self) -> str:
        """What the template writes after the answer."""
        return self.text.rpartition(_ANSWER["content"])[2]

    @property
    def before_next_message(self) -> str:
        """What follows the text in the longer one; empty if the longer one begins differently."""
        text = self.text.rstrip()
        if not self.longer_text.startswith(text):
            return ""
        return self.longer_text[len(text) :].lstrip()


def _ending_line(
    tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Collection[int]
) -> str | None:
    """Return the line of code that lets a text end with the token that ends its answer.

    Returns:
        The line; ``None`` if the chat template shows an answer differently from the way it prompts
        for it.
    """
    example = _render_example(tokenizer)
    if example is None or not example.continues_a_prompt:
        return None

    stop_tokens = _stop_token_pattern(tokenizer, stop_token_ids)
    shown_end = re.search(stop_tokens, example.after_answer)
    if shown_end is not None:
        end = _literal(shown_end[0])
        return f"    text = text[: text.rindex({end})] + {end}  # without what follows the end\n"

    # The template ends an answer with the first token of the next message, or with no token.
    next_token = re.match(stop_tokens, example.before_next_message)
    end = _literal(str(tokenizer.eos_token) if next_token is None else next_token[0])
    return f"    text = text.rstrip() + {end}  # the template shows no end\n"


def _render_example(tokenizer: "PreTrainedTokenizerFast") -> _Example | None:
    """Return the example; ``None`` if the template raises an error or does not show the answer."""
    try:
        example = _Example(
            prompts=[
                _render(tokenizer, [_QUESTION], add_generation_prompt=True, **options)
                for options in ({"enable_thinking": False}, {})
            ],
            text=_render(tokenizer, [_QUESTION, _ANSWER]),
            longer_text=_render(tokenizer, [_QUESTION, _ANSWER, _QUESTION]),
        )
    except Exception:  # a template can raise any error
        return None
    return example if _ANSWER["content"] in example.text else None


def _stop_token_pattern(
    tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Collection[int]
) -> str:
    """Return a regular expression for one or more of the tokens that end an answer."""
    added_tokens = tokenizer.added_tokens_decoder
    ids = {tokenizer.eos_token_id, *stop_token_ids}
    stop_tokens = [re.escape(added_tokens[id].content) for id in ids if id in added_tokens]
    return f"(?:{'|'.join(stop_tokens)})+"


def _literal(text: str) -> str:
    """Return a text as Python code, in double quotes."""
    return json_text(text, ensure_ascii=False)


def _render(
    tokenizer: "PreTrainedTokenizerFast", messages: list[dict[str, str]], **options: Any
) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
