"""Turn text, conversations or preference data into rows of tokens on disk, and cache them."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import filelock
import numpy as np

from llmtrain.config import flags_of
from llmtrain.console import say
from llmtrain.data import tokenizer as tok
from llmtrain.data.cache import cache_folder
from llmtrain.data.chat_template import NO_TEMPLATE, set_template, template_text
from llmtrain.data.config import (
    ChatConfig,
    DataConfig,
    PairConfig,
    RowConfig,
    parse_columns,
)
from llmtrain.data.formats import RECORD_FIELDS, is_plain_text
from llmtrain.data.grouping import BATCHES_PER_BLOCK
from llmtrain.data.lengths import LengthSummary, summarize_lengths
from llmtrain.data.metadata import DataMetadata, metadata_of
from llmtrain.data.packing import (
    LENGTHS,
    TOKEN_COLUMNS,
    Counts,
    Rows,
    Split,
    SplitStats,
    TokenRows,
    as_matrices,
)
from llmtrain.data.plain_text import make_renderer
from llmtrain.data.preference import PairAudit, Pairs, preference_format_of
from llmtrain.data.pretraining import Texts
from llmtrain.data.readers import is_readable, suffix_of
from llmtrain.data.sft import Audit, Conversations, format_of
from llmtrain.data.shuffle import Mixture, counts_per_period
from llmtrain.data.sources import (
    PythonRecords,
    Source,
    SplitChoice,
    open_source,
    records_source,
    with_columns,
)
from llmtrain.errors import UserError
from llmtrain.files import new_folder
from llmtrain.types import IGNORED

if TYPE_CHECKING:
    import pyarrow

# The version of a cache entry's content. Raise it when the content changes: all entries are then
# made again.
_FORMAT_VERSION = 6


class Corpus(Protocol):
    """The training and eval data of one source.

    Attributes:
        source: the records.
        only_split: the split of all records; ``None`` if they are divided.
    """

    source: Source
    only_split: Split | None

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield the texts of one split, or of both, to train a tokenizer on."""

    def encode(self, tokenizer: tok.FastTokenizer, folder: Path) -> "EncodedCorpus":
        """Render what does not depend on the length of rows, into a folder for temporary files."""


