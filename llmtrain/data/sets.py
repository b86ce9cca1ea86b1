"""The rows of sets that were prepared before, joined with those that a run makes."""

from collections.abc import Sequence

from llmtrain.data.audit import total_of_shards
from llmtrain.data.readers import Split
from llmtrain.data.request import DataRequest
from llmtrain.data.tokenized import SourceRows, Tokenized, metadata_of, rows_of
from llmtrain.errors import UserError


def joined(request: DataRequest, made: Tokenized | None) -> Tokenized:
    """Return the rows of all sources of a request, in their order.

    Args:
        request: the rows, with at least one set.
        made: the rows of the sources that are no sets, if there are any.

    Raises:
        UserError: if their rows have other columns.
    """
    if len(request.sources) == 1:
        only: Tokenized = request.sources[0].rows
        return only

    waiting = {} if made is None else {split: iter(rows) for split, rows in made.sources.items()}
    sources: dict[Split, list[SourceRows]] = {"train": [], "eval": []}
    for source in request.sources:
        for split in source.splits:
            if source.rows is None:
                sources[split].append(next(waiting[split]))
                continue
            own = source.rows.sources[split]
            # The eval data may be a set that has only training rows.
            if source.only_split == "eval" and source.rows.eval is None:
                own = source.rows.sources["train"]
            if own:
                sources[split].append(_merged(own))
    _check_columns([*sources["train"], *sources["eval"]])

    all_rows = [source.rows for source in request.sources if source.rows is not None]
    if made is not None:
        all_rows.append(made)
    task_rows = all_rows[0].metadata
    metadata = metadata_of(
        " ".join(request.train_names),
        request.spec,
        request.tokenizer,
        task_rows.block_size,
        train=[each.audit for each in sources["train"]],
        eval=[each.audit for each in sources["eval"]],
        shared=task_rows.shared,
        stop_token_ids=max((each.metadata.stop_token_ids for each in all_rows), key=len),
    )
    train = rows_of(sources["train"])
    eval = rows_of(sources["eval"])
    return Tokenized(train or eval, eval or None, request.tokenizer, metadata, sources=sources)


def _check_columns(sources: Sequence[SourceRows]) -> None:
    """Raise :class:`UserError` unless the rows of all sources have the same columns."""
    layouts = set()
    for source in sources:
        for shard in source.shards[:1]:
            layouts.add(str({name: (*column.shape,) for name, column in shard.columns.items()}))
    if len(layouts) > 1:
        raise UserError(
            f"the data sets have different columns, {' and '.join(sorted(layouts))}; make their "
            "rows with the same flags."
        )


def _merged(sources: Sequence[SourceRows]) -> SourceRows:
    """Return the rows of all sources of a set as those of one."""
    audit = total_of_shards([each.audit for each in sources])
    return SourceRows(audit, [shard for each in sources for shard in each.shards])
