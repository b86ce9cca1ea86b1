"""The rows that a recipe asks for: its data sets, its tokenizer, and how records become rows.

Everything that can be wrong with the flags is reported here, before any row is made.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llmtrain.config.flags import flags_of
from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import (
    DEFAULT_TEMPLATE,
    NO_TEMPLATE,
    set_template,
    template_text,
)
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.order import counts_per_period
from llmtrain.data.packing import LENGTHS, TOKEN_COLUMNS
from llmtrain.data.readers import Source
from llmtrain.data.requested_sources import RequestedSource, requested_sources
from llmtrain.errors import UserError
from llmtrain.files import digest
from llmtrain.interfaces.packing_support import PackingSupport

# The version of a cache entry's content. Raise it when the content changes: all entries are then
# made again.
_FORMAT_VERSION = 13


@dataclass(frozen=True)
class DataRequest:
    """The rows that a recipe asks for.

    Attributes:
        config: the flags of the data sets.
        sources: the data sets to train on, then those to evaluate on.
        tokenizer: the tokenizer with its chat template; ``None`` to train one on the data.
        new_tokens: tokens that the chat template has added to it.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
        chat: how conversations or pairs become rows; ``None`` if all data sets are text.
        takes_conversations: whether the recipe trains on conversations or pairs, too, and not only
            on text.
        unpaired: the loss takes single answers with a label, not only pairs.
        text_columns: the columns of rows of text.
        max_length: the length of the rows, or ``auto``.
        max_positions: the number of positions of the model, which ``auto`` does not exceed.
        decided: what the flags left open, by their names.
        notes: lines about these decisions for the log, each with its name.
        digest: a hash of everything that the rows depend on, the name of their cache entry.
    """

    config: DataConfig
    sources: list[RequestedSource]
    tokenizer: "tok.FastTokenizer | None"
    new_tokens: Sequence[int]
    stop_token_ids: Sequence[int]
    chat: RowConfig | None
    takes_conversations: bool
    unpaired: bool
    text_columns: list[str]
    max_length: int | Literal["auto"]
    max_positions: int | None
    decided: dict[str, Any]
    notes: list[tuple[str, str]]
    digest: str

    @property
    def spec(self) -> str:
        """The value of ``--tokenizer``."""
        return str(self.config.tokenizer)

    @property
    def dataset(self) -> str:
        """The names of the data sets to train on."""
        return " ".join(source.name for source in self.train)

    @property
    def train(self) -> list[Source]:
        """The data sets to train on."""
        return [requested.source for requested in self.sources if requested.is_for_training]

    @property
    def eval(self) -> list[Source]:
        """The data sets that have eval records."""
        return [requested.source for requested in self.sources if requested.is_for_eval]


def make_request(
    config: DataConfig,
    max_length: int | Literal["auto"],
    chat: RowConfig | None,
    support: PackingSupport | None,
    trust_remote_code: bool,
    own_source: Source | None,
    unpaired: bool,
    max_positions: int | None,
) -> DataRequest:
    """Check the flags, and find out what the data sets hold.

    Args:
        config: the data sets and the tokenizer.
        max_length: the length of the rows, or ``auto``.
        chat: how conversations or pairs become rows, if the recipe trains on them.
        support: what rows the model can be trained on, if it is known.
        trust_remote_code: run code that comes with the tokenizer.
        own_source: the records of a recipe that has its own data.
        unpaired: the loss takes single answers with a label, not only pairs.
        max_positions: the number of positions of the model, which ``auto`` does not exceed.

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

    decided: dict[str, Any] = {}
    packing_notes: list[str] = []
    if chat is not None and support is not None:
        decided, packing_notes = _decide_packing(chat, support)
        chat = chat.with_values(decided)

    sources = requested_sources(config, chat, own_source, unpaired)
    _check_record_flags(config, sources, chat)
    training_sources = [requested for requested in sources if requested.is_for_training]
    decided["dataset"] = [requested.source.name for requested in training_sources]
    if max_length == "auto" and {requested.format for requested in training_sources} == {"text"}:
        raise UserError(
            f"--max_length auto is for conversations, but {sources[0].source.name} is text; give "
            "the number of tokens in a row."
        )

    row_config = None
    text_columns = ["input_ids", "position_ids"] if config.isolate_documents else ["input_ids"]
    if chat is not None and any(requested.format != "text" for requested in sources):
        row_config = chat
        # Beside conversations, text has the columns of conversations, because all rows of a run
        # have the same ones.
        text_columns = TOKEN_COLUMNS if chat.is_packed else [*TOKEN_COLUMNS[:-1], LENGTHS]

    tokenizer = None
    if not tok.is_trained(config.tokenizer):
        tokenizer = tok.load_tokenizer(config.tokenizer, trust_remote_code)
    new_tokens: list[int] = []
    stop_token_ids: list[int] = []
    notes: list[tuple[str, str]] = []
    if row_config is not None:
        notes += [("packing", note) for note in packing_notes]
        needing_template = [requested for requested in sources if requested.needs_template]
        _check_template(config, row_config, needing_template)
        if tokenizer is not None:
            if needing_template and not (row_config.chat_template or tokenizer.chat_template):
                reason = "the tokenizer has no chat template"
                notes.append(("default", f"--chat_template {DEFAULT_TEMPLATE} ({reason})"))
            new_tokens = set_template(
                tokenizer, row_config.chat_template, is_plain_text=not needing_template
            )
            stop_token_ids = tok.stop_token_ids_of(config.tokenizer)

    columns = sorted(item for item in config.column_names.items() if item[0] != "text")
    described_sources = [
        {
            "fingerprint": requested.source.fingerprint(),
            "has_artificial_nulls": requested.source.has_artificial_nulls,
            "split": requested.only_split,
            "format": requested.format,
            "text_field": requested.text_field,
            "columns": columns,
        }
        for requested in sources
    ]
    # Everything that the rows depend on.
    entry = digest(
        {
            "format": _FORMAT_VERSION,
            "max_length": max_length,
            "max_positions": max_positions if max_length == "auto" else None,
            "eval_fraction": config.eval_fraction if sources[0].only_split is None else None,
            "max_train_samples": config.max_train_samples,
            "sources": described_sources,
            "tokenizer": config.tokenizer if tokenizer is None else tok.digest(tokenizer),
            "stop_token_ids": stop_token_ids,
            "text_columns": text_columns,
            "rendering": None if row_config is None else _rendering_of(row_config),
            "unpaired": unpaired,
        }
    )
    return DataRequest(
        config=config,
        sources=sources,
        tokenizer=tokenizer,
        new_tokens=new_tokens,
        stop_token_ids=stop_token_ids,
        chat=row_config,
        takes_conversations=chat is not None,
        unpaired=unpaired,
        text_columns=text_columns,
        max_length=max_length,
        max_positions=max_positions,
        decided=decided,
        notes=notes,
        digest=entry[:32],
    )


