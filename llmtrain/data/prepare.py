"""Turn text, conversations or preference data into rows of tokens on disk, cached by their content."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import filelock

from llmtrain.config import flags_of
from llmtrain.console import say
from llmtrain.data import tokenizer as tok
from llmtrain.data.cache import cache_folder
from llmtrain.data.chat_template import ChatTemplate, set_template, template_text
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.metadata import Facts, facts_of
from llmtrain.data.packing import TOKEN_COLUMNS, Rows, SplitStats, TokenRows, as_matrices
from llmtrain.data.preference import PairAudit, Pairs, judged_format
from llmtrain.data.pretraining import Texts
from llmtrain.data.sft import Audit, Conversations, format_of
from llmtrain.data.shuffle import Mixture, counts_per_period
from llmtrain.data.sources import RecordFunction, Source, function_source, open_source
from llmtrain.errors import UserError
from llmtrain.files import new_folder
from llmtrain.types import IGNORED

Corpus: TypeAlias = Texts | Conversations | Pairs
FORMAT = 5  # of cache entries; raise it when their content changes, and all of them are made again


@dataclass
class Tokenized:
    """Token rows, memory-mapped, with the tokenizer that made them."""

    train: TokenRows
    eval: TokenRows | None
    tokenizer: tok.FastTokenizer
    facts: Facts
    mixture: Mixture | None = None
    new_tokens: list[int] = field(
        default_factory=list
    )  # that a chat template has added to a pretrained tokenizer
    in_order: bool = False  # drawn in the stored order, not in a permutation of it
    sources: list[str] = field(default_factory=list)  # the names of the data sets

    @property
    def vocabulary(self) -> int:
        """The number of token ids, with gaps."""
        return self.facts.vocabulary

    @property
    def packed(self) -> bool:
        """Return whether a row may hold several documents, which must not see each other."""
        return "position_ids" in self.train.column_names

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens at which an answer ends; none of a text."""
        return tuple(self.facts.ends)

    @property
    def held_out_sources(self) -> dict[str, int]:
        """The rows held out of each source, by its name, where there are several."""
        rows, names = self.facts.eval_source_rows, self.sources
        short = [Path(name).stem or name for name in names]
        names = short if len({*short}) == len(short) else names
        found = {name: count for name, count in zip(names, rows, strict=False) if count}
        return found if sum(found.values()) == sum(rows) and len(found) > 1 else {}

    @property
    def positions(self) -> int:
        """The positions of a row that predict something."""
        return int(self.train.data.schema.field("input_ids").type.list_size) - 1

    def unseen_question(self) -> list[int] | None:
        """Return the tokens before the first answer of a held-out conversation."""
        if self.eval is None or self.facts.task == "text":
            return None
        row = self.eval[len(self.eval) - 1]
        answered = next(i for i, label in enumerate(row["labels"]) if label != IGNORED)
        return row["input_ids"][:answered]

    @classmethod
    def of(
        cls,
        train: Rows,
        tokenizer: tok.FastTokenizer,
        eval: "Rows | None" = None,
        in_order: bool = False,
    ) -> "Tokenized":
        """Take rows of one's own: ``input_ids`` and, where there are any, ``labels`` and ``position_ids``.

        Each is a list of integers, as long as every other; labels are not shifted. Other columns are left out. With
        ``in_order`` rows are drawn in the stored order. Raises :class:`UserError` for columns that are no such lists.
        """
        import pyarrow
        from pyarrow.compute import list_value_length

        given = [rows for rows in (train, eval) if rows is not None]
        tables = [
            rows.data if isinstance(rows, TokenRows) else rows.with_format("arrow")[:]
            for rows in given
        ]
        sides = [
            TokenRows(table.select([name for name in TOKEN_COLUMNS if name in table.column_names]))
            for table in tables
        ]
        columns = [column for rows in sides for column in rows.data.columns]
        try:
            (width,) = {
                length
                for column in columns
                for length in list_value_length(column).unique().to_pylist()
            }
            kinds = {matrix.dtype.kind for column in columns for matrix in as_matrices(column)}
        except (
            pyarrow.ArrowException,
            ValueError,
        ):  # no lists, lists with gaps, or lists of several lengths
            width, kinds = 0, set()
        if (
            kinds != {"i"}
            or width < 2
            or any("input_ids" not in rows.column_names for rows in sides)
        ):
            raise UserError(
                f"Tokenized.of: {', '.join(TOKEN_COLUMNS)} must be lists of integers, all of one length; pad or pack them."
            )
        written = [
            _measured(rows, tokenizer, held_out)
            for rows, held_out in zip(sides, (False, True), strict=False)
        ]
        name = tokenizer.name_or_path
        facts = facts_of("rows of one's own", name, tokenizer, width - 1, written[:1], written[1:])
        return cls(
            sides[0], sides[1] if len(sides) > 1 else None, tokenizer, facts, in_order=in_order
        )


