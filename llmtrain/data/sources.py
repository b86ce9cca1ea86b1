"""The data sets of a run: what a name in ``--dataset`` stands for, and the records of a recipe.

By the fingerprint of a source, rows that were made from it are found in the cache without reading
its records.
"""

import functools
import glob
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from llmtrain.console import can_show_bars
from llmtrain.data import builtin
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.formats import (
    CONVERSATION_FORMATS,
    PREFERENCE_FORMATS,
    PROMPT_FORMATS,
    detect_format,
    is_plain_text,
    parse_columns,
    rename_columns,
)
from llmtrain.data.readers import (
    READABLE,
    Fields,
    Record,
    Source,
    Split,
    digest_of_files,
    file_source,
    kind_of,
    numbered,
    visible_files,
)
from llmtrain.data.remote_sets import open_set
from llmtrain.data.tokenized import MANIFEST
from llmtrain.errors import UserError, first_line, hub_error
from llmtrain.files import json_text, local_path
from llmtrain.storage import is_address

if TYPE_CHECKING:
    import datasets

# The format of records that make rows of a task.
_FORMATS = {"text": "text", "conversations": "messages", "preferences": "pairs"}
# What a recipe passes: a function that yields records, a datasets.Dataset, or a list.
PythonRecords: TypeAlias = Callable[[], Iterable[str | Fields]] | Iterable[str | Fields]

# Files of a data set on the hub: SPLIT-00000-of-00001.parquet. Its README.md lists other files.
_CONFIGURATIONS = re.compile(r"\A---\s*\n(?:(?!---).*\n)*?configs:")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.parquet")
# NAME@REVISION:CONFIGURATION. The name may begin with the one of a user, and a slash.
_HUB_NAME = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)?)(?:@([^:]+))?(?::(.+))?")


def requested_sources(
    config: DataConfig,
    chat: RowConfig | None,
    own_source: Source | None,
    unpaired: bool,
    takes_prompts: bool = False,
) -> list[Source]:
    """Open the data sets to train on, then those to evaluate on.

    Args:
        config: their names, and those of their fields.
        chat: how records become rows, if they are not text.
        own_source: the records of a recipe that has its own data.
        unpaired: the loss takes single answers with a label, not only pairs.
        takes_prompts: records may have a prompt alone.

    Raises:
        UserError: if there is no such data set, split or field, or if the records have no format
            that the recipe takes.
    """
    if own_source is None:
        train = [open_source(name, config) for name in config.dataset]
    else:
        train = [own_source]
    eval: list[Source] = []
    if config.has_own_eval_data:
        names = config.eval_dataset or config.dataset
        eval = [open_source(name, config, is_eval=True) for name in names]
        if not config.eval_dataset:
            eval = [source for source in eval if source.has_splits]
    for name, of_flag in (("dataset_train_split", train), ("dataset_test_split", eval)):
        split = getattr(config, name)
        if split is not None and not any(source.has_splits for source in of_flag):
            raise UserError(
                f"--{name} {split}: none of the data sets has splits, which data sets of the hub "
                "and folders have; leave the flag out, or name eval files with --eval_dataset."
            )

    columns = parse_columns(config.columns)
    columns.pop("text", None)
    sources = [*train, *eval]
    if columns:
        sources = rename_columns(sources, columns)
    requested = []
    for number, source in enumerate(sources):
        only_split: Split | None = None
        if eval:
            only_split = "train" if number < len(train) else "eval"
        format = _format_of(source, chat, unpaired, takes_prompts)
        needs_template = format not in ("text", "tokens")
        if source.rows is not None:
            needs_template = source.needs_template
        elif format in ("prompt_completion", "prompts", *PREFERENCE_FORMATS) and source.first:
            needs_template = not is_plain_text(source.first.fields)
        requested.append(
            replace(source, format=format, only_split=only_split, needs_template=needs_template)
        )
    return requested


def _format_of(source: Source, chat: RowConfig | None, unpaired: bool, takes_prompts: bool) -> str:
    """Return the format of a source: ``--format``, or detected from the first record.

    Records that are neither conversations nor preference data are ``text``.
    """
    if source.token_files:
        return "text"
    if source.rows is not None:
        formats = ["pairs"] if isinstance(chat, PairConfig) else ["text", "messages"]
        if source.format not in (["text"] if chat is None else formats):
            raise UserError(
                f"{source.flag} {source.name} is a set of {source.rows.metadata.task}, which this "
                "recipe does not train on; use the recipe that it was made with."
            )
        return source.format
    if chat is None:
        return "text"
    if isinstance(chat, ChatConfig) and chat.format != "auto":
        return chat.format
    if source.first is None:
        raise UserError(f"{source.flag} {source.name} holds no records.")

    fields = source.first.fields
    if not isinstance(chat, PairConfig):
        known = CONVERSATION_FORMATS | (PROMPT_FORMATS if takes_prompts else {})
        return detect_format(fields, known) or "text"
    format = detect_format(fields, PREFERENCE_FORMATS)
    if format is None or (format == "labelled_answers" and not unpaired):
        pairs, labelled = map(", ".join, PREFERENCE_FORMATS.values())
        raise UserError(
            f"{source.flag} {source.name} is not preference data: its first record "
            f"has {', '.join(map(str, fields)) or 'no fields'}. Records need the fields {pairs}; "
            f"or, with --loss_type kto, {labelled}."
        )
    return format


