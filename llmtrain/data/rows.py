"""Text or conversations -> rows of tokens on disk, made once and found again by their content."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import filelock

from llmtrain.console import say
from llmtrain.contract import IGNORED
from llmtrain.data import tokenizer as tok
from llmtrain.data.cache import cache_folder
from llmtrain.data.chat import end_of_turn_ids, set_template, template_text
from llmtrain.data.config import DataConfig
from llmtrain.data.conversations import Audit, ChatConfig, Conversations, audit_of, format_of
from llmtrain.data.mixture import Mixture, parts_of
from llmtrain.data.sources import Made, Source, open_source
from llmtrain.data.table import TokenRows, Written
from llmtrain.data.text import Texts
from llmtrain.errors import UserError
from llmtrain.files import new_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast

FORMAT = 3  # of the prepared folder; a change makes every cache entry anew


@dataclass
class Facts:
    """What was prepared, for ``run.json`` and the banner. Hashes are hex sha256."""

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
    source_rows: list[int]  # rows to train on of each data set, in which they stand one after the other
    task: str = "text"
    audit: dict[str, int] | None = None  # of conversations
    eval_audit: dict[str, int] | None = None  # of those held out


@dataclass
class PreparedData:
    """Token rows, memory-mapped, with the tokenizer that made them."""

    train: TokenRows
    eval: TokenRows | None
    tokenizer: "PreTrainedTokenizerFast"
    facts: Facts
    mixture: Mixture | None = None
    new_tokens: list[int] = field(default_factory=list)  # that a chat template has added to a pretrained tokenizer

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents, which must not see each other."""
        return "position_ids" in self.train.column_names

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens at which an answer ends; none of a text."""
        return tuple(sorted(end_of_turn_ids(self.tokenizer))) if self.facts.task != "text" else ()

    def unseen_question(self) -> list[int] | None:
        """The tokens before the first answer of a held-out conversation."""
        if self.eval is None or self.facts.task == "text":
            return None
        row = self.eval[len(self.eval) - 1]
        answered = next(i for i, label in enumerate(row["labels"]) if label != IGNORED)
        return row["input_ids"][:answered]


class Corpus(Protocol):
    """A source, read as what it is."""

    task: str
    documents: int
    eval_documents: int
    eval_bytes: int

    @property
    def audits(self) -> list[Audit]:
        """Of conversations, once they are written: of those to train on, and of those held out."""

    def everything(self) -> "Iterator[str]":
        """All texts, held out or not."""

    def train(self) -> "Iterator[str]":
        """The texts to train on."""

    def write(
        self, tokenizer: "PreTrainedTokenizerFast", trained_here: bool, block_size: int, train: Path, held_out: Path
    ) -> tuple[Written, Written]:
        """Write the rows of both sides."""


def prepare(
    config: DataConfig,
    block_size: int,
    chat: ChatConfig | None = None,
    trust_remote_code: bool = False,
    records: Callable[[], Iterable[str | dict[str, Any]]] | None = None,
) -> PreparedData:
    """Find the prepared rows of this data, tokenizer and block size, or make them.

    Every process calls this before the process group exists; one makes the rows while the others wait for its lock.
    With ``chat``, data that are conversations are prepared as such. Where a recipe has data of its own, ``records``
    yields them, texts or conversations with their fields, always the same ones in the same order; nobody else's are
    read then. Raises :class:`UserError` for bad input, and then leaves nothing behind.
    """
    spec = config.tokenizer
    assert spec is not None, "a recipe says which tokenizer is meant where nobody named one"
    if tok.is_trained(spec):
        tok.vocabulary_size(spec)  # a wrong size is told before any text is read
    if config.mixture:
        parts_of(config.mixture)  # a share too small as well
    if records is not None:
        if config.given("dataset"):
            raise UserError("--dataset: this recipe has data of its own; leave it out.")
        config.dataset = [Made(records).name]
    sources: list[Source] = [Made(records)] if records else [open_source(name, config) for name in config.dataset]
    formats = _formats_of(sources, chat)
    asked, chat = chat, chat if formats[0] != "text" else None
    pretrained = None if tok.is_trained(spec) else tok.load_tokenizer(spec, trust_remote_code)
    vocabulary = pretrained.get_vocab() if pretrained is not None else {}
    if pretrained is not None and chat:
        set_template(pretrained, chat.chat_template)
    elif chat and spec == "char":
        raise UserError("--tokenizer char knows no letters but the data's, and a chat template has others; use byte.")
    key: list[Any] = [FORMAT, block_size, config.eval_fraction, [source.fingerprint() for source in sources]]
    key += [tok.digest(pretrained) if pretrained is not None else spec]
    template = template_text(chat.chat_template) if chat and chat.chat_template else None  # a file's may change
    key += [[formats, asdict(chat), template] if chat else config.text_field]
    folder = cache_folder() / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    prepared = _open(folder)
    found = prepared is not None
    if prepared is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{folder}.lock"):
                prepared = _open(folder)
                if prepared is None:
                    corpora: list[Corpus] = [
                        Conversations(source, name, config, chat) if chat else Texts(source, config)
                        for source, name in zip(sources, formats, strict=True)
                    ]
                    _make(folder, config, spec, corpora, pretrained, block_size, chat)
                    prepared = _open(folder)
        except OSError as error:
            raise UserError(
                f"the cache folder {folder.parent}: {error.strerror or error}; set LLMTRAIN_CACHE to another."
            ) from None
        assert prepared is not None, f"{folder} cannot be read back"
    facts = prepared.facts
    facts.dataset, facts.tokenizer = " ".join(config.dataset), spec  # its content may have moved
    if pretrained is not None:
        prepared.new_tokens = sorted(id for token, id in pretrained.get_vocab().items() if token not in vocabulary)
    if config.mixture:
        prepared.mixture = Mixture(facts.source_rows, config.mixture)
    _describe(facts, formats, asked, found)
    return prepared


def _formats_of(sources: list[Source], chat: ChatConfig | None) -> list[str]:
    """What the records of each source are; all text, or all conversations."""
    formats = [format_of(source, chat) if chat else "text" for source in sources]
    if len({name == "text" for name in formats}) > 1:
        kinds = ", ".join(f"{source.name} is {name}" for source, name in zip(sources, formats, strict=True))
        raise UserError(f"--dataset: text and conversations cannot be mixed ({kinds}); --format says what a record is.")
    idle = [
        name for name in ("chat_template", "overlong", "on_bad_row", "packing") if chat is not None and chat.given(name)
    ]
    if formats[0] == "text" and idle:
        raise UserError(
            f"--{idle[0]} is for conversations, and {sources[0].name} is text; leave it out, or see --format."
        )
    return formats


def _describe(facts: Facts, formats: list[str], chat: ChatConfig | None, found: bool) -> None:
    """Lines of the banner."""
    say(
        "data",
        f"{facts.dataset}: {facts.documents:,} {'documents' if facts.task == 'text' else facts.task}, "
        f"{facts.train_tokens:,} tokens to train on, {facts.eval_tokens:,} held out, "
        f"vocabulary {facts.vocabulary:,} ({facts.tokenizer}); {'found in the cache' if found else 'prepared'}",
    )
    if facts.audit and chat:
        say("task", f"fine-tuning on what assistants say: the records are {', '.join(dict.fromkeys(formats))}")
        for line in Audit(**facts.audit).lines(chat.overlong):
            say("audit", line)
        if facts.eval_audit and facts.eval_audit["conversations"] > facts.eval_audit["kept"]:
            say("held out", Audit(**facts.eval_audit).left(chat.overlong))
    elif chat:
        say("task", "going on with pretraining: the records are text, no conversations")


def _open(folder: Path) -> PreparedData | None:
    """What was prepared, or ``None`` where it was not, or where somebody has damaged it."""
    if not folder.exists():
        return None

    def rows(side: str, count: int) -> TokenRows:
        return TokenRows([folder / f"{side}-{i}.arrow" for i in range(count)])

    try:
        facts = Facts(**json.loads((folder / "facts.json").read_text()))
        count = len(facts.source_rows)
        return PreparedData(
            train=rows("train", count),
            eval=rows("eval", count) if facts.eval_rows else None,
            tokenizer=tok.load_tokenizer(str(folder / "tokenizer")),
            facts=facts,
        )
    except (OSError, ValueError, TypeError, UserError):  # pyarrow's errors are ValueErrors
        return None


def _make(
    folder: Path,
    config: DataConfig,
    spec: str,
    corpora: list[Corpus],
    pretrained: "PreTrainedTokenizerFast | None",
    block_size: int,
    chat: ChatConfig | None,
) -> None:
    def texts(name: str) -> "Iterator[str]":
        return itertools.chain.from_iterable(getattr(corpus, name)() for corpus in corpora)

    with new_folder(folder) as working:
        if pretrained is None:
            trained = tok.train_tokenizer(spec, texts("train"), lambda: texts("everything"))
            tokenizer = tok.as_pretrained(trained, block_size)
            if chat:
                set_template(tokenizer, chat.chat_template or "chatml")
        else:
            tokenizer = pretrained
        tokenizer.save_pretrained(working / "tokenizer")

        sides = [
            corpus.write(
                tokenizer, pretrained is None, block_size, working / f"train-{i}.arrow", working / f"eval-{i}.arrow"
            )
            for i, corpus in enumerate(corpora)
        ]
        train, held_out = zip(*sides, strict=True)
        total = sum(part.targets for part in train)
        if corpora[0].task == "text" and any(part.targets < block_size for part in train):
            smallest = min(part.targets for part in train)
            raise UserError(
                f"--block_size {block_size} is larger than the text to train on ({smallest + 1} tokens of "
                f"{' '.join(config.dataset)}); use at most {max(smallest, 1)} or more text."
            )
        facts = Facts(
            dataset=" ".join(config.dataset),
            tokenizer=spec,
            tokenizer_sha256=tok.digest(tokenizer),
            data_sha256=hashlib.sha256("".join(part.sha256 for part in (*train, *held_out)).encode()).hexdigest(),
            vocabulary=max(tokenizer.get_vocab().values()) + 1,  # ids may have gaps
            block_size=block_size,
            documents=sum(corpus.documents for corpus in corpora),
            eval_documents=sum(corpus.eval_documents for corpus in corpora),
            train_tokens=total,
            eval_tokens=sum(part.targets for part in held_out),
            train_rows=sum(part.rows for part in train),
            eval_rows=sum(part.rows for part in held_out),
            eval_bytes=sum(corpus.eval_bytes for corpus in corpora),
            source_rows=[part.rows for part in train],
            task=corpora[0].task,
            audit=asdict(audit_of(corpus.audits[0] for corpus in corpora)) if chat else None,
            eval_audit=asdict(audit_of(corpus.audits[1] for corpus in corpora)) if chat else None,
        )
        (working / "facts.json").write_text(json.dumps(asdict(facts), indent=2))
