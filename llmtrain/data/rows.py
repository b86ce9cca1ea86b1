"""Text or conversations -> rows of tokens on disk, made once and found again by their content."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import filelock

from llmtrain.config import flags_of
from llmtrain.console import say
from llmtrain.contract import IGNORED
from llmtrain.data import tokenizer as tok
from llmtrain.data.cache import cache_folder
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.conversations import Audit, Conversations, format_of
from llmtrain.data.facts import Facts, facts_of
from llmtrain.data.order import Mixture, counts_of
from llmtrain.data.pairs import PairAudit, Pairs, judged_format
from llmtrain.data.sources import MakesRecords, Source, made, open_source
from llmtrain.data.table import COLUMNS, Rows, TokenRows, Written, as_matrices
from llmtrain.data.template import ChatTemplate, set_template, template_text
from llmtrain.data.text import Texts
from llmtrain.errors import UserError, require
from llmtrain.files import new_folder

Corpus: TypeAlias = Texts | Conversations | Pairs
FORMAT = 5  # of a cache entry; a change makes every one anew


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
            TokenRows(table.select([name for name in COLUMNS if name in table.column_names]))
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
                f"Tokenized.of: {', '.join(COLUMNS)} must be lists of integers, all of one length; pad or pack them."
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
    records: MakesRecords | None = None,
    judged_alone: bool = False,
) -> Tokenized:
    """Find the rows of this data, tokenizer and block size in the cache, or make them.

    Every process calls this before the process group exists; one makes the rows while the others wait for its lock.
    With ``chat``, data that are conversations are rendered as such; with a :class:`PairConfig` they are answers that
    were judged, in pairs or ``judged_alone``. Where a recipe has data of its own, ``records`` yields them, texts or
    conversations with their fields, always the same ones in the same order; no other data are read then. Raises
    :class:`UserError` for bad input, and then leaves nothing behind.
    """
    spec = config.tokenizer
    assert spec is not None, "a recipe says which tokenizer is meant where nobody named one"
    if tok.is_trained(spec):
        tok.vocabulary_size(spec)  # a wrong size is told before any text is read
    if config.mixture:
        counts_of(config.mixture)  # a share too small as well
    if records is not None:
        require(
            not config.given("dataset"), "--dataset: this recipe has data of its own; leave it out."
        )
        config.dataset = [made(records).name]
    sources = [made(records)] if records else [open_source(name) for name in config.dataset]
    judged = isinstance(chat, PairConfig)
    formats = (
        [judged_format(one, judged_alone) for one in sources]
        if judged
        else _formats_of(sources, chat)
    )
    if formats[0] != "text" and config.given("text_field"):
        raise UserError(
            f"--text_field is for text, and {sources[0].name} is conversations; leave it out."
        )
    asked, chat = chat, chat if formats[0] != "text" else None
    pretrained = None if tok.is_trained(spec) else tok.load_tokenizer(spec, trust_remote_code)
    new_tokens = set_template(pretrained, chat.chat_template) if pretrained and chat else []
    stops = tok.stop_ids(spec) if pretrained and chat else []
    if chat and spec == "char":
        raise UserError(
            "--tokenizer char knows no letters but the data's, and a chat template has others; use byte."
        )
    template = (
        template_text(chat.chat_template) if chat and chat.chat_template else None
    )  # a file's may change
    key = [
        *(FORMAT, block_size, config.eval_fraction, [source.fingerprint() for source in sources]),
        tok.digest(pretrained) if pretrained is not None else spec,
        [formats, asdict(chat), template, stops, judged_alone] if chat else config.text_field,
    ]
    folder = cache_folder() / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    rows = found = _open(folder, spec)
    if rows is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{folder}.lock"):
                if _open(folder, spec) is None:
                    corpora: list[Corpus] = [
                        Pairs(source, config, chat, stops, judged_alone)
                        if isinstance(chat, PairConfig)
                        else Conversations(source, name, config, chat, stops)
                        if isinstance(chat, ChatConfig)
                        else Texts(source, config)
                        for source, name in zip(sources, formats, strict=True)
                    ]
                    _make(folder, config, block_size, corpora, pretrained, chat, stops)
        except OSError as error:
            said = error.strerror or error
            raise UserError(
                f"the cache folder {folder.parent}: {said}; set LLMTRAIN_CACHE to another."
            ) from None
        rows = _open(folder, spec)
        assert rows is not None, f"{folder} cannot be read back"
    rows.facts.dataset, rows.facts.tokenizer = (
        " ".join(config.dataset),
        spec,
    )  # its content may have moved
    rows.new_tokens, rows.sources = new_tokens, [*config.dataset]
    if config.mixture:
        rows.mixture = Mixture(rows.facts.source_rows, config.mixture)
    _describe(rows.facts, formats, asked, found is not None)
    return rows


def _measured(rows: TokenRows, tokenizer: tok.FastTokenizer, held_out: bool) -> Written:
    """Hash the content of rows of one's own, and count their targets."""
    digest, targets, size = hashlib.sha256(), 0, 0
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
    return Written(len(rows), len(rows), targets, size, digest.hexdigest())


