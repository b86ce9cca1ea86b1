"""Records of conversations, their rows, and the text of these."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmtrain.data.audit import Audit
from llmtrain.data.config import RowConfig
from llmtrain.data.loader import IGNORED
from llmtrain.data.tokenized import Tokenized
from llmtrain.training.rows import tokenize
from tests.data.chats import chat
from tests.data.preparation import data_config

CHATML_END = "<|im_end|>"  # the token that ends a turn in ChatML


def chat_record(*contents: str) -> dict[str, Any]:
    """Return a record with messages of the user and the assistant in turn."""
    return {"messages": chat(*contents).messages}


def chat_records(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Return short records with a question and an answer. No two are equal."""
    return [chat_record(f"{i}?", f"{i * i} ü.") for i in range(start, start + count)]


def chatml(record: dict[str, Any]) -> str:
    """Return a conversation as ChatML shows it, up to the end of its last turn."""
    messages = record["messages"]
    return "\n".join(f"<|im_start|>{m['role']}\n{m['content']}{CHATML_END}" for m in messages)


def size_of(record: dict[str, Any]) -> int:
    """Return the number of tokens of a conversation: bytes, and two control tokens a message."""
    bytes_of_text = len(chatml(record).replace(CHATML_END, "").replace("<|im_start|>", "").encode())
    return bytes_of_text + 2 * len(record["messages"])


def tokenize_rows(
    config_type: type[RowConfig],
    *paths: Path,
    max_length: int,
    unpaired: bool = False,
    **settings: Any,
) -> Tokenized:
    """Tokenize files. Each setting is a field of ``config_type`` or of ``DataConfig``."""
    names = config_type.__dataclass_fields__.keys() & settings.keys()
    row_settings = {name: settings.pop(name) for name in names}
    return tokenize(
        data_config(*paths, **settings),
        max_length,
        config_type(**row_settings),
        unpaired=unpaired,
    )


def multiple_of_64(length: int) -> int:
    """Return a length, rounded up."""
    return -(-length // 64) * 64


def audit_of(tokenized: Tokenized) -> Audit:
    """Return the counts of the training data."""
    assert tokenized.metadata.audit is not None
    return tokenized.metadata.audit


def _documents_of(row: dict[str, list[int]]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and the labels of each conversation in a row, without the padding."""
    ids = row["input_ids"]
    labels = row["labels"]
    if "position_ids" in row:
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
        stops = [*starts[1:], len(ids)]
    else:
        starts = [0]
        stops = row["lengths"]

    documents = []
    for start, stop in zip(starts, stops, strict=True):
        documents.append((ids[start:stop], labels[start:stop]))

    # Only padding has no target, and it is at the end of the row.
    has_target = [set(labels) != {IGNORED} for _, labels in documents]
    assert all(has_target[:-1])
    return documents if has_target[-1] else documents[:-1]


def texts_of(rows: Iterable[dict] | None, tokenized: Tokenized) -> list[str]:
    """Return each conversation in the rows as text."""
    texts = []
    for row in rows or []:
        texts += [tokenized.tokenizer.decode(ids) for ids, _ in _documents_of(row)]
    return texts


def answers_of(rows: Iterable[dict] | None, tokenized: Tokenized) -> list[str]:
    """Return the targets of each conversation in the rows as text."""
    answers = []
    for row in rows or []:
        for _, labels in _documents_of(row):
            targets = [label for label in labels if label != IGNORED]
            answers.append(tokenized.tokenizer.decode(targets))
    return answers
