"""Chat templates that differ from the usual ones in how they show messages, turns and their ends."""

from pathlib import Path

from tests.data.chats import TEMPLATES, unmarked

# A message has no end token. The next one begins with its role.
GLM = """
{%- for m in messages -%}
    {{- '<|' + m.role + '|>\\n' -}}
    {%- if m.tool_calls -%}{{- m.tool_calls | tojson -}}{%- else -%}{{- m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""

# Assistant messages that follow each other have one beginning and one end.
JOINED = """
{%- for m in messages -%}
    {%- if not (loop.previtem and loop.previtem.role == m.role) -%}
        {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- endif -%}
    {{- m.content -}}
    {%- if not (loop.nextitem and loop.nextitem.role == m.role) -%}{{- '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

# A prompt without reasoning ends with an empty block.
SWITCHED = """
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' -%}{{- '<think>' + (m.thinking or '') + '</think>' -}}{%- endif -%}
    {{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' + ('<think></think>' if enable_thinking is false else '') -}}
{%- endif -%}"""

# The first token is the number of messages.
COUNTS = "{{- messages | length -}}" + TEMPLATES["chatml"]
# The same, and each text without a role. No finished turn continues its prompt, which begins with
# another number.
COUNTS_WITHOUT_ROLES = (
    "{{ messages | length }}{% for m in messages %}{{ m.content + '|' }}{% endfor %}"
)
# Only the last turn has an end token, so no end can be found for an earlier one.
ENDED_ONCE = """
{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- else -%}{{- eos_token -}}{%- endif -%}"""
# A call has no end token, and only the last turn shows its reasoning.
CALL_WITHOUT_END = """
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' and loop.last -%}{{- '<think></think>' -}}{%- endif -%}
    {{- m.tool_calls | tojson if m.tool_calls else m.content + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

# Turns have no end tokens.
PLAIN = """
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}{{- 'Assistant: ' -}}«{{- m.content -}}»{{- '\\n' -}}
    {%- else -%}{{- 'User: ' + m.content + '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"""

_LOOKING_AHEAD = """
{%- for m in messages -%}
    {%- set end = '</s>' if m.role == 'assistant' and IS_LAST else '<|im_end|>' -%}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + end + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
_IS_LAST = {
    "length": "loop.index == messages | length",
    "last": "loop.last",
    "next item": "loop.nextitem is not defined",
    "last message": "messages[-1] is sameas m",
    "rest": "messages[loop.index :] == []",
    "rest in a list": "messages[loop.index :] | list == []",
    "next message": "messages[loop.index] is not defined",
    "reversed": "(messages | reverse | first) is sameas m",
    "as text": '(messages | string).endswith(m.content ~ "\'}]")',
    "a copy": "(messages + [])[-1] is sameas m",
}
# Templates that look ahead: the last turn of a conversation ends with another token. The key says
# how the template knows the last turn.
LOOKING_AHEAD = {
    name: _LOOKING_AHEAD.replace("IS_LAST", condition) for name, condition in _IS_LAST.items()
}

# A template that writes more after the last turn.
ENDED_TWICE = unmarked(TEMPLATES["llama"]) + "{%- if not add_generation_prompt -%}</s>{%- endif -%}"

# A template whose loop leaves out the first message, as for many system prompts.
WITHOUT_FIRST = """
{%- if messages[0].role == 'system' -%}
    {{- messages[0].content + '\\n' -}}{%- set rest = messages[1:] -%}
{%- else -%}{%- set rest = messages -%}{%- endif -%}""" + unmarked(TEMPLATES["chatml"]).replace(
    "in messages", "in rest[0:]"
)


def template_with_answers(answer: str) -> str:
    """Return a chat template that shows the assistant's messages with the given Jinja text."""
    return (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )


# Templates that mark the answer with its end token, and the end token alone.
MARKS_ANSWERS_AND_ENDS = template_with_answers(
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
)
MARKS_ENDS = template_with_answers(
    "{{ m.content }}{% generation %}{{ eos_token }}{% endgeneration %}"
)


def write_template(folder: Path, text: str) -> str:
    """Write a chat template, and return the value of ``--chat_template``."""
    path = folder / "template.jinja"
    path.write_text(text)
    return str(path)
