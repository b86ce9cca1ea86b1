"""Conversations of the usual formats -> messages -> text by a chat template -> token ids, each trained or not.

The assistant's words are trained, with the token that ends its turn; all else is there to be read.
"""

import copy
import json
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from llmtrain.data.sources import Fields
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.errors import UserError, first_line

# A format and the fields that it cannot do without; where two fit a record, the first has it.
_NEEDED = {
    "messages": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
}
FORMATS = tuple(_NEEDED)
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
}
_CHATML = Path(__file__).with_name("chatml.jinja")
_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
Message: TypeAlias = Fields  # as chat templates take it: role, content, and whatever else it had
_Span: TypeAlias = tuple[int, int]  # of characters
_T = TypeVar("_T")

# A conversation that shows how a template renders; two turns, because many treat the last one differently.
_PROBE: list[Message] = [
    {"role": "user", "content": "One question."},
    {"role": "assistant", "content": "One answer."},
    {"role": "user", "content": "The other question."},
    {"role": "assistant", "content": "The other answer."},
]


class BadRow(ValueError):  # noqa: N818 - it says what the row is
    """A conversation that cannot be trained on, and why, in one line; the caller adds its file and line."""


class Conversation(NamedTuple):
    """A conversation as chat templates take it."""

    messages: list[Message]
    tools: list[Fields] | None


class Rendered(NamedTuple):
    """One conversation as tokens.

    Attributes:
        ids: int32 [n].
        trained: bool [n], whether a token is a target.
        trained_bytes: UTF-8 bytes of the trained text; control tokens count none.
        turns: of the assistant.
        ended: turns whose last trained token is one that ends a turn.
    """

    ids: np.ndarray
    trained: np.ndarray
    trained_bytes: int
    turns: int
    ended: int


def recognise(fields: Collection[str]) -> str | None:
    """Return the one of :data:`FORMATS` that a record with these fields has; ``None`` where it is no conversation."""
    return next((format for format, needed in _NEEDED.items() if needed <= set(fields)), None)


def conversation_of(record: Fields, format: str) -> Conversation:
    """Read a record of one of :data:`FORMATS`; raises :class:`BadRow` where the assistant says nothing in it.

    A prompt and a completion are texts or lists of messages. ``None`` counts as absent, everywhere.
    """
    record = {field: _without_none(value) for field, value in record.items() if value is not None}
    given: list[object] = []
    if format in ("sharegpt", "alpaca") and (system := _field(record, "system", str, "")):
        given.append({"role": "system", "content": system})
    if format == "prompt_completion":
        for field, role in (("prompt", "user"), ("completion", "assistant")):
            said = record.get(field)
            given += said if isinstance(said, list) else [{"role": role, "content": _field(record, field, str)}]
    elif format == "alpaca":
        question = [_field(record, "instruction", str), _field(record, "input", str, "")]
        given.append({"role": "user", "content": "\n\n".join(filter(None, question))})
        given.append({"role": "assistant", "content": _field(record, "output", str)})
    else:
        given += _field(record, "messages" if format == "messages" else "conversations", list)
    if not given:
        raise BadRow("it has no messages")
    messages = [_message(message, number) for number, message in enumerate(given, start=1)]
    if all(message["role"] != "assistant" for message in messages):
        raise BadRow("the assistant has no turn in it")
    tools = {"tools": _from_json(record.get("tools") or [])}
    return Conversation(messages, _field(tools, "tools", list) or None)


