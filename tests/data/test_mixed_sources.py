"""Text beside conversations: one set of columns, a loss for each, and shares of rows and of targets."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from llmtrain.data.config import ChatConfig, PairConfig
from llmtrain.data.loader import IGNORED, Collate, eval_loader, train_loader
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.observe.preview import preview
from tests.data.test_prepare import complaint, left_behind
from tests.data.test_prepare import stream_of as stream
from tests.data.test_sft import END, answers_of, chat, chats, config, texts_of, write

BLOCK = 63
TEXTS = [f"document {i} " + "abcdefgh " * (i % 7) for i in range(30)]
E = 0  # end-of-text of the tokenizer ``byte``
OPEN_QUOTE = "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}"  # before targets, in a preview


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def paths(tmp_path) -> list[Path]:
    return [
        write(tmp_path / "chats.jsonl", chats(40)),
        write(tmp_path / "corpus.jsonl", [{"text": text} for text in TEXTS]),
    ]


def mixed(paths: list[Path], chat: ChatConfig | None = None, **settings) -> Tokenized:
    return tokenize(config(*paths, **settings), BLOCK, chat or ChatConfig())


def rows_by_source(made: Tokenized) -> list[list[dict]]:
    ends = np.cumsum([0, *made.metadata.source_rows])
    rows = [*made.train]
    return [rows[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("order", [1, -1], ids=["chats first", "text first"])
def test_each_source_has_the_rows_that_it_has_alone(paths, packing, order):
    made = mixed(paths[::order], ChatConfig(packing=packing))
    conversations, text = rows_by_source(made)[::order]

    alone = tokenize(config(paths[0]), BLOCK, ChatConfig(packing=packing))
    assert conversations == [*alone.train]
    text_alone = tokenize(config(paths[1], isolate_documents=packing), BLOCK)
    for row, row_alone in zip(text, text_alone.train, strict=True):
        assert row["labels"] == row["input_ids"]
        row.pop("labels")
        length = row.pop("lengths", [sum(token != IGNORED for token in row["input_ids"])])
        assert length == [sum(token != IGNORED for token in row["input_ids"])]
        assert row == row_alone
    assert made.is_packed == packing
    assert made.metadata.train_tokens == sum(made.metadata.source_targets)


@pytest.mark.parametrize("packing", [True, False])
def test_text_beside_conversations_trains_every_token(paths, packing):
    made = mixed(paths, ChatConfig(packing=packing))
    _, text = rows_by_source(made)
    decoded = made.tokenizer.decode(stream(text))
    assert decoded == "".join(f"<|endoftext|>{content}" for content in TEXTS) + "<|endoftext|>"
    targets = sum(label != IGNORED for row in text for label in row["labels"][1:])
    assert made.metadata.source_targets[1] == len(stream(text)) - 1 == targets
    assert all(answer.endswith(END) for answer in answers_of(rows_by_source(made)[0], made))


def test_text_beside_packed_conversations_is_isolated_with_the_flag_and_without(paths, capsys):
    made = mixed(paths)
    flagged = mixed(paths, isolate_documents=True)
    assert capsys.readouterr().out.count("; from the cache") == 1
    assert flagged.metadata == made.metadata
    _, text = rows_by_source(made)
    for row in text[:-1]:  # the last row holds the end-of-text after the last document, too
        for token, position in zip(row["input_ids"], row["position_ids"], strict=True):
            assert token != E or position == 0


@pytest.mark.parametrize("weights", [[3, 1], [1, 1], []])
def test_the_log_has_the_share_of_rows_and_of_target_tokens(paths, capsys, weights):
    made = mixed(paths, mixture=weights)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("mixture")]

    # What a run of many epochs draws.
    loader_rows = 4 * sum(made.metadata.source_rows) if not weights else 400
    size = 4
    steps = range(loader_rows // size)
    drawn = np.zeros(2)
    targets = np.zeros(2)
    batches = train_loader(made.train, size, size, steps, seed=0, mixture=made.mixture)
    for local_batch in batches:
        is_text = local_batch.rows.numpy() >= made.metadata.source_rows[0]
        is_row = local_batch.rows.numpy() >= 0
        for source, is_source in enumerate([~is_text & is_row, is_text]):
            drawn[source] += is_source.sum()
            targets[source] += local_batch.targets.numpy()[is_source].sum()

    numbers = [float(word.strip("%,;")) for word in line.split() if "%" in word]
    row_shares, target_shares = drawn / drawn.sum(), targets / targets.sum()
    assert row_shares[0] > 1.5 * target_shares[0], "rows of text are fuller of targets"
    expected = [share[i] * 100 for i in range(2) for share in (row_shares, target_shares)]
    assert numbers == pytest.approx(expected, abs=0.5)
    assert line == (
        f"mixture   chats {numbers[0]}% of rows, {numbers[1]}% of target tokens; "
        f"corpus {numbers[2]}%, {numbers[3]}%"
    )


def test_a_mixture_of_one_kind_has_shares_of_target_tokens_too(tmp_path, capsys):
    # A row has two targets, except for the second row of the short text, which has one.
    short = write(tmp_path / "short.jsonl", [{"text": "ab"}])
    long = write(tmp_path / "long.jsonl", [{"text": "c" * 99}])
    tokenize(config(short, long, mixture=[1, 1]), 2)
    out = capsys.readouterr().out
    assert "\nmixture   short 50.0% of rows, 42.9% of target tokens; long 50.0%, 57.1%\n" in out
    tokenize(config(short), 2)
    assert "\nmixture" not in capsys.readouterr().out


def test_the_audit_counts_conversations_alone(paths, capsys):
    made = mixed(paths, eval_fraction=0.2)
    alone = tokenize(config(paths[0], eval_fraction=0.2), BLOCK, ChatConfig())
    assert made.metadata.audit == alone.metadata.audit
    assert made.metadata.eval_audit == alone.metadata.eval_audit
    assert made.metadata.task == "conversations"
    assert made.stop_token_ids == alone.stop_token_ids
    out = capsys.readouterr().out
    assert ": 70 conversations and documents, " in out
    assert (
        "fine-tuning on the assistant's turns, and on every token of the text: the records are "
        "messages, text\n"
    ) in out


@pytest.mark.parametrize("order", [1, -1], ids=["chats first", "text first"])
def test_each_source_has_an_eval_loss_and_the_prompt_is_of_a_conversation(paths, order):
    made = mixed(paths[::order], eval_fraction=0.2)
    counts = made.metadata.eval_source_rows[::order]
    assert made.eval_sources == dict(zip(["chats", "corpus"], counts, strict=True))
    batches = [*eval_loader(made.eval, 1, 4, source_rows=[*made.eval_sources.values()])]
    assert sum(int((batch.rows >= 0).sum()) for batch in batches) == made.metadata.eval_rows
    prompt = made.tokenizer.decode(made.eval_prompt())
    assert prompt.startswith("<|im_start|>user")
    assert prompt.endswith("<|im_start|>assistant\n")


def test_the_log_says_which_split_the_text_is_in(paths, capsys):
    chats_path, text_path = paths
    mixed([chats_path], eval_dataset=[str(text_path)], eval_fraction=0.1)
    out = capsys.readouterr().out
    assert "fine-tuning on the assistant's turns: the records are messages, text\n" in out
    mixed([text_path], ChatConfig(), eval_dataset=[str(chats_path)])
    out = capsys.readouterr().out
    assert "continued pretraining: the training records are text, not conversations\n" in out


def test_eval_conversations_beside_training_text_are_counted_if_some_are_left_out(
    tmp_path, paths, capsys
):
    records = [*chats(3), chat("q", "long " * BLOCK)]
    eval_path = write(tmp_path / "eval.jsonl", records)
    mixed([paths[1]], eval_dataset=[str(eval_path)])
    assert "eval      3 of 4 conversations: 1 overlong dropped" in capsys.readouterr().out


def test_bits_per_byte_count_the_text_and_the_answers(paths):
    both = mixed(paths, eval_fraction=0.2).metadata.eval_bytes
    conversations = tokenize(config(paths[0], eval_fraction=0.2), BLOCK, ChatConfig())
    text = tokenize(config(paths[1], eval_fraction=0.2), BLOCK)
    assert both == conversations.metadata.eval_bytes + text.metadata.eval_bytes


def test_flags_of_conversations_and_of_text_go_together(tmp_path, paths):
    body = write(tmp_path / "body.jsonl", [{"body": text} for text in TEXTS])
    chat = ChatConfig(turns="last")
    chat.origins = {"turns": "command line"}
    data = config(paths[0], body, text_field="body")
    data.origins = {"text_field": "command line"}
    made = tokenize(data, BLOCK, chat)
    assert texts_of(rows_by_source(made)[0], made)
    assert rows_by_source(made)[1] == rows_by_source(mixed(paths))[1]


def test_a_tokenizer_is_trained_on_both(paths):
    made = mixed(paths, tokenizer="bpe:300")
    assert made.tokenizer.chat_template
    decoded = made.tokenizer.decode(stream(rows_by_source(made)[1]))
    assert decoded.count("abcdefgh") == sum(text.count("abcdefgh") for text in TEXTS)


def test_rows_of_both_are_shown(paths, capsys):
    made = mixed([paths[1], paths[0]])
    capsys.readouterr()
    preview(made.train, made.tokenizer, count=len(made.train))
    out = capsys.readouterr().out
    assert f"----- the next document\n{OPEN_QUOTE}<|endoftext|>document 1 abcdefgh " in out
    assert " padding token" in out


def test_every_row_can_be_collated(paths):
    made = mixed(paths)
    loader = train_loader(made.train, 8, 3, range(6), seed=1, mixture=None)
    assert isinstance(loader.collate_fn, Collate)
    for local_batch in loader:
        for batch in local_batch.batches:
            assert set(batch) == {"input_ids", "labels", "position_ids"}
            assert (batch["input_ids"] >= 0).all()


PAIRS = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(4)]
BAD = {
    "preferences beside text": (
        ["pairs", "corpus"],
        PairConfig(),
        {},
        "corpus.jsonl is not preference data",
    ),
    "preferences beside text, as text": (
        ["pairs", "corpus"],
        ChatConfig(),
        {},
        "pairs.jsonl, line 1: no field 'text'",
    ),
    "isolated pairs": (
        ["pairs"],
        PairConfig(),
        {"isolate_documents": True},
        "holds preference data; leave it out",
    ),
    "isolated conversations": (
        ["chats"],
        ChatConfig(),
        {"isolate_documents": True},
        "--isolate_documents is for text, but {folder}/chats.jsonl holds conversations",
    ),
    "isolated text beside conversations that are not packed": (
        ["chats", "corpus"],
        ChatConfig(packing=False),
        {"isolate_documents": True},
        "--isolate_documents needs packed rows",
    ),
    "a format that only one source has": (
        ["chats", "corpus"],
        ChatConfig(format="messages"),
        {},
        "corpus.jsonl, line 1: ",
    ),
    "a weight that is too small": (
        ["chats", "corpus"],
        ChatConfig(),
        {"mixture": [1, 1e-6]},
        "share below one in 1000",
    ),
    "a broken line of text": (
        ["chats", "broken"],
        ChatConfig(),
        {},
        "broken.jsonl, line 2: no field 'text'",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_what_does_not_go_together_is_one_line_and_leaves_nothing(tmp_path, paths, cache, case):
    names, chat, settings, expected = case
    write(tmp_path / "pairs.jsonl", PAIRS)
    write(tmp_path / "broken.jsonl", [{"text": "words " * 40}, {"txt": "words"}])
    files = [tmp_path / f"{name}.jsonl" for name in names]
    said = complaint(config(*files, **settings), BLOCK, chat)
    assert expected.format(folder=tmp_path) in said
    assert left_behind(cache) == []


def test_flags_of_conversations_are_still_refused_for_text_alone(paths):
    chat = ChatConfig(turns="last")
    chat.origins = {"turns": "command line"}
    assert "--turns is for conversations" in complaint(config(paths[1]), BLOCK, chat)
    data = config(paths[0], text_field="body")
    data.origins = {"text_field": "command line"}
    assert "--text_field is for text" in complaint(data, BLOCK, ChatConfig())