def tokenize(
    config: DataConfig,
    block_size: int,
    chat: RowConfig | None = None,
    trust_remote_code: bool = False,
    records: RecordFunction | None = None,
    judged_alone: bool = False,
) -> Tokenized:
    """Return the rows of a data set: from the cache if they were made before, or made now.

    Every process calls this before the process group exists. One of them makes the rows, while the others wait for its
    lock. If anything fails, the cache stays as it was.

    Args:
        config: The data sets and the tokenizer.
        block_size: The length of the rows; see :meth:`Texts.write`, :meth:`Conversations.write`, :meth:`Pairs.write`.
        chat: How conversations become rows. With a :class:`PairConfig` the records are preference data. ``None``: the
            records are plain text.
        trust_remote_code: Run code that comes with the tokenizer.
        records: Yields the records of a recipe that has its own data, always the same ones in the same order. No other
            data are read then.
        judged_alone: The loss takes single answers with a label, not only pairs.

    Raises:
        UserError: If the data, the tokenizer or the flags are wrong.
    """
    spec = config.tokenizer
    assert spec is not None, "the recipe sets a tokenizer if the user named none"
    # Wrong numbers are reported before any text is read.
    if tok.is_trained(spec):
        tok.vocabulary_size(spec)
    if config.mixture:
        counts_per_period(config.mixture)

    sources = _sources_of(config, records)
    if isinstance(chat, PairConfig):
        formats = [judged_format(source, judged_alone) for source in sources]
    else:
        formats = _formats_of(sources, chat)
    is_text = formats[0] == "text"
    if not is_text and config.given("text_field"):
        raise UserError(
            f"--text_field is for text, but {sources[0].name} holds conversations; leave it out."
        )
    rendering = None if is_text else chat

    pretrained = None if tok.is_trained(spec) else tok.load_tokenizer(spec, trust_remote_code)
    new_tokens: list[int] = []
    stops: list[int] = []
    if rendering and pretrained is not None:
        new_tokens = set_template(pretrained, rendering.chat_template)
        stops = tok.stop_ids(spec)
    if rendering and spec == "char":
        raise UserError(
            "--tokenizer char knows only the characters of the data, and a chat template has others; use byte."
        )

    key = [
        FORMAT,
        block_size,
        config.eval_fraction,
        [source.fingerprint() for source in sources],
        tok.digest(pretrained) if pretrained is not None else spec,
        _rendering_key(formats, rendering, stops, judged_alone) if rendering else config.text_field,
    ]
    folder = cache_folder() / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    rows = _open(folder, spec)
    is_cached = rows is not None
    if rows is None:
        with _cache_lock(folder):
            if _open(folder, spec) is None:
                corpora = _corpora(sources, formats, config, rendering, stops, judged_alone)
                _make(
                    folder,
                    config,
                    block_size,
                    corpora=corpora,
                    tokenizer=pretrained,
                    chat=rendering,
                    stops=stops,
                )
        rows = _open(folder, spec)
        assert rows is not None, f"{folder} cannot be read back"

    # The same content may have been read from other files before.
    rows.facts.dataset = " ".join(config.dataset)
    rows.facts.tokenizer = spec
    rows.new_tokens = new_tokens
    rows.sources = list(config.dataset)
    if config.mixture:
        rows.mixture = Mixture(rows.facts.source_rows, config.mixture)
    _describe(rows.facts, formats, chat, is_cached)
    return rows