def _without_none(value: object) -> object:
    """Drop what is ``None``: Parquet gives every object the fields of all of them."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [*map(_without_none, value)] if isinstance(value, list) else value


def _field(record: Fields, name: str, kind: type[_T], default: _T | None = None) -> _T:
    value = record.get(name, default)
    if not isinstance(value, kind):
        raise BadRow(f"field '{name}' is {value!r:.40}, not {'text' if kind is str else 'a list'}")
    return value


def _from_json(value: object) -> object:
    """Return what a JSON string holds; anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _message(given: object, number: int) -> Message:
    if not isinstance(given, dict):
        raise BadRow(f"message {number} is {given!r:.40}, not an object with a role and content")
    name = given.get("role", given.get("from"))
    if not isinstance(name, str) or name not in _ROLES:
        raise BadRow(f"message {number} has the role {name!r:.40}; known are {', '.join(_ROLES)}")
    message = {key: value for key, value in given.items() if key not in ("from", "value", "content", "tool_calls")}
    message["role"] = _ROLES[name]

    calls = given.get("tool_calls")
    if calls:  # "no calls" is best said by saying nothing: templates ask whether the field is there
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadRow(f"message {number} ({name}): its tool_calls are {calls!r:.40}, not a list of objects")
        message["tool_calls"] = [*map(_tool_call, calls)]

    content = given.get("content", given.get("value"))
    if isinstance(content, list) and all(isinstance(one, dict) and one.get("type") == "text" for one in content):
        content = "".join(_field(one, "text", str) for one in content)
    if content is None and calls:
        content = ""  # which more templates take than a field that is absent
    if not isinstance(content, str):
        raise BadRow(f"message {number} ({name}): its content is not text")
    message["content"] = content
    if message["role"] == "assistant" and not calls and not content.strip():
        raise BadRow(f"message {number} ({name}) is empty")
    return message


