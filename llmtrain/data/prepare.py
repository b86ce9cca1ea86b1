"""Turn text, conversations or preference data into rows of tokens on disk, and cache them."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import filelock

from llmtrain.config import flags_of
from llmtrain.console import say
from llmtrain.data import tokenizer as tok
from llmtrain.data.cache import cache_folder
from llmtrain.data.chat_template import ChatTemplate, set_template, template_text
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.metadata import DataMetadata, metadata_of
from llmtrain.data.packing import (
    TOKEN_COLUMNS,
    Rows,
    Split,
    SplitStats,
    TokenRows,
    as_matrices,
)
from llmtrain.data.preference import PairAudit, Pairs, preference_format_of
from llmtrain.data.pretraining import Texts
from llmtrain.data.sft import Audit, Conversations, format_of
from llmtrain.data.shuffle import Mixture, counts_per_period
from llmtrain.data.sources import RecordFunction, Source, function_source, open_source
from llmtrain.errors import UserError
from llmtrain.files import new_folder
from llmtrain.types import IGNORED

if TYPE_CHECKING:
    import pyarrow

Corpus: TypeAlias = Texts | Conversations | Pairs
# The version of a cache entry's content. Raise it when the content changes: all entries are then
# made again.
_FORMAT_VERSION = 6


@dataclass
class Tokenized:
    """Memory-mapped rows of tokens, and the tokenizer that made them.

    Attributes:
        train: the training rows.
        eval: the eval rows, if there are any.
        tokenizer: the tokenizer.
        metadata: counts and hashes of the rows.
        mixture: assigns positions of the run to data sets; ``None`` if every row is drawn once per
            epoch.
        new_tokens: tokens that a chat template has added to a pretrained tokenizer.
        in_order: draw the rows in the stored order instead of a permutation.
        sources: the names of the data sets.
    """

    train: TokenRows
    eval: TokenRows | None
    tokenizer: tok.FastTokenizer
    metadata: DataMetadata
    mixture: Mixture | None = None
    new_tokens: list[int] = field(default_factory=list)
    in_order: bool = False
    sources: list[str] = field(default_factory=list)

    @property
    def vocabulary(self) -> int:
        """The largest token id, plus 1."""
        return self.metadata.vocabulary

    @property
    def is_packed(self) -> bool:
        """Whether a row may hold several documents, which must not attend to each other."""
        return "position_ids" in self.train.column_names

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens at which an answer ends; empty for text."""
        return tuple(self.metadata.ends)

    @property
    def eval_sources(self) -> dict[str, int]:
        """The number of eval rows of each data set, by its name.

        The dictionary is empty unless several data sets have eval rows, under different names.
        """
        counts = self.metadata.eval_source_rows
        rows_by_name = {}
        for name, count in zip(_short_names(self.sources), counts, strict=False):
            if count:
                rows_by_name[name] = count
        has_all_rows = sum(rows_by_name.values()) == sum(counts)  # not if two names are equal
        return rows_by_name if has_all_rows and len(rows_by_name) > 1 else {}

    @property
    def positions(self) -> int:
        """The number of positions of a row that predict something."""
        return int(self.train.data.schema.field("input_ids").type.list_size) - 1

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
        tokenizer: tok.FastTokenizer,
        eval: "Rows | None" = None,
        in_order: bool = False,
    ) -> "Tokenized":
        """Take rows that were tokenised elsewhere.

        Args:
            train: the training rows, with the column ``input_ids``, and optionally ``labels`` and
                ``position_ids``. Each is a list of integers, and all lists have the same length.
                Labels are not shifted. Other columns are ignored.
            tokenizer: the tokenizer that made the rows.
            eval: the eval rows.
            in_order: draw the rows in the stored order instead of a permutation.

        Raises:
            UserError: if a column is not of this form.
        """
        train_rows = _as_token_rows(train)
        eval_rows = None if eval is None else _as_token_rows(eval)
        splits = [rows for rows in (train_rows, eval_rows) if rows is not None]

        columns = [column for rows in splits for column in rows.data.columns]
        width = _common_length(columns)
        has_ids = all("input_ids" in rows.column_names for rows in splits)
        if width is None or width < 2 or not has_ids:
            raise UserError(
                f"Tokenized.of: {', '.join(TOKEN_COLUMNS)} must be lists of integers, all of one "
                "length; pad or pack them."
            )

        train_stats = [_measure(train_rows, tokenizer, "train")]
        eval_stats = [] if eval_rows is None else [_measure(eval_rows, tokenizer, "eval")]
        metadata = metadata_of(
            "rows made by the recipe",
            spec=tokenizer.name_or_path,
            tokenizer=tokenizer,
            block_size=width - 1,
            train=train_stats,
            eval=eval_stats,
        )
        return cls(train_rows, eval_rows, tokenizer, metadata, in_order=in_order)


