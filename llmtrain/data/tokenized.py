"""Rows of tokens, ready for a run: from the cache, or tokenised elsewhere."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.data import tokenizer as tok
from llmtrain.data.audit import SplitStats
from llmtrain.data.metadata import DataMetadata, metadata_of
from llmtrain.data.order import BATCHES_PER_MEGABATCH, Mixture
from llmtrain.data.packing import LENGTHS, TOKEN_COLUMNS, Rows, TokenRows, as_matrices
from llmtrain.data.readers import kind_of, suffix_of
from llmtrain.data.records import Split
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED

if TYPE_CHECKING:
    import pyarrow


@dataclass
class Tokenized:
    """Memory-mapped rows of tokens, and the tokenizer that made them.

    Attributes:
        train: the training rows; the eval rows if there is no training data.
        eval: the eval rows, if there are any.
        tokenizer: the tokenizer; ``None`` if the rows were made without one.
        metadata: counts and hashes of the rows.
        mixture: assigns positions of the run to data sets; ``None`` if every row is drawn once per
            epoch.
        new_tokens: tokens that a chat template has added to a pretrained tokenizer.
        in_order: draw the rows in the stored order instead of a permutation.
        train_names: the names of the data sets that the training rows come from; empty for rows
            that the recipe made.
        eval_names: the names of the data sets that the eval rows may come from.
    """

    train: TokenRows
    eval: TokenRows | None
    tokenizer: "tok.FastTokenizer | None"
    metadata: DataMetadata
    mixture: Mixture | None = None
    new_tokens: list[int] = field(default_factory=list)
    in_order: bool = False
    train_names: Sequence[str] = ()
    eval_names: Sequence[str] = ()

    @property
    def vocabulary(self) -> int:
        """The largest token id, plus 1."""
        return self.metadata.vocabulary

    @property
    def is_packed(self) -> bool:
        """Whether a row may hold several documents, which must not attend to each other."""
        return "position_ids" in self.train.column_names

    @property
    def order(self) -> str:
        """The order in which training rows are drawn, for the fingerprint of a run."""
        if self.in_order:
            return "stored"
        if LENGTHS in self.train.column_names:
            return f"shuffled, grouped by length over {BATCHES_PER_MEGABATCH} batches"
        return "shuffled"

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens at which an answer ends; empty for text."""
        return tuple(self.metadata.stop_token_ids)

    @property
    def eval_sources(self) -> dict[str, int]:
        """The number of eval rows of each data set, by its name.

        The dictionary is empty unless several data sets have eval rows, under different names.
        """
        counts = self.metadata.eval_source_rows
        rows_by_name = {}
        for name, count in zip(short_names(self.eval_names), counts, strict=False):
            if count:
                rows_by_name[name] = count
        has_all_rows = sum(rows_by_name.values()) == sum(counts)  # not if two names are equal
        return rows_by_name if has_all_rows and len(rows_by_name) > 1 else {}

    @property
    def positions(self) -> int:
        """The number of positions of a row that predict something."""
        return len(self.train[0]["input_ids"]) - 1

    def eval_prompt(self) -> list[int] | None:
        """Return the tokens before the first answer of an eval conversation, if there is one."""
        if self.eval is None or self.metadata.task == "text":
            return None
        end = len(self.eval)
        for count in reversed(self.metadata.eval_source_rows):
            if count > 0:
                row = self.eval[end - 1]
                first_target = next(i for i, label in enumerate(row["labels"]) if label != IGNORED)
                if first_target > 0:  # the first token of a row of text is a target
                    return row["input_ids"][:first_target]
            end -= count
        return None

    @classmethod
    def of(
        cls,
        train: Rows,
        tokenizer: "tok.FastTokenizer | None",
        eval: "Rows | None" = None,
        in_order: bool = False,
    ) -> "Tokenized":
        """Take rows that were tokenised elsewhere.

        Args:
            train: the training rows, with the column ``input_ids``, and optionally ``labels`` and
                ``position_ids``. Each is a list of integers, and all lists have the same length.
                Labels are not shifted. Other columns are ignored.
            tokenizer: the tokenizer that made the rows. ``None`` if the rows are no text: the run
                then has no bits per byte and no samples, and its vocabulary is the largest number
                in the rows, plus 1.
            eval: the eval rows, with the same columns.
            in_order: draw the rows in the stored order instead of a permutation.

        Raises:
            UserError: if a column is not of this form.
        """
        train_rows = _as_token_rows(train)
        eval_rows = None if eval is None else _as_token_rows(eval)
        splits = [rows for rows in (train_rows, eval_rows) if rows is not None]
        names = [", ".join(rows.column_names) for rows in splits]

        columns = [column for rows in splits for column in rows.data.columns]
        width = _common_length(columns)
        has_ids = all("input_ids" in rows.column_names for rows in splits)
        if width is None or width < 2 or not has_ids:
            raise UserError(
                f"Tokenized.of: {', '.join(TOKEN_COLUMNS)} must be lists of integers, all of one "
                "length; pad or pack them."
            )
        if len(set(names)) > 1:
            raise UserError(
                f"Tokenized.of: the training rows have {names[0]}, and the eval rows {names[1]}; "
                "give both splits the same columns."
            )

        train_stats = [_measure(train_rows, tokenizer, "train")]
        eval_stats = [] if eval_rows is None else [_measure(eval_rows, tokenizer, "eval")]
        metadata = metadata_of(
            "rows made by the recipe",
            spec="none" if tokenizer is None else tokenizer.name_or_path,
            tokenizer=tokenizer,
            vocabulary=max(0, *(max(_largest_tokens(rows).values()) for rows in splits)) + 1,
            block_size=width - 1,
            train=train_stats,
            eval=eval_stats,
        )
        return cls(train_rows, eval_rows, tokenizer, metadata, in_order=in_order)


