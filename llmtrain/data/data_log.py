"""The lines about the data in the start-up log."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from llmtrain.console import is_or_are, pluralize, say
from llmtrain.data.audit import COVERED_SHARE, Audit
from llmtrain.data.readers import Source
from llmtrain.data.request import DataRequest
from llmtrain.data.tokenized import DataMetadata, Tokenized, short_names

# How the names of eval splits begin, such as "test_sft" and "validation".
_EVAL_SPLITS = ("test", "val", "eval", "dev")
_SHOWN_SUFFIXES = 10  # of files that are not read


def describe(request: DataRequest, rows: Tokenized, is_cached: bool) -> None:
    """Print the lines about the data in the start-up log.

    Args:
        request: the rows that the recipe asked for.
        rows: the rows.
        is_cached: whether they are from the cache.
    """
    metadata = rows.metadata
    kind = {"text": "document", "conversations": "conversation", "preferences": "preference"}
    documents = pluralize(metadata.records, kind[metadata.task])
    formats = [requested.format for requested in request.sources]
    if metadata.task == "conversations" and "text" in formats:
        documents = f"{metadata.records:,} conversations and documents"
    outcome = "from the cache" if is_cached else "tokenised"
    say(
        "data",
        f"{metadata.dataset or ' '.join(rows.eval_names)}: {documents}, "
        f"{metadata.train_tokens:,} train tokens, {metadata.eval_tokens:,} eval tokens, "
        f"vocabulary {metadata.vocabulary:,} ({metadata.tokenizer}); {outcome}",
    )
    for requested in request.sources:
        if requested.source.unread_files:
            _describe_unread_files(requested.source)
    if request.takes_conversations and request.train:
        _describe_task(request, metadata)
    if metadata.eval_audit:
        eval_audit = Audit(**metadata.eval_audit)
        if eval_audit.bad or eval_audit.overlong or eval_audit.untrained:
            say("eval", eval_audit.left_out())
    _describe_shares(rows, [source.name for source in request.train])

    if request.config.has_own_eval_data and request.train:
        is_split = not request.config.eval_dataset
        split = f"split {request.config.dataset_test_split} of " if is_split else ""
        say("eval", f"the eval data are {split}{' '.join(rows.eval_names)}")
    elif not is_cached:
        _describe_unread_splits(request.train)
    for name, note in rows.notes:
        say(name, note)
    assert rows.tokenizer is not None, "these rows were made with one"
    if request.chat is not None and rows.tokenizer.chat_template is None:
        say("template", "none: the rows are prompt, completion and EOS, as plain text")


def _describe_unread_files(source: Source) -> None:
    """Count the files of a folder or glob that cannot be read, the most frequent suffixes first."""
    counts = Counter(source.unread_files)
    most = counts.most_common(_SHOWN_SUFFIXES)
    kinds = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in most]
    say(
        "data",
        f"{source.name}: {pluralize(counts.total(), 'file')} {is_or_are(counts.total())} not read: "
        f"{', '.join(kinds)}; --text_suffixes names suffixes to read as text",
    )


def _describe_unread_splits(sources: Sequence[Source]) -> None:
    """Name the first split of each data set that its authors meant for evaluation."""
    for source in sources:
        eval_splits = [name for name in source.other_splits() if name.startswith(_EVAL_SPLITS)]
        if eval_splits:
            split = eval_splits[0]
            say(
                "eval",
                f"split {split} of {source.name} is not read; --dataset_test_split {split} "
                "evaluates on it",
            )


def _describe_task(request: DataRequest, metadata: DataMetadata) -> None:
    """Print what is trained, and how many conversations or pairs are left out and why."""
    if not metadata.audit:
        say("task", "continued pretraining: the training records are text, not conversations")
        return

    task = "fine-tuning on the assistant's turns"
    if metadata.task == "preferences":
        task = "preference training"
    elif "text" in [each.format for each in request.sources if each.is_for_training]:
        task += ", and on every token of the text"
    formats = ", ".join(dict.fromkeys(requested.format for requested in request.sources))
    say("task", f"{task}: the records are {formats}")

    audit = Audit(**metadata.audit)
    for line in audit.lines():
        say("audit", line)
    if request.max_length == "auto":
        say("lengths", f"--max_length auto is {metadata.block_size:,}")
    if audit.overlong > (1 - COVERED_SHARE) * audit.examples:
        say(
            "lengths",
            f"{audit.overlong:,} of {audit.examples:,} {is_or_are(audit.overlong)} longer than "
            f"--max_length {metadata.block_size:,}; --max_length {metadata.covering_length} holds "
            f"{COVERED_SHARE:.1%}",
        )


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
    drawn_targets = np.array(drawn_rows) * targets_per_row
    shares = []
    for i, name in enumerate(short_names(names)):
        row_share = drawn_rows[i] / sum(drawn_rows)
        target_share = drawn_targets[i] / drawn_targets.sum()
        shares.append(f"{name} {row_share:.1%} of rows, {target_share:.1%} of target tokens")
    say("mixture", "; ".join(shares))
