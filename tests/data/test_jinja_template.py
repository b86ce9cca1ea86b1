"""A template shows the same text whether or not spans are found, and runs in a sandbox."""

import pytest

from llmtrain.data.jinja_template import JinjaTemplate
from llmtrain.data.messages import BadRecord
from tests.data.chats import TEMPLATES, chat, make, marked, unmarked

# A variable that is set inside a block keeps its old value after the block, as in any Jinja block.
# The block can read the variables of the loop.
SCOPED = """
{%- set end = '!' -%}
{%- for m in messages -%}
    {%- generation -%}{%- set end = '?' -%}{{- loop.index ~ m.content ~ end -}}{%- endgeneration %}
    {{- end }}
{%- endfor -%}"""


@pytest.mark.parametrize(
    "template", [SCOPED, *map(marked, TEMPLATES.values())], ids=["scoped", *TEMPLATES]
)
def test_the_text_is_the_same_whether_spans_are_found_or_not(template: str) -> None:
    jinja = JinjaTemplate(make(template))
    data = jinja.plain_data(chat("a", "b", "c", "d").messages, None)

    without_spans = jinja.render(data)
    with_spans = jinja.render(data, find_spans=True)

    assert with_spans.text == without_spans.text
    assert without_spans.spans is None
    marked_texts = [with_spans.text[start:stop] for start, stop in with_spans.spans or []]
    assert any("b" in text for text in marked_texts)


def test_a_block_has_its_own_variables() -> None:
    jinja = JinjaTemplate(make(SCOPED))
    data = jinja.plain_data(chat("a", "b").messages, None)

    assert jinja.render(data, find_spans=True).text == "1a?!2b?!"


def test_a_template_without_blocks_has_no_spans() -> None:
    jinja = JinjaTemplate(make(unmarked(TEMPLATES["chatml"])))
    data = jinja.plain_data(chat("a", "b").messages, None)

    assert jinja.render(data, find_spans=True).spans is None


@pytest.mark.parametrize(
    "code",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "raise_exception.__globals__['os'].system('true')",
        "messages.append(messages)",
        "(messages | attr('__class__')).__base__",
    ],
)
def test_a_template_runs_in_a_sandbox(code: str) -> None:
    jinja = JinjaTemplate(make(f"{TEMPLATES['chatml']}{{{{ {code} }}}}"))
    data = jinja.plain_data(chat("a", "b").messages, None)

    with pytest.raises(BadRecord, match=r"the chat template refuses it: .*(unsafe|undefined)"):
        jinja.render(data)