def _sources_of(config: DataConfig, records: RecordFunction | None) -> list[Source]:
    """Return the sources that ``--dataset`` names, or the recipe's own one."""
    if records is None:
        return [open_source(name) for name in config.dataset]
    if config.given("dataset"):
        raise UserError("--dataset: this recipe has data of its own; leave the flag out.")
    source = function_source(records)
    config.dataset = [source.name]
    return [source]


@contextlib.contextmanager
def _cache_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache entry; raises :class:`UserError` if the cache folder cannot be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{folder}.lock"):
            yield
    except OSError as error:
        raise UserError(
            f"the cache folder {folder.parent}: {error.strerror or error}; set LLMTRAIN_CACHE to another."
        ) from None


def _rendering_key(
    formats: list[str], chat: RowConfig, stops: list[int], judged_alone: bool
) -> list[object]:
    """Return the part of a cache key that says how conversations become rows."""
    # The text of the template, because the file that --chat_template names may change.
    template = template_text(chat.chat_template) if chat.chat_template else None
    return [formats, asdict(chat), template, stops, judged_alone]


def _corpora(
    sources: list[Source],
    formats: list[str],
    config: DataConfig,
    chat: RowConfig | None,
    stops: Sequence[int],
    judged_alone: bool,
) -> list[Corpus]:
    """Return what turns the records of each source into rows."""
    corpora: list[Corpus] = []
    for source, format in zip(sources, formats, strict=True):
        if isinstance(chat, PairConfig):
            corpora.append(Pairs(source, config, chat, stops, judged_alone))
        elif isinstance(chat, ChatConfig):
            corpora.append(Conversations(source, format, config, chat, stops))
        else:
            corpora.append(Texts(source, config))
    return corpora


def _measured(rows: TokenRows, tokenizer: tok.FastTokenizer, held_out: bool) -> SplitStats:
    """Hash the content of rows of one's own, and count their targets."""
    digest = hashlib.sha256()
    targets = 0
    size = 0
    known = max(tokenizer.get_vocab().values()) + 1
    for name in rows.column_names:
        digest.update(name.encode())
        for matrix in as_matrices(rows.data.column(name)):
            digest.update(matrix.astype("<i4").tobytes())
            if name != "position_ids" and len(matrix) and matrix.max() >= known:
                raise UserError(
                    f"Tokenized.of: {name} holds {matrix.max()}; the tokenizer has {known} tokens."
                )
    for matrix in as_matrices(
        rows.data.column("labels" if "labels" in rows.column_names else "input_ids")
    ):
        labels = matrix[:, 1:][matrix[:, 1:] != IGNORED]
        targets += len(labels)
        size += len(tokenizer.backend_tokenizer.decode(labels.tolist()).encode()) if held_out else 0
    return SplitStats(len(rows), len(rows), targets, size, digest.hexdigest())


def _formats_of(sources: list[Source], chat: RowConfig | None) -> list[str]:
    """Return the format of each source's records, which are either all text or all conversations."""
    if not isinstance(chat, ChatConfig):
        formats = ["text"] * len(sources)
    else:
        formats = [format_of(source, chat) for source in sources]
    if "text" in formats and len(set(formats)) > 1:
        kinds = ", ".join(
            f"{source.name} is {format}" for source, format in zip(sources, formats, strict=True)
        )
        raise UserError(
            f"--dataset: text and conversations cannot be mixed ({kinds}); set the format with --format."
        )
    if formats[0] == "text" and chat:
        for name in flags_of(ChatConfig):
            if chat.given(name) and name != "format":
                raise UserError(
                    f"--{name} is for conversations, but {sources[0].name} is text; leave it out, or see --format."
                )
    return formats


