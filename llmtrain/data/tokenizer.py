"""Tokenizers and their chat templates.

A tokenizer is trained on the data (char, byte, bpe), or any fast tokenizer of Hugging Face.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from llmtrain.console import say
from llmtrain.errors import UserError, first_line, hub_error
from llmtrain.files import json_text
from llmtrain.model_folders import check_names_of_files, folder_with, stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FastTokenizer: TypeAlias = "PreTrainedTokenizerFast"
END_OF_TEXT = "<|endoftext|>"
NO_TEMPLATE = "none"  # the value of --chat_template that trains plain text without a template
_CHATML = Path(__file__).with_name("chatml.jinja")
# Two turns, because many templates render the last turn differently.
EXAMPLE = [
    {"role": "user", "content": "One question."},
    {"role": "assistant", "content": "One answer."},
    {"role": "user", "content": "The other question."},
    {"role": "assistant", "content": "The other answer."},
]
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def is_trained(spec: str) -> bool:
    """Return whether ``--tokenizer spec`` is trained on the data, not a folder or a hub name."""
    return spec.partition(":")[0] in ("char", "byte", "bpe") and not Path(spec).exists()


def vocabulary_size(spec: str) -> int:
    """Return N of ``bpe:N``, or 0 for ``char`` and ``byte``.

    Raises:
        UserError: if it is another word, or if a byte-level BPE cannot have N tokens.
    """
    kind, _, size = spec.partition(":")
    if spec in ("char", "byte"):
        return 0

    smallest = len(_BYTES) + 1  # every byte, and the end-of-text token
    largest = 10**8
    is_number = size.isascii() and size.isdecimal() and len(size) < 10
    if kind != "bpe" or not is_number or not smallest <= int(size) <= largest:
        raise UserError(
            f"--tokenizer {spec}: write char, byte, or bpe:N with N from {smallest} to "
            f"{largest:,}, such as bpe:4096."
        )
    return int(size)


def train_tokenizer(
    spec: str, train: Iterable[str], all_texts: Callable[[], Iterator[str]]
) -> tokenizers.Tokenizer:
    """Train a tokenizer on the data.

    Args:
        spec: ``char``, ``byte`` or ``bpe:N``.
        train: the training documents, from which ``bpe`` learns its merges.
        all_texts: returns all documents, from which ``char`` takes its characters. If a character
            occurs only in the eval data, it must not become an unknown token, because that would
            lower the eval loss.
    """
    size = vocabulary_size(spec)
    kind = spec.partition(":")[0]
    if kind == "char":
        characters: set[str] = set()
        for text in all_texts():
            characters.update(text)
        vocabulary = {token: i for i, token in enumerate([END_OF_TEXT, *sorted(characters)])}
        tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([END_OF_TEXT])
        return tokenizer

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=_BYTES,
        show_progress=False,
    )
    # Without texts there are no merges, so every token is a byte.
    tokenizer.train_from_iterator(train if kind == "bpe" else [], trainer)
    return tokenizer


def as_pretrained(tokenizer: tokenizers.Tokenizer, block_size: int | None = None) -> FastTokenizer:
    """Wrap a trained tokenizer in the class of Hugging Face.

    As in GPT-2, end-of-text is also the BOS and the unknown token.

    Args:
        tokenizer: the tokenizer.
        block_size: the longest text of its model, in tokens; ``None`` if it is not known.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        model_max_length=block_size,
        clean_up_tokenization_spaces=False,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
    )


def load_tokenizer(
    name: str, trust_remote_code: bool = False, trained: bool = False
) -> FastTokenizer:
    """Load a tokenizer from a folder or the Hugging Face hub.

    Args:
        name: the folder or hub name, NAME or NAME@REVISION.
        trust_remote_code: run code that comes with the tokenizer.
        trained: the tokenizer was trained by :func:`train_tokenizer`, so its class is known.
            Looking up the class takes a quarter of a second.

    Raises:
        UserError: if there is no tokenizer, if it is not a fast one, or if it has no end-of-text
            token.
    """
    import transformers

    tokenizer_class = (
        transformers.PreTrainedTokenizerFast if trained else transformers.AutoTokenizer
    )
    advice = "name one with --tokenizer: char, byte, bpe:N, a folder or a hub name"
    try:
        path, revision = _split_revision(name)
        check_names_of_files(folder_with(path, "tokenizer_config.json", revision))
        tokenizer = tokenizer_class.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # OSError, ValueError, KeyError, ..., some with very long messages
        reason = hub_error(error).rstrip(".")
        raise UserError(f"{name}: no tokenizer can be loaded ({reason}); {advice}.") from None
    # Without any file, AutoTokenizer makes one for some families that has only special tokens.
    is_empty = len(tokenizer) == len(tokenizer.all_special_ids)
    if is_empty or not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise UserError(f"{name} has no tokenizer.json, the file of a fast tokenizer; {advice}.")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{name}: its tokenizer has no end-of-text token (eos_token) to separate documents; "
            f"{advice}."
        )
    return tokenizer


