"""The chat template of a tokenizer: render messages with it, and find out what it shows.

Templates differ in ways that they do not declare: whether the arguments of a call are an object or
JSON text, which field holds reasoning, whether reasoning is shown at all, how a prompt asks for an
answer without reasoning, and which token ends a turn. Short conversations show that.
"""

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from llmtrain.data.messages import (
    REASONING,
    BadRecord,
    Message,
    separate_reasoning,
)
from llmtrain.data.readers import Fields
from llmtrain.data.tokenizer import EXAMPLE, FastTokenizer, control_tokens_of
from llmtrain.errors import first_line
from llmtrain.files import json_text

Span: TypeAlias = tuple[int, int]  # of characters
# Variables of a template beside the messages and the tools, such as {"enable_thinking": False}.
TemplateOptions: TypeAlias = dict[str, bool]
# How a template takes the arguments of a call: as an object, or as a string of JSON.
ArgumentsType: TypeAlias = Literal["object", "string"]

# The variable of templates that asks for a prompt with or without reasoning.
REASONING_OPTION = "enable_thinking"
OPEN_THINK_TAG = re.compile(r"<think>\s*$")

_GENERATION_TAG = re.compile(r"({%[-+]?\s*)(end)?generation(\s*[-+]?%})")
_QUESTION, _ANSWER, _NEXT_QUESTION, _ = EXAMPLE
# What is added to the example. These texts occur in no template.
_THOUGHT = "One thought."
_TOWNS = ("Timbuktu", "Samarkand")
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


