"""Chat templates: their properties, found by rendering short conversations.

Templates differ in ways that they do not declare: whether the arguments of a call are an object or
JSON text, which field holds reasoning, whether reasoning is shown at all, how a prompt asks for an
answer without reasoning, and which token ends a turn.
"""

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Literal, TypeAlias, cast

from llmtrain.data.messages import REASONING, BadRecord, Message
from llmtrain.data.sources import Fields
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos
from llmtrain.errors import UserError, first_line
from llmtrain.files import json_text

Span: TypeAlias = tuple[int, int]  # of characters
# An option of the template that asks for a prompt with or without reasoning. If it is empty, the
# template decides.
Switch: TypeAlias = dict[str, bool]
# How a template takes the arguments of a call: as an object, or as JSON text.
ArgumentsForm: TypeAlias = Literal["object", "text"]

_SWITCH = "enable_thinking"
OPENED = re.compile(r"<think>\s*$")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
# If the prompt has already begun the reasoning, an answer may leave out the first tag.
_REST_OF_THOUGHT = re.compile(r"(?:\s*<think>)?(.*?)</think>\s*", re.DOTALL)
DEFAULT_TEMPLATE = "chatml"  # of conversations, if the tokenizer has no template
NO_TEMPLATE = "none"  # the value of --chat_template that trains plain text without a template
_CHATML = Path(__file__).with_name("chatml.jinja")
GENERATION_BLOCK = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")

# A conversation that shows how a template renders. It has two turns, because many templates render
# the last turn differently.
_PROBE: list[Message] = [
    {"role": "user", "content": "One question."},
    {"role": "assistant", "content": "One answer."},
    {"role": "user", "content": "The other question."},
    {"role": "assistant", "content": "The other answer."},
]
# Reasoning, and arguments of calls, that the probe adds. The texts occur nowhere else in it.
_PROBE_THOUGHT = "One thought."
_PLACE = "Utopia"
_OTHER_PLACE = "Arcadia"
# A tool, and its answer to a call.
_RESULT: Message = {
    "role": "tool",
    "name": "forecast",
    "tool_call_id": "call00001",
    "content": "Rain.",
}
_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "where"}},
}
_TOOL = {
    "name": "forecast",
    "description": "Tell the weather.",
    "parameters": {**_PARAMETERS, "required": ["place"]},
}
_TOOLS: list[Fields] = [{"type": "function", "function": _TOOL}]


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

    try:
        text, _ = render(tokenizer, _PROBE)
    except BadRecord as error:
        raise UserError(f"{name} cannot show two questions and two answers: {error}.") from None
    if any(message["content"] not in text for message in _PROBE):
        raise UserError(f"{name} does not show the content of messages; use another one.")

    vocabulary = tokenizer.get_vocab()
    return sorted(id for token, id in vocabulary.items() if token not in vocabulary_before)