class EncodedCorpus(Protocol):
    """The data of one source, ready to be written as rows of any length."""

    def lengths(self, split: Split) -> np.ndarray:
        """Return the smallest row length that holds each conversation; empty for text."""

    def write(self, path: Path, split: Split, max_length: int) -> SplitStats:
        """Write the rows of a split."""

    def close(self) -> None:
        """Delete all temporary files."""


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
        eval_names: the names of the data sets that the eval rows may come from.
    """

    train: TokenRows
    eval: TokenRows | None
    tokenizer: tok.FastTokenizer
    metadata: DataMetadata
    mixture: Mixture | None = None
    new_tokens: list[int] = field(default_factory=list)
    in_order: bool = False
    eval_names: list[str] = field(default_factory=list)

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
            return f"shuffled, grouped by length over {BATCHES_PER_BLOCK} batches"
        return "shuffled"

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
        for name, count in zip(_short_names(self.eval_names), counts, strict=False):
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


def _short_names(names: Sequence[str]) -> Sequence[str]:
    """Return the names of data sets without folders and suffixes, if these differ."""
    short_names = [_short_name(name) for name in names]
    return short_names if len(set(short_names)) == len(short_names) else names


def _short_name(name: str) -> str:
    """Return the name of a data set without its folders, and without the suffix of a file."""
    path = Path(name)
    if is_readable(path):
        return path.name[: -len(suffix_of(path))]
    return path.stem or name


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
    max_length: int | Literal["auto"],
    chat: RowConfig | None = None,
    trust_remote_code: bool = False,
    records: PythonRecords | None = None,
    unpaired: bool = False,
    max_positions: int | None = None,
) -> Tokenized:
    """Return the rows of a data set, from the cache if they were made before.

    Every process calls this before the process group exists. One of them makes the rows, while the
    others wait for its lock. If anything fails, the cache stays as it was.

    Args:
        config: the data sets and the tokenizer.
        max_length: the length of the rows; see :meth:`Texts.write`,
            :meth:`EncodedConversations.write` and :meth:`EncodedPairs.write`. ``auto`` chooses a
            length that holds 99.5 % of the conversations. ``metadata.block_size`` of the result is
            the length.
        chat: how conversations become rows. With a :class:`PairConfig` the records are preference
            data. ``None``: the records are plain text.
        trust_remote_code: run code that comes with the tokenizer.
        records: the records of a recipe that has its own data: a ``datasets.Dataset``, a list of
            texts or of dictionaries of fields, or a function that yields them, always the same
            records in the same order. Then ``config.dataset`` is not read.
        unpaired: the loss takes single answers with a label, not only pairs.
        max_positions: the largest length that ``auto`` may choose; ``None`` for any.

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

    _check_data_flags(config)
    sources, eval_sources = _sources_of(config, records)
    all_sources = [*sources, *eval_sources]
    formats = _formats_of(all_sources, chat, unpaired=unpaired)
    row_config = None if set(formats) == {"text"} else chat
    if row_config is not None:
        # The recipe has asked the model class, unless the recipe has a model of its own.
        row_config.resolve_packing(can_pack=True)
    if isinstance(row_config, PairConfig):
        row_config.resolve_sharing(can_share=True)
    _check_text_flags(config, all_sources, formats, row_config)
    if row_config is None and max_length == "auto":
        raise UserError(
            f"--max_length auto is for conversations, but {sources[0].name} is text; give the "
            "number of tokens in a row."
        )
    text_columns = _text_columns(config, row_config)

    pretrained = None if tok.is_trained(spec) else tok.load_tokenizer(spec, trust_remote_code)
    new_tokens: list[int] = []
    stop_token_ids: list[int] = []
    has_plain_text = row_config is not None and _are_plain_text(all_sources, formats)
    if row_config and row_config.chat_template == NO_TEMPLATE and not has_plain_text:
        raise UserError(
            "--chat_template none is for prompts with completions of plain text, but the records "
            f"of {sources[0].name} are conversations; use --chat_template chatml."
        )
    if row_config and pretrained is not None:
        new_tokens = set_template(pretrained, row_config.chat_template, has_plain_text)
        stop_token_ids = tok.stop_token_ids_of(spec)
    if row_config and spec == "char":
        raise UserError(
            "--tokenizer char knows only the characters of the data, and a chat template has "
            "others; use byte."
        )

    key: list[object] = [
        _FORMAT_VERSION,
        [max_length, max_positions] if max_length == "auto" else max_length,
        None if eval_sources else config.eval_fraction,
        [source.fingerprint() for source in sources],
        [source.fingerprint() for source in eval_sources],
        sorted(config.renamed_columns.items()),
        tok.digest(pretrained) if pretrained is not None else spec,
    ]
    if row_config:
        key.append(_rendering_key(formats, row_config, stop_token_ids, unpaired))
    if "text" in formats:
        key += [config.text_column, text_columns]
    folder = cache_folder() / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def make() -> None:
        corpora = _corpora(
            sources,
            eval_sources,
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
            max_length,
            max_positions=max_positions,
            corpora=corpora,
            tokenizer=pretrained,
            chat=row_config,
            stop_token_ids=stop_token_ids,
            length_flag="--block_size" if chat is None else "--max_length",
        )

    rows = _open(folder, spec)
    is_cached = rows is not None
    if rows is None:
        rows = _make_once(folder, spec, make)

    # The cache entry may have been made from other files with the same content.
    rows.metadata.dataset = " ".join(config.dataset)
    rows.metadata.tokenizer = spec
    rows.new_tokens = new_tokens
    rows.eval_names = [source.name for source in eval_sources or sources]
    if config.mixture:
        rows.mixture = Mixture(rows.metadata.source_rows, config.mixture)
    _describe(rows.metadata, formats, chat, is_cached, is_auto=max_length == "auto")
    _describe_shares(rows, [source.name for source in sources])
    if eval_sources:
        split = "" if config.eval_dataset else f"split {config.dataset_test_split} of "
        say("eval", f"the eval data are {split}{' '.join(rows.eval_names)}")
    if row_config and rows.tokenizer.chat_template is None:
        say("template", "none: the rows are prompt, completion and EOS, as plain text")
    config.fit_micro_batch(rows.positions + 1)
    return rows


class _Sources(NamedTuple):
    """The data sets of a run.

    Attributes:
        train: the data sets to train on.
        eval: the data sets to evaluate on; empty to keep a share of the training data for that.
    """

    train: list[Source]
    eval: list[Source]


def _check_data_flags(config: DataConfig) -> None:
    """Check the flags that say what the records are, before any of them is read."""
    if config.has_own_eval_data and config.is_set("eval_fraction"):
        flag = "--eval_dataset" if config.eval_dataset else "--dataset_test_split"
        raise UserError(
            f"--eval_fraction keeps a share of --dataset for evaluation, but {flag} names the eval "
            "data; leave one of them out."
        )

    columns = parse_columns(config.columns)
    for ours, theirs in columns.items():
        if ours not in RECORD_FIELDS:
            raise UserError(
                f"--columns {ours}={theirs}: no format has a field '{ours}'; write OURS=THEIRS, "
                f"with one of {', '.join(RECORD_FIELDS)} on the left."
            )
    if "text" in columns and (config.is_set("text_field") or config.text_field != "text"):
        raise UserError(
            f"--columns text={columns['text']} and --text_field {config.text_field} both name the "
            "field that holds the text; leave one of them out."
        )


