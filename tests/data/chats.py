"""Chat templates after those of well-known models, and conversations for them."""

import itertools

from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.data.formats import Conversation
from llmtrain.data.render import Renderer
from llmtrain.data.rendered import TokenSequence

CONTROLS = [
    *[
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    *["<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<▁fin▁>", "<▁fin▁>>"],
]

# Small templates after those of well-known models. «...» is what the assistant says, a {% generation %} block or not.
TEMPLATES = {
    "chatml": """
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' -%}
        «{{- m.content + '<|im_end|>' -}}»
    {%- else -%}
        {{- m.content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}""",
    "llama": """
{{- bos_token -}}
{%- for m in messages -%}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
    {%- if m.role == 'assistant' -%}
        «{{- m.content | trim + '<|eot_id|>' -}}»
    {%- else -%}
        {{- m.content | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}""",
    "mistral": """
{{- bos_token -}}
{%- for m in messages -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('user and assistant\\nmust alternate') -}}
    {%- endif -%}
    {%- if m.role == 'user' -%}
        {{- '[INST] ' + m.content | trim + ' [/INST]' -}}
    {%- else -%}
        «{{- ' ' + m.content | trim + eos_token -}}»
    {%- endif -%}
{%- endfor -%}""",
    "gemma": """
{{- bos_token -}}
{%- for m in messages -%}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' -}}
    {%- if m.role == 'assistant' -%}
        «{{- m.content | trim + '<end_of_turn>' -}}»
    {%- else -%}
        {{- m.content | trim + '<end_of_turn>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}""",
    # its block takes in the line break too, as some do
    "zephyr": """
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {{- '<|assistant|>\\n' -}}«{{- m.content + eos_token + '\\n' -}}»
    {%- else -%}
        {{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}""",
}
END = {
    "chatml": "<|im_end|>",
    "llama": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "zephyr": "</s>",
}
# Reasoning is shown in the turns after the last question alone, and there even where it is empty.
QWEN3 = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = messages.index(m) -%}{%- endfor -%}
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' and loop.index0 > ns.last -%}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
# The generation prompt begins the reasoning, which no finished turn shows.
R1 = """
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}
    {%- else -%}{{- '<|assistant|>' + m.content.split('</think>')[-1] + eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\\n' -}}{%- endif -%}"""

TEXT = [
    "The answer is yes, and the question is: what is the answer? user assistant model system\n\n"
    * 20
]


def unmarked(template: str) -> str:
    return template.replace("«", "").replace("»", "")


def marked(template: str) -> str:
    return template.replace("«", "{%- generation -%}").replace("»", "{%- endgeneration -%}")


def make(template: str | None = None, spec: str = "byte") -> PreTrainedTokenizerFast:
    backend = tok.train_tokenizer(spec, iter(TEXT), lambda: iter(TEXT))
    backend.add_special_tokens(CONTROLS)
    tokenizer = tok.as_pretrained(backend, block_size=32)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: str) -> Conversation:
    """User and assistant in turn, the user first."""
    roles = ("user", "assistant")
    return Conversation(
        [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)], None
    )


def one(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> TokenSequence:
    """The one sequence of a conversation of which the template changes nothing."""
    (sequence,) = Renderer(tokenizer)(conversation).sequences
    return sequence


def said(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> list[str]:
    """The trained text, a string for each unbroken run of tokens, of all sequences."""
    texts = []
    for sequence in Renderer(tokenizer)(conversation).sequences:
        runs = itertools.groupby(
            range(len(sequence.ids)), key=lambda place, of=sequence: of.loss_mask[place]
        )
        texts += [
            tokenizer.decode(sequence.ids[list(places)]) for trained, places in runs if trained
        ]
    return texts


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "b": [3]}},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLING = [
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "Five."},
]


USER, ASSISTANT = chat("a", "b").messages
