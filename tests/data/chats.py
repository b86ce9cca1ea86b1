"""Small chat templates and tokenizers, and conversations for them."""

import itertools

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.data.formats import Conversation
from llmtrain.data.render import Rendered, Renderer, TokenSequence

# The special tokens of the templates. One of the last two begins with the other.
CONTROLS = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<▁fin▁>",
    "<▁fin▁>>",
]

# Short versions of well-known templates. «...» encloses the text of the assistant; see `marked` and
# `unmarked`.
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
    # Some templates have the line break after a turn in the block, too.
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
# The token that ends a turn in each of them.
END = {
    "chatml": "<|im_end|>",
    "llama": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "zephyr": "</s>",
}

# Shows reasoning only in the turns after the last question, and there even if it is empty.
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

# The generation prompt begins the reasoning. No finished turn shows it.
R1 = """
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}
    {%- else -%}{{- '<|assistant|>' + m.content.split('</think>')[-1] + eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\\n' -}}{%- endif -%}"""

# The training text of the tokenizers.
TEXT = [
    "The answer is yes, and the question is: what is the answer? user assistant model system\n\n"
    * 20
]


def unmarked(template: str) -> str:
    """Return a template without ``{% generation %}`` blocks."""
    return template.replace("«", "").replace("»", "")


def marked(template: str) -> str:
    """Return a template with ``{% generation %}`` blocks around the text of the assistant."""
    return template.replace("«", "{%- generation -%}").replace("»", "{%- endgeneration -%}")


def with_template(backend: tokenizers.Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a chat template, whose texts are between ``<s>`` and ``</s>``."""
    tokenizer = tok.as_pretrained(backend, block_size=32)
    tokenizer.bos_token = "<s>"
    tokenizer.eos_token = "</s>"
    tokenizer.chat_template = template
    return tokenizer


def make(template: str | None = None, spec: str = "byte") -> PreTrainedTokenizerFast:
    """Return a small tokenizer with a chat template. ``spec`` is a value of ``--tokenizer``."""
    backend = tok.train_tokenizer(spec, iter(TEXT), lambda: iter(TEXT))
    backend.add_special_tokens(CONTROLS)
    return with_template(backend, template)


def make_sentencepiece(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with byte fallback that puts a space before every text, like Llama's."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz<|>_\n:",
        "▁b",
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [("▁", "b")], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([*CONTROLS, tok.END_OF_TEXT])
    return with_template(backend, template)


def chat(*contents: str) -> Conversation:
    """Return a conversation with messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return Conversation(messages, tools=None)


def only_sequence(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> TokenSequence:
    """Render a conversation that makes one sequence, because no turn changes an earlier one."""
    (sequence,) = Renderer(tokenizer)(conversation).sequences
    return sequence


def target_texts(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> list[str]:
    """Render a conversation, and return the text of each unbroken run of target tokens."""
    texts = []
    for sequence in Renderer(tokenizer)(conversation).sequences:
        tokens = zip(sequence.loss_mask.tolist(), sequence.ids.tolist(), strict=True)
        for is_target, run in itertools.groupby(tokens, key=lambda token: token[0]):
            if is_target:
                texts.append(tokenizer.decode([id for _, id in run]))
    return texts


def assert_same_rendering(actual: Rendered | str, expected: Rendered | str) -> None:
    """Check that two renderings have the same sequences, or that both are the same error."""
    if isinstance(actual, str) or isinstance(expected, str):
        assert actual == expected
        return
    _, *counts = actual
    _, *expected_counts = expected
    assert counts == expected_counts
    for sequence, expected_sequence in zip(actual.sequences, expected.sequences, strict=True):
        assert sequence.ids.dtype == np.int32
        assert sequence.loss_mask.dtype == np.bool_
        np.testing.assert_array_equal(sequence.ids, expected_sequence.ids)
        np.testing.assert_array_equal(sequence.loss_mask, expected_sequence.loss_mask)
        assert sequence.end.target_bytes == expected_sequence.end.target_bytes
        assert sequence.turn_ends == expected_sequence.turn_ends


USER, ASSISTANT = chat("a", "b").messages

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "b": [3]}},
}
CALLING = [
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "Five."},
]
