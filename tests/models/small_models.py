"""Small models of each kind, a tokenizer for them, and their folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import llmtrain as lt
from llmtrain.data import tokenizer as tok
from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.models.lfm2 import build_gpt
from llmtrain.models.probe import probe
from llmtrain.record.saver import write_model


def byte_tokenizer(max_length: int = 64) -> PreTrainedTokenizerFast:
    """Return a tokenizer with 257 tokens: the bytes, and one that ends a document."""
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), max_length)


def export_model(bundle: lt.ModelBundle, folder: Path) -> Path:
    """Write the model of a bundle as a finished run does, and return its folder."""
    write_model(folder, bundle.files, bundle.files.export_tensors(bundle.model))
    return folder


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the gradients that the parameters of a model have."""
    parameters = model.named_parameters()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def perturbed(model: nn.Module) -> nn.Module:
    """Move all weights of a model far from their initial values, in place, for evaluation.

    Then no two biases or norms are alike, so that a mix-up shows.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def small_model(name: str, *, vocabulary: int, tokens: int, width: int) -> Any:
    """Return a model with two layers and random weights.

    Args:
        name: ``gpt2`` or ``lfm2`` of this package, or ``llama`` of transformers.
        vocabulary: its vocabulary.
        tokens: tokens of a row. The last one is only a target.
        width: its hidden size.
    """
    if name != "llama":
        config = lt.GPTConfig(
            n_layer=2, n_head=2, n_embd=width, block_size=tokens - 1, architecture=name
        )
        return build_gpt(config, vocabulary)

    llama_config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2 * tokens,
    )
    llama = make_causal_lm(LlamaForCausalLM(llama_config).float(), row_length=tokens - 1)
    probe(llama)
    return llama


def tiny_llama() -> LlamaConfig:
    """Return the configuration of a Llama with the vocabulary of a tokenizer of bytes."""
    return LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )


def twins(weights: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return pairs of parameters with the same random numbers, up to a factor."""
    first_names: dict[str, str] = {}
    pairs = []
    for name, tensor in weights.items():
        if tensor.dim() < 2 or tensor.numel() < 100 or tensor.std() == 0:
            continue
        numbers = tensor.flatten()[-64:].double()  # the first rows of an embedding may be zeros
        is_drawn = len(numbers.unique()) == 64 and not (numbers.diff() > 0).all()
        if is_drawn:
            key = str((numbers / numbers.norm()).round(decimals=4).tolist())
            first_name = first_names.setdefault(key, name)
            if first_name != name:
                pairs.append((first_name, name))
    return pairs