def _describe(facts: Facts, formats: list[str], chat: RowConfig | None, is_cached: bool) -> None:
    """Print the lines about the data in the start-up log."""
    kind = "documents" if facts.task == "text" else facts.task
    outcome = "found in the cache" if is_cached else "tokenised"
    say(
        "data",
        f"{facts.dataset}: {facts.documents:,} {kind}, "
        f"{facts.train_tokens:,} tokens to train on, {facts.eval_tokens:,} held out, "
        f"vocabulary {facts.vocabulary:,} ({facts.tokenizer}); {outcome}",
    )
    if chat is None:
        return
    if not facts.audit:
        say("task", "going on with pretraining: the records are text, no conversations")
        return

    if facts.task == "preferences":
        audit_type: type[Audit | PairAudit] = PairAudit
        task = "comparing answers"
    else:
        audit_type = Audit
        task = "fine-tuning on what assistants say"
    say("task", f"{task}: the records are {', '.join(dict.fromkeys(formats))}")
    for line in audit_type(**facts.audit).lines(chat.overlong):
        say("audit", line)
    left_out = ("overlong", "untrained", "same", "bad")
    if facts.eval_audit and any(facts.eval_audit.get(name) for name in left_out):
        say("held out", audit_type(**facts.eval_audit).left(chat.overlong))


def _open(folder: Path, spec: str) -> Tokenized | None:
    """Return the rows of a cache entry, or ``None`` if it does not exist or is damaged."""
    try:
        facts = Facts(**json.loads((folder / "facts.json").read_text()))
        numbers = range(len(facts.source_rows))
        train = TokenRows.open([folder / f"train-{i}.arrow" for i in numbers])
        eval = TokenRows.open([folder / f"eval-{i}.arrow" for i in numbers])
        tokenizer = tok.load_tokenizer(str(folder / "tokenizer"), trained=tok.is_trained(spec))
    except (OSError, ValueError, TypeError, UserError):  # pyarrow's errors are ValueErrors
        return None
    return Tokenized(train, eval if facts.eval_rows else None, tokenizer, facts)


def _make(
    folder: Path,
    config: DataConfig,
    block_size: int,
    corpora: Sequence[Corpus],
    tokenizer: "tok.FastTokenizer | None",
    chat: RowConfig | None,
    stops: Sequence[int],
) -> None:
    """Make a cache entry: the tokenizer, if it is made from the data, and the rows of each source.

    Args:
        folder: The cache entry. It exists only once it is complete.
        config: The data sets and the tokenizer.
        block_size: The length of the rows.
        corpora: Turn the records of each source into rows.
        tokenizer: A tokenizer that was loaded; ``None`` if it is to be made.
        chat: How conversations become rows; ``None`` for text.
        stops: The tokens at which the model stops generating, as far as its folder says so.
    """
    name = " ".join(config.dataset)
    spec = config.tokenizer or ""
    with new_folder(folder) as working:
        if tokenizer is None:
            train_texts = chain.from_iterable(corpus.texts(held_out=False) for corpus in corpora)
            trained = tok.train_tokenizer(
                spec,
                train=train_texts,
                all_texts=lambda: chain.from_iterable(corpus.texts() for corpus in corpora),
            )
            tokenizer = tok.as_pretrained(trained, block_size)
            if chat:
                set_template(tokenizer, chat.chat_template or "chatml")
        tokenizer.save_pretrained(working / "tokenizer")

        train: list[SplitStats] = []
        held_out: list[SplitStats] = []
        for i, corpus in enumerate(corpora):
            train_path = working / f"train-{i}.arrow"
            train.append(corpus.write(tokenizer, block_size, train_path, held_out=False))
            eval_path = working / f"eval-{i}.arrow"
            held_out.append(corpus.write(tokenizer, block_size, eval_path, held_out=True))
        smallest = min(written.targets for written in train)
        if chat is None and smallest < block_size:
            raise UserError(
                f"--block_size {block_size} is larger than the text to train on ({smallest + 1} tokens of {name}); "
                f"use at most {max(smallest, 1)} or more text."
            )

        facts = facts_of(name, spec, tokenizer, block_size, train, held_out)
        facts.shared = isinstance(chat, PairConfig) and chat.share_prompts and chat.packing
        facts.ends = sorted(ChatTemplate(tokenizer, stops).ends) if chat else []
        (working / "facts.json").write_text(json.dumps(asdict(facts), indent=2))
