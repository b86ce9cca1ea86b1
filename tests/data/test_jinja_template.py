"""A template shows the same text whether the spans of its generation blocks are found or not."""

import pytest

from llmtrain.data.jinja_template import JinjaTemplate
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