def render(
    tokenizer: FastTokenizer,
    messages: list[Message],
    tools: list[Fields] | None = None,
    add_generation_prompt: bool = False,
    switch: Switch | None = None,
) -> tuple[str, list[Span] | None]:
    """Render messages with the chat template of a tokenizer.

    Args:
        tokenizer: the tokenizer.
        messages: the messages.
        tools: the tools that the messages may call.
        add_generation_prompt: end the text with the words that ask for an answer.
        switch: an option of the template.

    Returns:
        The text, and the spans of its ``{% generation %}`` blocks. The spans are ``None`` if the
        template has no such blocks.

    Raises:
        BadRecord: if the template raises an error.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # The annotation of render_jinja_template is wrong.
    render_all = cast("Callable[..., tuple[list[str], list[list[Span]]]]", render_jinja_template)
    try:
        template = tokenizer.get_chat_template(tools=tools)
        has_marks = GENERATION_BLOCK.search(template) is not None
        texts, spans = render_all(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=has_marks,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens_map,
            **(switch or {}),
        )
    except Exception as error:  # a template can raise any error
        raise BadRecord(f"the chat template refuses it: {first_line(error)}") from None
    return texts[0], spans[0] if has_marks else None


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of several texts, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    alternatives = "|".join(map(re.escape, longest_first))
    return re.compile(alternatives or r"(?!)")  # without texts, a pattern that matches nothing


class ChatTemplate:
    """The chat template of a tokenizer, and its properties; see :func:`set_template`.

    Args:
        tokenizer: the tokenizer.
        stop_token_ids: the stop tokens in the model's ``generation_config.json``.

    Attributes:
        stop_token_ids: the tokens at which an answer ends: the end of a text, those in
            ``generation_config.json``, and the token that the template puts after an answer or a
            call.
        control_tokens: the id and the text of each special token, of the stop tokens and of EOS.
            Only the template may write them: in a message they are text.
        reasoning_field: the field in which the template looks for reasoning; ``None`` if it shows
            none.
        opens_reasoning: whether a prompt already begins the reasoning.
        has_switch: whether a prompt can ask for an answer with or without reasoning.
    """

    def __init__(self, tokenizer: FastTokenizer, stop_token_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._eos = str(tokenizer.eos_token)
        self._special_ids = _special_tokens(tokenizer)
        self._special = any_of(self._special_ids)

        # The order counts: each step may use what the steps before it have found.
        self._arguments_form = self._find_form_of_arguments()
        self._shows_several_calls = self._can_show_several_calls()
        self.reasoning_field = self._find_reasoning_field()
        self.opens_reasoning = self._prompt_begins_reasoning()
        self.has_switch = self._has_two_prompts()

        self._end_of_answer = self._find_end_token(_PROBE[1], following=_PROBE[2])
        self._end_of_call = self._find_end_of_call()
        self.stop_token_ids = self._find_stop_token_ids(stop_token_ids)
        self.control_tokens = self._find_control_tokens()
        self._stop_token = any_of(self.control_tokens[id] for id in self.stop_token_ids)
        self._stop_tokens = re.compile(f"(?:{self._stop_token.pattern})+")

    def switches(self, with_reasoning: bool) -> list[Switch]:
        """Return the options with which to prompt for a turn, in the order in which to try them."""
        return [{_SWITCH: with_reasoning}, {}] if self.has_switch else [{}]

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

    def adapt(self, messages: list[Message]) -> tuple[list[Message], list[str]]:
        """Bring calls and reasoning into the form that the template takes.

        Returns:
            The messages, and the reasoning of each; an empty text if it has none.

        Raises:
            BadRecord: if the template cannot show the calls of a message.
        """
        adapted_messages = []
        thoughts = []
        for number, message in enumerate(messages, start=1):
            adapted, thought = self._adapt_reasoning(message)
            calls = adapted.get("tool_calls")
            if calls:
                place = f"message {number} ({adapted['role']})"
                adapted = {**adapted, "tool_calls": self._adapt_calls(calls, place)}
            adapted_messages.append(adapted)
            thoughts.append(thought)
        return adapted_messages, thoughts

    def _adapt_reasoning(self, message: Message) -> tuple[Message, str]:
        """Move the reasoning of a message to the field in which the template looks for it.

        There are four cases:

        - The template has a field, and the message has reasoning: it goes into the field.
        - The template has a field, but the message has no reasoning: the message has no such field
          and no empty tags.
        - The template has no field, and its prompts do not begin the reasoning: the content stays
          as it is. Reasoning at its beginning is shown as a part of it.
        - The template has no field, but its prompts begin the reasoning: the message loses it.

        Returns:
            The message, and its reasoning; an empty text if it has none.
        """
        thought = ""
        adapted = message
        if message["role"] == "assistant":
            pattern = _REST_OF_THOUGHT if self.opens_reasoning else _THOUGHT
            adapted, thought = _separate_reasoning(message, pattern)

        if thought and self.reasoning_field is not None:
            adapted = {**adapted, self.reasoning_field: thought}
        elif not self.opens_reasoning and self.reasoning_field is None:
            # The template knows no reasoning, and shows it as a part of the content.
            adapted = {**adapted, "content": message["content"]}
        return adapted, thought

    def _adapt_calls(self, calls: list[Fields], place: str) -> list[Fields]:
        if self._arguments_form is None:
            raise BadRecord(f"{place} calls a tool, and the chat template shows no calls")
        if len(calls) > 1 and not self._shows_several_calls:
            raise BadRecord(f"{place} makes several calls; the chat template shows one")
        return [_adapt_call(call, self._arguments_form) for call in calls]

    # --- properties that are found by rendering

    def _attempt(
        self,
        messages: list[Message],
        add_generation_prompt: bool = False,
        switch: Switch | None = None,
    ) -> str:
        """Render messages, with a tool if one is called; return an empty text if that fails."""
        tools = _TOOLS if any("tool_calls" in message for message in messages) else None
        try:
            text, _ = render(
                self.tokenizer,
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                switch=switch,
            )
        except BadRecord:
            return ""
        return text

    def _find_form_of_arguments(self) -> ArgumentsForm | None:
        """Return the form of arguments that the template shows; ``None`` if it shows no calls."""
        forms: tuple[ArgumentsForm, ...] = ("object", "text")
        for form in forms:
            if self._shows_call(form):
                return form
        return None

    def _shows_call(self, form: ArgumentsForm) -> bool:
        """Return whether a call is shown exactly once, neither escaped nor as a Python dict."""
        text = self._attempt([_PROBE[0], _call_message(form)])
        return text.count(_PLACE) == 1 and not re.search(r"""'place': |\\"place""", text)

    def _can_show_several_calls(self) -> bool:
        """Return whether the template shows several calls of one message."""
        if self._arguments_form is None:
            return False
        calls = _call_message(self._arguments_form, (_PLACE, _OTHER_PLACE))
        return _OTHER_PLACE in self._attempt([_PROBE[0], calls])

    def _find_reasoning_field(self) -> str | None:
        """Return the field in which the template looks for reasoning."""
        for field in REASONING:
            if self._shows_reasoning(field):
                return field
        return None

    def _shows_reasoning(self, field: str) -> bool:
        """Return whether the reasoning in a field is shown, with an answer or a call."""
        turns = [_PROBE[1]]
        if self._arguments_form is not None:
            turns.append(_call_message(self._arguments_form))
        for turn in turns:
            messages = [_PROBE[0], {**turn, field: _PROBE_THOUGHT}]
            if _PROBE_THOUGHT in self._attempt(messages):
                return True
        return False

    def _prompt_begins_reasoning(self) -> bool:
        """Return whether a prompt ends with the tag that begins reasoning."""
        prompt = self._attempt([_PROBE[0]], add_generation_prompt=True)
        return OPENED.search(prompt) is not None

    def _has_two_prompts(self) -> bool:
        """Return whether the switch leads to two different prompts, with and without reasoning."""
        question = [_PROBE[0]]
        prompt_with_reasoning = self._attempt(
            question, add_generation_prompt=True, switch={_SWITCH: True}
        )
        prompt_without_reasoning = self._attempt(
            question, add_generation_prompt=True, switch={_SWITCH: False}
        )
        if not prompt_with_reasoning or not prompt_without_reasoning:
            return False
        return prompt_with_reasoning != prompt_without_reasoning

    def _find_end_token(self, turn: Message, following: Message) -> str:
        """Return the token that ends a turn.

        That is the last special token of its own text; or else the first one of the text of the
        next message; or else EOS.
        """
        text = self._attempt([_PROBE[0], turn]).rstrip()
        own = re.search(f"({self._special.pattern})$", text)
        if own:
            return own[0]

        longer_text = self._attempt([_PROBE[0], turn, following])
        if not text or not longer_text.startswith(text):
            return self._eos
        after_turn = self._special.match(longer_text[len(text) :].lstrip())
        return after_turn[0] if after_turn else self._eos

    def _find_end_of_call(self) -> str:
        """Return the token that ends a turn with a call."""
        if self._arguments_form is None:
            return self._end_of_answer
        return self._find_end_token(_call_message(self._arguments_form), following=_RESULT)

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
        all_ids = {
            int(self.tokenizer.eos_token_id),
            *(id for id in stop_token_ids if id in added_tokens),
        }
        last_of_conversation = self._last_special_token_after_answer()
        if last_of_conversation is not None:
            all_ids.add(self._special_ids[last_of_conversation])
        for token in (self._end_of_answer, self._end_of_call):
            if token in self._special_ids:
                all_ids.add(self._special_ids[token])
        return all_ids

    def _last_special_token_after_answer(self) -> str | None:
        """Return the last of the special tokens that follow an answer, if there are any."""
        text, _ = render(self.tokenizer, _PROBE)
        after_answer = text.rpartition(_PROBE[-1]["content"])[2]
        run = re.search(f"(?:{self._special.pattern})+", after_answer)
        if run is None:
            return None
        tokens: list[str] = self._special.findall(run[0])
        return tokens[-1]

    def _find_control_tokens(self) -> dict[int, str]:
        """Return the special tokens, the stop tokens and EOS."""
        control_tokens = {
            id: token.content
            for id, token in self.tokenizer.added_tokens_decoder.items()
            if token.special or id in self.stop_token_ids
        }
        control_tokens.setdefault(int(self.tokenizer.eos_token_id), self._eos)
        return control_tokens


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


