"""The data sets of a run: opened, with their fields renamed, and with the format of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.formats import (
    CONVERSATION_FORMATS,
    PREFERENCE_FORMATS,
    detect_format,
    is_plain_text,
)
from llmtrain.data.readers import Record, Source
from llmtrain.data.records import Split
from llmtrain.data.sources import SplitChoice, open_source
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
        if self.format not in ("prompt_completion", *PREFERENCE_FORMATS):
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
    train_choice = SplitChoice(
        config.dataset_train_split or "train",
        is_named=config.dataset_train_split is not None,
        text_suffixes=config.text_suffixes,
    )
    eval_choice = SplitChoice(
        config.dataset_test_split or "test",
        is_named=config.dataset_test_split is not None,
        data_flag="--eval_dataset" if config.eval_dataset and config.dataset else "--dataset",
        split_flag="--dataset_test_split",
        text_suffixes=config.text_suffixes,
    )
    eval: list[Source] = []
    if config.eval_dataset:
        eval = _open_sources(config.eval_dataset, eval_choice)
    elif eval_choice.is_named:
        eval = [one for one in _open_sources(config.dataset, eval_choice) if one.has_splits]
        # Nor are all files of a folder with splits training data.
        train_choice = replace(train_choice, is_named=True)
    if own_source is None:
        train = _open_sources(config.dataset, train_choice)
    else:
        train = [own_source]

    columns = config.column_names
    text_field = columns.pop("text", "text")
    requested = []
    for number, source in enumerate(_rename_columns([*train, *eval], columns)):
        only_split: Split | None = None
        if eval:
            only_split = "train" if number < len(train) else "eval"
        format = _format_of(source, chat, unpaired)
        requested.append(RequestedSource(source, format, only_split, text_field))
    return requested


def _open_sources(names: Sequence[str], choice: SplitChoice) -> list[Source]:
    """Open data sets, some of which must have the splits among which the user chose one."""
    sources = [open_source(name, choice) for name in names]
    if choice.is_named and not any(source.has_splits for source in sources):
        raise UserError(
            f"{choice.split_flag} {choice.split}: {' '.join(names)} has no splits, which data sets "
            "of the hub and folders have; leave the flag out, or name eval files with "
            "--eval_dataset."
        )
    return sources


def _rename_columns(sources: Sequence[Source], columns: Mapping[str, str]) -> list[Source]:
    """Return sources whose fields have our names: ``--columns``.

    A source that has none of the fields stays as it is: it may hold text, or have our names. The
    first record of each source decides.

    Raises:
        UserError: with the place of a record that has only some of the fields, or of the first
            record of all if no source has any.
    """
    if not columns:
        return [*sources]  # no record needs to be read

    theirs = set(columns.values())
    has_fields = [bool(source.first and theirs & source.first.fields.keys()) for source in sources]
    renamed = []
    for source, has_some in zip(sources, has_fields, strict=True):
        # If no source has any of the fields, the first record of all says what it has instead.
        if source.first and (has_some or not any(has_fields)):
            place, fields = source.first
            for name, their_name in columns.items():
                if their_name not in fields:
                    raise UserError(
                        f"{place}: no field '{their_name}' for --columns {name}={their_name}; the "
                        f"record has {', '.join(map(str, fields))}."
                    )
        renamed.append(_with_columns(source, columns) if has_some else source)
    return renamed


def _with_columns(source: Source, columns: Mapping[str, str]) -> Source:
    """Rename the fields of a source. A field that has the new name of another one is left out."""
    names = {*columns, *columns.values()}

    def records(_: str | None) -> Iterator[Record]:
        for place, fields in source.records(None):
            renamed = {name: value for name, value in fields.items() if name not in names}
            for ours, theirs in columns.items():
                if theirs in fields:
                    renamed[ours] = fields[theirs]
            yield Record(place, renamed)

    return replace(source, records=records)


def _format_of(source: Source, chat: RowConfig | None, unpaired: bool) -> str:
    """Return the format of a source: ``--format``, or detected from the first record.

    Records that are neither conversations nor preference data are ``text``.
    """
    if chat is None:
        return "text"
    if isinstance(chat, ChatConfig) and chat.format != "auto":
        return chat.format
    if source.first is None:
        raise UserError(f"{source.flag} {source.name} holds no records.")

    fields = source.first.fields
    if not isinstance(chat, PairConfig):
        return detect_format(fields, CONVERSATION_FORMATS) or "text"
    format = detect_format(fields, PREFERENCE_FORMATS)
    if format is None:
        needed = "; or ".join(map(", ".join, PREFERENCE_FORMATS.values()))
        raise UserError(
            f"{source.flag} {source.name} is not preference data: its first record has "
            f"{', '.join(map(str, fields)) or 'no fields'}. Records need the fields {needed}."
        )
    if format == "labelled_answers" and not unpaired:
        raise UserError(
            f"{source.flag} {source.name} has single answers with a label, but this loss compares "
            "two answers: use --loss_type kto."
        )
    return format