def _split_revision(name: str) -> tuple[str, str]:
    """Return the hub name and the revision of NAME@REVISION. A folder has no revision."""
    if Path(name).exists():
        return name, "main"
    path, _, revision = name.partition("@")
    return path, revision or "main"


def begins_with_bos(tokenizer: FastTokenizer) -> bool:
    """Return whether a tokenizer puts BOS before every text."""
    has_bos = tokenizer.bos_token_id is not None
    return has_bos and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]


def control_tokens_of(
    tokenizer: FastTokenizer, stop_token_ids: Collection[int] = ()
) -> dict[int, str]:
    """Return the id and the text of the special tokens, of EOS and of further stop tokens."""
    tokens = {
        id: token.content
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special or id in stop_token_ids
    }
    if tokenizer.eos_token_id is not None:
        tokens.setdefault(int(tokenizer.eos_token_id), str(tokenizer.eos_token))
    return tokens


def stop_token_ids_of(name: str) -> list[int]:
    """Return the tokens at which a model stops generating, from its ``generation_config.json``.

    Args:
        name: the model's folder or hub name, NAME or NAME@REVISION. A tokenizer without a model has
            no such tokens.
    """
    path, revision = _split_revision(name)
    return stop_token_ids(folder_with(path, "generation_config.json", revision))


def digest(tokenizer: FastTokenizer) -> str:
    """Return a hex sha256 of a tokenizer's content, which does not depend on its folder."""
    content = tokenizer.backend_tokenizer.to_str() + json_text(
        [tokenizer.special_tokens_map, tokenizer.eos_token_id, tokenizer.chat_template],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(content.encode()).hexdigest()


# --- the chat template


def template_text(name: str) -> str:
    """Read the template of ``--chat_template``; ``none`` is an empty one.

    Raises:
        UserError: if there is no such template.
    """
    if name == NO_TEMPLATE:
        return ""
    try:
        path = _CHATML if name == "chatml" else Path(name).expanduser()
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--chat_template {name} is neither chatml, none nor a readable file "
            f"({first_line(error)})."
        ) from None


def set_template(
    tokenizer: FastTokenizer, chat_template: str | None, is_plain_text: bool = False
) -> list[int]:
    """Set the chat template of a tokenizer, and check that it can show a conversation.

    Args:
        tokenizer: the tokenizer.
        chat_template: ``chatml`` or a file; ``none`` removes the tokenizer's own template, and
            ``None`` keeps it, or sets chatml if it has none.
        is_plain_text: the data are plain text, which can be trained without a template.

    Returns:
        The tokens that were added to the vocabulary. A model needs rows for them.

    Raises:
        UserError: if there is no such template, or if it cannot show a conversation.
    """
    if chat_template == NO_TEMPLATE:
        tokenizer.chat_template = None
        return []
    if chat_template is None and tokenizer.chat_template is None:
        if is_plain_text:
            return []
        chat_template = "chatml"
        say("default", "--chat_template chatml (the tokenizer has no chat template)")

    vocabulary_before = tokenizer.get_vocab()
    name = "the tokenizer's own chat template"
    if chat_template is not None:
        name = f"--chat_template {chat_template}"
        tokenizer.chat_template = template_text(chat_template)

    if chat_template == "chatml":
        # A model that was trained with a BOS before each text gets one before a conversation, too.
        if begins_with_bos(tokenizer):
            tokenizer.chat_template = "{{- bos_token -}}" + template_text(chat_template)
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)

    try:
        text = tokenizer.apply_chat_template(EXAMPLE, tokenize=False)
    except Exception as error:  # a template can raise any error
        raise UserError(
            f"{name} cannot show two questions and two answers: {first_line(error)}."
        ) from None
    if any(message["content"] not in text for message in EXAMPLE):
        raise UserError(f"{name} does not show the content of messages; use another one.")

    vocabulary = tokenizer.get_vocab()
    return sorted(id for token, id in vocabulary.items() if token not in vocabulary_before)