def _sources_of(config: DataConfig, records: PythonRecords | None) -> _Sources:
    """Return the sources in ``--dataset`` or the recipe's own source, and those of the eval data.

    The fields are renamed as ``--columns`` says.
    """
    if records is None:
        choice = SplitChoice(value=config.dataset_train_split)
        if config.dataset_test_split is not None and not config.eval_dataset:
            # A folder of files has splits then. Its files must not all be training data.
            choice = SplitChoice(value=choice.split)
        train = [open_source(name, choice) for name in config.dataset]
        if config.dataset_train_split is not None:
            _check_splits(train, choice)
    else:
        train = [_own_source(config, records)]

    test = SplitChoice("--dataset", "--dataset_test_split", "test", config.dataset_test_split)
    if config.eval_dataset:
        test = SplitChoice("--eval_dataset", test.split_flag, test.default, test.value)
        eval = [open_source(name, test) for name in config.eval_dataset]
        if config.dataset_test_split is not None:
            _check_splits(eval, test)
    elif config.dataset_test_split is not None:
        opened = [open_source(name, test) for name in config.dataset]
        _check_splits(opened, test)
        eval = [source for source in opened if source.has_splits]
    else:
        eval = []

    return _Sources(
        train=[with_columns(source, config.renamed_columns) for source in train],
        eval=[with_columns(source, config.renamed_columns) for source in eval],
    )


def _own_source(config: DataConfig, records: PythonRecords) -> Source:
    """Return the source of a recipe that has its own data."""
    flags = ["dataset", "dataset_train_split"]
    if not config.eval_dataset:
        flags.append("dataset_test_split")
    for name in flags:
        if config.is_set(name):
            raise UserError(f"--{name}: this recipe has its own data; leave the flag out.")
    source = records_source(records)
    config.dataset = [source.name]
    return source


def _check_splits(sources: list[Source], choice: SplitChoice) -> None:
    """Check that some data set has the splits among which the user chose one."""
    if not any(source.has_splits for source in sources):
        names = " ".join(source.name for source in sources)
        raise UserError(
            f"{choice.split_flag} {choice.value}: {names} has no splits, which data sets of the "
            "hub and folders have; leave the flag out, or name eval files with --eval_dataset."
        )


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
    """Check the flags that are for text, or only for other records.

    Args:
        config: the flags.
        sources: the data sets.
        formats: the format of each data set.
        chat: how conversations or pairs become rows; ``None`` if all data sets are text.

    Raises:
        UserError: if such a flag is set and has no effect, or if it does not fit the others.
    """
    name = sources[0].name
    if chat is None and config.renamed_columns:
        ours, theirs = next(iter(config.renamed_columns.items()))
        raise UserError(
            f"--columns {ours}={theirs}: {name} is read as text, which has no field '{ours}'; "
            f"rename all fields of a format of conversations, or write text={theirs}."
        )
    if "text" not in formats:
        kind = "preference data" if isinstance(chat, PairConfig) else "conversations"
        columns = parse_columns(config.columns)
        are_set = {
            f"--columns text={columns.get('text')}": "text" in columns,
            "--text_field": config.is_set("text_field"),
            "--isolate_documents": config.isolate_documents,
        }
        for flag, is_set in are_set.items():
            if is_set:
                raise UserError(f"{flag} is for text, but {name} holds {kind}; leave it out.")
    if config.isolate_documents and chat is not None and not chat.is_packed:
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
    return TOKEN_COLUMNS if chat.is_packed else [*TOKEN_COLUMNS[:-1], LENGTHS]


def _are_plain_text(sources: list[Source], formats: list[str]) -> bool:
    """Return whether the records are prompts with texts as completions.

    The first record of each source decides. Sources of text have no prompts, and do not count.
    """
    for source, format in zip(sources, formats, strict=True):
        if format == "text":
            continue
        if format not in ("prompt_completion", "pairs", "examples"):
            return False
        first = next(source.records(None), None)
        if first is None or not is_plain_text(first.fields):
            return False
    return True


