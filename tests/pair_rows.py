"""Rows of preference pairs, written from lists of tokens."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llmtrain.data.audit import Audit
from llmtrain.data.packing import Examples, TokenStore, write_rows
from llmtrain.data.shards import Shard, TokenRows, facts_of

VOCABULARY = 1 << 16
# The tokens of a prompt and of two answers, and whether the first answer is desirable.
TokenPair = tuple[list[int], list[int], list[int], bool]


def write_pair_rows(
    path: Path, pairs: Iterable[TokenPair], width: int, share_prompts: bool, packing: bool = True
) -> tuple[TokenRows, Audit]:
    """Write pairs as rows, and read them back.

    Args:
        path: the file to write.
        pairs: the pairs.
        width: tokens per row.
        share_prompts: whether the second answer has no copy of the prompt, except its last token.
        packing: whether a row may have several pairs.
    """
    store = TokenStore(path.with_suffix(".tokens"))
    shared_tokens = []
    is_first_desirable = []
    for prompt, first_answer, second_answer, is_desirable in pairs:
        for answer in (first_answer, second_answer):
            loss_mask = [False] * len(prompt) + [True] * len(answer)
            store.add(np.array(prompt + answer, np.int32), np.array(loss_mask))
        shared_tokens.append(len(prompt) - 1 if share_prompts else 0)
        is_first_desirable.append(is_desirable)

    # The first answer of a pair starts at the beginning of its sequence.
    starts = np.zeros((len(shared_tokens), 2), np.int64)
    starts[:, 1] = shared_tokens
    examples = Examples(
        sequences=np.arange(len(store)).reshape(-1, 2),
        starts=starts,
        stops=np.diff(store.bounds).reshape(-1, 2),
        is_first_desirable=np.array(is_first_desirable),
    )
    written = write_rows(path, store, examples, width=width, packing=packing, vocabulary=VOCABULARY)
    store.close()
    return TokenRows([Shard(path.parent, facts_of(path))]), written
