"""The rows that a recipe asks for: its data sets, its tokenizer, and how records become rows.

Everything that can be wrong with the flags is reported here, before any row is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.config.flags import flags_of
from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import NO_TEMPLATE, set_template, template_text
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.order import counts_per_period
from llmtrain.data.packing import LENGTHS, TOKEN_COLUMNS
from llmtrain.data.readers import Source
from llmtrain.data.requested_sources import RequestedSource, requested_sources
from llmtrain.errors import UserError
from llmtrain.files import digest
from llmtrain.json_types import JsonObject

# The version of a cache entry's content. Raise it when the content changes: all entries are then
# made again.
_FORMAT_VERSION = 13


@dataclass(frozen=True)
class RequestedTokenizer:
    """The tokenizer of a run.

    Attributes:
        spec: the value of ``--tokenizer``.
        pretrained: the tokenizer with its chat template; ``None`` to train one on the data.
        new_tokens: tokens that the chat template has added to it.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
        has_default_template: whether it has no chat template of its own and gets the default one.
    """

    spec: str
    pretrained: "tok.FastTokenizer | None" = None
    new_tokens: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    has_default_template: bool = False


@dataclass(frozen=True)
class DataRequest:
    """The rows that a recipe asks for.

    Attributes:
        sources: the data sets to train on, then those to evaluate on.
        tokenizer: the tokenizer.
        chat: how conversations or pairs become rows; ``None`` if all data sets are text.
        unpaired: the loss takes single answers with a label, not only pairs.
        takes_conversations: whether the recipe trains on conversations or pairs, too, and not only
            on text.
        eval_fraction: the share of the records that is kept for evaluation.
        max_train_samples: the most training records of each data set; ``None`` for all.
        mixture: the sampling weight of each data set; empty to draw every row once per epoch.
        text_columns: the columns of rows of text.
        max_length: the length of the rows, or ``auto``.
        max_positions: the number of positions of the model, which ``auto`` does not exceed.
        eval_split: the split of the training data sets that is the eval data, if there is one.
        digest: a hash of everything that the rows depend on, the name of their cache entry.
    """

    sources: list[RequestedSource]
    tokenizer: RequestedTokenizer
    chat: RowConfig | None
    unpaired: bool
    takes_conversations: bool
    eval_fraction: float
    max_train_samples: int | None
    mixture: list[float]
    text_columns: list[str]
    max_length: int | Literal["auto"]
    max_positions: int | None
    eval_split: str | None
    digest: str

    @property
    def train(self) -> list[Source]:
        """The data sets to train on."""
        return [requested.source for requested in self.sources if requested.is_for_training]

    @property
    def eval(self) -> list[Source]:
        """The data sets that have eval records."""
        return [requested.source for requested in self.sources if requested.is_for_eval]

    @property
    def has_eval_sources(self) -> bool:
        """Whether the eval data are other data sets or splits than the training data."""
        return self.sources[0].only_split is not None

    @property
    def dataset(self) -> str:
        """The names of the data sets to train on."""
        return " ".join(source.name for source in self.train)

    @property
    def length_flag(self) -> str:
        """The flag that sets the length of the rows, for error messages."""
        return "--max_length" if self.takes_conversations else "--block_size"


def make_request(
    config: DataConfig,
    max_length: int | Literal["auto"],
    chat: RowConfig | None,
    trust_remote_code: bool,
    own_source: Source | None,
    unpaired: bool,
    max_positions: int | None,
) -> DataRequest:
    """Check the flags, and find out what the data sets hold.

    Args:
        own_source: the records of a recipe that has its own data.

    The other arguments are those of :func:`llmtrain.data.prepare.tokenize`.

    Raises:
        UserError: if the data, the tokenizer or the flags are wrong.
    """
    assert config.tokenizer is not None, "the recipe sets a tokenizer if the user named none"
    # Wrong numbers are reported before any text is read.
    if tok.is_trained(config.tokenizer):
        tok.vocabulary_size(config.tokenizer)
    if config.mixture:
        counts_per_period(config.mixture)
    _check_data_flags(config, has_own_records=own_source is not None)

    sources = requested_sources(config, chat, own_source, unpaired)
    _check_record_flags(config, sources, chat)
    if all(requested.format == "text" for requested in sources):
        row_config = None
        text_columns = ["input_ids", "position_ids"] if config.isolate_documents else ["input_ids"]
    else:
        row_config = chat
        # Beside conversations, text has the columns of conversations, because all rows of a run
        # have the same ones.
        assert chat is not None, "without a config, all records are text"
        text_columns = TOKEN_COLUMNS if chat.is_packed else [*TOKEN_COLUMNS[:-1], LENGTHS]

    training_formats = {requested.format for requested in sources if requested.is_for_training}
    if max_length == "auto" and training_formats == {"text"}:
        raise UserError(
            f"--max_length auto is for conversations, but {sources[0].source.name} is text; give "
            "the number of tokens in a row."
        )

    chat_template = None if row_config is None else row_config.chat_template
    tokenizer = _tokenizer_of(
        config.tokenizer,
        sources,
        chat_template,
        trust_remote_code=trust_remote_code,
    )
    # Everything that the rows depend on.
    entry = digest(
        {
            "format": _FORMAT_VERSION,
            "max_length": max_length,
            "max_positions": max_positions if max_length == "auto" else None,
            "eval_fraction": config.eval_fraction if sources[0].only_split is None else None,
            "max_train_samples": config.max_train_samples,
            "sources": [_described(requested, config.column_names) for requested in sources],
            "tokenizer": tok.digest(tokenizer.pretrained)
            if tokenizer.pretrained
            else tokenizer.spec,
            "stop_token_ids": list(tokenizer.stop_token_ids),
            "text_columns": text_columns,
            "rendering": None if row_config is None else row_config.fingerprint(),
            "chat_template": template_text(chat_template) if chat_template else None,
            "unpaired": unpaired,
        }
    )
    return DataRequest(
        sources=sources,
        tokenizer=tokenizer,
        chat=row_config,
        unpaired=unpaired,
        takes_conversations=chat is not None,
        eval_fraction=config.eval_fraction,
        max_train_samples=config.max_train_samples,
        mixture=config.mixture,
        text_columns=text_columns,
        max_length=max_length,
        max_positions=max_positions,
        eval_split=None if config.eval_dataset else config.dataset_test_split,
        digest=entry[:32],
    )


def _described(requested: RequestedSource, columns: Mapping[str, str]) -> JsonObject:
    """Return everything about a data set that the rows depend on."""
    return {
        "fingerprint": requested.source.fingerprint(),
        "has_artificial_nulls": requested.source.has_artificial_nulls,
        "split": requested.only_split,
        "format": requested.format,
        "text_field": requested.text_field,
        "columns": sorted(item for item in columns.items() if item[0] != "text"),
    }


def _tokenizer_of(
    spec: str, sources: list[RequestedSource], chat_template: str | None, trust_remote_code: bool
) -> RequestedTokenizer:
    """Load a tokenizer, unless it is trained, and set its chat template.

    Args:
        spec: the value of ``--tokenizer``.
        sources: the data sets.
        chat_template: the value of ``--chat_template``.
        trust_remote_code: run code that comes with the tokenizer.

    Raises:
        UserError: if there is no such tokenizer, or if it does not fit the records.
    """
    pretrained = None if tok.is_trained(spec) else tok.load_tokenizer(spec, trust_remote_code)
    if all(requested.format == "text" for requested in sources):
        return RequestedTokenizer(spec, pretrained)

    needing = [requested for requested in sources if requested.needs_template]
    if chat_template == NO_TEMPLATE and needing:
        raise UserError(
            "--chat_template none is for prompts with completions of plain text, but the records "
            f"of {needing[0].source.name} are conversations; use --chat_template chatml."
        )
    if spec == "char":
        raise UserError(
            "--tokenizer char knows only the characters of the data, and a chat template has "
            "others; use byte."
        )
    if pretrained is None:
        return RequestedTokenizer(spec)
    has_template = bool(chat_template or pretrained.chat_template)
    new_tokens = set_template(pretrained, chat_template, is_plain_text=not needing)
    return RequestedTokenizer(
        spec,
        pretrained,
        new_tokens=new_tokens,
        stop_token_ids=tok.stop_token_ids_of(spec),
        has_default_template=bool(needing) and not has_template,
    )


def _check_data_flags(config: DataConfig, has_own_records: bool) -> None:
    """Check the flags that say what the records are, before any of them is read."""
    if has_own_records:
        flags = ["dataset", "dataset_train_split"]
        if not config.eval_dataset:
            flags += ["dataset_test_split", "text_suffixes"]
        for name in flags:
            if config.is_set(name):
                raise UserError(f"--{name}: this recipe has its own data; leave the flag out.")
    if config.has_own_eval_data and config.is_set("eval_fraction"):
        flag = "--eval_dataset" if config.eval_dataset else "--dataset_test_split"
        raise UserError(
            f"--eval_fraction keeps a share of --dataset for evaluation, but {flag} names the eval "
            "data; leave one of them out."
        )

    has_text_field = config.is_set("text_field") or config.text_field != "text"
    text_column = config.column_names.get("text")
    if text_column and has_text_field:
        raise UserError(
            f"--columns text={text_column} and --text_field {config.text_field} both name the "
            "field that holds the text; leave one of them out."
        )


def _check_record_flags(
    config: DataConfig, sources: list[RequestedSource], chat: RowConfig | None
) -> None:
    """Check the flags that are for text, or only for other records.

    Raises:
        UserError: if such a flag is set and has no effect, or if it does not fit the others.
    """
    name = sources[0].source.name
    columns = config.column_names
    formats = {requested.format for requested in sources}
    kind = "preference data" if isinstance(chat, PairConfig) else "conversations"
    if formats == {"text"}:
        for flag in flags_of(ChatConfig):
            if flag != "format" and chat is not None and chat.is_set(flag):
                raise UserError(
                    f"--{flag} is for conversations, but {name} is text; leave it out, or see "
                    "--format."
                )
        for ours, theirs in columns.items():
            if ours != "text":
                raise UserError(
                    f"--columns {ours}={theirs}: {name} is read as text, which has no field "
                    f"'{ours}'; rename all fields of a format of conversations, or write "
                    f"text={theirs}."
                )

    if "text" not in formats:
        are_set = {
            f"--columns text={columns.get('text')}": "text" in columns,
            "--text_field": config.is_set("text_field"),
            "--isolate_documents": config.isolate_documents,
        }
        for flag, is_set in are_set.items():
            if is_set:
                raise UserError(f"{flag} is for text, but {name} holds {kind}; leave it out.")

    is_mixed = "text" in formats and len(formats) > 1
    if config.isolate_documents and is_mixed and chat is not None and not chat.is_packed:
        raise UserError(
            "--isolate_documents needs packed rows if text and conversations are mixed, and this "
            "run does not pack them; leave --isolate_documents out."
        )
