"""The rows that a recipe asks for: its data sets, their formats, and how they become rows.

Everything that can be wrong with the flags is reported here, before any row is made.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from llmtrain.config.flags import flags_of
from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import (
    DEFAULT_TEMPLATE,
    NO_TEMPLATE,
    set_template,
    template_text,
)
from llmtrain.data.columns import Column, rename_columns
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.dataset_names import open_source
from llmtrain.data.formats import is_plain_text
from llmtrain.data.packing import LENGTHS, TOKEN_COLUMNS
from llmtrain.data.preference import preference_format_of
from llmtrain.data.recipe_records import PythonRecords, records_source
from llmtrain.data.sft import format_of
from llmtrain.data.shuffle import counts_per_period
from llmtrain.data.sources import Source, SplitChoice
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.json_types import JsonObject

# The version of a cache entry's content. Raise it when the content changes: all entries are then
# made again.
_FORMAT_VERSION = 8


@dataclass
class DataRequest:
    """The rows that a recipe asks for.

    Attributes:
        config: the data sets, the tokenizer and the share of the eval data.
        max_length: the length of the rows, or ``auto``.
        max_positions: the number of positions of the model, which no length may exceed; ``None`` if
            there is no limit.
        takes_conversations: whether the recipe trains on conversations or pairs, too, and not only
            on text.
        train: the data sets to train on.
        eval: the data sets to evaluate on; empty to keep a share of the training data for that.
        formats: the format of each data set, first of those in ``train``, then in ``eval``.
        chat: how conversations or pairs become rows; ``None`` if all data sets are text.
        unpaired: the loss takes single answers with a label, not only pairs.
        text_columns: the columns of rows of text.
        tokenizer: a pretrained tokenizer with its chat template; ``None`` to train one.
        new_tokens: tokens that the chat template has added to it.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
    """

    config: DataConfig
    max_length: int | Literal["auto"]
    max_positions: int | None
    takes_conversations: bool
    train: list[Source]
    eval: list[Source]
    formats: list[str]
    chat: RowConfig | None
    unpaired: bool
    text_columns: list[str]
    tokenizer: "tok.FastTokenizer | None"
    new_tokens: list[int]
    stop_token_ids: list[int]

    @property
    def spec(self) -> str:
        """The value of ``--tokenizer``."""
        assert self.config.tokenizer is not None
        return self.config.tokenizer

    @property
    def sources(self) -> list[Source]:
        """All data sets, in the order of ``formats``."""
        return [*self.train, *self.eval]

    @property
    def train_formats(self) -> list[str]:
        """The format of each data set in ``train``."""
        return self.formats[: len(self.train)]

    @property
    def length_flag(self) -> str:
        """The flag that sets the length of the rows, for error messages."""
        return "--max_length" if self.takes_conversations else "--block_size"

    @property
    def is_auto(self) -> bool:
        """Whether the length of the rows is chosen by the conversations."""
        return self.max_length == "auto"

    def digest(self) -> str:
        """Hash everything that the rows depend on, for the name of their cache entry."""
        config = self.config
        names = config.column_names
        key: list[object] = [
            _FORMAT_VERSION,
            [self.max_length, self.max_positions] if self.is_auto else self.max_length,
            None if self.eval else config.eval_fraction,
            [source.fingerprint() for source in self.train],
            [source.fingerprint() for source in self.eval],
            [sorted(names.renamed(source.name).items()) for source in self.sources],
            tok.digest(self.tokenizer) if self.tokenizer is not None else self.spec,
        ]
        if self.chat is not None:
            key += [self.formats, _rendering_of(self.chat), self.stop_token_ids, self.unpaired]
        if "text" in self.formats:
            key += [[config.text_column(source.name) for source in self.sources], self.text_columns]
        return hashlib.sha256(json_text(key).encode()).hexdigest()[:32]


def make_request(
    config: DataConfig,
    max_length: int | Literal["auto"],
    chat: RowConfig | None,
    trust_remote_code: bool,
    records: PythonRecords | None,
    unpaired: bool,
    max_positions: int | None,
    records_fingerprint: str | None = None,
) -> DataRequest:
    """Check the flags, and find out what the data sets hold.

    The arguments are those of :func:`llmtrain.data.prepare.tokenize`. If ``chat`` leaves open
    whether rows are packed, they are.

    Raises:
        UserError: if the data, the tokenizer or the flags are wrong.
    """
    assert config.tokenizer is not None, "the recipe sets a tokenizer if the user named none"
    # Wrong numbers are reported before any text is read.
    if tok.is_trained(config.tokenizer):
        tok.vocabulary_size(config.tokenizer)
    if config.mixture:
        counts_per_period(config.mixture)
    _check_data_flags(config)

    sources = _sources_of(config, records, records_fingerprint)
    all_sources = [*sources.train, *sources.eval]
    formats = _formats_of(all_sources, chat, unpaired=unpaired)
    row_config = None if set(formats) == {"text"} else chat
    if row_config is not None:
        # The recipe has asked the model class, unless the recipe has a model of its own.
        row_config.resolve_packing(can_pack=True)
    if isinstance(row_config, PairConfig):
        row_config.resolve_sharing(can_share=True)

    _check_text_flags(config, all_sources, formats, row_config)
    if max_length == "auto" and set(formats[: len(sources.train)]) == {"text"}:
        raise UserError(
            f"--max_length auto is for conversations, but {sources.train[0].name} is text; give "
            "the number of tokens in a row."
        )
    request = DataRequest(
        config=config,
        max_length=max_length,
        max_positions=max_positions,
        takes_conversations=chat is not None,
        train=sources.train,
        eval=sources.eval,
        formats=formats,
        chat=row_config,
        unpaired=unpaired,
        text_columns=_text_columns(config, row_config),
        tokenizer=None,
        new_tokens=[],
        stop_token_ids=[],
    )
    _load_tokenizer(request, trust_remote_code)
    return request


def _load_tokenizer(request: DataRequest, trust_remote_code: bool) -> None:
    """Load the tokenizer of a request, unless it is trained, and set its chat template.

    Raises:
        UserError: if there is no such tokenizer, or if it does not fit the records.
    """
    chat = request.chat
    spec = request.spec
    if not tok.is_trained(spec):
        request.tokenizer = tok.load_tokenizer(spec, trust_remote_code)
    if chat is None:
        return

    conversations = _first_that_needs_template(request.sources, request.formats)
    if chat.chat_template == NO_TEMPLATE and conversations is not None:
        raise UserError(
            "--chat_template none is for prompts with completions of plain text, but the records "
            f"of {conversations.name} are conversations; use --chat_template chatml."
        )
    if request.tokenizer is not None:
        has_template = chat.chat_template or request.tokenizer.chat_template
        if conversations is not None and not has_template:
            chat.set_default(
                "chat_template", DEFAULT_TEMPLATE, "the tokenizer has no chat template"
            )
        request.new_tokens = set_template(
            request.tokenizer, chat.chat_template, is_plain_text=conversations is None
        )
        request.stop_token_ids = tok.stop_token_ids_of(spec)
    if spec == "char":
        raise UserError(
            "--tokenizer char knows only the characters of the data, and a chat template has "
            "others; use byte."
        )


def _rendering_of(chat: RowConfig) -> JsonObject:
    """Return everything in a config that says how conversations become rows."""
    flags = asdict(chat)
    del flags["dataset_num_proc"]  # the rows are the same from any number of processes
    # The text of the template instead of its path: the file may change, or be moved.
    if chat.chat_template:
        flags["chat_template"] = template_text(chat.chat_template)
    return flags


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

    has_text_field = config.is_set("text_field") or config.text_field != "text"
    for column in config.column_names.of_all_datasets():
        if column.ours == "text" and has_text_field:
            raise UserError(
                f"--columns {column} and --text_field {config.text_field} both name the field that "
                "holds the text; leave one of them out."
            )


def _sources_of(
    config: DataConfig, records: PythonRecords | None, records_fingerprint: str | None
) -> _Sources:
    """Return the sources in ``--dataset`` or the recipe's own source, and those of the eval data.

    The fields are renamed as ``--columns`` says.
    """
    is_train_named = config.dataset_train_split is not None
    is_test_named = config.dataset_test_split is not None
    if records is None:
        # With --dataset_test_split, a folder of files is read as a data set with splits. Its files
        # must not all be training data.
        train_choice = SplitChoice(
            config.dataset_train_split or "train",
            is_named=is_train_named or (is_test_named and not config.eval_dataset),
        )
        train = [open_source(name, train_choice) for name in config.dataset]
        if is_train_named:
            _check_splits(train, train_choice)
    else:
        train = [_own_source(config, records, records_fingerprint)]

    eval: list[Source] = []
    if config.eval_dataset or is_test_named:
        test_choice = SplitChoice(
            config.dataset_test_split or "test",
            is_named=is_test_named,
            data_flag="--eval_dataset" if config.eval_dataset else "--dataset",
            split_flag="--dataset_test_split",
        )
        eval = [open_source(name, test_choice) for name in config.eval_dataset or config.dataset]
        if is_test_named:
            _check_splits(eval, test_choice)
        if not config.eval_dataset:
            eval = [source for source in eval if source.has_splits]

    renamed = rename_columns([*train, *eval], config.column_names)
    return _Sources(train=renamed[: len(train)], eval=renamed[len(train) :])


def _own_source(config: DataConfig, records: PythonRecords, fingerprint: str | None) -> Source:
    """Return the source of a recipe that has its own data."""
    flags = ["dataset", "dataset_train_split"]
    if not config.eval_dataset:
        flags.append("dataset_test_split")
    for name in flags:
        if config.is_set(name):
            raise UserError(f"--{name}: this recipe has its own data; leave the flag out.")
    source = records_source(records, fingerprint)
    config.dataset = [source.name]
    return source


def _check_splits(sources: list[Source], choice: SplitChoice) -> None:
    """Check that some data set has the splits among which the user chose one."""
    if not any(source.has_splits for source in sources):
        names = " ".join(source.name for source in sources)
        raise UserError(
            f"{choice.split_flag} {choice.split}: {names} has no splits, which data sets of the "
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
                    f"--{name} is for conversations, but {sources[0].name} is text; "
                    "leave it out, or see --format."
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
    names = config.column_names
    kind = "preference data" if isinstance(chat, PairConfig) else "conversations"
    if chat is None:
        for column in names.of_all_datasets():
            _check_names_text(column, name)
    for source, format in zip(sources, formats, strict=True):
        for column in names.of_dataset(source.name):
            if format == "text":
                _check_names_text(column, source.name)
            elif column.ours == "text":
                raise UserError(
                    f"--columns {column} is for text, but {source.name} holds {kind}; leave it out."
                )

    if "text" not in formats:
        are_set = {
            f"--columns text={names.text('')}": names.text("") is not None,
            "--text_field": config.is_set("text_field"),
            "--isolate_documents": config.isolate_documents,
        }
        for flag, is_set in are_set.items():
            if is_set:
                raise UserError(f"{flag} is for text, but {name} holds {kind}; leave it out.")
    if config.isolate_documents and chat is not None and not chat.is_packed:
        raise UserError(
            "--isolate_documents needs packed rows if text and conversations are mixed, and this "
            "run does not pack them; leave --isolate_documents out."
        )


def _check_names_text(column: Column, name: str) -> None:
    """Raise :class:`UserError` if a word of ``--columns`` for text is not ``text=THEIRS``."""
    if column.ours != "text":
        raise UserError(
            f"--columns {column}: {name} is read as text, which has no field '{column.ours}'; "
            f"rename all fields of a format of conversations, or write text={column.theirs}."
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


def _first_that_needs_template(sources: list[Source], formats: list[str]) -> Source | None:
    """Return the first source whose records are not prompts with texts as completions.

    The first record of each source decides. Sources of text have no prompts, and do not count.
    """
    for source, format in zip(sources, formats, strict=True):
        if format == "text":
            continue
        if format not in ("prompt_completion", "pairs", "examples"):
            return source
        first = source.first()
        if first is None or not is_plain_text(first.fields):
            return source
    return None
