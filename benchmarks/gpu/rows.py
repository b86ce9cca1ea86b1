"""Random rows on the host.

The time of a step does not depend on the values of its tokens, so no tokenizer is trained.
"""

import datasets
import numpy as np
import torch

import llmtrain as lt

# The shortest and the longest document of a packed row, as shares of the row.
_DOCUMENT_SHARES = (1 / 16, 1 / 3)


def text_rows(vocabulary: int, block: int, count: int) -> lt.Tokenized:
    """Return rows of random tokens.

    Args:
        vocabulary: the number of tokens; the largest of them occurs.
        block: positions of a row that predict something.
        count: the number of rows.
    """
    tokens = np.random.default_rng(seed=0).integers(vocabulary, size=(count, block + 1))
    tokens[0, 0] = vocabulary - 1
    return lt.Tokenized.of(_table(input_ids=tokens), None)


def packed_rows(vocabulary: int, block: int, count: int) -> lt.Tokenized:
    """Return packed rows of random conversations: in each document, the second half are targets."""
    random = np.random.default_rng(seed=0)
    tokens = random.integers(vocabulary, size=(count, block + 1))
    tokens[0, 0] = vocabulary - 1
    labels = tokens.copy()
    positions = np.zeros_like(tokens)
    shortest, longest = (int(share * block) for share in _DOCUMENT_SHARES)
    for row in range(count):
        start = 0
        while start <= block:
            length = min(int(random.integers(shortest, longest)), block + 1 - start)
            positions[row, start : start + length] = np.arange(length)
            labels[row, start : start + length // 2 + 1] = -100
            start += length
    return lt.Tokenized.of(_table(input_ids=tokens, labels=labels, position_ids=positions), None)


def target_share(rows: lt.Tokenized) -> float:
    """Return which share of all positions are targets."""
    metadata = rows.metadata
    return metadata.train_tokens / (metadata.train_rows * metadata.block_size)


def batches_on_host(rows: lt.Tokenized, size: int, pinned: bool) -> list[torch.Tensor]:
    """Return the tokens of all rows as batches [size, block + 1]."""
    tokens = torch.from_numpy(rows.train.column("input_ids"))
    return [batch.pin_memory() if pinned else batch for batch in tokens.split(size)]


def _table(**columns: np.ndarray) -> datasets.Dataset:
    return datasets.Dataset.from_dict({name: column.tolist() for name, column in columns.items()})