def _short_names(sources: Sequence[str]) -> Sequence[str]:
    """Return the names of data sets without folders and suffixes, if these differ."""
    short_names = [Path(name).stem or name for name in sources]
    return short_names if len(set(short_names)) == len(short_names) else sources


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


def _measure(rows: TokenRows, tokenizer: tok.FastTokenizer, split: Split) -> SplitStats:
    """Hash the content of rows that were tokenised elsewhere, and count their targets.

    Raises:
        UserError: if the tokenizer does not have all their tokens.
    """
    digest = hashlib.sha256()
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    for name in rows.column_names:
        digest.update(name.encode())
        for matrix in as_matrices(rows.data.column(name)):
            digest.update(matrix.astype("<i4").tobytes())
            if name != "position_ids" and len(matrix) and matrix.max() >= vocabulary:
                raise UserError(
                    f"Tokenized.of: {name} holds {matrix.max()}; the tokenizer has {vocabulary} "
                    "tokens. Pass the tokenizer that made the rows."
                )

    targets = 0
    target_bytes = 0
    label_column = "labels" if "labels" in rows.column_names else "input_ids"
    for matrix in as_matrices(rows.data.column(label_column)):
        labels = matrix[:, 1:][matrix[:, 1:] != IGNORED]
        targets += len(labels)
        if split == "eval":
            text = tokenizer.backend_tokenizer.decode(labels.tolist())
            target_bytes += len(text.encode())
    return SplitStats(
        documents=len(rows),
        rows=len(rows),
        targets=targets,
        bytes=target_bytes,
        sha256=digest.hexdigest(),
    )