def short_names(names: Sequence[str]) -> Sequence[str]:
    """Return the names of data sets without folders and suffixes, if these differ."""
    short_names = [_short_name(name) for name in names]
    return short_names if len(set(short_names)) == len(short_names) else names


def _short_name(name: str) -> str:
    """Return the name of a data set without its folders, and without the suffix of a file."""
    path = Path(name)
    if kind_of(path):
        return path.name[: -len(suffix_of(path))]
    return path.name or name


def _as_token_rows(rows: Rows) -> TokenRows:
    """Return the columns of rows that a run reads."""
    table = rows.data if isinstance(rows, TokenRows) else rows.with_format("arrow")[:]
    return TokenRows(table.select([name for name in TOKEN_COLUMNS if name in table.column_names]))


def _common_length(columns: Sequence["pyarrow.ChunkedArray"]) -> int | None:
    """Return the length of all lists in some columns.

    Returns:
        The length; ``None`` if the columns hold no lists of integers, lists with gaps, or lists of
        several lengths.
    """
    import pyarrow
    from pyarrow.compute import list_value_length

    lengths: set[int] = set()
    kinds: set[str] = set()
    try:
        for column in columns:
            lengths.update(list_value_length(column).unique().to_pylist())
        if len(lengths) != 1:
            return None
        for column in columns:
            kinds.update(matrix.dtype.kind for matrix in as_matrices(column))
    except (pyarrow.ArrowException, ValueError):
        return None
    return lengths.pop() if kinds == {"i"} else None


def _largest_tokens(rows: TokenRows) -> dict[str, int]:
    """Return the largest number in each column of tokens or labels.

    Raises:
        UserError: if a number is no token. A model would fail in the middle of a run.
    """
    largest = {}
    for name in rows.column_names:
        if name != "position_ids":
            matrices = as_matrices(rows.data.column(name))
            largest[name] = max((int(matrix.max()) for matrix in matrices), default=0)
            if any(((matrix < 0) & (matrix != IGNORED)).any() for matrix in matrices):
                raise UserError(
                    f"Tokenized.of: {name} holds negative numbers; only {IGNORED} may be negative."
                )
    return largest


def _measure(rows: TokenRows, tokenizer: "tok.FastTokenizer | None", split: Split) -> SplitStats:
    """Hash the content of rows that were tokenised elsewhere, and count their targets.

    Raises:
        UserError: if the tokenizer does not have all their tokens.
    """
    if tokenizer is not None:
        vocabulary = max(tokenizer.get_vocab().values()) + 1
        for name, largest in _largest_tokens(rows).items():
            if largest >= vocabulary:
                raise UserError(
                    f"Tokenized.of: {name} holds {largest}; the tokenizer has {vocabulary} tokens. "
                    "Pass the tokenizer that made the rows."
                )
    digest = hashlib.sha256()
    for name in rows.column_names:
        digest.update(name.encode())
        for matrix in as_matrices(rows.data.column(name)):
            digest.update(matrix.astype("<i4").tobytes())

    targets = 0
    target_bytes = 0
    label_column = "labels" if "labels" in rows.column_names else "input_ids"
    for matrix in as_matrices(rows.data.column(label_column)):
        labels = matrix[:, 1:][matrix[:, 1:] != IGNORED]
        targets += len(labels)
        if split == "eval" and tokenizer is not None:
            text = tokenizer.backend_tokenizer.decode(labels.tolist())
            target_bytes += len(text.encode())
    return SplitStats(
        records=len(rows),
        rows=len(rows),
        targets=targets,
        bytes=target_bytes,
        sha256=digest.hexdigest(),
    )
