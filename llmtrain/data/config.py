"""Settings of the data set, the global batch, chat data and preference data."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain.config.flags import (
    Affects,
    Config,
    flag,
    flags_of,
    require_range,
)
from llmtrain.data.formats import ConversationFormat, parse_columns, parse_extra_columns
from llmtrain.errors import UserError
from llmtrain.model_folders import tokenizer_folder

_MOST_ROWS = 10_000_000  # in a step: the numbers of its rows are in memory, and it takes days
_MICRO_BATCH_TOKENS = 4096  # in the default micro-batch, unless one row has more


@dataclass
class BatchConfig(Config):
    """Batch sizes. Each field is a flag."""

    group: ClassVar[str] = "data"
    affects: ClassVar[Affects] = "data"

    global_batch_size: int = flag(
        32,
        "rows per optimizer step, summed over all processes; does not depend on how many there are",
        group="batch and memory",
    )
    per_device_train_batch_size: int = flag(
        16,
        "largest number of rows in one forward and backward pass (the micro-batch) of each "
        "process; lower it if memory runs out",
        affects="nothing",
        group="batch and memory",
    )

    def __post_init__(self) -> None:
        require_range(self, "global_batch_size", at_least=1, at_most=_MOST_ROWS)
        require_range(self, "per_device_train_batch_size", at_least=1)

    def fit_micro_batch(self, row_tokens: int) -> None:
        """Lower the default micro-batch to 4,096 tokens, and log it.

        A default that is lowered becomes a power of two, because most global batches are multiples
        of one.

        Args:
            row_tokens: the number of positions of a row.
        """
        most_rows = max(_MICRO_BATCH_TOKENS // row_tokens, 1)
        if most_rows < self.per_device_train_batch_size:
            self.set_default(
                "per_device_train_batch_size",
                1 << (most_rows.bit_length() - 1),
                f"at most {_MICRO_BATCH_TOKENS:,} tokens in a micro-batch",
            )


@dataclass
class DataConfig(BatchConfig):
    """The data sets, the tokenizer and the batch sizes. Each field is a flag."""

    dataset: list[str] = flag(
        ["builtin:python-docs"],
        "training data: a file, folder or glob of .txt, .md, .json, .jsonl or .csv (each also with "
        ".gz or .zst) or .parquet; a data set on the Hugging Face hub (NAME, NAME:CONFIGURATION, "
        "NAME@REVISION or NAME@REVISION:CONFIGURATION) or a folder in its layout; or, with no "
        "download, builtin:python-docs, builtin:python-functions or builtin:python-preferences; "
        "name several to train on all of them",
    )
    dataset_train_split: str | None = flag(
        None,
        "split to train on, for data sets that have splits (default: train); with this flag or "
        "the next, a folder of files is read as a data set of the hub would be",
        hidden=True,
    )
    dataset_test_split: str | None = flag(
        None,
        "split of the data sets in --dataset that becomes the eval data, instead of "
        "--eval_fraction; with --eval_dataset, the split of the data sets named there "
        "(default: test)",
        hidden=True,
    )
    eval_dataset: list[str] = flag(
        [],
        "eval data, named as in --dataset, instead of --eval_fraction; name several to get an eval "
        "loss of each",
    )
    columns: list[str] = flag(
        [],
        "names of the fields in the data, as OURS=THEIRS: prompt=question completion=answer reads "
        "the field question as the prompt, and text=body the field body as the text; data sets "
        "that have none of the fields on the right stay as they are",
        metavar="OURS=THEIRS",
    )
    extra_columns: list[str] = flag(
        [],
        "fields of the records for the loss: a number, a list with a number or k numbers for each "
        "token, or spans of text, a list of objects with start, stop and value; NAME:DTYPE is "
        "float16, float32 (default) or int32; loss_weight weighs tokens",
        hidden=True,
    )
    mixture: list[float] = flag(
        [],
        "sampling weight of each data set, in the order of --dataset: its share of the rows; the "
        "log shows its share of the target tokens, too (default: every row once per epoch)",
        hidden=True,
    )
    text_suffixes: list[str] = flag(
        [],
        "suffixes of other files that are read as text, such as .py .rst; each file is a document",
        hidden=True,
    )
    isolate_documents: bool = flag(
        False,
        "plain text: keep the documents in a row apart, so that each attends to itself alone and "
        "has positions from 0; otherwise a token sees all earlier tokens of its row, also those "
        "of other documents (text beside packed conversations is always kept apart)",
        hidden=True,
    )
    eval_fraction: float = flag(
        0.1,
        "share of the documents or conversations kept for evaluation, chosen by a hash of their "
        "content; if there are too few documents for that, the end of the longest one; "
        "0: no eval data; not used with --eval_dataset or --dataset_test_split",
    )
    max_train_samples: int | None = flag(
        None,
        "for quick tests: use only the first N training records of each data set "
        "(documents, conversations or preferences, in the order of the data, after the eval data "
        "are taken away); the eval data stay the same (default: all)",
        hidden=True,
    )
    shuffle_window: int = flag(
        64, "shards among which rows are shuffled at a time, if the data have more", hidden=True
    )
    cache_size: float | None = flag(
        None,
        "gigabytes on the disk of each machine for the shards of a set in object storage (default: "
        "the shards that are shuffled at a time, twice, and the eval data)",
        metavar="GB",
        hidden=True,
    )
    tokenizer: str | None = flag(
        "bpe:4096",
        "char, byte or bpe:N to train a tokenizer on this data (N: size of its vocabulary), or the "
        "folder or hub name of a tokenizer (NAME or NAME@REVISION), or a run; the fine-tuning "
        "recipes default to the model's own",
        affects="data",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(self, "eval_fraction", at_least=0, below=1)
        if self.max_train_samples is not None:
            require_range(self, "max_train_samples", at_least=1)
        require_range(self, "shuffle_window", at_least=1)
        for name in flags_of(self):
            value = getattr(self, name)
            # A variable of a shell script may be empty.
            if value == "" or (isinstance(value, list) and "" in value):
                raise UserError(f"--{name} is empty: give it a value, or leave it out.")
        if self.tokenizer is not None:
            self.tokenizer = tokenizer_folder(self.tokenizer)

        self.text_suffixes = [f".{suffix.lower().lstrip('.')}" for suffix in self.text_suffixes]
        parse_columns(self.columns)  # so that a wrong word is reported now
        parse_extra_columns(self.extra_columns)

        if self.mixture and len(self.mixture) != len(self.dataset):
            raise UserError(
                f"--mixture has {len(self.mixture)} numbers for {len(self.dataset)} data sets; "
                "give one for each."
            )

    @property
    def has_own_eval_data(self) -> bool:
        """Whether the eval data are other data sets or splits, not a share of ``--dataset``."""
        return bool(self.eval_dataset) or self.dataset_test_split is not None


@dataclass
class RowConfig(Config):
    """How conversations or pairs of answers become rows. Each field is a flag."""

    group: ClassVar[str] = "conversations"
    affects: ClassVar[Affects] = "data"

    chat_template: str | None = flag(
        None,
        "chatml or the path of a Jinja file; replaces the tokenizer's own chat template; none: "
        "train prompts with completions of plain text as they are, followed by EOS (default: the "
        "tokenizer's own; if it has none, chatml for conversations, and none for plain text; "
        "chatml if it is trained on the data)",
    )
    overlong: Literal["drop", "truncate", "error"] = flag(
        "drop",
        "what to do with a conversation that is longer than --max_length: leave it out; keep the "
        "turns that fit (of an answer to compare, its beginning); or stop",
        hidden=True,
    )
    on_bad_row: Literal["error", "skip"] = flag(
        "error",
        "what to do with a record that cannot be trained on: stop and name its line, or leave it "
        "out and count it",
        hidden=True,
    )
    packing: bool | None = flag(
        None,
        "put several conversations (or pairs of answers) into one row; --no_packing puts each into "
        "a row of its own, which is slower (default: auto, which packs if the model keeps packed "
        "documents apart)",
    )

    dataset_num_proc: int | None = flag(
        None,
        "processes that render conversations, if there are thousands (default: the CPU cores, and "
        "at most 16)",
        affects="nothing",
        hidden=True,
    )

    def __post_init__(self) -> None:
        if self.dataset_num_proc is not None:
            require_range(self, "dataset_num_proc", at_least=1)

    @property
    def is_packed(self) -> bool:
        """Whether a row may hold several conversations or pairs."""
        return self.packing is not False


@dataclass
class ChatConfig(RowConfig):
    """The format of chat data, and the turns that are trained. Each field is a flag."""

    format: Literal["auto", "text", "tokens", ConversationFormat] = flag(
        "auto",
        "format of the records; auto detects it from their fields; conversations train the "
        "assistant's turns, plain text every token, tokens those with a label",
        hidden=True,
    )
    turns: Literal["all", "last"] = flag(
        "all",
        "assistant turns to train: all of them, or only those after the last user message",
        hidden=True,
    )


@dataclass
class PairConfig(RowConfig):
    """How preference data becomes rows. Each field is a flag."""

    share_prompts: bool | None = flag(
        None,
        "store the prompt of a pair once for both answers; --no_share_prompts stores it for each, "
        "which is slower, and so does --no_packing (default: auto, which shares prompts if the "
        "model keeps the answers apart)",
        hidden=True,
    )

    @property
    def shares_prompts(self) -> bool:
        """Whether two answers follow one copy of their prompt."""
        return self.is_packed and self.share_prompts is not False
