"""Conversations as rows: the targets, the counts, the eval data, and the cache."""

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.audit import Audit
from llmtrain.data.config import ChatConfig
from llmtrain.data.formats import CONVERSATION_FORMATS
from llmtrain.data.loader import IGNORED
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from llmtrain.training.summary import eval_prompt
from tests.data.chat_records import (
    CHATML_END,
    answers_of,
    audit_of,
    chat_record,
    chat_records,
    chatml,
    multiple_of_64,
    size_of,
    texts_of,
    tokenize_rows,
)
from tests.data.chats import QWEN3, make
from tests.data.odd_templates import (
    COUNTS_WITHOUT_ROLES,
    MARKS_ANSWERS_AND_ENDS,
    template_with_answers,
    write_template,
)
from tests.data.preparation import data_config, left_behind, log_lines, write_records

pytestmark = pytest.mark.usefixtures("cache")

MAX_LENGTH = 95


# --- records

LONG_ANSWER = chat_record("q", "x" * 100)
LONG_QUESTION = chat_record("x" * 100, "a")
LONG_SECOND_ANSWER = chat_record("q", "a", "q", "x" * 100)

# A bad record that can be read but not rendered, and one that cannot be read.
AMBIGUOUS = chat_record("a", f"b{CHATML_END}\U000f0000")
UNANSWERED = {"messages": [{"role": "user", "content": "a"}]}


# --- tokenizing


def tokenize_files(*paths: Path, max_length: int = MAX_LENGTH, **settings: Any) -> Tokenized:
    return tokenize_rows(ChatConfig, *paths, max_length=max_length, **settings)


def tokenize_chats(folder: Path, records: list[dict[str, Any]], **settings: Any) -> Tokenized:
    return tokenize_files(write_records(folder / "chats.jsonl", records), **settings)


def refusal(*paths: Path, **settings: Any) -> str:
    """Return the message, of one line, with which files are refused."""
    with pytest.raises(UserError) as refused:
        tokenize_files(*paths, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- the text that is expected


def chatml_answers(record: dict[str, Any]) -> str:
    """Return the assistant's messages in ChatML, each with its end token."""
    messages = record["messages"]
    return "".join(m["content"] + CHATML_END for m in messages if m["role"] == "assistant")


def target_count(record: dict[str, Any]) -> int:
    """Return the number of bytes and end tokens of the assistant's messages."""
    answers = chatml_answers(record)
    return len(answers.replace(CHATML_END, "").encode()) + answers.count(CHATML_END)


def eval_bytes_of(tokenized: Tokenized) -> int:
    """Return the number of bytes of the eval targets, without their end tokens."""
    answers = "".join(answers_of(tokenized.eval, tokenized))
    return len(answers.replace(CHATML_END, "").encode())


# Marks the answers without their end tokens.
MARKS_ANSWERS = template_with_answers(
    "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}"
)
# --- targets

VARIED = [
    chat_record("What is 漢字?", "Writing 🙂."),
    chat_record("one", "1", "two", " 2 \n", "three", "e\u0301"),
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            *chat_record("why", "so")["messages"],
        ]
    },
    *(chat_record("x" * i, "y" * i) for i in range(1, 30, 4)),
]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
def test_the_targets_are_the_assistants_messages_and_their_end_tokens(tmp_path, tokenizer, packing):
    tokenized = tokenize_chats(tmp_path, VARIED, tokenizer=tokenizer, packing=packing)

    texts = texts_of(tokenized.train, tokenized)
    answers = answers_of(tokenized.train, tokenized)
    expected = {chatml(record): chatml_answers(record) for record in VARIED}
    assert dict(zip(texts, answers, strict=True)) == expected

    metadata = tokenized.metadata
    labels = tokenized.train.column("labels")
    assert labels.shape == (metadata.train_rows, MAX_LENGTH + 1)
    assert metadata.train_tokens == (labels != IGNORED).sum()
    assert tokenized.is_packed == packing
    assert (metadata.train_rows < len(VARIED)) == packing


