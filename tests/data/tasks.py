"""The tasks that a data set can be for: a small record of each, and the text of its rows."""

from pathlib import Path
from typing import Any

from llmtrain.data.config import ChatConfig, PairConfig
from llmtrain.data.prepare import Tokenized
from tests.data.preparation import write_records


def text_record(name: str) -> dict:
    return {"text": f"a document about {name}, and more words"}


def completion_record(name: str) -> dict:
    return {"prompt": f"{name}?", "completion": f"it is {name}"}


def pair_record(name: str) -> dict:
    return {"prompt": f"{name}?", "chosen": f"it is {name}", "rejected": f"not {name}"}


# The name of a task -> the type of the `chat` argument of tokenize(), and a function that makes a
# record with a name in it.
TASKS = {
    "text": (None, text_record),
    "chats": (ChatConfig, completion_record),
    "pairs": (PairConfig, pair_record),
}


def write_dataset(path: Path, records: list[Any]) -> str:
    """Write records as JSON Lines, and return the value of ``--dataset``."""
    return str(write_records(path, records))


def shown(rows: Any, tokenized: Tokenized) -> str:
    """Decode rows. A row of text ends with the token that the next row begins with."""
    overlap = 1 if tokenized.metadata.task == "text" else 0
    texts = []
    for row in rows:
        tokens = row["input_ids"][: len(row["input_ids"]) - overlap]
        texts.append(tokenized.tokenizer.decode([token for token in tokens if token >= 0]))
    return "".join(texts)
