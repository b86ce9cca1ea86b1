"""A chat template: what it takes, how it shows what the assistant says, and what ends its turns. All found by trying.

Templates differ in ways that nothing announces: the form of a call's arguments, the field that reasoning is in, whether
it is shown at all, how a prompt without reasoning is asked for, which token ends a turn.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeAlias, cast

from llmtrain.data.sources import Fields
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.errors import UserError, first_line

Message: TypeAlias = Fields  # as chat templates take it: role, content, and whatever else it had
Span: TypeAlias = tuple[int, int]  # of characters
Switch: TypeAlias = dict[
    str, bool
]  # asks for a prompt with reasoning, or for one without; empty: what a chat asks for

REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # the fields in which templates look for it
_SWITCH = "enable_thinking"
OPENED = re.compile(r"<think>\s*$")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_REST_OF_THOUGHT = re.compile(
    r"(?:\s*<think>)?(.*?)</think>\s*", re.DOTALL
)  # as such a prompt is answered
_CHATML = Path(__file__).with_name("chatml.jinja")
_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
# A conversation that shows how a template renders; two turns, because many treat the last one differently.
_PROBE: list[Message] = [
    {"role": "user", "content": "One question."},
    {"role": "assistant", "content": "One answer."},
    {"role": "user", "content": "The other question."},
    {"role": "assistant", "content": "The other answer."},
]
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


class BadRow(ValueError):  # noqa: N818 - it says what the row is
    """A conversation that cannot be trained on, and why, in one line; the caller adds its file and line."""


def template_text(name: str) -> str:
    """Read the template that ``--chat_template`` names; raises :class:`UserError` where there is none."""
    try:
        return (_CHATML if name == "chatml" else Path(name).expanduser()).read_text(
            encoding="utf-8"
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--chat_template {name}: not chatml, and no file to read ({first_line(error)})."
        ) from None


def set_template(tokenizer: FastTokenizer, chat_template: str | None) -> list[int]:
    """Give the tokenizer the template that ``--chat_template`` names: ``None`` (its own), ``chatml`` or a file.

    Returns:
        The tokens that were added to the vocabulary; a model needs rows for them.
    Raises:
        UserError: there is no such template, or it cannot show a conversation.
    """
    before = tokenizer.get_vocab()
    named = (
        "the tokenizer's own chat template"
        if chat_template is None
        else f"--chat_template {chat_template}"
    )
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    elif tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template; give --chat_template chatml or a file."
        )
    if chat_template == "chatml":
        # a model that has always met a BOS before a text shall meet it before a conversation
        if tokenizer.bos_token is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
            tokenizer.chat_template = "{{- bos_token -}}" + template_text(chat_template)
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    try:
        text, _ = render(tokenizer, _PROBE)
    except BadRow as error:
        raise UserError(f"{named} cannot show two questions and two answers: {error}.") from None
    if any(message["content"] not in text for message in _PROBE):
        raise UserError(f"{named} is not one: it does not show what is said.")
    return sorted(id for token, id in tokenizer.get_vocab().items() if token not in before)


def render(
    tokenizer: FastTokenizer,
    messages: list[Message],
    tools: list[Fields] | None = None,
    prompted: bool = False,
    switch: Switch | None = None,
) -> tuple[str, list[Span] | None]:
    """Return the text, and the spans of its ``{% generation %}`` blocks; ``None`` where the template has none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # its own annotation is wrong
    rendered = cast("Callable[..., tuple[list[str], list[list[Span]]]]", render_jinja_template)
    try:
        template = tokenizer.get_chat_template(tools=tools)
        marks = _GENERATION.search(template) is not None
        texts, spans = rendered(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompted,
            **tokenizer.special_tokens_map,
            **(switch or {}),
        )
    except Exception as error:  # a template can raise whatever Python can
        raise BadRow(f"the chat template refuses it: {first_line(error)}") from None
    return texts[0], spans[0] if marks else None


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of several texts, the longest first; of none where there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