def _formats_of(sources: list[Source], chat: RowConfig | None) -> list[str]:
    """Return the format of the records of each source: all text, or all conversations."""
    formats = [
        format_of(source, chat) if isinstance(chat, ChatConfig) else "text" for source in sources
    ]
    if len({name == "text" for name in formats}) > 1:
        kinds = ", ".join(
            f"{source.name} is {name}" for source, name in zip(sources, formats, strict=True)
        )
        raise UserError(
            f"--dataset: text and conversations cannot be mixed ({kinds}); --format says what a record is."
        )
    idle = [name for name in flags_of(ChatConfig) if chat and chat.given(name) and name != "format"]
    if formats[0] == "text" and idle:
        raise UserError(
            f"--{idle[0]} is for conversations, and {sources[0].name} is text; leave it out, or see --format."
        )
    return formats


def _describe(facts: Facts, formats: list[str], chat: RowConfig | None, found: bool) -> None:
    """Print lines of the banner."""
    say(
        "data",
        f"{facts.dataset}: {facts.documents:,} {'documents' if facts.task == 'text' else facts.task}, "
        f"{facts.train_tokens:,} tokens to train on, {facts.eval_tokens:,} held out, "
        f"vocabulary {facts.vocabulary:,} ({facts.tokenizer}); {'found in the cache' if found else 'tokenised'}",
    )
    if facts.audit and chat:
        kind = PairAudit if facts.task == "preferences" else Audit
        what = "comparing answers" if kind is PairAudit else "fine-tuning on what assistants say"
        say("task", f"{what}: the records are {', '.join(dict.fromkeys(formats))}")
        for line in kind(**facts.audit).lines(chat.overlong):
            say("audit", line)
        if facts.eval_audit and any(
            map(facts.eval_audit.get, ("overlong", "untrained", "same", "bad"))
        ):
            say("held out", kind(**facts.eval_audit).left(chat.overlong))
    elif chat:
        say("task", "going on with pretraining: the records are text, no conversations")


def _open(folder: Path, spec: str) -> Tokenized | None:
    """Return the rows of a cache entry, or ``None`` where there is none, or where somebody has damaged it."""
    try:
        facts = Facts(**json.loads((folder / "facts.json").read_text()))
        train, held_out = (
            TokenRows.open([folder / f"{side}-{i}.arrow" for i in range(len(facts.source_rows))])
            for side in ("train", "eval")
        )
        tokenizer = tok.load_tokenizer(str(folder / "tokenizer"), trained=tok.is_trained(spec))
    except (OSError, ValueError, TypeError, UserError):  # pyarrow's errors are ValueErrors
        return None
    return Tokenized(train, held_out if facts.eval_rows else None, tokenizer, facts)


def _make(
    folder: Path,
    config: DataConfig,
    block_size: int,
    corpora: Sequence[Corpus],
    tokenizer: "tok.FastTokenizer | None",
    chat: RowConfig | None,
    stops: Sequence[int],
) -> None:
    name, spec = " ".join(config.dataset), config.tokenizer or ""
    with new_folder(folder) as working:
        if tokenizer is None:
            texts = chain.from_iterable(corpus.texts(held_out=False) for corpus in corpora)
            everything = (corpus.texts() for corpus in corpora)
            trained = tok.train_tokenizer(spec, texts, lambda: chain.from_iterable(everything))
            tokenizer = tok.as_pretrained(trained, block_size)
            if chat:
                set_template(tokenizer, chat.chat_template or "chatml")
        tokenizer.save_pretrained(working / "tokenizer")
        train, held_out = list[Written](), list[Written]()
        for i, corpus in enumerate(corpora):
            train.append(
                corpus.write(tokenizer, block_size, working / f"train-{i}.arrow", held_out=False)
            )
            held_out.append(
                corpus.write(tokenizer, block_size, working / f"eval-{i}.arrow", held_out=True)
            )
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
