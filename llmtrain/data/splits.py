"""Divide the records of a source into training and eval data, by hashes of their content.

So a record keeps its split if others are added, and all answers to a prompt share one.
"""

import hashlib
import math
from typing import Literal, TypeAlias

import numpy as np

from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.files import json_text

Split: TypeAlias = Literal["train", "eval"]
# More eval data than this share, or than twice --eval_fraction, are far too many.
_LARGEST_EVAL_SHARE = 0.5


def largest_eval_share(fraction: float) -> float:
    """Return the largest share of eval data that hashes may choose for ``--eval_fraction``."""
    return max(_LARGEST_EVAL_SHARE, 2 * fraction)


def hash_fraction(text: bytes) -> float:
    """Hash a text to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big") / 2**48


def hash_of(record: Conversation | PreferenceRecord) -> float:
    """Hash the prompt of a record to a number in [0, 1).

    A conversation that begins with an answer is hashed completely.
    """
    hashed = record.prompt or record.messages
    return hash_fraction(json_text(hashed, sort_keys=True, default=str).encode())


def first_of(is_selected: np.ndarray, count: int | None) -> np.ndarray:
    """Return which records are the first ``count`` selected ones, bool [records].

    Args:
        is_selected: whether each record is selected, bool [records].
        count: how many; ``None`` for all selected ones.
    """
    if count is None:
        return is_selected
    is_first: np.ndarray = is_selected & (np.cumsum(is_selected) <= count)
    return is_first


def eval_limit_of(hashes: np.ndarray, fraction: float) -> float:
    """Return the limit below which the hash of a record makes it eval data.

    The limit is ``fraction``, unless that would choose no record or far too many. Then it is a
    limit that chooses about ``fraction`` of them. Records with the same prompt have the same hash
    and stay in the same split.

    Args:
        hashes: float64 [records], the hash of each record, in [0, 1).
        fraction: the share of eval data, in [0, 1).
    """
    count = len(hashes)
    if not count:
        return fraction
    chosen = int((hashes < fraction).sum())
    largest = min(count * largest_eval_share(fraction), count - 1)
    if not fraction or 0 < chosen <= largest:
        return fraction

    ascending = np.sort(hashes)
    wanted = min(math.ceil(count * fraction), count - 1)
    # With the smallest hash as the limit, no record would be chosen.
    limits = ascending[wanted:][ascending[wanted:] > ascending[0]]
    return float(limits[0]) if len(limits) else 0.0  # 0 if all prompts are the same