class ChatTemplate:
    """The template that a tokenizer has; see :func:`set_template`.

    Attributes:
        ends: the tokens at which an answer ends: the end of a text, those of ``generation_config.json`` (``stops``),
            and what the template puts behind an answer or a call.
        controls: the text of each token that no message may hold.
        end: a pattern of the ends, several in a row.
        reasoning: the field in which the template looks for reasoning; ``None`` where it shows none.
        opens_reasoning: whether the prompt has already begun it.
        switched: whether a chat can ask for reasoning, and for none.
    """

    def __init__(self, tokenizer: FastTokenizer, stops: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        known = tokenizer.added_tokens_decoder
        special = {
            token.content: id
            for id, token in known.items()
            if token.special and token.content.strip()
        }
        one, run = any_of(special), re.compile(f"(?:{any_of(special).pattern})+")
        eos = str(tokenizer.eos_token)
        self.ends = {int(tokenizer.eos_token_id), *(id for id in stops if id in known)}
        answered, _ = render(tokenizer, _PROBE)
        if found := run.search(answered.rpartition(_PROBE[-1]["content"])[2]):
            self.ends.add(special[one.findall(found[0])[-1]])

        self._as_text = next((as_text for as_text in (False, True) if self._shows(as_text)), None)
        both = [_PROBE[0], _call(self._as_text or False, "Utopia", "Arcadia")]
        self._several = self._as_text is not None and "Arcadia" in self._attempt(both)
        self.reasoning = next((field for field in REASONING if self._shows_reasoning(field)), None)
        self.opens_reasoning = OPENED.search(self._attempt(_PROBE[:1], True)) is not None
        prompts = {self._attempt(_PROBE[:1], True, {_SWITCH: reasons}) for reasons in (True, False)}
        self.switched = len(prompts) == 2 and "" not in prompts

        def end_of(turn: Message, following: Message) -> str:
            """Return the last special token of a turn's own text, else the first of what follows, else EOS."""
            text = self._attempt([_PROBE[0], turn]).rstrip()
            if own := re.search(f"({one.pattern})$", text):
                return own[0]
            more = self._attempt([_PROBE[0], turn, following])
            behind = (
                one.match(more[len(text) :].lstrip()) if text and more.startswith(text) else None
            )
            return behind[0] if behind else eos

        self._after_answer = self._after_call = end_of(_PROBE[1], _PROBE[2])
        if self._as_text is not None:
            self._after_call = end_of(_call(self._as_text), _RESULT)
        self.ends |= {
            special[stop] for stop in (self._after_answer, self._after_call) if stop in special
        }
        self.controls = {
            id: token.content for id, token in known.items() if token.special or id in self.ends
        }
        self.controls.setdefault(int(tokenizer.eos_token_id), eos)
        self.end = re.compile(f"(?:{any_of(self.controls[id] for id in self.ends).pattern})+")

    def switches(self, reasons: bool) -> list[Switch]:
        """Return the ways to prompt for a turn, the first that fits to be taken."""
        return [{_SWITCH: reasons}, {}] if self.switched else [{}]

    def stop_of(self, message: Message) -> str:
        """Return the token to end a turn with that ends with this message, where the template shows none."""
        return self._after_call if "tool_calls" in message else self._after_answer

    def fitted(self, messages: list[Message]) -> tuple[list[Message], list[str]]:
        """Return messages with calls and reasoning in the form that the template takes, and the reasoning of each.

        Raises :class:`BadRow` where there are calls and the template shows none.
        """
        shown, thoughts = list[Message](), list[str]()
        for number, message in enumerate(messages, start=1):
            pattern = _REST_OF_THOUGHT if self.opens_reasoning else _THOUGHT
            thought, rest = (
                _divided(message, pattern) if message["role"] == "assistant" else ("", message)
            )
            if thought and self.reasoning is not None:
                rest = {**rest, self.reasoning: thought}
            elif (
                not self.opens_reasoning and self.reasoning is None
            ):  # such a template shows it where it is
                rest = {**rest, "content": message["content"]}
            if calls := rest.get("tool_calls"):
                place = f"message {number} ({rest['role']})"
                if self._as_text is None:
                    raise BadRow(f"{place} calls a tool, and the chat template shows no calls")
                if len(calls) > 1 and not self._several:
                    raise BadRow(f"{place} makes several calls; the chat template shows one")
                rest = {**rest, "tool_calls": [_in_form(call, self._as_text) for call in calls]}
            shown.append(rest)
            thoughts.append(thought)
        return shown, thoughts

    def _attempt(
        self, messages: list[Message], prompted: bool = False, switch: Switch | None = None
    ) -> str:
        """Return what is shown, with a tool at hand where one is called; nothing where the template refuses."""
        tools = _TOOLS if any("tool_calls" in message for message in messages) else None
        try:
            return render(self.tokenizer, messages, tools, prompted, switch)[0]
        except BadRow:
            return ""

    def _shows(self, as_text: bool) -> bool:
        """Return whether a call in this form is shown once, neither escaped nor as Python writes it."""
        text = self._attempt([_PROBE[0], _call(as_text)])
        return text.count("Utopia") == 1 and not re.search(r"""'place': |\\"place""", text)

    def _shows_reasoning(self, field: str) -> bool:
        turns = [_PROBE[1]] if self._as_text is None else [_PROBE[1], _call(self._as_text)]
        return any(
            "One thought." in self._attempt([_PROBE[0], {**turn, field: "One thought."}])
            for turn in turns
        )


def _call(as_text: bool, *places: str) -> Message:
    """Return a turn that calls for the weather at some places."""
    functions = [
        {"name": "forecast", "arguments": {"place": place}} for place in places or ("Utopia",)
    ]
    calls = [
        {"id": f"call0000{number}", "function": one}
        for number, one in enumerate(functions, start=1)
    ]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [_in_form(call, as_text) for call in calls],
    }


def _in_form(call: Fields, as_text: bool) -> Fields:
    """Return a call in a "function", as OpenAI has it, its arguments an object or JSON text.

    Arguments that are no object stay as they are.
    """
    function: Fields = call["function"] if isinstance(call.get("function"), dict) else call
    rest = {
        key: value for key, value in call.items() if key not in ("function", "name", "arguments")
    }
    arguments = function.get("arguments", {})
    if as_text and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False, default=str)  # Parquet has dates
    own = {key: value for key, value in function.items() if key not in rest}
    return {**rest, "type": "function", "function": {**own, "arguments": arguments}}


def _divided(message: Message, within: re.Pattern[str]) -> tuple[str, Message]:
    """Return an assistant's reasoning, from whichever field or from its content, and the message without it."""
    rest = {key: value for key, value in message.items() if key not in REASONING}
    thoughts = [message[field].strip() for field in REASONING if field in message]
    if found := within.match(message["content"]):
        thoughts.append(found[1].strip())
        rest["content"] = message["content"][found.end() :]
    return next(filter(None, thoughts), ""), rest