class ChatTemplate:
    """The chat template of a tokenizer, with the properties that rendered examples show.

    Args:
        tokenizer: the tokenizer.
        stop_token_ids: the stop tokens in the model's ``generation_config.json``.

    Attributes:
        stop_token_ids: the tokens at which an answer ends: EOS, those in
            ``generation_config.json``, and the token that the template puts after an answer or a
            call.
        control_tokens: the id and the text of each special token, of the stop tokens and of EOS.
            Only the template may write them: in a message they are text.
        stop_tokens: matches a stop token with the stop tokens that follow it.
        has_marks: whether ``{% generation %}`` blocks mark the text that is trained.
        opens_reasoning: whether a prompt already begins the reasoning.
        has_reasoning_option: whether a prompt can ask for an answer with or without reasoning.
        end_of_answer: the token that ends an answer, if the template shows none after it.
        end_of_call: the token that ends a call, likewise.
    """

    def __init__(self, tokenizer: FastTokenizer, stop_token_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._special_tokens = tokenizer.special_tokens_map
        self.has_marks = _GENERATION_TAG.search(str(tokenizer.chat_template)) is not None

        # The type of arguments with which a call is shown once, neither escaped nor as a dictionary
        # of Python; None if the template shows no calls.
        self._arguments_type: ArgumentsType | None = None
        types: tuple[ArgumentsType, ...] = ("string", "object")  # the second is preferred
        for arguments_type in types:
            text = self._attempt([_QUESTION, _message_with_calls(arguments_type, _TOWNS[:1])])
            if text.count(_TOWNS[0]) == 1 and not re.search(r"""'town': |\\"town""", text):
                self._arguments_type = arguments_type

        turns = [_ANSWER]
        self._shows_several_calls = False
        if self._arguments_type is not None:
            turns.append(_message_with_calls(self._arguments_type, _TOWNS[:1]))
            calls = _message_with_calls(self._arguments_type, _TOWNS)
            self._shows_several_calls = _TOWNS[1] in self._attempt([_QUESTION, calls])

        with_reasoning = [{**turn, **dict.fromkeys(REASONING, _THOUGHT)} for turn in turns]
        texts = [self._attempt([_QUESTION, turn]) for turn in with_reasoning]
        self._shows_reasoning = any(_THOUGHT in text for text in texts)

        prompt = self._attempt([_QUESTION], add_generation_prompt=True)
        self.opens_reasoning = OPEN_THINK_TAG.search(prompt) is not None
        prompts = {
            self._attempt([_QUESTION], {REASONING_OPTION: value}, add_generation_prompt=True)
            for value in (True, False)
        }
        self.has_reasoning_option = len(prompts) == 2 and "" not in prompts

        self.stop_token_ids = self._find_stop_token_ids(stop_token_ids)
        self.control_tokens = control_tokens_of(tokenizer, self.stop_token_ids)
        stop_token = any_of(self.control_tokens[id] for id in self.stop_token_ids)
        self.stop_tokens = re.compile(f"(?:{stop_token.pattern})+")

    def render(
        self,
        messages: list[Message],
        tools: list[Fields] | None,
        options: TemplateOptions | None = None,
        add_generation_prompt: bool = False,
        marks: list[Span] | None = None,
    ) -> str:
        """Render messages, as ``tokenizer.apply_chat_template`` does.

        Args:
            messages: the messages, which hold JSON values only.
            tools: the tools, likewise.
            options: further variables of the template.
            add_generation_prompt: end the text with the words that ask for an answer.
            marks: the spans of ``{% generation %}`` blocks are added to it. Finding them takes
                longer.

        Raises:
            BadRecord: if the template raises an error.
        """
        from transformers.utils import chat_template_utils

        # Its annotations are narrower than what it takes and returns.
        render: Any = chat_template_utils.render_jinja_template
        source = self.tokenizer.get_chat_template(tools=tools)
        if self.has_marks and marks is None:
            source = _without_marks(source)
        try:
            [text], all_spans = render(
                [messages],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=marks is not None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **(options or {}),
            )
        except Exception as error:  # a template can raise any error
            raise BadRecord(f"the chat template refuses it: {first_line(error)}") from None
        if marks is not None:
            marks.extend(*all_spans)
        return str(text)

    def adapt(self, messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
        """Bring the calls and the reasoning of messages into the form that the template takes.

        Returns:
            The messages, and the reasoning of each; an empty text if it has none.

        Raises:
            BadRecord: if the template cannot show the calls of a message.
        """
        adapted_messages = []
        all_reasoning = []
        for number, message in enumerate(messages, start=1):
            adapted = {**message}
            reasoning = ""
            if message["role"] == "assistant":
                adapted, reasoning = separate_reasoning(message, is_begun=self.opens_reasoning)
                if not self._shows_reasoning and not self.opens_reasoning:
                    adapted["content"] = message["content"]
                elif self._shows_reasoning and reasoning:
                    adapted["reasoning_content"] = reasoning

            calls = message.get("tool_calls", [])
            if calls:
                place = f"message {number} ({message['role']})"
                if self._arguments_type is None:
                    raise BadRecord(f"{place} calls a tool, and the chat template shows no calls")
                if len(calls) > 1 and not self._shows_several_calls:
                    raise BadRecord(f"{place} makes several calls; the chat template shows one")
                if self._arguments_type == "string":
                    adapted["tool_calls"] = [_with_text_arguments(call) for call in calls]
            adapted_messages.append(adapted)
            all_reasoning.append(reasoning)
        return adapted_messages, all_reasoning

    def _attempt(
        self,
        messages: list[Message],
        options: TemplateOptions | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render messages, with a tool if one is called; return an empty text if that fails."""
        tools = _TOOLS if any("tool_calls" in message for message in messages) else None
        try:
            return self.render(messages, tools, options, add_generation_prompt)
        except BadRecord:
            return ""

    def _find_stop_token_ids(self, stop_token_ids: Collection[int]) -> set[int]:
        """Return all tokens at which an answer ends.

        A template may end the last turn of a conversation with other tokens than the turns before
        it, so the end of a first turn and that of the last of two answers are looked at.
        """
        # An id that is no added token is left out. Either it is an ordinary token, which messages
        # may hold, or the tokenizer does not have it.
        added_tokens = self.tokenizer.added_tokens_decoder
        ids = {id for id in stop_token_ids if id in added_tokens}
        if self.tokenizer.eos_token_id is not None:
            ids.add(int(self.tokenizer.eos_token_id))

        # Templates put white space around messages, where it does not mean that a turn ends.
        special_ids = {
            token.content: id
            for id, token in added_tokens.items()
            if token.special and token.content.strip()
        }
        special = any_of(special_ids)
        self.end_of_answer = self._find_end_token(special, _ANSWER, following=_NEXT_QUESTION)
        self.end_of_call = self.end_of_answer
        if self._arguments_type is not None:
            call = _message_with_calls(self._arguments_type, _TOWNS[:1])
            self.end_of_call = self._find_end_token(special, call, following=_TOOL_RESULT)

        after_answer = self.render(EXAMPLE, tools=None).rpartition(EXAMPLE[-1]["content"])[2]
        last_run = re.search(f"(?:{special.pattern})+", after_answer)
        ends = special.findall(last_run[0])[-1:] if last_run else []
        for end in [*ends, self.end_of_answer, self.end_of_call]:
            if end in special_ids:
                ids.add(special_ids[end])
        return ids

    def _find_end_token(self, special: re.Pattern[str], turn: Message, following: Message) -> str:
        """Return the token that ends a turn.

        That is the last special token of its own text; or else the first one of the text of the
        next message; or else EOS.
        """
        text = self._attempt([_QUESTION, turn]).rstrip()
        own = re.search(f"({special.pattern})$", text)
        if own:
            return own[0]

        eos = str(self.tokenizer.eos_token)
        longer_text = self._attempt([_QUESTION, turn, following])
        if not text or not longer_text.startswith(text):
            return eos
        after_turn = special.match(longer_text[len(text) :].lstrip())
        return after_turn[0] if after_turn else eos


@functools.lru_cache
def _without_marks(source: str) -> str:
    """Replace the generation blocks of a template by blocks that do nothing.

    A generation block is a call of a macro, which takes as long as all else that is rendered of a
    message.
    """
    return _GENERATION_TAG.sub(r"\1\2with\3", source)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of several texts, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    alternatives = "|".join(map(re.escape, longest_first))
    return re.compile(alternatives or r"(?!)")  # without texts, a pattern that matches nothing


def _with_text_arguments(call: Fields) -> Fields:
    """Return a call whose arguments are JSON text."""
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, dict):
        # Parquet has dates, which json cannot write.
        arguments = json_text(arguments, ensure_ascii=False, default=str)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _message_with_calls(arguments_type: ArgumentsType, towns: Sequence[str]) -> Message:
    """Return a message that asks a tool for the weather in some towns."""
    calls = []
    for number, town in enumerate(towns, start=1):
        arguments: Fields = {"town": town}
        function = {
            "name": "forecast",
            "arguments": json_text(arguments) if arguments_type == "string" else arguments,
        }
        calls.append({"id": f"call0000{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}
