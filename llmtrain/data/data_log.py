"""The lines about the data in the start-up log."""

import numpy as np

from llmtrain.console import is_or_are, pluralize, say
from llmtrain.data.audit import COVERED_SHARE, Audit
from llmtrain.data.request import DataRequest
from llmtrain.data.tokenized import Tokenized, short_names

_TASKS = {
    "text": "continued pretraining",
    "conversations": "fine-tuning on the assistant's turns",
    "preferences": "preference training",
}


def describe(request: DataRequest, rows: Tokenized, is_cached: bool) -> None:
    """Print the lines about the data in the start-up log.

    Args:
        request: the rows that the recipe asked for.
        rows: the rows.
        is_cached: whether they are from the cache.
    """
    metadata = rows.metadata
    outcome = "from the cache" if is_cached else "tokenised"
    say(
        "data",
        f"{metadata.dataset or ' '.join(rows.eval_names)}: "
        f"{pluralize(metadata.records, 'record')}, {metadata.train_tokens:,} train tokens, "
        f"{metadata.eval_tokens:,} eval tokens, vocabulary {metadata.vocabulary:,} "
        f"({metadata.tokenizer}); {outcome}",
    )
    if request.takes_conversations and request.train_names:
        formats = dict.fromkeys(source.format for source in request.sources)
        say("task", f"{_TASKS[metadata.task]}: the records are {', '.join(formats)}")
    if request.max_length == "auto":
        say("lengths", f"--max_length auto is {metadata.block_size:,}")
    if metadata.audit:
        audit = Audit(**metadata.audit)
        for line in audit.lines():
            say("audit", line)
        if audit.overlong > (1 - COVERED_SHARE) * audit.examples:
            overlong = f"{audit.overlong:,} of {audit.examples:,} {is_or_are(audit.overlong)}"
            say(
                "lengths",
                f"{overlong} longer than --max_length {metadata.block_size:,}; "
                f"--max_length auto holds {COVERED_SHARE:.1%}",
            )
    if metadata.eval_audit:
        eval_audit = Audit(**metadata.eval_audit)
        if eval_audit.bad or eval_audit.overlong or eval_audit.untrained:
            say("eval", eval_audit.left_out())
    _describe_shares(rows, request.train_names)


def _describe_shares(rows: Tokenized, names: list[str]) -> None:
    """Print each data set's share of the rows that a run draws, and of their target tokens.

    The two differ, because rows of text are full of targets and rows of conversations are not.
    """
    metadata = rows.metadata
    if len(metadata.source_rows) < 2:
        return

    # Without a mixture every row is drawn once per epoch.
    drawn_rows = metadata.source_rows if rows.mixture is None else rows.mixture.counts
    targets_per_row = np.array(metadata.source_targets) / metadata.source_rows
    row_shares = np.array(drawn_rows) / sum(drawn_rows)
    target_shares = row_shares * targets_per_row / np.dot(row_shares, targets_per_row)
    shares = [
        f"{name} {drawn:.1%} of rows, {targets:.1%} of target tokens"
        for name, drawn, targets in zip(short_names(names), row_shares, target_shares, strict=True)
    ]
    say("mixture", "; ".join(shares))
