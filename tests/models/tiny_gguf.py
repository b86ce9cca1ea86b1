"""Tiny models of each class that `llmtrain export --to_gguf` writes, with their tokenizers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

import llmtrain as lt
from llmtrain.models.gpt_family import build_gpt
from llmtrain.record.saver import write_model

END = "<|endoftext|>"
CHATML = (
    "{%- for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Pre-tokenizers split these texts differently: digits, contractions, spaces, lines, letters, marks.
PROMPTS = [
    "Hello, world!",
    "def f(x):\n    return x * 12345",
    "It's what we'll say, I'VE heard; DON'T.",
    "  spaces   and\t\ttabs\n\n\n  lines \n",
    "Ünïcödé 日本語 текст 😀",
    "3.14159 and 1,000,000",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "<|im_start|>user\nHi<|im_end|> <tool_call>",
    "नमस्ते x² (1/2)",
]

# As in the tokenizer.json of Llama 3, Qwen 2 and Qwen 3.5.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def splitting(pattern: str) -> Any:
    """Return a pre-tokenizer that splits text by a regular expression."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, BYTE_LEVEL])


# Pre-tokenizers by llama.cpp's names.
PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": splitting(LLAMA3),
    "dbrx": splitting(LLAMA3),
    "qwen2": splitting(QWEN2),
    "qwen35": splitting(QWEN35),
}


def tokenizer_of(
    name: str, pre_tokenizer: Any = None, tokens: int = 400
) -> PreTrainedTokenizerFast:
    """Return a small BPE tokenizer with the pre-tokenizer that llama.cpp calls `name`."""
    is_llama3 = name == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(ignore_merges=is_llama3))
    tokenizer.pre_tokenizer = pre_tokenizer or PRE_TOKENIZERS[name]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROMPTS * 3, trainer)
    if is_llama3:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, 0)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.add_tokens(["<tool_call>"])
    fast.chat_template = CHATML
    return fast


# More embeddings than the tokenizer has tokens.
SIZES = {
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2_SIZES = {"vocab_size": 448, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}

# Configurations, and the pre-tokenizers that go with them.
CONFIGS = {
    "llama": (LlamaConfig(**SIZES), "llama-bpe"),
    "llama, biases, tied": (
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "smollm",
    ),
    "llama 3.1": (LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3_ROPE), "llama-bpe"),
    "mistral": (MistralConfig(**SIZES, sliding_window=100, rope_parameters=LINEAR_ROPE), "dbrx"),
    "qwen2": (Qwen2Config(**SIZES), "qwen2"),
    "qwen3": (Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True), "qwen35"),
    "gpt2": (GPT2Config(**GPT2_SIZES, bos_token_id=0, eos_token_id=0), "gpt-2"),
    "lfm2": (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "gpt-2"),
}
# The models of recipes/gpt.py, and the tokens that their tokenizers have: bytes have no merges.
OURS = {"our gpt2": 257, "our lfm2": 400}


def write_folder(
    folder: Path, name: str, dtype: torch.dtype = torch.float32, stops: Sequence[int] = ()
) -> Path:
    """Write a model folder with random weights that are large enough to make up its mind."""
    torch.manual_seed(3)
    if name in OURS:
        tokenizer = tokenizer_of("gpt-2", tokens=OURS[name])
        settings = lt.GPTConfig(
            n_layer=4, n_head=2, n_embd=32, block_size=256, architecture=name.split()[1]
        )
        ours = build_gpt(settings, len(tokenizer))
        randomize(ours)
        write_model(folder, ours.files(tokenizer, "text"), ours.state_dict())
        return folder

    config, pre_tokenizer = CONFIGS[name]
    tokenizer = tokenizer_of(pre_tokenizer)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    randomize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    GenerationConfig(eos_token_id=[im_end, 0, *stops]).save_pretrained(folder)
    return folder


def randomize(model: nn.Module) -> None:
    """Draw weights so that neither norms nor biases are neutral, and the best tokens are clear."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * noise)
        else:
            parameter.data.copy_(0.4 * noise)