def tokenize(
    config: DataConfig,
    block_size: int,
    chat: RowConfig | None = None,
    trust_remote_code: bool = False,
    records: RecordFunction | None = None,
    unpaired: bool = False,
) -> Tokenized:
    """Return the rows of a data set, from the cache if they were made before.

    Every process calls this before the process group exists. One of them makes the rows, while the
    others wait for its lock. If anything fails, the cache stays as it was.

    Args:
        config: the data sets and the tokenizer.
        block_size: the length of the rows; see :meth:`Texts.write`, :meth:`Conversations.write` and
            :meth:`Pairs.write`.
        chat: how conversations become rows. With a :class:`PairConfig` the records are preference
            data. ``None``: the records are plain text.
        trust_remote_code: run code that comes with the tokenizer.
        records: yields the records of a recipe that has its own data, always the same records in
            the same order. Then ``config.dataset`` is not read.
        unpaired: the loss takes single answers with a label, not only pairs.

    Raises:
        UserError: if the data, the tokenizer or the flags are wrong.
    """
    spec = config.tokenizer
    assert spec is not None, "the recipe sets a tokenizer if the user named none"
    # Wrong numbers are reported before any text is read.
    if tok.is_trained(spec):
        tok.vocabulary_size(spec)
    if config.mixture:
        counts_per_period(config.mixture)

    sources = _sources_of(config, records)
    formats = _formats_of(sources, chat, unpaired=unpaired)
    row_config = None if set(formats) == {"text"} else chat
    _check_text_flags(config, sources, formats, row_config)
    text_columns = _text_columns(config, row_config)

    pretrained = None if tok.is_trained(spec) else tok.load_tokenizer(spec, trust_remote_code)
    new_tokens: list[int] = []
    stop_token_ids: list[int] = []
    if row_config and pretrained is not None:
        new_tokens = set_template(pretrained, row_config.chat_template)
        stop_token_ids = tok.stop_token_ids_of(spec)
    if row_config and spec == "char":
        raise UserError(
            "--tokenizer char knows only the characters of the data, and a chat template has "
            "others; use byte."
        )

    key: list[object] = [
        _FORMAT_VERSION,
        block_size,
        config.eval_fraction,
        [source.fingerprint() for source in sources],
        tok.digest(pretrained) if pretrained is not None else spec,
    ]
    if row_config:
        key.append(_rendering_key(formats, row_config, stop_token_ids, unpaired))
    if "text" in formats:
        key += [config.text_field, text_columns]
    folder = cache_folder() / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def make() -> None:
        corpora = _corpora(
            sources,
            formats,
            config=config,
            chat=row_config,
            stop_token_ids=stop_token_ids,
            unpaired=unpaired,
            text_columns=text_columns,
        )
        _make(
            folder,
            config,
            block_size,
            corpora=corpora,
            tokenizer=pretrained,
            chat=row_config,
            stop_token_ids=stop_token_ids,
        )

    rows = _open(folder, spec)
    is_cached = rows is not None
    if rows is None:
        rows = _make_once(folder, spec, make)

    # The cache entry may have been made from other files with the same content.
    rows.metadata.dataset = " ".join(config.dataset)
    rows.metadata.tokenizer = spec
    rows.new_tokens = new_tokens
    rows.sources = list(config.dataset)
    if config.mixture:
        rows.mixture = Mixture(rows.metadata.source_rows, config.mixture)
    _describe(rows.metadata, formats, chat, is_cached)
    _describe_shares(rows)
    return rows


def _sources_of(config: DataConfig, records: RecordFunction | None) -> list[Source]:
    """Return the sources in ``--dataset``, or the recipe's own source."""
    if records is None:
        return [open_source(name) for name in config.dataset]
    if config.is_set("dataset"):
        raise UserError("--dataset: this recipe has its own data; leave the flag out.")
    source = function_source(records)
    config.dataset = [source.name]
    return [source]


def _formats_of(sources: list[Source], chat: RowConfig | None, unpaired: bool) -> list[str]:
    """Return the format of each source's records.

    A run has sources of text, of conversations or both, or only sources of preference data.
    """
    if isinstance(chat, PairConfig):
        return [preference_format_of(source, unpaired) for source in sources]
    if isinstance(chat, ChatConfig):
        formats = [format_of(source, chat) for source in sources]
    else:
        formats = ["text"] * len(sources)

    if set(formats) == {"text"} and chat:
        for name in flags_of(ChatConfig):
            if chat.is_set(name) and name != "format":
                raise UserError(
                    f"--{name} is for conversations, but {sources[0].name} is text; leave it out, "
                    "or see --format."
                )
    return formats


def _check_text_flags(
    config: DataConfig, sources: list[Source], formats: list[str], chat: RowConfig | None
) -> None:
    """Check the flags that are for text.

    Args:
        config: the flags.
        sources: the data sets.
        formats: the format of each data set.
        chat: how conversations or pairs become rows; ``None`` if all data sets are text.

    Raises:
        UserError: if such a flag is set and has no effect, or if it does not fit the others.
    """
    if "text" not in formats:
        kind = "preference data" if isinstance(chat, PairConfig) else "conversations"
        are_set = {
            "text_field": config.is_set("text_field"),
            "isolate_documents": config.isolate_documents,
        }
        for name, is_set in are_set.items():
            if is_set:
                raise UserError(
                    f"--{name} is for text, but {sources[0].name} holds {kind}; leave it out."
                )
    if config.isolate_documents and chat is not None and not chat.packing:
        raise UserError(
            "--isolate_documents needs packed rows if text and conversations are mixed, and this "
            "run does not pack them (--no_packing); leave --isolate_documents out."
        )


