"""Rows of preference pairs, written from lists of tokens."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llmtrain.data.packing import Examples, WrittenRows, write_rows
from llmtrain.data.store import TokenRows, TokenStore

TokenPair = tuple[list[int], list[int], list[int], bool]  # prompt, two answers, a label


def write_pair_rows(
    path: Path, pairs: Iterable[TokenPair], width: int, share_prompts: bool, packing: bool = True
) -> tuple[TokenRows, WrittenRows]:
    """Write pairs as rows of ``width`` tokens, and read them back."""
    store = TokenStore(path.with_suffix(".tokens"))
    shared = []
    labels = []
    for prompt, first, second, desirable in pairs:
        for answer in (first, second):
            loss_mask = [False] * len(prompt) + [True] * len(answer)
            store.add(np.array(prompt + answer, np.int32), np.array(loss_mask))
        shared.append(len(prompt) - 1 if share_prompts else 0)
        labels.append(desirable)

    stops = store.lengths.reshape(-1, 2)
    examples = Examples(
        sequences=np.arange(len(store)).reshape(-1, 2),
        starts=np.stack([np.zeros(len(shared), np.int64), np.array(shared)], axis=1),
        stops=stops,
        is_first_desirable=np.array(labels),
    )
    written = write_rows(path, store, examples, width, packing)
    store.close()
    return TokenRows.open([path]), written
