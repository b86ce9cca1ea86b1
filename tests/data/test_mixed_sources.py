"""Text beside conversations: both have the same columns, and losses and shares are counted apart."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.loader import IGNORED, eval_loader, train_loader
from llmtrain.data.tokenized import Tokenized
from llmtrain.training.rows import tokenize
from llmtrain.training.summary import eval_prompt
from tests.data.chat_records import CHATML_END, answers_of, chat_records, texts_of
from tests.data.preparation import complaint, data_config, left_behind, stream_of, write_records

pytestmark = pytest.mark.usefixtures("cache")

BLOCK = 63
TEXTS = [f"document {i} " + "abcdefgh " * (i % 7) for i in range(30)]
E = 0  # end-of-text of the tokenizer ``byte``


@pytest.fixture
def chat_file(tmp_path) -> Path:
    return write_records(tmp_path / "chats.jsonl", chat_records(40))


@pytest.fixture
def text_file(tmp_path) -> Path:
    return write_records(tmp_path / "corpus.jsonl", [{"text": text} for text in TEXTS])


def tokenize_files(*paths: Path, chat: ChatConfig | None = None, **settings) -> Tokenized:
    return tokenize(data_config(*paths, **settings), BLOCK, chat or ChatConfig())


def rows_by_source(tokenized: Tokenized) -> list[list[dict]]:
    ends = np.cumsum([0, *tokenized.metadata.source_rows])
    rows = list(tokenized.train)
    return [rows[start:end] for start, end in pairwise(ends)]


def from_command_line(data: DataConfig | RowConfig, flag: str) -> None:
    """Mark a setting as one that the user has typed."""
    data.origins = {flag: "command line"}


# --- rows


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("is_text_first", [True, False])
def test_both_kinds_have_their_own_rows_with_the_same_columns(
    chat_file, text_file, is_text_first, packing
):
    paths = [text_file, chat_file] if is_text_first else [chat_file, text_file]
    mixed = tokenize_files(*paths, chat=ChatConfig(packing=packing))
    assert mixed.is_packed == packing
    assert mixed.metadata.train_tokens == sum(mixed.metadata.source_targets)

    rows_of_sources = rows_by_source(mixed)
    text, conversations = rows_of_sources if is_text_first else rows_of_sources[::-1]
    only_chats = tokenize_files(chat_file, chat=ChatConfig(packing=packing))
    assert conversations == list(only_chats.train)
    answers = answers_of(conversations, mixed)
    assert len(answers) == 40
    assert all(answer.endswith(CHATML_END) for answer in answers)

    only_text = tokenize(data_config(text_file, isolate_documents=packing), BLOCK)
    for row, expected in zip(text, only_text.train, strict=True):
        expected["labels"] = expected["input_ids"]
        if not packing:
            expected["lengths"] = [sum(token != IGNORED for token in expected["input_ids"])]
        assert row == expected
    if packing:
        for row in text[:-1]:  # the last row ends with the end-of-text of the last document
            positions = np.array(row["position_ids"])
            assert (positions[np.array(row["input_ids"]) == E] == 0).all()


def test_a_tokenizer_is_trained_on_text_and_conversations(chat_file, text_file):
    mixed = tokenize_files(chat_file, text_file, tokenizer="bpe:300")
    assert mixed.tokenizer.chat_template
    _, text = rows_by_source(mixed)
    repeats = sum(document.count("abcdefgh") for document in TEXTS)
    assert mixed.tokenizer.decode(stream_of(text)).count("abcdefgh") == repeats


def test_flags_of_conversations_and_of_text_apply_to_their_own_source(
    tmp_path, chat_file, text_file
):
    body_file = write_records(tmp_path / "body.jsonl", [{"body": text} for text in TEXTS])
    chat_config = ChatConfig(turns="last")
    from_command_line(chat_config, "turns")
    data = data_config(chat_file, body_file, columns=["text=body"])

    mixed = tokenize(data, BLOCK, chat_config)
    conversations, text = rows_by_source(mixed)
    assert len(texts_of(conversations, mixed)) == 40
    assert text == rows_by_source(tokenize_files(chat_file, text_file))[1]


# --- counts


@pytest.mark.parametrize("is_text_first", [True, False])
def test_counts_and_losses_of_both_kinds(chat_file, text_file, capsys, is_text_first):
    paths = [text_file, chat_file] if is_text_first else [chat_file, text_file]
    chats = tokenize_files(chat_file, eval_fraction=0.2)
    text = tokenize(data_config(text_file, eval_fraction=0.2), BLOCK)
    capsys.readouterr()
    mixed = tokenize_files(*paths, eval_fraction=0.2)
    assert ": 70 records, " in capsys.readouterr().out
    assert mixed.metadata.task == "conversations"
    assert mixed.metadata.audit == chats.metadata.audit
    assert mixed.metadata.eval_audit == chats.metadata.eval_audit
    assert mixed.metadata.eval_bytes == chats.metadata.eval_bytes + text.metadata.eval_bytes
    assert mixed.stop_token_ids == chats.stop_token_ids

    names = [path.stem for path in paths]
    rows_of_sources = mixed.metadata.eval_source_rows
    assert mixed.eval_sources == dict(zip(names, rows_of_sources, strict=True))
    loader = eval_loader(mixed.eval, 1, micro_batch=4, source_rows=rows_of_sources)
    rows = [row for batch in loader for row in batch.rows.tolist()]
    assert sum(row >= 0 for row in rows) == mixed.metadata.eval_rows

    prompt = mixed.tokenizer.decode(eval_prompt(mixed))
    assert prompt.startswith("<|im_start|>user")
    assert prompt.endswith("<|im_start|>assistant\n")


# --- shares of a mixture


def percentages(line: str) -> list[float]:
    return [float(word.strip("%,;")) for word in line.split() if "%" in word]


@pytest.mark.parametrize("weights", [[3, 1], []], ids=["3 to 1", "all rows once"])
def test_the_log_has_the_shares_of_rows_and_target_tokens(chat_file, text_file, capsys, weights):
    mixed = tokenize_files(chat_file, text_file, mixture=weights)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mixture")]
    numbers = percentages(line)
    assert line == (
        f"mixture   chats {numbers[0]}% of rows, {numbers[1]}% of target tokens; "
        f"corpus {numbers[2]}% of rows, {numbers[3]}% of target tokens"
    )

    # Count the rows and targets of a run with many epochs.
    steps = range(100 if weights else sum(mixed.metadata.source_rows))
    loader = train_loader(mixed.train, 4, micro_batch=4, steps=steps, seed=0, mixture=mixed.mixture)
    batches = list(loader)
    rows = np.concatenate([batch.rows for batch in batches])
    targets = np.concatenate([batch.targets for batch in batches])
    is_chat = rows < mixed.metadata.source_rows[0]  # an empty slot is row -1, without targets
    row_share = 100 * (is_chat & (rows >= 0)).sum() / (rows >= 0).sum()
    target_share = 100 * targets[is_chat].sum() / targets.sum()

    assert numbers[0::2] == pytest.approx([row_share, 100 - row_share], abs=0.5)
    assert numbers[1::2] == pytest.approx([target_share, 100 - target_share], abs=0.5)
    assert row_share > 1.5 * target_share, "rows of text have more targets"


@pytest.mark.parametrize(
    ("weights", "order"), [([], "shuffled in windows of 1 shards"), ([3, 1], "shuffled")]
)
def test_the_sources_of_a_mixture_count_their_shards_apart(tmp_path, text_file, weights, order):
    other = write_records(tmp_path / "other.jsonl", [{"text": text.upper()} for text in TEXTS])
    mixed = tokenize(data_config(text_file, other, mixture=weights, shuffle_window=1), BLOCK)
    assert mixed.order == order


# --- errors

PAIRS = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(4)]


@pytest.mark.parametrize(
    ("names", "row_config", "settings", "error"),
    [
        ("pairs corpus", PairConfig(), {}, "corpus.jsonl is not preference data"),
        ("pairs", PairConfig(), {"isolate_documents": True}, "--isolate_documents"),
        ("chats", ChatConfig(), {"isolate_documents": True}, "--isolate_documents"),
        ("chats corpus", ChatConfig(format="messages"), {}, "corpus.jsonl, line 1: "),
        ("chats corpus", ChatConfig(), {"mixture": [1, 1e-6]}, "--mixture 1 1e-06"),
        ("chats broken", ChatConfig(), {}, "broken.jsonl, line 2: no field 'text'"),
    ],
)
@pytest.mark.usefixtures("chat_file", "text_file")
def test_sources_and_settings_that_do_not_fit_are_an_error(
    tmp_path, monkeypatch, cache, names, row_config, settings, error
):
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "pairs.jsonl", PAIRS)
    write_records(tmp_path / "broken.jsonl", [{"text": "words " * 40}, {"txt": "words"}])
    data = data_config(*[Path(f"{name}.jsonl") for name in names.split()], **settings)
    assert error in complaint(data, BLOCK, row_config)
    assert left_behind(cache) == []


def test_a_flag_of_the_other_kind_is_an_error(chat_file, text_file):
    chat_config = ChatConfig(turns="last")
    from_command_line(chat_config, "turns")
    assert complaint(data_config(text_file), BLOCK, chat_config).startswith("--turns ")

    data = data_config(chat_file, columns=["text=body"])
    assert complaint(data, BLOCK, ChatConfig()).startswith("--columns text=body ")
