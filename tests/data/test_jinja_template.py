"""The text of a conversation is the same with and without the spans of generation blocks."""

import pytest

from llmtrain.data.jinja_template import JinjaTemplate
from tests.data.chats import TEMPLATES, chat, make, marked, unmarked

# What is set in a block is not set behind it, and a block may be in a loop and read its variables.
SCOPED = """
{%- set end = '!' -%}
{%- for m in messages -%}
    {%- generation -%}{%- set end = '?' -%}{{- loop.index ~ m.content ~ end -}}{%- endgeneration %}
    {{- end }}
{%- endfor -%}"""


@pytest.mark.parametrize(
    "template", [SCOPED, *map(marked, TEMPLATES.values())], ids=["scoped", *TEMPLATES]
)
def test_the_text_does_not_depend_on_whether_spans_are_found(template: str) -> None:
    jinja = JinjaTemplate(make(template))
    data = jinja.plain_data(chat("a", "b", "c", "d").messages, None)
    with_spans = jinja.render(data, find_spans=True)
    assert jinja.render(data).text == with_spans.text
    assert jinja.render(data).spans is None
    assert with_spans.spans is not None
    parts = [with_spans.text[start:stop] for start, stop in with_spans.spans]
    assert any("b" in part for part in parts)


def test_a_template_without_blocks_has_no_spans() -> None:
    jinja = JinjaTemplate(make(unmarked(TEMPLATES["chatml"])))
    data = jinja.plain_data(chat("a", "b").messages, None)
    assert jinja.render(data, find_spans=True).spans is None
