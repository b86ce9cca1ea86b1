"""Counts and hashes of rows."""

import hashlib
from dataclasses import asdict, dataclass, field

from llmtrain.data import tokenizer as tok
from llmtrain.data.packing import SplitStats
from llmtrain.data.preference import PairAudit
from llmtrain.data.sft import Audit, audit_of


@dataclass
class Facts:
    """Counts and hashes of rows, for ``run.json`` and the banner. Hashes are hex sha256."""

    dataset: str
    tokenizer: str
    tokenizer_sha256: str
    data_sha256: str  # of the tokens, training and held out
    vocabulary: int
    block_size: int
    documents: int
    eval_documents: int
    train_tokens: int
    eval_tokens: int
    train_rows: int
    eval_rows: int
    eval_bytes: int  # UTF-8 bytes of the held-out text, for bits per byte
    source_rows: list[
        int
    ]  # rows to train on of each data set, in which they stand one after the other
    eval_source_rows: list[int]  # of those held out
    task: str = "text"
    audit: dict[str, int] | None = None  # of conversations
    eval_audit: dict[str, int] | None = None  # of those held out
    ends: list[int] = field(
        default_factory=list
    )  # the tokens at which an answer ends; none of a text
    pairs: int = 0  # of judged answers that a row has, at most
    shared: bool = False  # the answers of a pair go on from one copy of their prompt


def facts_of(
    dataset: str,
    spec: str,
    tokenizer: tok.FastTokenizer,
    block_size: int,
    train: list[SplitStats],
    held_out: list[SplitStats],
) -> Facts:
    """Return the facts about rows that were written, of one or several sources."""
    everything = [*train, *held_out]
    audits, eval_audits = (
        [written.audit for written in side if written.audit] for side in (train, held_out)
    )
    tasks = {Audit: "conversations", PairAudit: "preferences"}
    return Facts(
        dataset=dataset,
        tokenizer=spec,
        tokenizer_sha256=tok.digest(tokenizer),
        data_sha256=hashlib.sha256(
            "".join(written.sha256 for written in everything).encode()
        ).hexdigest(),
        vocabulary=max(tokenizer.get_vocab().values()) + 1,  # ids may have gaps
        block_size=block_size,
        documents=sum(written.documents for written in everything),
        eval_documents=sum(written.documents for written in held_out),
        train_tokens=sum(written.targets for written in train),
        eval_tokens=sum(written.targets for written in held_out),
        train_rows=sum(written.rows for written in train),
        eval_rows=sum(written.rows for written in held_out),
        eval_bytes=sum(written.bytes for written in held_out),
        source_rows=[written.rows for written in train],
        eval_source_rows=[written.rows for written in held_out],
        task=tasks[type(audits[0])] if audits else "text",
        audit=asdict(audit_of(audits)) if audits else None,
        eval_audit=asdict(audit_of(eval_audits)) if eval_audits else None,
        pairs=max(written.pairs for written in everything),
    )