def open_source(name: str, config: DataConfig, is_eval: bool = False) -> Source:
    """Return the source with a name in ``--dataset`` or ``--eval_dataset``.

    A name that is neither a path nor builtin is taken for a data set on the Hugging Face hub. The
    hub is asked only when its records are read.

    Args:
        name: a file, a folder, a glob, a builtin data set, or a data set on the hub, which may be
            followed by ``@REVISION`` and ``:CONFIGURATION``.
        config: the splits to read, and the suffixes of text.
        is_eval: whether it is read for evaluation.

    Raises:
        UserError: if there is no such path or builtin data set.
    """
    flag = "--eval_dataset" if is_eval and config.eval_dataset and config.dataset else "--dataset"
    if name in builtin.CORPORA:
        return Source(
            name,
            # The text depends on the Python version.
            fingerprint=lambda: hashlib.sha256(f"{name} {sys.version}".encode()).hexdigest(),
            records=lambda _: numbered(builtin.CORPORA[name](), f"{name}, document"),
            flag=flag,
        )
    if name.startswith("builtin:"):
        names = ", ".join(builtin.CORPORA)
        raise UserError(f"{flag} {name} does not exist; use one of {names}.")

    split_source = functools.partial(_split_source, name, config, is_eval, flag)
    try:
        prepared = _prepared_source(name, flag, config)
        if prepared is not None:
            return prepared
        path = Path(local_path(name, f"{flag} ")).expanduser()
        names_split = config.dataset_test_split is not None
        if not is_eval:
            # With a test split, not all files of the folder must be training data.
            names_split &= not config.eval_dataset
            names_split |= config.dataset_train_split is not None
        if path.is_dir() and (names_split or _has_hub_layout(path)):
            return split_source(str(path))
        source = file_source(name, path, flag, config.text_suffixes)
        if source is not None:
            return source
        folder, _, configuration = str(path).rpartition(":")
        if folder and Path(folder).is_dir():
            return split_source(folder, configuration or None)
    except (OSError, RuntimeError) as error:
        # The name is too long, or it begins with a ~user that does not exist.
        raise UserError(f"{flag} {name[:80]}: {first_line(error)}.") from None

    match = _HUB_NAME.fullmatch(name)
    if match is None or kind_of(path, config.text_suffixes) or Path(match[1]).exists():
        raise UserError(
            f"{flag} {name}: no file ending in {READABLE} was found; check the path "
            f"from {Path.cwd()}, read other files as text with --text_suffixes, or name a data set "
            "of the hub as NAME@REVISION:CONFIGURATION."
        )
    return split_source(match[1], configuration=match[3], revision=match[2])


# --- sets that were prepared before, and files of tokens


def is_set(name: str) -> bool:
    """Return whether a name in ``--dataset`` is the folder of a set, or an address."""
    return is_address(name) or (Path(name).expanduser() / MANIFEST).is_file()


def _prepared_source(name: str, flag: str, config: DataConfig) -> Source | None:
    """Return a set, or files of tokens, as a source; ``None`` if the name is neither."""
    if name.endswith(".bin"):
        paths = sorted(map(Path, glob.glob(str(Path(name).expanduser()))))  # noqa: PTH207
        labels = {path: "" for each in paths for path in (each, each.with_suffix(".idx"))}
        labels = {path: label for path, label in labels.items() if path.exists()}
        fingerprint = functools.partial(digest_of_files, labels)
        source = Source(name, fingerprint, lambda _: iter(()), flag=flag, token_files=paths)
        return source if paths else None
    if not is_set(name):
        if [*Path(name).expanduser().glob("shard-*.json")]:
            raise UserError(f"{flag} {name} is not complete; see llmtrain tokenize --finish.")
        return None
    rows = open_set(name, flag, config)
    return Source(
        name,
        fingerprint=lambda: rows.metadata.data_sha256,
        records=lambda _: iter(()),
        flag=flag,
        format=_FORMATS[rows.metadata.task],
        needs_template=getattr(rows.tokenizer, "chat_template", None) is not None,
        rows=rows,
    )


# --- data sets that ``datasets`` loads