def _rendering_key(
    formats: list[str], chat: RowConfig, stop_token_ids: list[int], unpaired: bool
) -> list[object]:
    """Return the part of a cache key that says how conversations become rows."""
    # The text of the template, because the file in --chat_template may change.
    template = template_text(chat.chat_template) if chat.chat_template else None
    return [formats, asdict(chat), template, stop_token_ids, unpaired]


def _corpora(
    sources: list[Source],
    eval_sources: list[Source],
    formats: list[str],
    config: DataConfig,
    chat: RowConfig | None,
    stop_token_ids: Sequence[int],
    unpaired: bool,
    text_columns: Sequence[str],
) -> list[Corpus]:
    """Return the objects that turn the records of each source into rows.

    Args:
        sources: the data sets to train on.
        eval_sources: the data sets to evaluate on; empty to divide ``sources``.
        formats: the format of each of these data sets.
        config: holds the share of the eval data.
        chat: how conversations become rows; ``None`` for text.
        stop_token_ids: the tokens at which the model stops generating.
        unpaired: the loss takes single answers with a label, not only pairs.
    """
    corpora: list[Corpus] = []
    for number, (source, format) in enumerate(zip([*sources, *eval_sources], formats, strict=True)):
        split: Split | None = None
        if eval_sources:
            split = "train" if number < len(sources) else "eval"
        if isinstance(chat, PairConfig):
            corpora.append(Pairs(source, config, chat, stop_token_ids, unpaired, split))
        elif isinstance(chat, ChatConfig) and format != "text":
            corpora.append(Conversations(source, format, config, chat, stop_token_ids, split))
        else:
            corpora.append(Texts(source, config, text_columns, split))
    return corpora


def _describe(
    metadata: DataMetadata,
    formats: list[str],
    chat: RowConfig | None,
    is_cached: bool,
    is_auto: bool,
) -> None:
    """Print the lines about the data in the start-up log.

    Args:
        metadata: the counts.
        formats: the format of each source.
        chat: how conversations become rows; ``None`` if the recipe trains on text only.
        is_cached: whether the rows are from the cache.
        is_auto: whether ``--max_length auto`` has chosen the length.
    """
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
    audit = audit_type(**metadata.audit)
    for line in audit.lines(chat.overlong):
        say("audit", line)
    _describe_lengths(metadata, audit, is_auto)
    left_out = ("overlong", "untrained", "same", "bad")
    if metadata.eval_audit and any(metadata.eval_audit.get(name) for name in left_out):
        say("eval", audit_type(**metadata.eval_audit).left_out(chat.overlong))


def _describe_lengths(metadata: DataMetadata, audit: Counts, is_auto: bool) -> None:
    """Print how long the conversations are, if ``--max_length`` depends on that or should."""
    lengths = LengthSummary(metadata.covering_length, tuple(metadata.length_histogram))
    if is_auto:
        say("lengths", f"--max_length auto is {metadata.block_size:,}; {lengths.describe()} tokens")
        return
    advice = lengths.advice(audit.overlong, metadata.block_size)
    if advice is not None:
        say("lengths", advice)


def _describe_shares(rows: Tokenized, names: list[str]) -> None:
    """Print each data set's share of the rows that a run draws, and of their target tokens.

    The two differ, because rows of text are full of targets and rows of conversations are not.
    """
    metadata = rows.metadata
    if len(metadata.source_rows) < 2:
        return

    # Without a mixture every row is drawn once per epoch.
    drawn_rows = metadata.source_rows if rows.mixture is None else rows.mixture.counts
    drawn_targets = []
    for drawn, count, targets in zip(
        drawn_rows, metadata.source_rows, metadata.source_targets, strict=True
    ):
        drawn_targets.append(drawn * targets / count)

    shares: list[str] = []
    for name, row_count, target_count in zip(
        _short_names(names), drawn_rows, drawn_targets, strict=True
    ):
        row_share = row_count / sum(drawn_rows)
        target_share = target_count / sum(drawn_targets)
        of_rows = "" if shares else " of rows"
        of_targets = "" if shares else " of target tokens"
        shares.append(f"{name} {row_share:.1%}{of_rows}, {target_share:.1%}{of_targets}")
    say("mixture", "; ".join(shares))


# --- cache entries


