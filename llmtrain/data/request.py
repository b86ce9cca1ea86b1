"""The rows that a recipe asks for: its data sets, its tokenizer, and how records become rows.

Flags that do not fit each other or the first records are reported here, before any row is made.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Literal, Protocol

import numpy as np

from llmtrain.config.flags import flags_of
from llmtrain.console import say
from llmtrain.data import tokenizer as tok
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.formats import parse_columns
from llmtrain.data.order import counts_per_period
from llmtrain.data.packing import LENGTHS, TOKEN_COLUMNS
from llmtrain.data.readers import Source
from llmtrain.data.shards import Column
from llmtrain.data.sources import requested_sources
from llmtrain.data.token_files import token_documents
from llmtrain.data.tokenized import FORMAT_VERSION, Tokenized
from llmtrain.errors import UserError
from llmtrain.files import JsonObject, digest
from llmtrain.interfaces.model import PackingSupport
from llmtrain.storage import is_address


class Scorer(Protocol):
    """Adds columns to rows: what another model, such as a teacher, says about their targets.

    Attributes:
        precision: the mixed precision of the model; empty before it has scored something.
    """

    precision: str

    @property
    def fingerprint(self) -> JsonObject:
        """Everything that the columns depend on, apart from the precision."""

    def columns(self, width: int, vocabulary: int) -> Mapping[str, Column]:
        """Return the columns that are added to rows of ``width`` tokens."""

    def score(self, rows: Tokenized) -> Iterator[dict[str, np.ndarray]]:
        """Yield the columns of a few rows at a time, in the stored order."""


class DataRequest:
    """The rows that a recipe asks for.

    It checks the flags, and finds out what the data sets hold.

    Args:
        config: the data sets and the tokenizer.
        max_length: the length of the rows, or ``auto``.
        chat: how conversations or pairs become rows, if the recipe trains on them.
        support: what rows the model can be trained on, if it is known.
        trust_remote_code: run code that comes with the tokenizer.
        own_source: the records of a recipe that has its own data.
        unpaired: the loss takes single answers with a label, not only pairs.
        max_positions: the number of positions of the model, which ``auto`` does not exceed.
        scorer: adds columns to the rows.
        tokenizer: the one that ``config`` names, with its chat template, if it is loaded already.
        takes_prompts: records may have a prompt alone, which the model that is trained answers.

    Attributes:
        sources: the data sets to train on, then those to evaluate on.
        recorded: those that are no prepared sets, but have records.
        train_names: the names of the data sets to train on.
        spec: the value of ``--tokenizer``.
        tokenizer: the tokenizer with its chat template; ``None`` to train one on the data.
        new_tokens: tokens that the chat template has added to it.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
        chat: how conversations or pairs become rows, with what the model decides about that;
            ``None`` if all data sets are text.
        takes_conversations: whether the recipe trains on conversations or pairs, too, and not only
            on text.
        text_columns: the columns of rows of text.

    Raises:
        UserError: if the data, the tokenizer or the flags are wrong.
    """

    def __init__(
        self,
        config: DataConfig,
        max_length: int | Literal["auto"],
        chat: RowConfig | None,
        support: PackingSupport | None,
        trust_remote_code: bool,
        own_source: Source | None,
        unpaired: bool,
        max_positions: int | None,
        scorer: Scorer | None = None,
        tokenizer: "tok.FastTokenizer | None" = None,
        takes_prompts: bool = False,
    ) -> None:
        assert config.tokenizer is not None, "the recipe sets a tokenizer if the user named none"
        self.config = config
        self.max_length = max_length
        self.takes_conversations = chat is not None
        self.unpaired = unpaired
        self.max_positions = max_positions
        self.scorer = scorer
        self.spec = config.tokenizer

        # Wrong numbers are reported before any text is read.
        if tok.is_trained(self.spec):
            tok.vocabulary_size(self.spec)
        if config.mixture:
            counts_per_period(config.mixture)
        _check_data_flags(config, has_own_records=own_source is not None)
        self.sources = requested_sources(config, chat, own_source, unpaired, takes_prompts)
        if not self.sources:
            raise UserError("there are no data: name a data set with --dataset.")
        self.tokenizer = tokenizer
        sets = [source for source in self.sources if source.rows is not None]
        if sets and self.max_length == "auto":
            self.max_length = sets[0].rows.metadata.block_size
        _check_record_flags(config, self.sources, chat, self.max_length)
        self.train_names = [each.name for each in self.sources if each.only_split != "eval"]

        self.chat: RowConfig | None = None
        self.text_columns = ["input_ids"]
        if config.isolate_documents:
            self.text_columns.append("position_ids")
        if chat is not None and any(source.format != "text" for source in self.sources):
            self.chat = chat if support is None else _with_packing(chat, support)
            # Beside conversations, text has the columns of conversations, because all rows of a run
            # have the same ones.
            last_column = TOKEN_COLUMNS[-1] if self.chat.is_packed else LENGTHS
            self.text_columns = [*TOKEN_COLUMNS[:-1], last_column]

        self.new_tokens: list[int] = []
        self.stop_token_ids: list[int] = []
        self._choose_tokenizer(trust_remote_code)
        for number, source in enumerate(self.sources):
            if source.rows is not None:
                self._check_set(source)
            elif source.token_files:
                assert self.tokenizer is not None, "it is not trained"
                read = functools.partial(token_documents, source.token_files, self.tokenizer)
                self.sources[number] = replace(source, records=read)
        self.recorded = [source for source in self.sources if source.rows is None]

    def _choose_tokenizer(self, trust_remote_code: bool) -> None:
        """Load the tokenizer, and set its chat template. Without ``--tokenizer``, a set has one.

        Raises:
            UserError: if rows that are tokenised already want another one than that of the flag.
        """
        for source in self.sources:
            is_wrong = bool(source.token_files)
            if source.rows is not None and self.config.is_set("tokenizer"):
                is_wrong = self.spec != source.rows.metadata.tokenizer
            if is_wrong and tok.is_trained(self.spec):
                raise UserError(
                    f"--tokenizer {self.spec} is trained on the data, and {source.name} is "
                    "tokenised already; name the tokenizer that made it."
                )
        sets = [source for source in self.sources if source.rows is not None]
        if sets and tok.is_trained(self.spec):
            self.spec = sets[0].rows.tokenizer.name_or_path
            self.tokenizer = copy.copy(sets[0].rows.tokenizer)
        elif self.tokenizer is None and not tok.is_trained(self.spec):
            self.tokenizer = tok.load_tokenizer(self.spec, trust_remote_code)
        if self.tokenizer is not None and self.chat is not None:
            is_plain_text = not any(source.needs_template for source in self.sources)
            self.new_tokens = tok.set_template(
                self.tokenizer, self.chat.chat_template, is_plain_text
            )
            self.stop_token_ids = tok.stop_token_ids_of(self.spec)

    def _check_set(self, source: Source) -> None:
        """Raise :class:`UserError` if a set has other rows than a run wants, given the flags."""
        rows = source.rows
        place = f"{source.flag} {source.name}"
        assert self.tokenizer is not None, "that of the set, if the user named none"
        if tok.digest(self.tokenizer) != rows.metadata.tokenizer_sha256:
            raise UserError(
                f"{place} was tokenised with another tokenizer or chat template than {self.spec}; "
                "leave --tokenizer out, or make the set again."
            )
        length = rows.metadata.block_size
        if self.max_length not in ("auto", length):
            flag = "--max_length" if self.takes_conversations else "--block_size"
            raise UserError(
                f"{place} has rows of {length} tokens; set {flag} {length}, not {self.max_length}."
            )

        made_from = {**rows.made_from, **(rows.made_from["rendering"] or {})}
        made_from["isolate_documents"] = "position_ids" in made_from["text_columns"]
        configs = [self.config] if self.chat is None else [self.config, self.chat]
        for config in configs:
            for name, value in vars(config).items():
                if name in ("tokenizer", "chat_template"):  # which are compared above
                    continue
                made_with = made_from.get(name, value)
                # Some models cannot be trained on packed rows, or on shared prompts.
                is_possible = value is not False or name not in ("packing", "share_prompts")
                is_given = config.is_set(name) and name != "columns"
                if made_with != value and (is_given or not is_possible):
                    raise UserError(
                        f"{place} was made with --{name} {made_with}, and this run wants {value}; "
                        "make the set again, or change the flag."
                    )
        if made_from["unpaired"] != self.unpaired:
            raise UserError(f"{place} was made for another --loss_type; make the set again.")

    def digest(self) -> str:
        """Return a hash of everything that the rows depend on, the name of their cache entry."""
        return digest(self.content)[:32]

    @functools.cached_property
    def content(self) -> JsonObject:
        """Everything that the rows depend on."""
        config = self.config
        tokenizer = self.spec if self.tokenizer is None else tok.digest(self.tokenizer)
        sources = [
            [each.fingerprint(), each.has_artificial_nulls, each.only_split, each.format]
            for each in self.recorded
        ]
        rendering = None
        if self.chat is not None:
            rendering = asdict(self.chat)
            del rendering["dataset_num_proc"]  # the rows are the same from any number of processes
            if self.chat.chat_template:  # its file may change, or be moved
                rendering["chat_template"] = tok.template_text(self.chat.chat_template)
        return {
            "format": FORMAT_VERSION,
            "max_length": self.max_length,
            "max_positions": self.max_positions if self.max_length == "auto" else None,
            "eval_fraction": None if config.has_own_eval_data else config.eval_fraction,
            "max_train_samples": config.max_train_samples,
            "columns": sorted(parse_columns(config.columns).items()),
            "extra_columns": config.extra_columns,
            "sources": sources,
            "tokenizer": tokenizer,
            "stop_token_ids": self.stop_token_ids,
            "text_columns": self.text_columns,
            "rendering": rendering,
            "unpaired": self.unpaired,
            "teacher": None if self.scorer is None else self.scorer.fingerprint,
        }


def _with_packing(chat: RowConfig, support: PackingSupport) -> RowConfig:
    """Decide on ``--packing`` and ``--share_prompts``, unless the user did."""
    chat = copy.copy(chat)
    if chat.packing is None:
        chat.packing = not support.packing_problem
        if support.packing_problem:
            examples = "pairs" if isinstance(chat, PairConfig) else "conversations"
            say("packing", f"{examples} are not packed: {support.packing_problem}")
    if isinstance(chat, PairConfig) and chat.share_prompts is None and chat.is_packed:
        chat.share_prompts = support.shares_prompts
    return chat


def _check_data_flags(config: DataConfig, has_own_records: bool) -> None:
    """Check the flags that say what the records are, before any of them is read."""
    flags_of_training_files = ["dataset", "dataset_train_split"]
    if not config.eval_dataset:
        flags_of_training_files.append("text_suffixes")
    for name in flags_of_training_files:
        if has_own_records and config.is_set(name):
            raise UserError(f"--{name}: this recipe has its own data; leave the flag out.")
    names = config.dataset + config.eval_dataset
    if config.cache_size is not None and not any(map(is_address, names)):
        raise UserError(
            "--cache_size has no effect: no data set is at an address, such as s3://bucket/set; "
            "leave it out."
        )
    if config.has_own_eval_data and config.is_set("eval_fraction"):
        raise UserError(
            "--eval_fraction keeps a share of --dataset for evaluation, but --eval_dataset or "
            "--dataset_test_split names the eval data; leave one of them out."
        )


def _check_record_flags(
    config: DataConfig,
    sources: list[Source],
    chat: RowConfig | None,
    max_length: int | Literal["auto"],
) -> None:
    """Raise :class:`UserError` if a flag does not fit the records, or has no effect on them."""
    formats = {source.format for source in sources}
    columns = parse_columns(config.columns)
    kind = "text"
    useless = []
    if formats == {"text"}:
        if chat is not None:
            chat_flags = [flag for flag in flags_of(ChatConfig) if flag != "format"]
            useless = [f"--{flag}" for flag in chat_flags if chat.is_set(flag)]
    elif "text" not in formats:
        kind = "preference data" if isinstance(chat, PairConfig) else "conversations"
        if "text" in columns:
            useless.append(f"--columns text={columns['text']}")
        if config.isolate_documents:
            useless.append("--isolate_documents")
    trained = {source.format for source in sources if source.only_split != "eval"}
    if max_length == "auto" and trained == {"text"}:
        useless.append("--max_length auto")
    if useless:
        raise UserError(
            f"{useless[0]} has no effect, because {sources[0].name} holds {kind}; leave it "
            "out, or see --format and --columns."
        )
    if config.tokenizer == "char" and formats != {"text"}:
        raise UserError(
            "--tokenizer char knows only the characters of the data, and a chat template has "
            "others; use byte."
        )
