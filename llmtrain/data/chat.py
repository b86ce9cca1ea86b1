"""Conversations of the usual formats -> messages -> text by a chat template -> token ids and what of them is trained.

What is trained is what the assistant says, with the token that ends its turn; all else is there to be read.
"""

import copy
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llmtrain.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# A format and the fields that it cannot do without; where two fit a record, the first has it.
_NEEDED = {
    "messages": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
}
FORMATS = tuple(_NEEDED)
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}

_CHATML = """
{%- if tools -%}
    {{- '<|im_start|>system\\n<tools>\\n' + tools | map('tojson') | join('\\n') + '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
            {%- if message.reasoning_content -%}
                {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
            {%- endif -%}
            {{- message.content -}}
            {%- for call in message.tool_calls -%}
                {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
                {{- '<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' -}}
            {%- endfor -%}
            {{- '<|im_end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- message.content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")

# What is rendered to learn a template's ways; two turns, because many treat the last one differently.
_PROBE = [
    {"role": "user", "content": "One question."},
    {"role": "assistant", "content": "One answer."},
    {"role": "user", "content": "The other question."},
    {"role": "assistant", "content": "The other answer."},
]


class BadRow(ValueError):  # noqa: N818 - it says what the row is
    """What is wrong with one conversation, in one line; the caller says in which file and line it stands."""


class Conversation(NamedTuple):
    """Messages as chat templates take them: ``role``, ``content``, and whatever else a message had."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


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
    """The one of :data:`FORMATS` that a record with these fields has; ``None`` where it is no conversation."""
    return next((format for format, needed in _NEEDED.items() if needed <= set(fields)), None)


def conversation_of(record: dict[str, Any], format: str) -> Conversation:
    """Read a record of one of :data:`FORMATS`; raises :class:`BadRow` where the assistant says nothing in it.

    A prompt and a completion are texts or lists of messages. ``None`` counts as absent, everywhere.
    """
    record = _without_none(record)
    given: list[Any] = []
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