def _open(folder: Path, spec: str) -> Tokenized | None:
    """Return the rows of a cache entry, or ``None`` if it does not exist or is damaged."""
    try:
        metadata = DataMetadata(**json.loads((folder / "facts.json").read_text()))
        train_numbers = range(len(metadata.source_rows))
        eval_numbers = range(len(metadata.eval_source_rows))
        train = TokenRows.open([folder / f"train-{i}.arrow" for i in train_numbers])
        eval = TokenRows.open([folder / f"eval-{i}.arrow" for i in eval_numbers])
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
    max_length: int | Literal["auto"],
    max_positions: int | None,
    corpora: Sequence[Corpus],
    tokenizer: "tok.FastTokenizer | None",
    chat: RowConfig | None,
    stop_token_ids: Sequence[int],
    length_flag: str,
) -> None:
    """Make a cache entry: the tokenizer, if it is trained on the data, and the rows of each source.

    Args:
        folder: the cache entry. It exists only once it is complete.
        config: the data sets and the tokenizer.
        max_length: the length of the rows, or ``auto``.
        max_positions: the largest length that ``auto`` may choose; ``None`` for any.
        corpora: turn the records of each source into rows.
        tokenizer: a pretrained tokenizer; ``None`` to train one on the data.
        chat: how conversations become rows; ``None`` for text.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
        length_flag: the flag that sets the length, for error messages.
    """
    name = " ".join(config.dataset)
    spec = config.tokenizer or ""
    with new_folder(folder) as working:
        if tokenizer is None:
            tokenizer = _trained_tokenizer(spec, corpora)
            if chat:
                set_template(tokenizer, chat.chat_template or "chatml")

        with _encoded_corpora(corpora, tokenizer, working) as encoded:
            lengths = np.concatenate([corpus.lengths("train") for corpus in encoded])
            summary = summarize_lengths(lengths)
            length = summary.covering if max_length == "auto" else max_length
            if max_length == "auto" and max_positions is not None:
                length = min(length, max_positions)
            if tok.is_trained(spec):
                tokenizer.model_max_length = length
            tokenizer.save_pretrained(working / "tokenizer")

            train: list[SplitStats] = []
            eval: list[SplitStats] = []
            for corpus, encoded_corpus in zip(corpora, encoded, strict=True):
                if corpus.only_split != "eval":
                    path = working / f"train-{len(train)}.arrow"
                    train.append(encoded_corpus.write(path, "train", length))
                if corpus.only_split != "train":
                    path = working / f"eval-{len(eval)}.arrow"
                    eval.append(encoded_corpus.write(path, "eval", length))
                if corpus.only_split == "eval":
                    _check_eval_data(corpus.source, eval[-1], chat)

        smallest = min(stats.targets for stats in train)
        if chat is None and smallest < length:
            raise UserError(
                f"{length_flag} {length} is larger than the training text ({smallest + 1} "
                f"tokens of {name}); use at most {max(smallest, 1)}, or more text."
            )

        metadata = metadata_of(name, spec, tokenizer, length, train=train, eval=eval)
        metadata.shared = isinstance(chat, PairConfig) and chat.shares_prompts
        metadata.covering_length = summary.covering
        metadata.length_histogram = list(summary.histogram)
        if chat:
            metadata.ends = sorted(make_renderer(tokenizer, stop_token_ids).stop_token_ids)
        (working / "facts.json").write_text(json.dumps(asdict(metadata), indent=2))


@contextlib.contextmanager
def _encoded_corpora(
    corpora: Sequence[Corpus], tokenizer: tok.FastTokenizer, working: Path
) -> Iterator[list[EncodedCorpus]]:
    """Encode the data of all sources, and delete their temporary files at the end."""
    with contextlib.ExitStack() as stack:
        encoded = []
        for i, corpus in enumerate(corpora):
            folder = working / f"encoded-{i}"
            folder.mkdir()
            corpus_of_tokens = corpus.encode(tokenizer, folder)
            stack.callback(folder.rmdir)
            stack.callback(corpus_of_tokens.close)
            encoded.append(corpus_of_tokens)
        yield encoded


def _check_eval_data(source: Source, stats: SplitStats, chat: RowConfig | None) -> None:
    """Raise :class:`UserError` if a data set that the user chose for evaluation has no targets."""
    if stats.targets:
        return
    reason = ""
    if chat is not None and isinstance(stats.audit, Audit | PairAudit):
        reason = f" ({stats.audit.left_out(chat.overlong)})"
    raise UserError(
        f"{source.flag} {source.name}: no record can be used for evaluation{reason}; check "
        "--max_length, --columns and the chat template."
    )


def _trained_tokenizer(spec: str, corpora: Sequence[Corpus]) -> tok.FastTokenizer:
    """Train the tokenizer ``char``, ``byte`` or ``bpe:N`` on the data."""
    trained = tok.train_tokenizer(
        spec,
        train=chain.from_iterable(corpus.texts("train") for corpus in corpora),
        all_texts=lambda: chain.from_iterable(corpus.texts() for corpus in corpora),
    )
    return tok.as_pretrained(trained)
