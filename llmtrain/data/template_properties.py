"""The properties of a chat template, found by rendering short conversations.

Templates differ in ways that they do not declare: whether the arguments of a call are an object or
JSON text, which field holds reasoning, whether reasoning is shown at all, how a prompt asks for an
answer without reasoning, and which token ends a turn.
"""

import re
from collections.abc import Collection, Iterable
from typing import Literal, TypeAlias

from llmtrain.data.jinja_template import JinjaTemplate, TemplateOptions, trial
from llmtrain.data.messages import REASONING, BadRecord, Message
from llmtrain.data.sources import Fields
from llmtrain.data.tokenizer import FastTokenizer, control_tokens_of
from llmtrain.files import json_text

# How a template takes the arguments of a call: as an object, or as a string of JSON.
ArgumentsType: TypeAlias = Literal["object", "string"]

# The variable of templates that asks for a prompt with or without reasoning.
REASONING_OPTION = "enable_thinking"
OPEN_THINK_TAG = re.compile(r"<think>\s*$")

# A conversation that shows how a template renders. It has two turns, because many templates render
# the last turn differently.
EXAMPLE: list[Message] = [
    {"role": "user", "content": "One question."},
    {"role": "assistant", "content": "One answer."},
    {"role": "user", "content": "The other question."},
    {"role": "assistant", "content": "The other answer."},
]
_QUESTION = EXAMPLE[0]
_ANSWER = EXAMPLE[1]
_NEXT_QUESTION = EXAMPLE[2]
# What is added to the example. These texts occur in no template.
_REASONING = "One thought."
_TOWN = "Timbuktu"
_OTHER_TOWN = "Samarkand"
# A tool, and its answer to a call.
_TOOL = {
    "name": "forecast",
    "description": "Tell the weather.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "description": "where"}},
        "required": ["town"],
    },
}
_TOOLS: list[Fields] = [{"type": "function", "function": _TOOL}]
_TOOL_RESULT: Message = {
    "role": "tool",
    "name": "forecast",
    "tool_call_id": "call00001",
    "content": "Rain.",
}