def test_the_users_messages_are_no_targets_even_if_the_template_marks_them(tmp_path):
    marks_everything = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if m.role == 'user' %}.{% endif %}{% endfor %}"
    )

    tokenized = tokenize_chats(
        tmp_path,
        [chat_record("ab", "cd")],
        chat_template=write_template(tmp_path, marks_everything),
    )

    assert texts_of(tokenized.train, tokenized) == ["ab.cd<|endoftext|>"]
    assert answers_of(tokenized.train, tokenized) == ["cd<|endoftext|>"]


def test_a_saved_tokenizer_makes_the_same_rows_as_when_it_was_trained(tmp_path):
    trained = tokenize_chats(tmp_path, VARIED)
    trained.tokenizer.save_pretrained(tmp_path / "tokenizer")

    loaded = tokenize_chats(tmp_path, VARIED, tokenizer=str(tmp_path / "tokenizer"))

    assert loaded.metadata.data_sha256 == trained.metadata.data_sha256
    assert [*loaded.train] == [*trained.train]


# --- formats


def alpaca(question: str, answer: str) -> dict[str, Any]:
    return {"instruction": question, "input": "", "output": answer}


# The same conversation in every format.
SAME: dict[str, dict[str, Any]] = {
    "messages": chat_record("two ü", "2"),
    "prompt_completion": {"prompt": "two ü", "completion": "2"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "two ü"}, {"from": "gpt", "value": "2"}]
    },
    "alpaca": alpaca("two ü", "2"),
}


@pytest.mark.parametrize(
    ("format", "suffix"),
    [
        *itertools.product(SAME, ("jsonl", "parquet")),
        ("alpaca", "csv"),
    ],
)
def test_every_format_is_detected_and_gives_the_same_rows(tmp_path, capsys, format, suffix):
    assert ["tokens", *SAME] == list(CONVERSATION_FORMATS)
    as_messages = tokenize_chats(tmp_path, [SAME["messages"]])

    tokenized = tokenize_files(write_records(tmp_path / f"other.{suffix}", [SAME[format]]))

    assert [*tokenized.train] == [*as_messages.train]
    assert tokenized.metadata.data_sha256 == as_messages.metadata.data_sha256
    assert tokenized.metadata.task == "conversations"
    assert tokenized.metadata.records == 1
    assert f"the records are {format}\n" in capsys.readouterr().out


TWO_FORMATS = SAME["messages"] | {"prompt": "from", "completion": "the completion"}


@pytest.mark.parametrize(
    ("format", "answer"),
    [("auto", f"2{CHATML_END}"), ("prompt_completion", f"the completion{CHATML_END}")],
)
def test_a_record_of_two_formats_has_the_first_one_or_that_of_the_flag(tmp_path, format, answer):
    tokenized = tokenize_chats(tmp_path, [TWO_FORMATS], format=format)

    assert answers_of(tokenized.train, tokenized) == [answer]


def test_the_format_text_is_read_even_if_the_record_is_a_conversation(tmp_path):
    record = TWO_FORMATS | {"text": "a text"}

    tokenized = tokenize_chats(tmp_path, [record], max_length=4, format="text")

    assert tokenized.metadata.task == "text"