def _call_message(form: ArgumentsForm, places: tuple[str, ...] = (_PLACE,)) -> Message:
    """Return a message that asks a tool for the weather at some places."""
    calls = []
    for number, place in enumerate(places, start=1):
        function = {"name": "forecast", "arguments": {"place": place}}
        call = {"id": f"call0000{number}", "function": function}
        calls.append(_adapt_call(call, form))
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _adapt_call(call: Fields, form: ArgumentsForm) -> Fields:
    """Return a call in the format of OpenAI: name and arguments in a field ``function``.

    Args:
        call: a call in this format, or with name and arguments as its own fields.
        form: ``text`` to make arguments JSON text instead of an object. Arguments that are no
            object stay as they are.
    """
    moved = ("function", "name", "arguments")
    outer_fields = {key: value for key, value in call.items() if key not in moved}
    if isinstance(call.get("function"), dict):
        # The call has this format. A field that is on both levels, such as an id, stays outside.
        function = {
            key: value for key, value in call["function"].items() if key not in outer_fields
        }
    else:
        # Name and arguments are fields of the call, and move into the function.
        function = {key: value for key, value in call.items() if key in moved}

    arguments = function.get("arguments", {})
    if form == "text" and isinstance(arguments, dict):
        # Parquet has dates, which json cannot write.
        arguments = json_text(arguments, ensure_ascii=False, default=str)
    return {**outer_fields, "type": "function", "function": {**function, "arguments": arguments}}


def _separate_reasoning(message: Message, pattern: re.Pattern[str]) -> tuple[Message, str]:
    """Return an assistant's message without its reasoning, and the reasoning.

    Args:
        message: holds reasoning in one of the fields :data:`REASONING`, or at the beginning of its
            content.
        pattern: matches reasoning at the beginning of the content.
    """
    rest = {key: value for key, value in message.items() if key not in REASONING}
    thoughts = [message[field].strip() for field in REASONING if field in message]
    in_content = pattern.match(message["content"])
    if in_content:
        thoughts.append(in_content[1].strip())
        rest["content"] = message["content"][in_content.end() :]

    for thought in thoughts:
        if thought:
            return rest, thought
    return rest, ""
