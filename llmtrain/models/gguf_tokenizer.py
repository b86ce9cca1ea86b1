"""The tokenizer of a GGUF file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import UserError
from llmtrain.files import json_text, read_object
from llmtrain.json_types import JsonObject

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerFast


# llama.cpp refuses a tokenizer without merges. This one never applies: a text is split into
# characters, and without other merges no longer pieces arise.
_NO_MERGES = "<no> <merges>"


def add_tokenizer(
    writer: "GGUFWriter", folder: Path, tokenizer: "PreTrainedTokenizerFast", vocabulary: int
) -> None:
    """Add the vocabulary, the merges and the chat template.

    Args:
        writer: of the GGUF file.
        folder: the folder of the model, for messages.
        tokenizer: the tokenizer.
        vocabulary: the number of embeddings, which may be more than the tokenizer has tokens.

    Raises:
        UserError: if llama.cpp would make other tokens of a text.
    """
    from gguf import TokenType

    vocab = tokenizer.get_vocab()
    if max(vocab.values()) >= vocabulary:
        raise UserError(
            f"--to_gguf: the tokenizer of {folder} has {max(vocab.values()) + 1:,} tokens, but the "
            f"model only {vocabulary:,} embeddings."
        )
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(_pre_tokenizer_name(folder, content))

    tokens = [f"[PAD{index}]" for index in range(vocabulary)]
    types = [TokenType.UNUSED] * vocabulary
    for token, index in vocab.items():
        tokens[index] = token
        types[index] = TokenType.NORMAL
    for added in content["added_tokens"]:
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    writer.add_token_merges(merges or [_NO_MERGES])

    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)
    _add_special_tokens(writer, folder, tokenizer)


# The regular expressions of pre-tokenizers, as in tokenizer.json.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES
)
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES
_QWEN35 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _LINES
)

# llama.cpp's name of a pre-tokenizer, by its regular expressions and whether a word that is a token
# is not split (``ignore_merges``).
_PRE_TOKENIZERS = {
    ((_GPT2,), False): "gpt-2",
    ((r"\p{N}", _GPT2), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
}


def _pre_tokenizer_name(folder: Path, content: JsonObject) -> str:
    """Return llama.cpp's name of a pre-tokenizer.

    Args:
        folder: the folder of the model, for messages.
        content: of ``tokenizer.json``.

    Raises:
        UserError: if llama.cpp has no such tokenizer.
    """
    model = content["model"]
    steps = content["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    # llama.cpp does not normalise. Text is almost always in NFC already.
    is_normalised = (content["normalizer"] or {"type": "NFC"})["type"] == "NFC"
    is_byte_level = steps[-1].get("type") == "ByteLevel" and not steps[-1]["add_prefix_space"]
    if model["type"] != "BPE" or not is_byte_level or not is_normalised:
        raise UserError(
            f"--to_gguf: the tokenizer of {folder} is not a byte-level BPE. For SentencePiece, try "
            "llama.cpp's convert_hf_to_gguf.py; a model trained from scratch can use --tokenizer "
            "bpe:N."
        )

    patterns = tuple(pattern for step in steps for pattern in _patterns_of(step))
    name = _PRE_TOKENIZERS.get((patterns, bool(model.get("ignore_merges"))))
    if name is None:
        raise UserError(
            f"--to_gguf: the tokenizer of {folder} splits text in a way that it does not know; "
            f"it knows those of {', '.join(_PRE_TOKENIZERS.values())}."
        )
    return name


def _patterns_of(step: JsonObject) -> list[str]:
    """Return the regular expressions by which a step of a pre-tokenizer splits text."""
    match step:
        case {"type": "ByteLevel", "use_regex": use_regex}:
            return [_GPT2] if use_regex else []
        case {"type": "Digits", "individual_digits": True}:
            return [r"\p{N}"]
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return [str(pattern)]
    return [json_text(step)]


def _add_special_tokens(
    writer: "GGUFWriter", folder: Path, tokenizer: "PreTrainedTokenizerFast"
) -> None:
    """Add the tokens at which generation stops, and those that surround a text.

    Raises:
        UserError: if there are more of them than a GGUF file can name.
    """
    stops = read_object(folder / "generation_config.json").get("eos_token_id")
    candidates = [tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])]
    stop_token_ids = [token for token in dict.fromkeys(candidates) if token is not None]

    # End of sequence, of turn and of message: llama.cpp stops at all of them.
    setters = [writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id]
    if len(stop_token_ids) > len(setters):
        raise UserError(
            f"--to_gguf: generation_config.json of {folder} names {len(stop_token_ids)} stop "
            f"tokens, and a GGUF file can name {len(setters)}; remove some from eos_token_id."
        )
    for set_token, token in zip(setters, stop_token_ids, strict=False):
        set_token(token)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)

    around_nothing = tokenizer.encode("")
    writer.add_add_bos_token(
        tokenizer.bos_token_id is not None and around_nothing[:1] == [tokenizer.bos_token_id]
    )
    writer.add_add_eos_token(
        len(around_nothing) > 1 and around_nothing[-1] == tokenizer.eos_token_id
    )
