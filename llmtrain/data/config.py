"""The settings of the data of a run, of its global batch, and of conversations and pairs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain.config import Config, flag, require_at_least
from llmtrain.errors import require


@dataclass
class BatchConfig(Config):
    """How many rows make an update. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "data"
    acts: ClassVar[str] = "data"

    global_batch_size: int = flag(
        32, "rows per update, over all processes; part of the run, not of its layout"
    )
    per_device_train_batch_size: int = flag(
        16, "rows per forward and backward pass (the micro-batch)", acts="layout"
    )

    def __post_init__(self) -> None:
        require_at_least(self, 1, "global_batch_size", "per_device_train_batch_size")

    @property
    def proportions(self) -> list[float]:
        """The proportions in which several data sets are drawn; empty where every row comes once an epoch."""
        return []


@dataclass
class DataConfig(BatchConfig):
    """Texts, their tokenizer, and how many rows of them make an update. Each field is a flag."""

    dataset: list[str] = flag(
        ["builtin:python-docs"],
        "builtin:python-docs, builtin:python-functions, a file, folder or glob of .txt .md .jsonl .parquet .csv, or "
        "the name of a dataset on the hub, with :CONFIGURATION where it has several; or several of these",
    )
    mixture: list[float] = flag(
        [],
        "the proportions in which several data sets are drawn (default: every row once an epoch)",
    )
    text_field: str = flag(
        "text", "the field that holds the text, in .jsonl, .parquet, .csv and hub datasets"
    )
    eval_fraction: float = flag(
        0.1,
        "share of the documents held out for evaluation, chosen by a hash of their text; "
        "where documents are few, the last part of the longest",
    )
    tokenizer: str | None = flag(
        "bpe:4096",
        "char, byte or bpe:N (trained on this data), or a tokenizer's folder or hub name",
        acts="model data",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.eval_fraction < 1,
            f"--eval_fraction {self.eval_fraction} must be at least 0 and below 1.",
        )
        require(
            self.tokenizer != "",
            "--tokenizer is empty: use char, byte, bpe:N or a tokenizer's name.",
        )
        require(
            all(self.dataset), "--dataset is empty: name a file, a folder or builtin:python-docs."
        )
        numbers, sets = len(self.mixture), len(self.dataset)
        require(
            numbers in (0, sets),
            f"--mixture has {numbers} numbers for {sets} data sets; give one for each.",
        )
        require(
            all(0 < share < float("inf") for share in self.mixture),
            "--mixture must be numbers above 0.",
        )

    @property
    def proportions(self) -> list[float]:
        return self.mixture


@dataclass
class RowConfig(Config):
    """How conversations become rows. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "conversations"
    acts: ClassVar[str] = "data"

    chat_template: str | None = flag(
        None, "chatml or a Jinja file, where the tokenizer has no template or another's"
    )
    overlong: Literal["drop", "truncate", "error"] = flag(
        "drop", "a conversation that is longer than a row"
    )
    on_bad_row: Literal["error", "skip"] = flag("error", "a conversation that cannot be trained on")
    packing: bool = flag(True, "several conversations a row, which do not see each other")


@dataclass
class ChatConfig(RowConfig):
    """How records become conversations, and what of them is trained. Each field is a flag."""

    format: Literal["auto", "text", "messages", "prompt_completion", "sharegpt", "alpaca"] = flag(
        "auto",
        "what a record is; auto recognises it by its fields: conversations are fine-tuned on, text is continued",
    )
    turns: Literal["all", "last"] = flag(
        "all",
        "what is trained of a conversation: every turn of the assistant's, or those since the last question",
    )


@dataclass
class PairConfig(RowConfig):
    """How pairs of answers become rows. Each field is a flag."""

    share_prompts: bool = flag(True, "one copy of a prompt for both answers")
