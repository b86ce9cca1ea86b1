"""Counts and hashes of rows."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llmtrain.data import tokenizer as tok
from llmtrain.data.audit import SplitStats, total_audit


@dataclass
class DataMetadata:
    """Counts and hashes of rows, for ``run.json`` and the start-up log. Hashes are hex sha256.

    Attributes:
        dataset: the names of the data sets.
        tokenizer: the value of ``--tokenizer``; ``none`` if the rows were made without one.
        tokenizer_sha256: a hash of the tokenizer; ``none`` without one.
        data_sha256: a hash of all tokens, of both splits.
        vocabulary: the largest token id, plus 1. Not every smaller id need be a token.
        block_size: the number of positions of a row that predict something.
        records: documents, conversations or preference records of both splits.
        eval_records: those of the eval split.
        train_tokens: target tokens of the training split.
        eval_tokens: target tokens of the eval split.
        train_rows: rows of the training split.
        eval_rows: rows of the eval split.
        eval_bytes: UTF-8 bytes of the eval text, for bits per byte; 0 if the rows are no text.
        source_rows: training rows of each data set. They are stored one data set after the other.
        source_targets: target tokens of each data set's training rows.
        eval_source_rows: eval rows of each data set that has eval data. These are the data sets of
            ``source_rows``, unless ``--eval_dataset`` or ``--dataset_test_split`` chooses others.
        task: ``text``, ``conversations`` or ``preferences``. It is ``conversations`` if there is
            text, too.
        audit: counts of the training conversations or pairs; ``None`` for text alone.
        eval_audit: counts of the eval conversations or pairs.
        stop_token_ids: the tokens at which an answer ends; empty for text.
        pairs: the largest number of pairs in a row.
        shared: whether the answers of a pair share one copy of their prompt.
        covering_length: the smallest ``--max_length``, in multiples of 64, that is long enough for
            99.5 % of the training conversations; 0 for text.
        cache_entry: the name of the rows' folder in the cache; empty for rows that the recipe made.
    """

    dataset: str
    tokenizer: str
    tokenizer_sha256: str
    data_sha256: str
    vocabulary: int
    block_size: int
    records: int
    eval_records: int
    train_tokens: int
    eval_tokens: int
    train_rows: int
    eval_rows: int
    eval_bytes: int
    source_rows: list[int]
    eval_source_rows: list[int]
    source_targets: list[int]
    task: str = "text"
    audit: dict[str, Any] | None = None
    eval_audit: dict[str, Any] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    pairs: int = 0
    shared: bool = False
    covering_length: int = 0
    cache_entry: str = ""


def metadata_of(
    dataset: str,
    spec: str,
    tokenizer: "tok.FastTokenizer | None",
    block_size: int,
    train: Sequence[SplitStats],
    eval: Sequence[SplitStats],
    vocabulary: int = 0,
    **others: Any,
) -> DataMetadata:
    """Return the metadata of rows that were written.

    Args:
        dataset: the names of the data sets.
        spec: the value of ``--tokenizer``.
        tokenizer: the tokenizer, if there is one.
        block_size: the number of positions of a row that predict something.
        train: the counts of each source's training split.
        eval: the counts of each source's eval split.
        vocabulary: the largest token id, plus 1, if there is no tokenizer.
        others: further fields of the metadata, by name.
    """
    if tokenizer is not None:
        vocabulary = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
    both = [*train, *eval]
    hashes = "".join(stats.sha256 for stats in train)
    if len(train) != len(eval):
        # The eval data have sources of their own, so the hash must say where they begin.
        hashes += " eval "
    hashes += "".join(stats.sha256 for stats in eval)
    return DataMetadata(
        dataset=dataset,
        tokenizer=spec,
        tokenizer_sha256="none" if tokenizer is None else tok.digest(tokenizer),
        data_sha256=hashlib.sha256(hashes.encode()).hexdigest(),
        vocabulary=vocabulary,
        block_size=block_size,
        records=sum(stats.records for stats in both),
        eval_records=sum(stats.records for stats in eval),
        train_tokens=sum(stats.targets for stats in train),
        eval_tokens=sum(stats.targets for stats in eval),
        train_rows=sum(stats.rows for stats in train),
        eval_rows=sum(stats.rows for stats in eval),
        eval_bytes=sum(stats.bytes for stats in eval),
        source_rows=[stats.rows for stats in train],
        eval_source_rows=[stats.rows for stats in eval],
        source_targets=[stats.targets for stats in train],
        task=_task_of(train or eval),
        audit=_summed_audit(train),
        eval_audit=_summed_audit(eval),
        pairs=max(stats.pairs for stats in both),
        **others,
    )


def _task_of(splits: Sequence[SplitStats]) -> str:
    audits = [stats.audit for stats in splits if stats.audit]
    if not audits:
        return "text"
    return "conversations" if audits[0].unit == "conversation" else "preferences"


def _summed_audit(splits: Sequence[SplitStats]) -> dict[str, Any] | None:
    """Return the sums of the sources' audits, or ``None`` if all sources are text."""
    audits = [stats.audit for stats in splits if stats.audit]
    return asdict(total_audit(audits)) if audits else None