def _without_none(value: Any) -> Any:
    """Parquet gives every object the fields of all of them, ``None`` where it has none."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _field(record: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = record.get(name, default)
    if not isinstance(value, kind):
        raise BadRow(f"field '{name}' is {value!r:.40}, not {'text' if kind is str else 'a list'}")
    return value


def _from_json(value: Any) -> Any:
    """What a JSON string holds; as it is, where it is something else."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _message(given: Any, number: int) -> dict[str, Any]:
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
        message["tool_calls"] = [_tool_call(call) for call in calls]

    content = given.get("content", given.get("value"))
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(_field(part, "text", str) for part in content)
    if content is None and calls:
        content = ""  # which more templates take than a field that is absent
    if not isinstance(content, str):
        raise BadRow(f"message {number} ({name}): its content is not text")
    message["content"] = content
    if message["role"] == "assistant" and not calls and not content.strip():
        raise BadRow(f"message {number} ({name}) is empty")
    return message


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """With its arguments as an object, as templates take them; OpenAI has the JSON of one."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = _from_json(call.get("arguments"))
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def template_text(chat_template: str) -> str:
    """What ``--chat_template`` stands for. Raises :class:`UserError` where it is neither chatml nor a file."""
    if chat_template == "chatml":
        return _CHATML
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--chat_template {chat_template}: not chatml, and no file to read ({first_line(error)})."
        ) from None


def set_template(tokenizer: "PreTrainedTokenizerFast", chat_template: str | None) -> int:
    """Give the tokenizer the template that ``--chat_template`` names: ``None`` (its own), ``chatml`` or a file.

    Returns:
        How many tokens were added to the vocabulary; a model needs rows for them.
    Raises:
        UserError: there is no such template, or it cannot show a conversation.
    """
    before = len(tokenizer)
    named = "the tokenizer's own chat template" if chat_template is None else f"--chat_template {chat_template}"
    if chat_template == "chatml":
        # a model that has always met a BOS before a text shall meet it before a conversation
        begins = tokenizer.bos_token is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{- bos_token -}}" if begins else "") + _CHATML
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    elif chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    elif tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template; give --chat_template chatml or a file.")
    try:
        text, _ = _render(tokenizer, _PROBE)
    except BadRow as error:
        raise UserError(f"{named} cannot show two questions and two answers: {error}.") from None
    if any(message["content"] not in text for message in _PROBE):
        raise UserError(f"{named} is not one: it does not show what is said.")
    return len(tokenizer) - before


def end_of_turn_ids(tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """The tokens that may end an assistant's turn: EOS, and the first that the template puts behind its last words."""
    text, _ = _render(tokenizer, _PROBE)
    behind = text.rpartition(_PROBE[-1]["content"])[2]
    added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    found = _any_of(added).search(behind)
    return {tokenizer.eos_token_id} | ({added[found[0]]} if found else set())


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _render(
    tokenizer: "PreTrainedTokenizerFast",
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text, and the spans of it in ``{% generation %}`` blocks; ``None`` where the template has no such blocks."""
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template  # its annotations are wrong
    try:
        template = tokenizer.get_chat_template(tools=tools)
        marks = _GENERATION.search(template) is not None
        texts, spans = render(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=add_generation_prompt,
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

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_of_turn_ids(tokenizer)
        added = tokenizer.added_tokens_decoder
        controls = {id: token.content for id, token in added.items() if token.special or id in self.end_ids}
        self.control_ids = np.array(list(controls))
        self.controls = _any_of(controls.values())
        self.end = re.compile(f"(?:{_any_of(controls[id] for id in self.end_ids).pattern})+")
        text, _ = _render(tokenizer, _PROBE)
        self.ends_every_turn = self.end.match(text.partition(_PROBE[1]["content"])[2].lstrip()) is not None
        # The generation prompt may hold more than every turn begins with, such as "<think>".
        prompt, _ = _render(tokenizer, _PROBE[:1], add_generation_prompt=True)
        self.beyond = next(prompt[n:] for n in range(len(prompt), -1, -1) if text.startswith(prompt[:n]))
        # A copy, because others have the tokenizer read "<|im_end|>" as text. A post-processor would add nothing here,
        # but may take white space out of the offsets.
        self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = False
        self.backend.post_processor = None

    def __call__(self, conversation: Conversation) -> Rendered:
        """Raises :class:`BadRow` where the template does, and where it cannot be told what to train."""
        messages, tools = conversation
        said = [(f"message {number} ({message['role']})", message) for number, message in enumerate(messages, start=1)]
        for place, part in [*said, ("field 'tools'", tools)]:
            if found := self.controls.search(json.dumps(part, ensure_ascii=False, default=str)):
                raise BadRow(f"{place} holds the control token {found[0]}")
        text, spans = _render(self.tokenizer, messages, tools)
        if spans is None:
            spans = self._turns(text, messages, tools)
        spans = [(start, m.end() if (m := self.end.search(text, start, end)) else end) for start, end in spans]
        turns = sum(message["role"] == "assistant" for message in messages)
        spoken = sum(bool(self.end.sub("", text[start:end]).strip()) for start, end in spans)
        if spoken < max(1, min(turns, len(spans))):  # fewer may be marked, or some in parts
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

    def _turns(self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[tuple[int, int]]:
        """The assistant's turns as spans of ``text``, found by rendering the conversation as far as each of them."""
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, _ = _render(self.tokenizer, messages[:i], tools, add_generation_prompt=True)
            if not text.startswith(prompt):
                prompt = prompt.removesuffix(self.beyond)
            start = len(prompt)
            so_far, _ = _render(self.tokenizer, messages[: i + 1], tools) if i + 1 < len(messages) else (text, None)
            end = len(so_far) if text.startswith(so_far) else -1
            # A turn may read differently where it is not the last, perhaps without its reasoning.
            if end < 0 and self.ends_every_turn and re.search(self.end.pattern + r"\s*\Z", so_far):
                end = found.end() if (found := self.end.search(text, start)) else -1
            if not text.startswith(prompt) or end < 0:
                raise BadRow(
                    f"the chat template rewrites what came before message {i + 1}, so that turns cannot be told apart; "
                    "give a --chat_template with {% generation %} around what the assistant says"
                )
            spans.append((start, end))
        return spans
