"""Tokenizers: three that are trained on the data, or any of Hugging Face's, always a ``PreTrainedTokenizerFast``."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from llmtrain.errors import UserError, hub_said, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FastTokenizer: TypeAlias = "PreTrainedTokenizerFast"
END_OF_TEXT = "<|endoftext|>"
TRAINED = ("char", "byte", "bpe")  # kinds that are made from the data
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def is_trained(spec: str) -> bool:
    """Return whether ``--tokenizer spec`` is made from the data (else it is a folder or a hub name)."""
    return spec.partition(":")[0] in TRAINED and not Path(spec).exists()


def vocabulary_size(spec: str) -> int:
    """Return N of ``bpe:N``, and 0 for ``char`` and ``byte``.

    Raises :class:`UserError` where N is not a number that a byte-level BPE can have.
    """
    smallest, largest = len(_BYTES) + 1, 10**8  # every byte, and the end of text
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        require(not size, f"--tokenizer {spec}: {kind} takes no size; write --tokenizer {kind}.")
        return 0
    fits = (
        size.isascii() and size.isdecimal() and len(size) < 10 and smallest <= int(size) <= largest
    )
    require(
        fits,
        f"--tokenizer {spec}: write bpe:N with N from {smallest} to {largest:,}, such as bpe:4096.",
    )
    return int(size)


def train_tokenizer(
    spec: str, train: Iterable[str], everything: Callable[[], Iterator[str]]
) -> tokenizers.Tokenizer:
    """Make the tokenizer that ``spec`` names: ``char``, ``byte`` or ``bpe:N``.

    ``bpe`` learns its merges from the training documents alone. ``char`` takes its alphabet from ``everything``: a
    held-out character must not become an unknown one, which would flatter the loss.
    """
    size, kind = vocabulary_size(spec), spec.partition(":")[0]
    alphabet = (
        sorted({character for text in everything() for character in set(text)})
        if kind == "char"
        else _BYTES
    )
    vocabulary = {token: i for i, token in enumerate([END_OF_TEXT, *alphabet])}
    if kind == "char":
        tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    if kind == "bpe":
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=_BYTES,
            show_progress=False,
        )
        tokenizer.train_from_iterator(train, trainer)
    else:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def as_pretrained(tokenizer: tokenizers.Tokenizer, block_size: int) -> FastTokenizer:
    """Return the trained tokenizer as every Hugging Face tool expects it; end-of-text plays GPT-2's three parts."""
    from transformers import PreTrainedTokenizerFast

    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no types here
        tokenizer_object=tokenizer,
        model_max_length=block_size,
        clean_up_tokenization_spaces=False,
        **tokens,
    )


def load_tokenizer(
    name: str, trust_remote_code: bool = False, trained: bool = False
) -> FastTokenizer:
    """Load the tokenizer of a folder or hub name. Raises :class:`UserError` unless it is a fast one that ends texts.

    Of one that was ``trained`` here the class is known; to look for it takes a quarter of a second.
    """
    import transformers

    kind = transformers.PreTrainedTokenizerFast if trained else transformers.AutoTokenizer
    other = "name one with --tokenizer: char, byte, bpe:N, a folder or a hub name"
    try:
        tokenizer = kind.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # OSError, ValueError, KeyError, ... with essays for messages
        raise UserError(
            f"{name}: no tokenizer can be loaded ({hub_said(error).rstrip('.')}); {other}."
        ) from None
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise UserError(f"{name} has no tokenizer.json, the file of a fast tokenizer; {other}.")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{name}: its tokenizer has no end-of-text token (eos_token) to join documents with; {other}."
        )
    return tokenizer


def stop_ids(name: str) -> list[int]:
    """Return the tokens at which generation ends, where a model's folder or hub name says so."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(name).eos_token_id
    except (OSError, ValueError):  # a tokenizer alone
        return []
    return [found] if isinstance(found, int) else [*(found or [])]


def digest(tokenizer: FastTokenizer) -> str:
    """Return the sha256 that identifies a tokenizer, wherever it was loaded from."""
    content = tokenizer.backend_tokenizer.to_str() + json.dumps(
        [tokenizer.special_tokens_map, tokenizer.eos_token_id, tokenizer.chat_template],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(content.encode()).hexdigest()