def _split_source(
    name: str,
    config: DataConfig,
    is_eval: bool,
    flag: str,
    path: str,
    configuration: str | None = None,
    revision: str | None = None,
) -> Source:
    """Return a split of a data set on the hub or in a folder. It is loaded when it is needed.

    Args:
        name: the name of the source.
        config: the splits for training and for evaluation.
        is_eval: whether the latter is read.
        flag: the flag that names the source.
        path: the name on the hub, or the path of a folder.
        configuration: ``None`` for the only one.
        revision: a branch, tag or commit on the hub; ``None`` for the newest commit.
    """
    split_flag = "dataset_test_split" if is_eval else "dataset_train_split"
    split = getattr(config, split_flag) or ("test" if is_eval else "train")

    @functools.cache
    def load() -> "datasets.Dataset":
        loaded = _load_splits(path, configuration, revision, place=f"{flag} {name}")
        if split not in loaded:
            raise UserError(
                f"{flag} {name} has no split '{split}', but {', '.join(loaded)}; choose one with "
                f"--{split_flag}."
            )
        return loaded[split]

    source = _dataset_source(name, load, place=f"{name}, {split} row")
    source = replace(source, flag=flag, has_splits=True)
    if not Path(path).is_dir():
        return source

    def fingerprint() -> str:
        labels = {file: str(file.relative_to(path)) for file in visible_files(Path(path))}
        return digest_of_files(labels, f"{configuration} {split}")

    return replace(source, fingerprint=fingerprint)


def _dataset_source(name: str, load: Callable[[], "datasets.Dataset"], place: str) -> Source:
    """Return the rows of a ``datasets.Dataset``.

    Args:
        name: the name of the source.
        load: returns the data set, the same one each time.
        place: what error messages write before the number of a row.
    """

    def fingerprint() -> str:
        return hashlib.sha256(load()._fingerprint.encode()).hexdigest()

    def records(field: str | None) -> Iterator[Record]:
        dataset = load()
        if field in dataset.column_names:
            dataset = dataset.select_columns([field])
        return numbered(dataset, place, field)

    return Source(name, fingerprint, records, has_artificial_nulls=True)


def _has_hub_layout(folder: Path) -> bool:
    """Return whether the files of a folder are named as in a data set on the hub."""
    files = [*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]
    if any(_SHARD.fullmatch(file.name) for file in files):
        return True
    readme = folder / "README.md"
    return readme.is_file() and bool(_CONFIGURATIONS.match(readme.read_text(errors="replace")))


def _load_splits(
    path: str, configuration: str | None, revision: str | None, place: str
) -> "datasets.DatasetDict":
    """Load a data set on the hub or in a folder, or raise :class:`UserError` with the place."""
    import datasets  # slow to import, and needed only here

    if not can_show_bars():
        datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(path, configuration, revision=revision)
    except Exception as error:  # of many types
        failure = "is not a file or folder, and the hub answered"
        if Path(path).is_dir():
            failure = "cannot be loaded"
        # A file that cannot be parsed is the cause of "An error occurred while generating ...".
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
        reason = hub_error(cause or error).rstrip(".")
        if reason == "Config name is missing":
            reason = f"{str(error).splitlines()[1]}; name one as NAME:CONFIGURATION"
        raise UserError(f"{place} {failure}: {reason}.") from None
    return cast("datasets.DatasetDict", splits)


# --- records of a recipe


def records_source(records: PythonRecords, fingerprint: str | None = None) -> Source:
    """Return the records that a recipe has in Python.

    Args:
        records: a ``datasets.Dataset``, a function that yields texts or dictionaries of fields, or
            a list of these. They must always be the same, in the same order.
        fingerprint: of a function, a name that the recipe changes whenever it changes the records.
            Without it, each process reads all records at each start, to notice changes.

    Raises:
        UserError: if ``records`` is something else, or if it can be read only once.
    """
    datasets = sys.modules.get("datasets")  # whoever has such an object has imported its module
    if datasets is not None and isinstance(records, datasets.Dataset):
        return _dataset_source("records", lambda: records, place="records, row")
    if callable(records):
        read = records
    elif isinstance(records, list | tuple):
        read = functools.partial(iter, records)
    else:
        raise UserError(
            f"tokenize(records=...) cannot read a {type(records).__name__}, because it reads "
            "records several times, in one order; pass a datasets.Dataset, a list of texts or of "
            "dictionaries, or a function that returns or yields them."
        )
    name = getattr(records, "__name__", "records")  # of a function; some callables have none

    def digest() -> str:
        if callable(records) and fingerprint is not None:
            # Other functions may use the same fingerprint.
            definition = type(records).__qualname__
            code = getattr(records, "__code__", None)
            if code is not None:
                definition = f"{code.co_filename}:{code.co_firstlineno}"
            return hashlib.sha256(f"{definition} {fingerprint}".encode()).hexdigest()

        content = hashlib.sha256()
        for record in read():
            content.update(json_text(record, default=repr).encode() + b"\n")
        return content.hexdigest()

    return Source(
        name,
        fingerprint=digest,
        records=lambda field: numbered(read(), f"{name}, record", field),
    )
