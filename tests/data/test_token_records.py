"""Records that are already tokens: their rows, their losses, and what they must not hold."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from llmtrain.data import tokenizer as tok
from llmtrain.data.config import ChatConfig, PairConfig
from llmtrain.data.loader import IGNORED
from llmtrain.training.rows import tokenize
from tests.data.chat_records import audit_of, chat_records, tokenize_rows
from tests.data.preparation import TEXTS, complaint, data_config, write_records
from tests.forked import run_forked
from tests.launching import FINETUNE, PYTHON, series
from tests.models.small_models import byte_tokenizer, tiny_llama

pytestmark = pytest.mark.usefixtures("cache")

EOT = 0  # of `byte_tokenizer`
STEPS = 6


@pytest.fixture
def byte_folder(tmp_path: Path) -> str:
    """The folder of a tokenizer of bytes."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def labelled(ids: list[int], *targets: slice) -> dict[str, list[int]]:
    """Return a record whose labels are some stretches of its tokens."""
    labels = [IGNORED] * len(ids)
    for target in targets:
        labels[target] = ids[target]
    return {"input_ids": ids, "labels": labels}


def random_records() -> list[dict[str, list[int]]]:
    """Return records of 5 and 11 tokens, each with two stretches of targets."""
    generator = np.random.default_rng(0)
    records = []
    for length in [5, 11] * 4:
        ids = generator.integers(1, 257, length).tolist()
        records.append(labelled(ids, slice(1, 3), slice(length - 2, length)))
    return records


def test_a_loss_mask_of_floats_also_weighs_the_targets(tmp_path, byte_folder):
    record = {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 0.5, 2]}
    path = write_records(tmp_path / "tokens.jsonl", [record])
    config = data_config(path, tokenizer=byte_folder, extra_columns=["loss_mask"])

    rows = tokenize(config, 8, ChatConfig(packing=False)).train[0]

    assert rows["labels"][:4] == [IGNORED, IGNORED, 7, 8]
    assert rows["loss_weight"][:4] == [1, 0, 0.5, 2]


# --- losses