def _decide_packing(chat: RowConfig, support: PackingSupport) -> tuple[dict[str, Any], list[str]]:
    """Decide on ``--packing`` and ``--share_prompts``, unless the user did.

    Returns:
        The values by the names of the flags, and notes for the log.
    """
    decided: dict[str, Any] = {}
    notes = []
    if chat.packing is None:
        decided["packing"] = support.packs
        if not support.packs:
            examples = "pairs" if isinstance(chat, PairConfig) else "conversations"
            notes.append(f"{examples} are not packed: {support.packing_problem}")
    is_packed = decided.get("packing", chat.packing)
    if isinstance(chat, PairConfig) and chat.share_prompts is None and is_packed:
        decided["share_prompts"] = support.shares_prompts
        if not support.shares_prompts:
            notes.append(f"each answer has its own copy of the prompt: {support.sharing_problem}")
    return decided, notes


def _rendering_of(chat: RowConfig) -> dict[str, Any]:
    """Return how records become rows, as far as these depend on it."""
    flags = asdict(chat)
    del flags["dataset_num_proc"]  # the rows are the same from any number of processes
    if chat.chat_template:  # its file may change, or be moved
        flags["chat_template"] = template_text(chat.chat_template)
    return flags


def _check_template(
    config: DataConfig, chat: RowConfig, needing_template: list[RequestedSource]
) -> None:
    """Check that ``--chat_template`` and ``--tokenizer`` fit the records."""
    if chat.chat_template == NO_TEMPLATE and needing_template:
        raise UserError(
            "--chat_template none is for prompts with completions of plain text, but the records "
            f"of {needing_template[0].source.name} are conversations; use --chat_template chatml."
        )
    if config.tokenizer == "char":
        raise UserError(
            "--tokenizer char knows only the characters of the data, and a chat template has "
            "others; use byte."
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
        raise UserError(
            "--eval_fraction keeps a share of --dataset for evaluation, but --eval_dataset or "
            "--dataset_test_split names the eval data; leave one of them out."
        )


def _check_record_flags(
    config: DataConfig, sources: list[RequestedSource], chat: RowConfig | None
) -> None:
    """Raise :class:`UserError` if a flag is set that has no effect on such records."""
    formats = {requested.format for requested in sources}
    columns = config.column_names
    kind = "text"
    flags = []
    if formats == {"text"}:
        flags = [f"--columns {ours}={columns[ours]}" for ours in columns if ours != "text"]
        if chat is not None:
            flags += [f"--{name}" for name in flags_of(ChatConfig) if chat.is_set(name)]
    elif "text" not in formats:
        kind = "preference data" if isinstance(chat, PairConfig) else "conversations"
        if "text" in columns:
            flags.append(f"--columns text={columns['text']}")
        if config.isolate_documents:
            flags.append("--isolate_documents")
    elif config.isolate_documents and chat is not None and not chat.is_packed:
        kind = "text and conversations in rows that are not packed"
        flags.append("--isolate_documents")

    useless = [flag for flag in flags if flag != "--format"]
    if useless:
        raise UserError(
            f"{useless[0]} has no effect, because {sources[0].source.name} holds {kind}; leave it "
            "out, or see --format and --columns."
        )