def _text_columns(config: DataConfig, chat: RowConfig | None) -> list[str]:
    """Return the columns of rows of text.

    Beside conversations, text has the columns of conversations, because all rows of a run have the
    same ones.

    Args:
        config: says whether documents of text alone attend to each other.
        chat: how conversations become rows; ``None`` if all data sets are text.
    """
    if chat is None:
        return ["input_ids", "position_ids"] if config.isolate_documents else ["input_ids"]
    return TOKEN_COLUMNS if chat.packing else TOKEN_COLUMNS[:-1]


def _rendering_key(
    formats: list[str], chat: RowConfig, stop_token_ids: list[int], unpaired: bool
) -> list[object]:
    """Return the part of a cache key that says how conversations become rows."""
    # The text of the template, because the file in --chat_template may change.
    template = template_text(chat.chat_template) if chat.chat_template else None
    return [formats, asdict(chat), template, stop_token_ids, unpaired]


def _corpora(
    sources: list[Source],
    formats: list[str],
    config: DataConfig,
    chat: RowConfig | None,
    stop_token_ids: Sequence[int],
    unpaired: bool,
    text_columns: Sequence[str],
) -> list[Corpus]:
    """Return the objects that turn the records of each source into rows."""
    corpora: list[Corpus] = []
    for source, format in zip(sources, formats, strict=True):
        if isinstance(chat, PairConfig):
            corpora.append(Pairs(source, config, chat, stop_token_ids, unpaired=unpaired))
        elif isinstance(chat, ChatConfig) and format != "text":
            corpora.append(Conversations(source, format, config, chat, stop_token_ids))
        else:
            corpora.append(Texts(source, config, text_columns))
    return corpora


def _describe(
    metadata: DataMetadata, formats: list[str], chat: RowConfig | None, is_cached: bool
) -> None:
    """Print the lines about the data in the start-up log."""
    kind = "documents" if metadata.task == "text" else metadata.task
    if metadata.task == "conversations" and "text" in formats:
        kind = "conversations and documents"
    outcome = "from the cache" if is_cached else "tokenised"
    say(
        "data",
        f"{metadata.dataset}: {metadata.documents:,} {kind}, "
        f"{metadata.train_tokens:,} train tokens, {metadata.eval_tokens:,} eval tokens, "
        f"vocabulary {metadata.vocabulary:,} ({metadata.tokenizer}); {outcome}",
    )
    if chat is None:
        return
    if not metadata.audit:
        say("task", "continued pretraining: the records are text, not conversations")
        return

    if metadata.task == "preferences":
        audit_type: type[Audit | PairAudit] = PairAudit
        task = "preference training"
    else:
        audit_type = Audit
        task = "fine-tuning on the assistant's turns"
        if "text" in formats:
            task += ", and on every token of the text"
    say("task", f"{task}: the records are {', '.join(dict.fromkeys(formats))}")
    for line in audit_type(**metadata.audit).lines(chat.overlong):
        say("audit", line)
    left_out = ("overlong", "untrained", "same", "bad")
    if metadata.eval_audit and any(metadata.eval_audit.get(name) for name in left_out):
        say("eval", audit_type(**metadata.eval_audit).left_out(chat.overlong))


def _describe_shares(rows: Tokenized) -> None:
    """Print each data set's share of the rows that a run draws, and of their target tokens.

    The two differ, because rows of text are full of targets and rows of conversations are not.
    """
    metadata = rows.metadata
    if len(metadata.source_rows) < 2:
        return

    # Without a mixture every row is drawn once per epoch.
    drawn_rows = metadata.source_rows if rows.mixture is None else rows.mixture.counts
    drawn_targets = []
    for i, drawn in enumerate(drawn_rows):
        targets_per_row = metadata.source_targets[i] / metadata.source_rows[i]
        drawn_targets.append(drawn * targets_per_row)

    shares: list[str] = []
    for i, name in enumerate(_short_names(rows.sources)):
        row_share = drawn_rows[i] / sum(drawn_rows)
        target_share = drawn_targets[i] / sum(drawn_targets)
        of_rows = "" if shares else " of rows"
        of_targets = "" if shares else " of target tokens"
        shares.append(f"{name} {row_share:.1%}{of_rows}, {target_share:.1%}{of_targets}")
    say("mixture", "; ".join(shares))