class TemplateProperties:
    """The properties of a tokenizer's chat template.

    Args:
        tokenizer: the tokenizer.
        stop_token_ids: the stop tokens in the model's ``generation_config.json``.

    Attributes:
        stop_token_ids: the tokens at which an answer ends: the end of a text, those in
            ``generation_config.json``, and the token that the template puts after an answer or a
            call.
        control_tokens: the id and the text of each special token, of the stop tokens and of EOS.
            Only the template may write them: in a message they are text.
        jinja: renders with the template.
        arguments_type: the arguments of a call that the template can show; ``None`` if it shows no
            calls.
        shows_several_calls: whether it shows several calls of one message.
        reasoning_field: the field in which the template looks for reasoning; ``None`` if it shows
            none.
        opens_reasoning: whether a prompt already begins the reasoning.
        has_reasoning_option: whether a prompt can ask for an answer with or without reasoning.
    """

    def __init__(self, tokenizer: FastTokenizer, stop_token_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.jinja = JinjaTemplate(tokenizer)
        self._eos = str(tokenizer.eos_token)
        self._special_ids = _special_tokens(tokenizer)
        self._special = any_of(self._special_ids)

        with trial(f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"):
            # The order counts: each step may use what the steps before it have found.
            self.arguments_type = self._find_arguments_type()
            self.shows_several_calls = self._can_show_several_calls()
            self.reasoning_field = self._find_reasoning_field()
            prompt = self._attempt([_QUESTION], add_generation_prompt=True)
            self.opens_reasoning = OPEN_THINK_TAG.search(prompt) is not None
            self.has_reasoning_option = self._has_two_prompts()

            self._end_of_answer = self._find_end_token(_ANSWER, following=_NEXT_QUESTION)
            self._end_of_call = self._end_of_answer
            if self.arguments_type is not None:
                call = _message_with_call(self.arguments_type)
                self._end_of_call = self._find_end_token(call, following=_TOOL_RESULT)
            self.stop_token_ids = self._find_stop_token_ids(stop_token_ids)
        self.control_tokens = control_tokens_of(tokenizer, self.stop_token_ids)
        self._stop_token = any_of(self.control_tokens[id] for id in self.stop_token_ids)
        self._stop_tokens = re.compile(f"(?:{self._stop_token.pattern})+")

    def prompt_options(self, with_reasoning: bool) -> list[TemplateOptions]:
        """Return the options with which to prompt for a turn, in the order in which to try them."""
        if self.has_reasoning_option:
            return [{REASONING_OPTION: with_reasoning}, {}]
        return [{}]

    def end_token_of(self, message: Message) -> str:
        """Return the token that ends a turn with this last message, if the template shows none."""
        return self._end_of_call if "tool_calls" in message else self._end_of_answer

    def find_end(self, text: str, start: int, stop: int) -> re.Match[str] | None:
        """Find the first stop token in a part of a text, with the stop tokens that follow it.

        Args:
            text: the text.
            start: the first character of the part.
            stop: the character after the part.
        """
        first = self._stop_token.search(text, start, stop)
        return first and self._stop_tokens.match(text, first.start(), stop)

    # --- properties that are found by rendering

    def _attempt(
        self,
        messages: list[Message],
        add_generation_prompt: bool = False,
        options: TemplateOptions | None = None,
    ) -> str:
        """Render messages, with a tool if one is called; return an empty text if that fails."""
        tools = _TOOLS if any("tool_calls" in message for message in messages) else None
        data = self.jinja.plain_data(messages, tools)
        try:
            return self.jinja.render(data, add_generation_prompt, options).text
        except BadRecord:
            return ""

    def _find_arguments_type(self) -> ArgumentsType | None:
        """Return the arguments that the template can show; ``None`` if it shows no calls."""
        types: tuple[ArgumentsType, ...] = ("object", "string")
        for arguments_type in types:
            text = self._attempt([_QUESTION, _message_with_call(arguments_type)])
            # Exactly once, neither escaped nor as a Python dict.
            if text.count(_TOWN) == 1 and not re.search(r"""'town': |\\"town""", text):
                return arguments_type
        return None

    def _can_show_several_calls(self) -> bool:
        """Return whether the template shows several calls of one message."""
        if self.arguments_type is None:
            return False
        calls = _message_with_call(self.arguments_type, (_TOWN, _OTHER_TOWN))
        return _OTHER_TOWN in self._attempt([_QUESTION, calls])

    def _find_reasoning_field(self) -> str | None:
        """Return the field whose reasoning the template shows, with an answer or a call."""
        turns = [_ANSWER]
        if self.arguments_type is not None:
            turns.append(_message_with_call(self.arguments_type))
        for field in REASONING:
            texts = [self._attempt([_QUESTION, {**turn, field: _REASONING}]) for turn in turns]
            if any(_REASONING in text for text in texts):
                return field
        return None

    def _has_two_prompts(self) -> bool:
        """Return whether the option leads to two different prompts, with and without reasoning."""
        question = [_QUESTION]
        prompt_with_reasoning = self._attempt(
            question, add_generation_prompt=True, options={REASONING_OPTION: True}
        )
        prompt_without_reasoning = self._attempt(
            question, add_generation_prompt=True, options={REASONING_OPTION: False}
        )
        if not prompt_with_reasoning or not prompt_without_reasoning:
            return False
        return prompt_with_reasoning != prompt_without_reasoning

    def _find_end_token(self, turn: Message, following: Message) -> str:
        """Return the token that ends a turn.

        That is the last special token of its own text; or else the first one of the text of the
        next message; or else EOS.
        """
        text = self._attempt([_QUESTION, turn]).rstrip()
        own = re.search(f"({self._special.pattern})$", text)
        if own:
            return own[0]

        longer_text = self._attempt([_QUESTION, turn, following])
        if not text or not longer_text.startswith(text):
            return self._eos
        after_turn = self._special.match(longer_text[len(text) :].lstrip())
        return after_turn[0] if after_turn else self._eos

    def _find_stop_token_ids(self, stop_token_ids: Collection[int]) -> set[int]:
        """Return all tokens at which an answer ends.

        Two searches find the tokens of the template, because a template may end the last turn of a
        conversation with other tokens than the turns before it: one search looks after the last
        of two answers, the other looks for the end of the first turn.

        Args:
            stop_token_ids: the stop tokens in the model's ``generation_config.json``.
        """
        # An id that is no added token is left out. Either it is an ordinary token, which messages
        # may hold, or the tokenizer does not have it.
        added_tokens = self.tokenizer.added_tokens_decoder
        all_ids = {id for id in stop_token_ids if id in added_tokens}
        if self.tokenizer.eos_token_id is not None:
            all_ids.add(int(self.tokenizer.eos_token_id))
        last_of_conversation = self._last_special_token_after_answer()
        if last_of_conversation is not None:
            all_ids.add(self._special_ids[last_of_conversation])
        for token in (self._end_of_answer, self._end_of_call):
            if token in self._special_ids:
                all_ids.add(self._special_ids[token])
        return all_ids

    def _last_special_token_after_answer(self) -> str | None:
        """Return the last of the special tokens that follow an answer, if there are any."""
        text = self.jinja.render(self.jinja.plain_data(EXAMPLE, tools=None)).text
        after_answer = text.rpartition(EXAMPLE[-1]["content"])[2]
        run = re.search(f"(?:{self._special.pattern})+", after_answer)
        if run is None:
            return None
        tokens: list[str] = self._special.findall(run[0])
        return tokens[-1]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of several texts, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    alternatives = "|".join(map(re.escape, longest_first))
    return re.compile(alternatives or r"(?!)")  # without texts, a pattern that matches nothing


def _special_tokens(tokenizer: FastTokenizer) -> dict[str, int]:
    """Return the special tokens by their text.

    Tokens of white space are left out: templates put white space around messages, where it does
    not mean that a turn ends.
    """
    return {
        token.content: id
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content.strip()
    }


def _message_with_call(arguments_type: ArgumentsType, towns: tuple[str, ...] = (_TOWN,)) -> Message:
    """Return a message that asks a tool for the weather in some towns."""
    calls = []
    for number, town in enumerate(towns, start=1):
        arguments: Fields = {"town": town}
        call = {
            "name": "forecast",
            "arguments": json_text(arguments) if arguments_type == "string" else arguments,
        }
        calls.append({"id": f"call0000{number}", "type": "function", "function": call})
    return {"role": "assistant", "content": "", "tool_calls": calls}
