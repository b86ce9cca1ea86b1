"""Render conversations with the chat template of a tokenizer."""

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from llmtrain.data.messages import BadRecord, Message
from llmtrain.data.sources import Fields
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.errors import UserError, first_line

if TYPE_CHECKING:
    import jinja2

Span: TypeAlias = tuple[int, int]  # of characters
# Variables of a template beside the messages and the tools, such as {"enable_thinking": False}.
TemplateOptions: TypeAlias = dict[str, bool]

TRIAL_SECONDS = 10  # that a template may compute for, to show a few short conversations
_GENERATION_TAG = re.compile(r"({%[-+]?\s*)(end)?generation(\s*[-+]?%})")


@contextlib.contextmanager
def trial(name: str) -> Iterator[None]:
    """Limit the time in which the block renders a template that was not tried before.

    Nested loops can take hours. A trace function ends them on every platform and in every thread,
    which a signal would not do, and nothing goes on in the background, as a thread would.

    Args:
        name: the template, for the message.

    Raises:
        UserError: if the block computes for more than :data:`TRIAL_SECONDS`.
    """
    deadline = time.thread_time() + TRIAL_SECONDS

    def check_time(frame: FrameType, event: str, argument: object) -> Any:
        if time.thread_time() > deadline:
            raise UserError(
                f"{name} takes more than {TRIAL_SECONDS} seconds to show a short conversation; "
                "use another one with --chat_template."
            )
        return check_time

    previous = sys.gettrace()
    sys.settrace(check_time)
    try:
        yield
    finally:
        sys.settrace(previous)


class RenderedText(NamedTuple):
    """A conversation as text.

    Attributes:
        text: the text.
        spans: the spans of the ``{% generation %}`` blocks; ``None`` if the template has no such
            blocks, or if they were not to be found.
    """

    text: str
    spans: list[Span] | None


class PlainData(NamedTuple):
    """Messages and tools as the objects that a template gets."""

    messages: list[Message]
    tools: list[Fields] | None


class JinjaTemplate:
    """The compiled chat template of a tokenizer.

    It does what ``transformers.utils.chat_template_utils.render_jinja_template`` does, but messages
    are converted once instead of for each text. A short conversation takes half the time.

    Args:
        tokenizer: a tokenizer with a chat template.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._compiled: dict[tuple[bool, bool], _CompiledTemplate] = {}

    def plain_data(self, messages: list[Message], tools: list[Fields] | None) -> PlainData:
        """Convert messages and tools to the objects that a template gets.

        Objects that are not JSON become their names, and reasoning is in all fields in which
        templates look for it.

        Raises:
            BadRecord: if a tool is no object.
        """
        from transformers.utils import chat_template_utils

        for tool in tools or []:
            if not isinstance(tool, dict):
                raise BadRecord(f"field 'tools' holds {tool!r:.40}, not an object")
        plain_messages = chat_template_utils._plain_template_data(messages)
        return PlainData(
            messages=chat_template_utils._alias_reasoning_fields(plain_messages),
            tools=chat_template_utils._plain_template_data(tools),
        )

    def render(
        self,
        data: PlainData,
        add_generation_prompt: bool = False,
        options: TemplateOptions | None = None,
        find_spans: bool = False,
    ) -> RenderedText:
        """Render messages.

        Args:
            data: the messages and tools.
            add_generation_prompt: end the text with the words that ask for an answer.
            options: further variables of the template.
            find_spans: find the spans of ``{% generation %}`` blocks. A template with such blocks
                takes twice as long then.

        Raises:
            BadRecord: if the template raises an error.
        """
        variables: Fields = {
            **self._special_tokens,
            "messages": data.messages,
            "tools": data.tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(options or {}),
        }
        try:
            return self._compiled_for(data.tools, find_spans).render(variables)
        except UserError:  # of a trial
            raise
        except Exception as error:  # a template can raise any error
            raise BadRecord(f"the chat template refuses it: {first_line(error)}") from None

    def _compiled_for(self, tools: list[Fields] | None, find_spans: bool) -> "_CompiledTemplate":
        """Return the template for conversations with or without tools.

        If no spans are to be found, generation blocks become blocks that do nothing: each of them
        is a call of a macro, which takes as long as all else that is rendered of a message.
        """
        key = (tools is not None, find_spans)
        if key not in self._compiled:
            source = self._tokenizer.get_chat_template(tools=tools)
            if not find_spans:
                source = _GENERATION_TAG.sub(r"\1\2with\3", source)
            self._compiled[key] = _CompiledTemplate(source)
        return self._compiled[key]


class _CompiledTemplate:
    """A compiled template.

    Args:
        source: the text of the template.
    """

    def __init__(self, source: str) -> None:
        from transformers.utils import chat_template_utils

        # There is no public function that compiles a template with all that templates use.
        compiled = chat_template_utils._compile_jinja_template(source)
        self._template = cast("jinja2.Template", compiled)
        self._globals = dict(self._template.globals)
        self._has_generation_blocks = _GENERATION_TAG.search(source) is not None

    def render(self, variables: Fields) -> RenderedText:
        """Render the template with these variables."""
        # Jinja's own methods make such a dictionary from a chain of mappings, which takes as long
        # as to render a short conversation.
        context = self._template.new_context({**self._globals, **variables}, shared=True)
        if not self._has_generation_blocks:
            return RenderedText("".join(self._template.root_render_func(context)), spans=None)

        environment: Any = self._template.environment  # transformers adds a method to it
        pieces: list[str] = []
        spans: list[Span] = []
        with environment.activate_tracker(pieces, spans):
            # One by one: at each block, the tracker reads what has been written so far.
            for piece in self._template.root_render_func(context):
                pieces.append(piece)
        return RenderedText("".join(pieces), spans)