# --- cache entries


def _open(folder: Path, spec: str) -> Tokenized | None:
    """Return the rows of a cache entry, or ``None`` if it does not exist or is damaged."""
    try:
        metadata = DataMetadata(**json.loads((folder / "facts.json").read_text()))
        numbers = range(len(metadata.source_rows))
        train = TokenRows.open([folder / f"train-{i}.arrow" for i in numbers])
        eval = TokenRows.open([folder / f"eval-{i}.arrow" for i in numbers])
        tokenizer = tok.load_tokenizer(str(folder / "tokenizer"), trained=tok.is_trained(spec))
    except (OSError, ValueError, TypeError, UserError):  # pyarrow's errors are ValueErrors
        return None
    return Tokenized(train, eval if metadata.eval_rows else None, tokenizer, metadata)


def _make_once(folder: Path, spec: str, make: Callable[[], None]) -> Tokenized:
    """Make a cache entry, unless another process makes it first, and return its rows."""
    with _cache_lock(folder):
        if _open(folder, spec) is None:
            make()
    rows = _open(folder, spec)
    assert rows is not None, f"{folder} cannot be read back"
    return rows


@contextlib.contextmanager
def _cache_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache entry.

    Raises:
        UserError: if the cache folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{folder}.lock"):
            yield
    except OSError as error:
        raise UserError(
            f"the cache folder {folder.parent}: {error.strerror or error}; set LLMTRAIN_CACHE to "
            "another."
        ) from None


def _make(
    folder: Path,
    config: DataConfig,
    block_size: int,
    corpora: Sequence[Corpus],
    tokenizer: "tok.FastTokenizer | None",
    chat: RowConfig | None,
    stop_token_ids: Sequence[int],
) -> None:
    """Make a cache entry: the tokenizer, if it is trained on the data, and the rows of each source.

    Args:
        folder: the cache entry. It exists only once it is complete.
        config: the data sets and the tokenizer.
        block_size: the length of the rows.
        corpora: turn the records of each source into rows.
        tokenizer: a pretrained tokenizer; ``None`` to train one on the data.
        chat: how conversations become rows; ``None`` for text.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
    """
    name = " ".join(config.dataset)
    spec = config.tokenizer or ""
    with new_folder(folder) as working:
        if tokenizer is None:
            tokenizer = _trained_tokenizer(spec, corpora, block_size)
            if chat:
                set_template(tokenizer, chat.chat_template or "chatml")
        tokenizer.save_pretrained(working / "tokenizer")

        train: list[SplitStats] = []
        eval: list[SplitStats] = []
        for i, corpus in enumerate(corpora):
            train.append(corpus.write(tokenizer, block_size, working / f"train-{i}.arrow", "train"))
            eval.append(corpus.write(tokenizer, block_size, working / f"eval-{i}.arrow", "eval"))
        smallest = min(stats.targets for stats in train)
        if chat is None and smallest < block_size:
            raise UserError(
                f"--block_size {block_size} is larger than the training text ({smallest + 1} "
                f"tokens of {name}); use at most {max(smallest, 1)}, or more text."
            )

        metadata = metadata_of(name, spec, tokenizer, block_size, train=train, eval=eval)
        metadata.shared = isinstance(chat, PairConfig) and chat.share_prompts and chat.packing
        if chat:
            metadata.ends = sorted(ChatTemplate(tokenizer, stop_token_ids).stop_token_ids)
        (working / "facts.json").write_text(json.dumps(asdict(metadata), indent=2))


def _trained_tokenizer(spec: str, corpora: Sequence[Corpus], block_size: int) -> tok.FastTokenizer:
    """Train the tokenizer ``char``, ``byte`` or ``bpe:N`` on the data."""
    trained = tok.train_tokenizer(
        spec,
        train=chain.from_iterable(corpus.texts("train") for corpus in corpora),
        all_texts=lambda: chain.from_iterable(corpus.texts() for corpus in corpora),
    )
    return tok.as_pretrained(trained, block_size)
