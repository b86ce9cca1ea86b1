"""Render conversations with a compiled chat template, and find out what the text depends on.

A conversation of n turns has n prompts. To render the text of each would take time that grows with
the square of n, so :class:`JinjaTemplate` renders the complete conversation once, and notes which
part of the text had been written when the template first looked at each message. That part cannot
depend on the message, so it is also the beginning of every shorter conversation.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from llmtrain.data.chat_template import GENERATION_BLOCK, Span, Switch
from llmtrain.data.messages import REASONING, BadRecord, Message
from llmtrain.data.sources import Fields
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.errors import first_line

if TYPE_CHECKING:
    import jinja2


_MOST_PIECES = 32


class Rendering(NamedTuple):
    """A conversation as text.

    Attributes:
        text: the text.
        marks: the spans of the ``{% generation %}`` blocks; ``None`` if the template has no such
            blocks.
        known: int [messages + 1]. The first ``known[i]`` characters do not depend on the messages
            from number ``i`` on, so the text of the first ``i`` messages begins with them.
    """

    text: str
    marks: list[Span] | None
    known: list[int]


class PlainData(NamedTuple):
    """Messages and tools as the objects that a template gets."""

    messages: list[Message]
    tools: list[Fields] | None


class JinjaTemplate:
    """The compiled chat template of a tokenizer.

    It does what ``transformers.utils.chat_template_utils.render_jinja_template`` does, but messages
    are converted once instead of for each text.

    Args:
        tokenizer: a tokenizer with a chat template.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._compiled: dict[bool, _CompiledTemplate] = {}

    def plain_data(self, messages: list[Message], tools: list[Fields] | None) -> PlainData:
        """Convert messages and tools to the objects that a template gets.

        Objects that are not JSON become their names, and reasoning is in all fields in which
        templates look for it.

        Raises:
            BadRecord: if a tool is no object.
        """
        for tool in tools or []:
            if not isinstance(tool, dict):
                raise BadRecord(f"field 'tools' holds {tool!r:.40}, not an object")
        # The usual case, in which there is nothing to convert.
        if tools is None and all(map(_has_only_texts, messages)):
            return PlainData(messages, tools)

        from transformers.utils import chat_template_utils

        # transformers hands its templates objects that these two functions have converted. Versions
        # without them convert nothing.
        convert = getattr(chat_template_utils, "_plain_template_data", _unchanged)
        add_aliases = getattr(chat_template_utils, "_alias_reasoning_fields", _unchanged)
        return PlainData(add_aliases(convert(messages)), convert(tools))

    def render(
        self, data: PlainData, add_generation_prompt: bool = False, switch: Switch | None = None
    ) -> str:
        """Render messages.

        Args:
            data: the messages and tools.
            add_generation_prompt: end the text with the words that ask for an answer.
            switch: an option of the template.

        Raises:
            BadRecord: if the template raises an error.
        """
        try:
            compiled = self._compiled_for(data.tools)
            variables = self._variables(data, add_generation_prompt, switch)
            return "".join(compiled.pieces(data.messages, variables))
        except Exception as error:  # a template can raise any error
            raise _refusal(error) from None

    def render_completely(self, data: PlainData, switch: Switch | None = None) -> Rendering:
        """Render a complete conversation, and find out what each part of the text depends on.

        If a template does not accept the object that watches it, the text is rendered again from a
        list, and nothing is known of it.

        Args:
            data: the messages and tools.
            switch: an option of the template.

        Raises:
            BadRecord: if the template raises an error.
        """
        try:
            compiled = self._compiled_for(data.tools)
        except Exception as error:  # the template cannot be parsed, say
            raise _refusal(error) from None
        variables = self._variables(data, add_generation_prompt=False, switch=switch)

        first_looks: list[int | None] = [None] * len(data.messages)
        output = _Output()
        watched = _WatchedMessages(data.messages, first_looks, output)
        try:
            marks = output.generate(compiled, watched, variables)
        except Exception:  # the template may need a list; it may also refuse the conversation
            first_looks = [0] * len(data.messages)
            output = _Output()
            try:
                marks = output.generate(compiled, data.messages, variables)
            except Exception as error:
                raise _refusal(error) from None

        text = "".join(output.pieces)
        return Rendering(
            text, marks if compiled.has_marks else None, _known(first_looks, len(text))
        )

    def _compiled_for(self, tools: list[Fields] | None) -> "_CompiledTemplate":
        """Return the template for conversations with or without tools."""
        has_tools = tools is not None
        if has_tools not in self._compiled:
            source = self._tokenizer.get_chat_template(tools=tools)
            self._compiled[has_tools] = _CompiledTemplate(source)
        return self._compiled[has_tools]

    def _variables(
        self, data: PlainData, add_generation_prompt: bool, switch: Switch | None
    ) -> Fields:
        """Return all variables of a template except the messages."""
        variables: Fields = {
            **self._special_tokens,
            "tools": data.tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables.update(switch or {})
        return variables


class _CompiledTemplate:
    """A compiled template.

    Args:
        source: the text of the template.

    Attributes:
        has_marks: whether it has ``{% generation %}`` blocks.
    """

    def __init__(self, source: str) -> None:
        from transformers.utils import chat_template_utils

        # There is no public function that compiles a template with all that templates use.
        compiled = chat_template_utils._compile_jinja_template(source)
        self._template = cast("jinja2.Template", compiled)
        self._globals = dict(self._template.globals)
        self.has_marks = GENERATION_BLOCK.search(source) is not None

    def pieces(self, messages: Sequence[Message], variables: Fields) -> Iterator[str]:
        """Yield the text of messages in pieces, as the template writes them."""
        # Jinja's own methods make such a dictionary from a chain of mappings, which takes longer
        # than to render a short conversation.
        context = self._template.new_context(
            {**self._globals, **variables, "messages": messages}, shared=True
        )
        return self._template.root_render_func(context)

    def tracker(
        self, pieces: list[str], marks: list[Span]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the spans of generation blocks are appended to ``marks``."""
        environment: Any = self._template.environment  # transformers adds a method to it
        return cast(
            "contextlib.AbstractContextManager[None]", environment.activate_tracker(pieces, marks)
        )


class _Output:
    """The text that a template has written so far.

    Attributes:
        pieces: the text in pieces.
        length: the number of characters.
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.length = 0

    def generate(
        self, compiled: _CompiledTemplate, messages: Sequence[Message], variables: Fields
    ) -> list[Span]:
        """Let a template write its text, and return the spans of its generation blocks."""
        marks: list[Span] = []
        if compiled.has_marks:
            with compiled.tracker(self.pieces, marks):
                self._extend(compiled.pieces(messages, variables))
        else:
            self._extend(compiled.pieces(messages, variables))
        return marks

    def _extend(self, pieces: Iterator[str]) -> None:
        for piece in pieces:
            self.pieces.append(piece)
            self.length += len(piece)
            if len(self.pieces) > _MOST_PIECES:  # they are joined at each generation block
                self.pieces[:] = ["".join(self.pieces)]


class _WatchedMessages(Sequence[Message]):
    """Messages that note how much a template had written when it first looked at each.

    A template may use it like a list. To learn the number of messages counts as a look at all.
    Attributes begin with an underscore, so that templates cannot read them.

    Args:
        messages: the messages.
        first_looks: int [messages], gets the length of the output at the first look at each.
        output: the output of the template.
        start: the number of the first message that the template sees.
    """

    def __init__(
        self,
        messages: list[Message],
        first_looks: list[int | None],
        output: _Output,
        start: int = 0,
    ) -> None:
        self._messages = messages
        self._first_looks = first_looks
        self._output = output
        self._start = start

    def __iter__(self) -> Iterator[Message]:
        for number in range(self._start, len(self._messages)):
            self._note(number)
            yield self._messages[number]

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...

    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        if isinstance(index, int) and index >= 0:
            number = self._start + index
            if number < len(self._messages):
                self._note(number)
            return self._messages[number]

        if isinstance(index, slice) and index.stop is None and index.step in (None, 1):
            first = 0 if index.start is None else index.start
            if isinstance(first, int) and first >= 0:
                start = min(self._start + first, len(self._messages))
                return _WatchedMessages(self._messages, self._first_looks, self._output, start)

        return self._all()[index]  # raises TypeError for the name of an attribute

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == other

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def _note(self, number: int) -> None:
        if self._first_looks[number] is None:
            self._first_looks[number] = self._output.length

    def _all(self) -> list[Message]:
        """Return the messages as a list, and note that the template has looked at all."""
        for number in range(len(self._messages)):
            self._note(number)
        return self._messages[self._start :]


def _known(first_looks: list[int | None], length: int) -> list[int]:
    """Return ``Rendering.known``.

    Args:
        first_looks: the length of the output at the first look at each message; ``None`` for a
            message that the template has not looked at.
        length: the length of the output.
    """
    known = [length]
    for look in reversed(first_looks):
        known.append(known[-1] if look is None else min(look, known[-1]))
    known.reverse()
    return known


def _has_only_texts(message: Message) -> bool:
    """Return whether a message has only texts, and no reasoning."""
    for field, value in message.items():
        if type(value) is not str or field in REASONING:
            return False
    return True


def _unchanged(value: Any) -> Any:
    return value


def _refusal(error: Exception) -> BadRecord:
    return BadRecord(f"the chat template refuses it: {first_line(error)}")