def padded(records: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return records as a batch of the Trainer."""
    batch = {}
    for name, padding in {"input_ids": EOT, "labels": IGNORED}.items():
        tensors = [torch.tensor(record[name]) for record in records]
        batch[name] = pad_sequence(tensors, batch_first=True, padding_value=padding)
    return batch


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("packing", "rows"), [("--packing", 4), ("--no_packing", 8)])
def test_the_losses_are_those_of_the_trainer(tmp_path, packing, rows):
    records = random_records()
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_llama()).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        TrainingArguments(
            tmp_path / "trainer",
            per_device_train_batch_size=len(records),
            max_steps=STEPS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        data_collator=padded,
        train_dataset=records,
    )
    trainer.train()
    expected = {entry["step"]: entry["loss"] for entry in trainer.state.log_history[:-1]}

    path = write_records(tmp_path / "tokens.parquet", records)
    flags = shlex.split(
        f"--model_name_or_path {tmp_path / 'base'} --dataset {path} --max_length 15 {packing} "
        f"--eval_fraction 0 --global_batch_size {rows} --max_steps {STEPS} --learning_rate 1e-3 "
        "--lr_scheduler_type constant --warmup_steps 0 --weight_decay 0 --adam_beta2 0.999 "
        f"--logging_steps 1 --threads 1 --report_to none --output_dir {tmp_path / 'run'}"
    )
    run_forked([*PYTHON, FINETUNE, *flags]).assert_ok()

    assert len(expected) == STEPS
    assert series(tmp_path / "run", "train/loss") == pytest.approx(expected, rel=1e-5)


# --- rows of records with targets

X = IGNORED
IDS = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({}, [X, 6, 7, 8]),
        ({"labels": [X, X, 7, 8]}, [X, X, 7, 8]),
        ({"labels": None, "loss_mask": [0, 0, 1, 0]}, [X, X, 7, X]),
        ({"completion_mask": [False, False, True, True]}, [X, X, 7, 8]),
        ({"labels": [X, 6, 7, X], "assistant_masks": [1, 0, 1, 1]}, [X, X, 7, X]),
        (
            {
                "input_ids": [0, 0, *IDS, 0],
                "labels": [X, X, 5, X, 7, 8, X],
                "attention_mask": [0, 0, 1, 1, 1, 1, 0],
                "messages": [],
            },
            [X, X, 7, 8],
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_targets_are_those_of_labels_and_masks(tmp_path, byte_folder, suffix, fields, labels):
    path = write_records(tmp_path / f"tokens.{suffix}", [{"input_ids": IDS} | fields])

    rows = tokenize_rows(ChatConfig, path, max_length=5, packing=False, tokenizer=byte_folder)

    assert [*rows.train] == [{"input_ids": [*IDS, 0, 0], "labels": [*labels, X, X], "lengths": [4]}]
    assert rows.metadata.train_tokens == len(labels) - labels.count(X)
    assert audit_of(rows).bytes == rows.metadata.train_tokens


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_an_overlong_record_is_dropped_or_cut(tmp_path, byte_folder, overlong):
    records = [{"input_ids": IDS}, labelled([*range(1, 21)], slice(6, 20))]
    path = write_records(tmp_path / "tokens.jsonl", records)

    rows = tokenize_rows(
        ChatConfig, path, max_length=7, packing=False, overlong=overlong, tokenizer=byte_folder
    )

    labels = [row["labels"] for row in rows.train]
    assert labels[0] == [X, 6, 7, 8, X, X, X, X]
    assert labels[1:] == ([] if overlong == "drop" else [[X] * 6 + [7, 8]])
    assert (audit_of(rows).dropped, audit_of(rows).truncated) == (
        (1, 0) if overlong == "drop" else (0, 1)
    )


def test_tokens_are_rows_beside_conversations_and_text(tmp_path, byte_folder):
    paths = [
        write_records(tmp_path / "tokens.parquet", random_records()),
        write_records(tmp_path / "chats.jsonl", chat_records(9)),
        write_records(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS]),
    ]
    alone = [
        tokenize_rows(ChatConfig, path, max_length=63, packing=True, tokenizer=byte_folder)
        for path in (paths[0], paths[1])
    ]

    mixed = tokenize_rows(
        ChatConfig, *paths, max_length=63, packing=True, tokenizer=byte_folder, mixture=[2, 1, 1]
    )

    sizes = mixed.metadata.source_rows
    assert sizes[:2] == [len(rows.train) for rows in alone]
    assert [*mixed.train][: sum(sizes[:2])] == [*alone[0].train, *alone[1].train]


# --- documents of plain text


@pytest.mark.parametrize("has_own_ends", [False, True])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_documents_of_tokens_have_the_rows_of_their_text(tmp_path, adds_bos, has_own_ends):
    backend = tok.train_tokenizer("bpe:270", TEXTS, lambda: iter(TEXTS))
    tokenizer = tok.as_pretrained(backend, 64)
    if adds_bos:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = [text for text in TEXTS if "<|" not in text]
    records = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=has_own_ends)["input_ids"]
        if has_own_ends:
            ids = [*([] if adds_bos else [EOT]), *ids, EOT]
        records.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids})
    records[2] = {"text": texts[2]}
    tokens_path = write_records(tmp_path / "tokens.jsonl", records)
    text_path = write_records(tmp_path / "texts.jsonl", [{"text": text} for text in texts])

    from_tokens, from_text = [
        tokenize(
            data_config(path, eval_dataset=[str(path)], tokenizer=str(tmp_path / "tokenizer")), 8
        )
        for path in (tokens_path, text_path)
    ]

    assert [*from_tokens.train] == [*from_text.train]
    assert from_tokens.metadata.data_sha256 == from_text.metadata.data_sha256
    assert from_tokens.metadata.eval_bytes == from_text.metadata.eval_bytes > 0


@pytest.mark.parametrize("chat", [None, ChatConfig(packing=False)])
def test_copies_of_tokens_are_in_one_split(tmp_path, byte_folder, chat):
    records = [{"input_ids": [i, i + 1, i + 2]} for i in range(1, 99)]
    path = write_records(tmp_path / "tokens.jsonl", records * 2)

    rows = tokenize(data_config(path, tokenizer=byte_folder, eval_fraction=0.3), 4, chat)

    train, eval = [{row["input_ids"][2] for row in split} for split in (rows.train, rows.eval)]
    assert eval
    assert not train & eval
    assert rows.metadata.records == 196


# --- errors

ALL = {"input_ids": IDS}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (ALL | {"labels": [X, 7, 8, X]}, "labels has another token than input_ids"),
        (ALL | {"labels": [X, 6]}, "field 'labels' has another length than input_ids"),
        (
            ALL | {"loss_mask": [0, "a", 1, 1]},
            "field 'loss_mask' is [0, \"a\", 1, 1], not a list of",
        ),
        (ALL | {"attention_mask": [1, 1, 2, 2]}, "attention_mask divides the tokens"),
        (ALL | {"attention_mask": [1, 0, 1, 1]}, "attention_mask divides the tokens"),
        ({"input_ids": [5, 257]}, "the tokenizer has no token 257; --tokenizer"),
        ({"input_ids": [[5], [6]]}, "field 'input_ids' is [[5], [6]], not a list of integers"),
        ({"messages": []}, "field 'input_ids' is null, not a list of integers"),
    ],
)
def test_a_bad_record_of_tokens_is_one_line_with_its_place(tmp_path, byte_folder, record, message):
    path = write_records(tmp_path / "tokens.jsonl", [ALL, record])
    data = data_config(path, tokenizer=byte_folder)

    assert f"{path}, line 2: {message}" in complaint(data, 8, ChatConfig())
    assert tokenize(data, 8, ChatConfig(on_bad_row="skip")).metadata.records == 1


@pytest.mark.parametrize(
    ("fields", "tokenizer", "chat", "message"),
    [
        ({}, "byte", None, "line 1: the tokenizer has no token 5; --tokenizer must name"),
        ({}, "bpe:300", ChatConfig(), "line 1: the tokenizer has no token 5; --tokenizer must"),
        ({"labels": [5, X, 7, 8]}, "named", None, "use recipes/finetune.py"),
        ({}, "named", PairConfig(), "Records need the fields chosen, rejected"),
    ],
)
def test_tokens_need_a_recipe_and_a_tokenizer_that_take_them(
    tmp_path, byte_folder, fields, tokenizer, chat, message
):
    path = write_records(tmp_path / "tokens.jsonl", [ALL | fields])
    name = byte_folder if tokenizer == "named" else tokenizer

    assert message in complaint(data_config(path, tokenizer=name), 3, chat)