def test_text_has_the_same_rows_with_a_chat_config_as_without(tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_text("some words")
    as_text = tokenize(data_config(path), 4)

    tokenized = tokenize_files(path, max_length=4)

    assert "; from the cache\n" in capsys.readouterr().out
    assert tokenized.metadata == as_text.metadata
    assert tokenized.metadata.audit is None
    assert tokenized.stop_token_ids == ()
    assert not tokenized.is_packed


@pytest.mark.parametrize(("suffix", "arguments"), [("jsonl", '{"limit": null}'), ("parquet", "{}")])
def test_null_in_arguments_is_kept_unless_parquet_made_it(tmp_path, suffix, arguments):
    call = {"function": {"name": "find", "arguments": {"limit": None}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]

    tokenized = tokenize_files(write_records(tmp_path / f"a.{suffix}", [{"messages": messages}]))

    (answer,) = answers_of(tokenized.train, tokenized)
    assert f'"arguments": {arguments}' in answer


# --- the audit

SHORT = [*chat_records(10), chat_record("u", "v", "w", "x")]
OVERLONG = [LONG_SECOND_ANSWER, LONG_ANSWER, LONG_QUESTION]
BAD = [AMBIGUOUS, UNANSWERED, AMBIGUOUS]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize(
    ("overlong", "kept", "untrained"),
    [
        pytest.param("drop", SHORT, 0, id="drop"),
        # No turn of the other two overlong conversations fits in a row.
        pytest.param("truncate", [*SHORT, chat_record("q", "a")], 2, id="truncate"),
    ],
)
def test_the_audit_has_the_counts_of_the_records(
    tmp_path, capsys, overlong, kept, untrained, packing
):
    tokenized = tokenize_chats(
        tmp_path,
        SHORT + OVERLONG + BAD,
        overlong=overlong,
        on_bad_row="skip",
        packing=packing,
    )

    tokens = sum(map(size_of, kept))
    rows = len(tokenized.train)
    assert rows == len(kept) or packing
    audit = audit_of(tokenized)
    assert audit == Audit(
        unit="conversation",
        records=17,
        bad=3,
        examples=14,
        dropped=3 if overlong == "drop" else 0,
        truncated=3 if overlong == "truncate" else 0,
        lost_tokens=sum(map(size_of, SHORT + OVERLONG)) - tokens,
        untrained=untrained,
        kept=len(kept),
        tokens=tokens,
        targets=sum(map(target_count, kept)),
        rows=rows,
        positions=rows * (MAX_LENGTH + 1),
        bytes=audit.bytes,
        ended=len(kept),
        needed_length=multiple_of_64(max(map(size_of, OVERLONG)) - 1),
        first_fault=audit.first_fault,
    )
    first_bad_line = len(SHORT + OVERLONG) + 1
    assert f", line {first_bad_line}: " in audit.first_fault
    assert log_lines(capsys, "audit")[0].startswith(f"{len(kept)} of 17 examples: 3 overlong")


def test_special_tokens_and_weights_are_counted_and_logged(tmp_path, capsys):
    weighted = chat_record("a", "b", "c", "d")
    weighted["messages"][1]["weight"] = 0
    special = chat_record("e", f"f{CHATML_END}{CHATML_END}")

    tokenized = tokenize_chats(tmp_path, [weighted, special, chat_record("g", "h")])

    answers = answers_of(tokenized.train, tokenized)
    assert sorted(answers) == [
        f"d{CHATML_END}",
        f"f{CHATML_END}{CHATML_END}{CHATML_END}",
        f"h{CHATML_END}",
    ]
    audit = audit_of(tokenized)
    assert audit.untrained_turns == 1
    assert audit.special_as_text == 2
    log = capsys.readouterr().out
    assert "1 turn not trained: the weight is 0" in log
    assert "2 special tokens" in log


def test_the_audit_of_several_files_is_the_sum_of_their_audits(tmp_path):
    special = chat_record("e", f"f{CHATML_END}")
    first_path = write_records(tmp_path / "a.jsonl", [*chat_records(3), special, LONG_ANSWER])
    second_path = write_records(tmp_path / "b.jsonl", [*chat_records(4, start=50), special])

    first = audit_of(tokenize_files(first_path))
    second = audit_of(tokenize_files(second_path))
    both = audit_of(tokenize_files(first_path, second_path))

    for field in dataclasses.fields(Audit):
        if type(field.default) is int:
            total = max if field.name == "needed_length" else sum
            expected = total([getattr(first, field.name), getattr(second, field.name)])
            assert getattr(both, field.name) == expected, field.name
    assert (both.records, both.overlong, both.special_as_text) == (10, 1, 2)


# --- overlong conversations


def test_a_conversation_with_two_tokens_more_than_max_length_is_an_error(tmp_path, cache):
    """The last token of a row predicts nothing, so a row holds one token more."""
    record = chat_record("12345678", "12345678")
    assert size_of(record) == 36
    records = [*chat_records(2), record, *chat_records(2, start=2)]
    path = write_records(tmp_path / "a.jsonl", records)

    error = refusal(path, max_length=34, overlong="error")
    assert error.startswith(f"{path}, line 3: 36 tokens are more than --max_length 34 allows")
    assert left_behind(cache) == []

    assert audit_of(tokenize_files(path, max_length=35, overlong="error")).kept == 5


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_a_conversation_is_truncated_after_its_last_turn_that_fits(tmp_path, tokenizer):
    fitting = [chat_record(f"q{i}", f"{i} ü.", "r", f"{i}!") for i in range(8)]
    records = []
    for i, record in enumerate(fitting):
        rest = chat_record("s", str(7 ** (i + 500)), "t", "u")
        records.append({"messages": record["messages"] + rest["messages"]})

    tokenized = tokenize_chats(
        tmp_path, records, eval_fraction=0.5, overlong="truncate", tokenizer=tokenizer
    )

    texts = texts_of(tokenized.train, tokenized) + texts_of(tokenized.eval, tokenized)
    assert sorted(texts) == sorted(map(chatml, fitting))
    assert tokenized.metadata.eval_bytes == eval_bytes_of(tokenized)
    audit = audit_of(tokenized)
    labels = tokenized.train.column("labels")
    assert audit.targets == (labels != IGNORED).sum()


def test_a_conversation_that_truncation_empties_is_left_out_and_counted(tmp_path):
    records = [*chat_records(2), LONG_ANSWER, LONG_SECOND_ANSWER]
    path = write_records(tmp_path / "a.jsonl", records)

    audit = audit_of(tokenize_files(path, overlong="truncate"))
    assert (audit.truncated, audit.untrained, audit.kept) == (2, 1, 3)

    # A row of the length of its first turn holds that turn.
    first_turn = size_of(chat_record("q", "a"))
    audit = audit_of(tokenize_files(path, overlong="truncate", max_length=first_turn - 1))
    assert (audit.kept, audit.tokens) == (1, first_turn)


def test_each_example_of_a_conversation_is_truncated_on_its_own(tmp_path, capsys):
    """The template drops earlier reasoning, so each turn with reasoning is an example."""
    make(QWEN3).save_pretrained(tmp_path / "tokenizer")
    with_reasoning = chat_record("q", "a", "r", "x" * 200)
    for answer in with_reasoning["messages"][1::2]:
        answer["reasoning_content"] = "why"
    untrained = chat_record("s", "t")
    untrained["messages"][1]["weight"] = 0

    tokenized = tokenize_chats(
        tmp_path,
        [with_reasoning, untrained],
        overlong="truncate",
        tokenizer=str(tmp_path / "tokenizer"),
    )

    answers = answers_of(tokenized.train, tokenized)
    assert answers == [f"<think>\nwhy\n</think>\n\na{CHATML_END}"]
    assert log_lines(capsys, "audit")[0].startswith("1 of 3 examples: 1 overlong truncated (")
    audit = audit_of(tokenized)
    assert (audit.records, audit.examples) == (2, 3)
    assert (audit.untrained, audit.kept) == (2, 1)


# --- bad records


@pytest.mark.parametrize(
    ("bad", "suffix", "place"),
    [
        pytest.param(AMBIGUOUS, "jsonl", "line 3", id="cannot-be-rendered"),
        pytest.param(UNANSWERED, "parquet", "row 2", id="cannot-be-read"),
        pytest.param(chat_record("a", "b\ud83d"), "jsonl", "line 3", id="half-of-a-surrogate-pair"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_a_bad_record_is_an_error_with_its_place_or_is_left_out(
    tmp_path, cache, bad, suffix, place, tokenizer
):
    records = [*chat_records(2), bad, *chat_records(2, start=2)]
    path = write_records(tmp_path / f"a.{suffix}", records)

    error = refusal(path, eval_fraction=0.5, tokenizer=tokenizer)

    assert error.startswith(f"{path}, {place}: ")
    assert "--on_bad_row skip" in error
    assert left_behind(cache) == []

    audit = audit_of(tokenize_files(path, tokenizer=tokenizer, on_bad_row="skip"))
    assert (audit.bad, audit.kept) == (1, 4)


@pytest.mark.parametrize(
    ("records", "settings", "hint"),
    [
        ([LONG_ANSWER, LONG_QUESTION], {}, "--max_length 95 to 128"),
        ([LONG_QUESTION], {"overlong": "truncate"}, "--max_length 95 to"),
        ([AMBIGUOUS], {"on_bad_row": "skip"}, "line 1"),
        (chat_records(10), {"chat_template": MARKS_ANSWERS}, "no turn trains the token"),
        (chat_records(10), {"chat_template": COUNTS_WITHOUT_ROLES}, "10 turns not trained"),
        (chat_records(2), {"format": "alpaca"}, "instruction"),
        (chat_records(2), {"dataset_num_proc": 0}, "--dataset_num_proc"),
        (chat_records(4), {"tokenizer": "char"}, "--tokenizer char"),
    ],
)
def test_data_without_useful_targets_are_an_error(tmp_path, cache, records, settings, hint):
    if "chat_template" in settings:
        settings = {"chat_template": write_template(tmp_path, settings["chat_template"])}
    path = write_records(tmp_path / "a.jsonl", records)

    error = refusal(path, **settings)

    assert hint in error
    assert left_behind(cache) == []


# --- the eval data


def split_of(folder: Path, records: list[dict], fraction: float) -> tuple[list[str], list[str]]:
    """Return the texts of the training and of the eval data, and check that they are a split."""
    tokenized = tokenize_chats(folder, records, eval_fraction=fraction)
    train = texts_of(tokenized.train, tokenized)
    eval = texts_of(tokenized.eval, tokenized)

    assert sorted(train + eval) == sorted(map(chatml, records))
    assert set(train).isdisjoint(eval)
    assert tokenized.metadata.records == len(records)
    assert tokenized.metadata.eval_records == len(eval)
    return train, eval


@pytest.mark.parametrize(("count", "fraction"), [(100, 0.3), (20, 0.1)])
def test_conversations_keep_their_split_if_others_are_added(tmp_path, count, fraction):
    shuffled = chat_records(200)
    random.Random(0).shuffle(shuffled)

    train, eval = split_of(tmp_path, chat_records(count), fraction)
    larger_train, larger_eval = split_of(tmp_path, shuffled, fraction)

    assert set(train) < set(larger_train)
    assert set(eval) < set(larger_eval)
    assert len(larger_eval) / 200 == pytest.approx(fraction, abs=0.1)


def test_the_eval_data_do_not_depend_on_how_rows_are_made(tmp_path):
    def eval_texts(**settings: Any) -> list[str]:
        tokenized = tokenize_chats(tmp_path, chat_records(40), eval_fraction=0.2, **settings)
        return sorted(texts_of(tokenized.eval, tokenized))

    usual = eval_texts()
    assert 0 < len(usual) < 20
    assert eval_texts(packing=False) == usual
    assert eval_texts(tokenizer="bpe:300") == usual
    assert eval_texts(max_length=200) == usual
    assert eval_texts(overlong="truncate") == usual


@pytest.mark.parametrize(("count", "fraction"), [(2, 0.001), (3, 0.5), (5, 0.99)])
def test_a_few_conversations_leave_some_in_each_split(tmp_path, count, fraction):
    train, eval = split_of(tmp_path, chat_records(count), fraction)

    assert train
    assert eval


def test_a_single_conversation_is_training_data(tmp_path):
    tokenized = tokenize_chats(tmp_path, chat_records(1), eval_fraction=0.9)

    assert tokenized.eval is None
    assert tokenized.metadata.eval_bytes == 0
    assert tokenized.metadata.eval_tokens == 0


def test_the_prompt_for_a_sample_is_one_of_the_eval_data(tmp_path):
    tokenized = tokenize_chats(tmp_path, chat_records(20), eval_fraction=0.2)

    prompt = tokenized.tokenizer.decode(eval_prompt(tokenized))

    eval_prompts = []
    for text in texts_of(tokenized.eval, tokenized):
        question, _, _ = text.partition(f"{CHATML_END}\n")
        eval_prompts.append(f"{question}{CHATML_END}\n<|im_start|>assistant\n")
    assert prompt in eval_prompts
    assert tokenized.tokenizer.convert_tokens_to_ids(CHATML_END) in tokenized.stop_token_ids


def test_a_tokenizer_is_trained_on_the_training_data(tmp_path):
    records = chat_records(40)
    tokenized = tokenize_chats(tmp_path, records, eval_fraction=0.5, tokenizer="bpe:300")
    train_texts = texts_of(tokenized.train, tokenized)

    def tokenizer_digest(records: list[dict]) -> str:
        return tokenize_chats(tmp_path, records, tokenizer="bpe:300").metadata.tokenizer_sha256

    train = [record for record in records if chatml(record) in train_texts]
    assert tokenizer_digest(train) == tokenized.metadata.tokenizer_sha256
    assert tokenizer_digest(records) != tokenized.metadata.tokenizer_sha256


# --- the cache and the data hash


def test_other_rows_have_another_hash_and_cache_entry(tmp_path, capsys):
    variants = {
        "usual": {},
        "records": {"records": chat_records(9)},
        "max_length": {"max_length": MAX_LENGTH + 1},
        "eval_fraction": {"eval_fraction": 0.5},
        "packing": {"packing": False},
        "tokenizer": {"tokenizer": "bpe:300"},
    }
    hashes = set()
    for name, variant in variants.items():
        tokenized = tokenize_chats(tmp_path, **{"records": chat_records(8)} | variant)
        assert "; tokenised\n" in capsys.readouterr().out, name
        hashes.add(tokenized.metadata.data_sha256)
    assert len(hashes) == len(variants)


@pytest.mark.parametrize(
    "setting",
    [
        {"overlong": "truncate"},
        {"on_bad_row": "skip"},
        {"chat_template": "chatml"},
        {"format": "messages"},
    ],
)
def test_equal_rows_of_other_settings_have_the_same_hash(tmp_path, capsys, setting):
    usual = tokenize_chats(tmp_path, chat_records(8), eval_fraction=0.2)

    for source in ("tokenised", "from the cache"):
        capsys.readouterr()
        tokenized = tokenize_chats(tmp_path, chat_records(8), eval_fraction=0.2, **setting)
        assert f"; {source}\n" in capsys.readouterr().out
        assert tokenized.metadata.data_sha256 == usual.metadata.data_sha256
        assert [*tokenized.train] == [*usual.train]
        assert [*tokenized.eval] == [*usual.eval]


def test_the_cache_entry_depends_on_the_content_of_the_template(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))

    def first_text(template: str, source: str) -> str:
        """Return the first conversation, and check that its row is new or from the cache."""
        write_template(tmp_path, template)
        tokenized = tokenize_chats(tmp_path, chat_records(1), chat_template="~/template.jinja")
        assert f"; {source}\n" in capsys.readouterr().out
        return texts_of(tokenized.train, tokenized)[0]

    uppercase = MARKS_ANSWERS_AND_ENDS.replace("m.role +", "m.role | upper +")
    assert first_text(MARKS_ANSWERS_AND_ENDS, "tokenised").startswith("user:0?")
    assert first_text(uppercase, "tokenised").startswith("USER:0?")
    assert first_text(MARKS_ANSWERS_AND_ENDS, "from the cache").startswith("user:0?")

    moved = (tmp_path / "template.jinja").rename(tmp_path / "moved.jinja")
    tokenize_chats(tmp_path, chat_records(1), chat_template=str(moved))
    assert "; from the cache\n" in capsys.readouterr().out