def _tool_call(call: Fields) -> Fields:
    """Return a call with its arguments as an object, as templates take them; OpenAI has the JSON of one."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = _from_json(call.get("arguments"))
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def template_text(name: str) -> str:
    """Read the template that ``--chat_template`` names; raises :class:`UserError` where there is none."""
    try:
        return (_CHATML if name == "chatml" else Path(name).expanduser()).read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--chat_template {name}: not chatml, and no file to read ({first_line(error)}).") from None


def set_template(tokenizer: FastTokenizer, chat_template: str | None) -> list[int]:
    """Give the tokenizer the template that ``--chat_template`` names: ``None`` (its own), ``chatml`` or a file.

    Returns:
        The tokens that were added to the vocabulary; a model needs rows for them.
    Raises:
        UserError: there is no such template, or it cannot show a conversation.
    """
    before = tokenizer.get_vocab()
    named = "the tokenizer's own chat template" if chat_template is None else f"--chat_template {chat_template}"
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    elif tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template; give --chat_template chatml or a file.")
    if chat_template == "chatml":
        # a model that has always met a BOS before a text shall meet it before a conversation
        if tokenizer.bos_token is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
            tokenizer.chat_template = "{{- bos_token -}}" + template_text(chat_template)
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    try:
        text, _ = _render(tokenizer, _PROBE)
    except BadRow as error:
        raise UserError(f"{named} cannot show two questions and two answers: {error}.") from None
    if any(message["content"] not in text for message in _PROBE):
        raise UserError(f"{named} is not one: it does not show what is said.")
    return sorted(id for token, id in tokenizer.get_vocab().items() if token not in before)


def end_of_turn_ids(tokenizer: FastTokenizer) -> set[int]:
    """Return the tokens that may end an assistant's turn: EOS, and the first that follows its last words."""
    text, _ = _render(tokenizer, _PROBE)
    behind = text.rpartition(_PROBE[-1]["content"])[2]
    known = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    found = _any_of(known).search(behind)
    return {tokenizer.eos_token_id} | ({known[found[0]]} if found else set())


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _render(
    tokenizer: FastTokenizer, messages: list[Message], tools: list[Fields] | None = None, prompted: bool = False
) -> tuple[str, list[_Span] | None]:
    """Return the text, and the spans of its ``{% generation %}`` blocks; ``None`` where the template has none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # its own annotation is wrong
    render = cast("Callable[..., tuple[list[str], list[list[_Span]]]]", render_jinja_template)
    try:
        template = tokenizer.get_chat_template(tools=tools)
        marks = _GENERATION.search(template) is not None
        texts, spans = render(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompted,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template can raise whatever Python can
        raise BadRow(f"the chat template refuses it: {first_line(error)}") from None
    return texts[0], spans[0] if marks else None


class Renderer:
    """Conversations -> tokens, by the chat template that the tokenizer has; see :func:`set_template`.

    The text is tokenised once, whole, as a model meets it. What is trained are spans of characters: the template's
    ``{% generation %}`` blocks, else what each turn adds to the generation prompt before it; either as far as the token
    that ends the turn, behind which a model says nothing. A token is trained where all its characters are.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_of_turn_ids(tokenizer)
        known = tokenizer.added_tokens_decoder
        controls = {id: token.content for id, token in known.items() if token.special or id in self.end_ids}
        self.control_ids = np.array(list(controls))
        self.controls = _any_of(controls.values())
        self.end = re.compile(f"(?:{_any_of(controls[id] for id in self.end_ids).pattern})+")
        text, _ = _render(tokenizer, _PROBE)
        self.ends_every_turn = self.end.match(text.partition(_PROBE[1]["content"])[2].lstrip()) is not None
        # The generation prompt may hold more than every turn begins with, such as "<think>".
        prompt, _ = _render(tokenizer, _PROBE[:1], prompted=True)
        self.surplus = next(prompt[n:] for n in range(len(prompt), -1, -1) if text.startswith(prompt[:n]))
        # A copy, because others have the tokenizer read "<|im_end|>" as text. A post-processor would add nothing here,
        # but may take white space out of the offsets.
        self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = False
        self.backend.post_processor = None

    def __call__(self, conversation: Conversation) -> Rendered:
        """Render one; raises :class:`BadRow` where the template does, and where it cannot be told what to train."""
        messages, tools = conversation
        said = [(f"message {number} ({message['role']})", message) for number, message in enumerate(messages, start=1)]
        for place, shown in [*said, ("field 'tools'", tools)]:
            if found := self.controls.search(json.dumps(shown, ensure_ascii=False, default=str)):
                raise BadRow(f"{place} holds the control token {found[0]}")
        text, spans = _render(self.tokenizer, messages, tools)
        if spans is None:
            spans = self._turns(text, messages, tools)
        spans = [(start, m.end() if (m := self.end.search(text, start, end)) else end) for start, end in spans]
        turns = sum(message["role"] == "assistant" for message in messages)
        spoken = sum(bool(self.end.sub("", text[start:end]).strip()) for start, end in spans)
        if spoken < max(1, min(turns, len(spans))):  # fewer may be marked, or some in several blocks
            raise BadRow("the chat template shows nothing of what the assistant says in one of its turns")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRow("it holds half of a surrogate pair, which is no text") from None

        encoding = self.backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        first, last = np.array(encoding.offsets).T  # a token is text[first:last]
        controls = np.flatnonzero(np.isin(ids, self.control_ids))
        for i in controls:  # some take in the white space beside them
            token = text[first[i] : last[i]]
            first[i], last[i] = last[i] - len(token.lstrip()), first[i] + len(token.rstrip())
        trained = np.zeros(len(ids), bool)
        trained_bytes = ended = 0
        for start, end in spans:
            inside = np.flatnonzero((start <= first) & (last <= end))
            if len(inside):
                trained[inside] = True
                trained_bytes += len(text[first[inside[0]] : last[inside[-1]]].encode())
                ended += int(ids[inside[-1]]) in self.end_ids
        trained_bytes -= sum(len(text[first[i] : last[i]].encode()) for i in controls if trained[i])
        return Rendered(ids, trained, trained_bytes, turns, min(ended, turns))

    def _turns(self, text: str, messages: list[Message], tools: list[Fields] | None) -> list[_Span]:
        """Find the assistant's turns in ``text``, by rendering the conversation as far as each of them."""
        spans: list[_Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, _ = _render(self.tokenizer, messages[:i], tools, prompted=True)
            if not text.startswith(prompt):
                prompt = prompt.removesuffix(self.surplus)
            so_far, _ = _render(self.tokenizer, messages[: i + 1], tools) if i + 1 < len(messages) else (text, None)
            end = len(so_far) if text.startswith(so_far) else -1
            # A turn may read differently where it is not the last, perhaps without its reasoning.
            if end < 0 and self.ends_every_turn and re.search(self.end.pattern + r"\s*\Z", so_far):
                end = found.end() if (found := self.end.search(text, len(prompt))) else -1
            if not text.startswith(prompt) or end < 0:
                raise BadRow(
                    f"the chat template rewrites what came before message {i + 1}, so that turns cannot be told apart; "
                    "give a --chat_template with {% generation %} around what the assistant says"
                )
            spans.append((len(prompt), end))
        return spans
