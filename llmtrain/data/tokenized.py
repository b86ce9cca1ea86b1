"""Rows of tokens, ready for a run, with their counts and hashes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.data import tokenizer as tok
from llmtrain.data.audit import Audit, total_audit
from llmtrain.data.given_rows import GivenRows, as_token_rows, measured
from llmtrain.data.order import WINDOW, Mixture, shuffle_name
from llmtrain.data.packing import LENGTHS
from llmtrain.data.readers import Split, kind_of
from llmtrain.data.shards import CheckedFile, FileOpener, Rows, Shard, TokenRows
from llmtrain.errors import DamagedRowsError, UserError
from llmtrain.files import JsonObject, damaged_files, read_patiently, read_sealed
from llmtrain.model_folders import vocabulary_of

MANIFEST = "manifest.json"  # of a set, which is complete if it has one
# The version of a set's content. Raise it when the content changes: the entries of the cache are
# then made again.
FORMAT_VERSION = 15


@dataclass
class DataMetadata:
    """Counts and hashes of rows, for ``run.json`` and the start-up log. Hashes are hex sha256.

    Attributes:
        dataset: the names of the data sets.
        tokenizer: the value of ``--tokenizer``; ``none`` if the rows were made without one.
        tokenizer_sha256: a hash of the tokenizer; ``none`` without one.
        data_sha256: a hash of all tokens, of both splits.
        eval_sha256: the same of the eval split.
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
        cache_entry: the name of the rows' folder in the cache; empty for rows that the recipe made.
    """

    dataset: str
    tokenizer: str
    tokenizer_sha256: str
    data_sha256: str
    eval_sha256: str
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
    audit: Audit | None = None
    eval_audit: Audit | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    pairs: int = 0
    shared: bool = False
    cache_entry: str = ""


def metadata_of(
    dataset: str,
    spec: str,
    tokenizer: "tok.FastTokenizer | None",
    block_size: int,
    train: Sequence[Audit],
    eval: Sequence[Audit],
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
    both = [*train, *eval]
    hashes = "".join(stats.sha256 for stats in train)
    if len(train) != len(eval):
        # The eval data have sources of their own, so the hash must say where they begin.
        hashes += " eval "
    eval_hashes = "".join(stats.sha256 for stats in eval)
    hashes += eval_hashes

    task = "text"
    units = {stats.unit for stats in train or eval} - {"text"}
    if units:
        task = "conversations" if units == {"conversation"} else "preferences"
    return DataMetadata(
        dataset=dataset,
        tokenizer=spec,
        tokenizer_sha256="none" if tokenizer is None else tok.digest(tokenizer),
        data_sha256=hashlib.sha256(hashes.encode()).hexdigest(),
        eval_sha256=hashlib.sha256(eval_hashes.encode()).hexdigest(),
        vocabulary=vocabulary if tokenizer is None else vocabulary_of(tokenizer),
        block_size=block_size,
        records=sum(stats.records - stats.bad for stats in both),
        eval_records=sum(stats.records - stats.bad for stats in eval),
        train_tokens=sum(stats.targets for stats in train),
        eval_tokens=sum(stats.targets for stats in eval),
        train_rows=sum(stats.rows for stats in train),
        eval_rows=sum(stats.rows for stats in eval),
        eval_bytes=sum(stats.bytes for stats in eval),
        source_rows=[stats.rows for stats in train],
        eval_source_rows=[stats.rows for stats in eval],
        source_targets=[stats.targets for stats in train],
        task=task,
        audit=total_audit(train),
        eval_audit=total_audit(eval),
        pairs=max(stats.pairs for stats in both),
        **others,
    )


class SourceRows(NamedTuple):
    """The rows that a split has of a source.

    Attributes:
        audit: their counts and hashes.
        shards: the rows, without empty shards.
    """

    audit: Audit
    shards: Sequence[Rows]


@dataclass
class Tokenized:
    """Rows of tokens, and the tokenizer that made them.

    Attributes:
        train: the training rows; the eval rows if there is no training data.
        eval: the eval rows, if there are any.
        tokenizer: the tokenizer; ``None`` if the rows were made without one.
        metadata: counts and hashes of the rows.
        mixture: assigns positions of the run to data sets; ``None`` if every row is drawn once per
            epoch.
        new_tokens: tokens that a chat template has added to a pretrained tokenizer.
        in_order: draw the rows in the stored order instead of a permutation.
        window: the largest number of shards whose rows are mixed.
        eval_names: the names of the data sets that the eval rows may come from.
        decided: the values that :func:`llmtrain.tokenize` has chosen for flags, by their names.
        sources: the rows of a set, by split and source.
        made_from: what the rows of a set depend on; see :class:`llmtrain.data.request.DataRequest`.
    """

    train: TokenRows
    eval: TokenRows | None
    tokenizer: "tok.FastTokenizer | None"
    metadata: DataMetadata
    mixture: Mixture | None = None
    new_tokens: list[int] = field(default_factory=list)
    in_order: bool = False
    window: int = WINDOW
    eval_names: Sequence[str] = ()
    decided: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[Split, Sequence[SourceRows]] = field(default_factory=dict)
    made_from: JsonObject = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """The largest token id, plus 1."""
        return self.metadata.vocabulary

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        return self.train.column_names

    @property
    def is_packed(self) -> bool:
        """Whether a row may hold several documents, which must not attend to each other."""
        return "position_ids" in self.column_names

    @property
    def order(self) -> str:
        """The order in which training rows are drawn, for the fingerprint of a run."""
        if self.in_order:
            return "stored"
        shards = [len(self.train.shard_rows)]
        if self.mixture is not None:
            shards = [shuffle.shards for shuffle in self.mixture.shuffles]
        return shuffle_name(shards, self.window, by_length=LENGTHS in self.train.column_names)

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
        names = short_names(self.eval_names)
        rows_by_name = {name: count for name, count in zip(names, counts, strict=False) if count}
        has_all_rows = sum(rows_by_name.values()) == sum(counts)  # not if two names are equal
        return rows_by_name if has_all_rows and len(rows_by_name) > 1 else {}

    @property
    def positions(self) -> int:
        """The number of positions of a row that predict something."""
        return self.train.columns["input_ids"].shape[0] - 1

    def ordered(self, weights: Sequence[float], window: int) -> "Tokenized":
        """Return the same rows in another order.

        Args:
            weights: the weight of each data set in a mixture; empty to draw every row once per
                epoch.
            window: the largest number of shards whose rows are mixed.
        """
        mixture = None
        if weights:
            sizes = self.metadata.source_rows
            mixture = Mixture(sizes, weights, self.train.shard_rows, window)
        return replace(self, mixture=mixture, window=window)

    @classmethod
    def open(
        cls,
        folder: Path,
        check: bool = False,
        open_file: FileOpener = CheckedFile.of,
    ) -> "Tokenized":
        """Return the rows of a set.

        Args:
            folder: the folder of the set, which may be a cache entry.
            check: compare all blocks of its shards with their hashes now.
            open_file: opens the file of a shard.

        Raises:
            OSError: if it does not exist, or if a file is absent or damaged.
            UserError: if its disk fails, which is no damage, or if its tokenizer cannot be loaded.
        """
        manifest_path = folder / MANIFEST
        manifest_path.stat()  # raises OSError if there is no such file
        manifest = read_sealed(manifest_path)
        if not manifest:
            raise OSError(f"{MANIFEST} differs from its hash")
        if manifest["format"] != FORMAT_VERSION:
            raise OSError(f"format {manifest['format']} is of another version of llmtrain")
        damaged = read_patiently(folder, lambda: damaged_files(folder, manifest["tokenizer"]))
        if damaged:
            raise OSError(f"{' '.join(damaged)} differs from its hash")

        metadata = DataMetadata(**manifest["metadata"])
        sources: dict[Split, list[SourceRows]] = {"train": [], "eval": []}
        for split, entries in sources.items():
            for entry in manifest[split]:
                filled = [facts for facts in entry["shards"] if facts["rows"]]
                shards = [Shard(folder, facts, open_file) for facts in filled]
                entries.append(SourceRows(Audit(**entry["audit"]), shards))
                for shard in shards if check else ():
                    try:
                        shard.file.check()
                    except DamagedRowsError:
                        name = shard.file.path.name
                        raise OSError(f"{name} differs from its hash") from None
        counts = [[sum(map(len, each.shards)) for each in split] for split in sources.values()]
        if counts != [metadata.source_rows, metadata.eval_source_rows]:
            raise OSError(f"{MANIFEST} counts other rows than its shards have")
        metadata.audit = total_audit([source.audit for source in sources["train"]])
        metadata.eval_audit = total_audit([source.audit for source in sources["eval"]])
        metadata.cache_entry = folder.name
        train = rows_of(sources["train"])
        eval = rows_of(sources["eval"])
        tokenizer = tok.load_tokenizer(
            str(folder / "tokenizer"), trained=tok.is_trained(metadata.tokenizer)
        )
        if metadata.vocabulary != vocabulary_of(tokenizer):
            raise OSError(f"{MANIFEST} has another vocabulary than its tokenizer")
        return cls(
            train=train or eval,
            eval=eval or None,
            tokenizer=tokenizer,
            metadata=metadata,
            sources=sources,
            made_from=manifest["made_from"],
        )

    @classmethod
    def of(
        cls,
        train: GivenRows,
        tokenizer: "tok.FastTokenizer | None",
        eval: "GivenRows | None" = None,
        in_order: bool = False,
        extra_columns: Sequence[str] = (),
    ) -> "Tokenized":
        """Take rows that were tokenised elsewhere.

        Args:
            train: the training rows, with the column ``input_ids``, and optionally ``labels`` and
                ``position_ids``. Each is a list of integers, and all lists have the same length.
                Labels are not shifted. Other columns are ignored, unless they are named.
            tokenizer: the tokenizer that made the rows. ``None`` if the rows are no text: the run
                then has no bits per byte and no samples, and its vocabulary is the largest number
                in the rows, plus 1.
            eval: the eval rows, with the same columns.
            in_order: draw the rows in the stored order instead of a permutation.
            extra_columns: columns that the loss needs, each ``NAME`` or ``NAME:DTYPE`` with
                float16, float32 (the default) or int32. A row has a number, or a list with a number
                or k numbers for each token.

        Raises:
            UserError: if a column is not of this form.
        """
        splits = [as_token_rows(rows, extra_columns) for rows in (train, eval) if rows is not None]
        width = len(splits[0][0]["input_ids"])
        layouts = {f"{rows.column_names} of {len(rows[0]['input_ids'])} tokens" for rows in splits}
        if len(layouts) > 1:
            raise UserError(
                f"Tokenized.of: one split has {' and one '.join(layouts)}; give both the same."
            )
        counts = [measured(splits[0]), *[measured(rows, tokenizer) for rows in splits[1:]]]
        vocabulary = max(largest for _, largest in counts) + 1
        if tokenizer is not None and vocabulary > vocabulary_of(tokenizer):
            raise UserError(
                f"Tokenized.of: the tokenizer has no token {vocabulary - 1}, which the rows hold; "
                "pass the tokenizer that made the rows."
            )
        eval_rows = None if eval is None else splits[1]
        metadata = metadata_of(
            "rows made by the recipe",
            spec="none" if tokenizer is None else tokenizer.name_or_path,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            block_size=width - 1,
            train=[counts[0][0]],
            eval=[stats for stats, _ in counts[1:]],
        )
        return cls(splits[0], eval_rows, tokenizer, metadata, in_order=in_order)


def rows_of(sources: Sequence[SourceRows]) -> TokenRows:
    """Return the rows of a split, one source after the other."""
    return TokenRows([shard for source in sources for shard in source.shards])


def short_names(names: Sequence[str]) -> Sequence[str]:
    """Return the names of data sets without folders and suffixes, if these differ."""
    paths = [Path(name).absolute() for name in names]
    short_names = [path.stem if kind_of(path) else path.name for path in paths]
    return short_names if len(set(short_names)) == len(short_names) else names
