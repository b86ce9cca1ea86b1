"""The data sets of a run: opened, with their fields renamed, and with the format of each."""

from typing import NamedTuple

from llmtrain.data.columns import rename_columns
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.dataset_names import SplitChoice, open_source
from llmtrain.data.formats import (
    CONVERSATION_FORMATS,
    FORMATS,
    PREFERENCE_FORMATS,
    detect_format,
    is_plain_text,
)
from llmtrain.data.sources import Source
from llmtrain.data.splits import Split
from llmtrain.errors import UserError


class RequestedSource(NamedTuple):
    """A data set of a run.

    Attributes:
        source: its records.
        format: their format.
        only_split: the split of all its records; ``None`` to divide them.
        text_field: the field that holds the text, if the format is text.
    """

    source: Source
    format: str
    only_split: Split | None
    text_field: str

    @property
    def is_for_training(self) -> bool:
        """Whether some of its records are training data."""
        return self.only_split != "eval"

    @property
    def is_for_eval(self) -> bool:
        """Whether some of its records are eval data."""
        return self.only_split != "train"

    @property
    def needs_template(self) -> bool:
        """Whether its records are more than prompts with texts as completions.

        The first record decides. Text has no prompts, and needs no template.
        """
        if self.format == "text":
            return False
        if not FORMATS[self.format].can_be_plain_text:
            return True
        first = self.source.first
        return first is None or not is_plain_text(first.fields)


def requested_sources(
    config: DataConfig, chat: RowConfig | None, own_source: Source | None, unpaired: bool
) -> list[RequestedSource]:
    """Open the data sets to train on, then those to evaluate on.

    Args:
        config: their names, and those of their fields.
        chat: how records become rows, if they are not text.
        own_source: the records of a recipe that has its own data.
        unpaired: the loss takes single answers with a label, not only pairs.

    Raises:
        UserError: if there is no such data set, split or field, or if the records have no format
            that the recipe takes.
    """
    if own_source is None:
        train = _training_sources(config)
    else:
        train = [own_source]
    eval = _eval_sources(config)
    columns = config.column_names
    text_field = columns.pop("text", config.text_field)

    requested = []
    for number, source in enumerate(rename_columns([*train, *eval], columns)):
        split: Split | None = None
        if eval:
            split = "train" if number < len(train) else "eval"
        requested.append(
            RequestedSource(
                source,
                format=_format_of(source, chat, unpaired),
                only_split=split,
                text_field=text_field,
            )
        )
    return requested


def _training_sources(config: DataConfig) -> list[Source]:
    # With --dataset_test_split, a folder of files is read as a data set with splits. Its files must
    # not all be training data.
    has_test_split = config.dataset_test_split is not None and not config.eval_dataset
    is_named = config.dataset_train_split is not None
    choice = SplitChoice(
        config.dataset_train_split or "train",
        is_named=is_named or has_test_split,
        text_suffixes=config.text_suffixes,
    )
    sources = [open_source(name, choice) for name in config.dataset]
    if is_named:
        _check_splits(sources, choice)
    return sources


def _eval_sources(config: DataConfig) -> list[Source]:
    """Open the data sets to evaluate on; none if a share of the training data is for that."""
    is_named = config.dataset_test_split is not None
    if not config.eval_dataset and not is_named:
        return []
    choice = SplitChoice(
        config.dataset_test_split or "test",
        is_named=is_named,
        data_flag="--eval_dataset" if config.eval_dataset and config.dataset else "--dataset",
        split_flag="--dataset_test_split",
        text_suffixes=config.text_suffixes,
    )
    sources = [open_source(name, choice) for name in config.eval_dataset or config.dataset]
    if is_named:
        _check_splits(sources, choice)
    if config.eval_dataset:
        return sources
    return [source for source in sources if source.has_splits]


def _check_splits(sources: list[Source], choice: SplitChoice) -> None:
    """Check that some data set has the splits among which the user chose one."""
    if not any(source.has_splits for source in sources):
        names = " ".join(source.name for source in sources)
        raise UserError(
            f"{choice.split_flag} {choice.split}: {names} has no splits, which data sets of the "
            "hub and folders have; leave the flag out, or name eval files with --eval_dataset."
        )


def _format_of(source: Source, chat: RowConfig | None, unpaired: bool) -> str:
    """Return the format of a source: ``--format``, or detected from the first record.

    Records that are neither conversations nor preference data are ``text``.
    """
    if isinstance(chat, PairConfig):
        return _preference_format_of(source, unpaired)
    if not isinstance(chat, ChatConfig):
        return "text"
    if chat.format != "auto":
        return chat.format
    return detect_format(_first_fields(source), CONVERSATION_FORMATS) or "text"


def _preference_format_of(source: Source, unpaired: bool) -> str:
    """Return the format of preference data."""
    fields = _first_fields(source)
    format = detect_format(fields, PREFERENCE_FORMATS)
    if format is None:
        names = ", ".join(map(str, fields)) or "no fields"
        needed = [", ".join(format.fields) for format in PREFERENCE_FORMATS.values()]
        raise UserError(
            f"{source.flag} {source.name} is not preference data: its first record has {names}. "
            f"Records need the fields {'; or '.join(needed)}."
        )
    if format == "labelled_answers" and not unpaired:
        raise UserError(
            f"{source.flag} {source.name} has single answers with a label, but this loss compares "
            "two answers: use --loss_type kto."
        )
    return format


def _first_fields(source: Source) -> list[str]:
    """Return the names of the fields of the first record."""
    first = source.first
    if first is None:
        raise UserError(f"{source.flag} {source.name} holds no records.")
    return list(first.fields)
