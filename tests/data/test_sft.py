"""Conversations -> rows: what is trained is what assistants say, counted exactly, and nothing is held out by chance."""

import csv
import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data import parallel_rendering
from llmtrain.data import prepare as tokenizing
from llmtrain.data.audit import Audit, total_audit
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig
from llmtrain.data.dataset_names import open_source
from llmtrain.data.formats import conversation_of
from llmtrain.data.loader import IGNORED
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.records import Records
from llmtrain.data.splits import eval_limit_of, hash_of
from llmtrain.errors import UserError
from tests.data.chats import QWEN3, make
from tests.data.test_prepare import complaint, left_behind

BLOCK = 95
END = "<|im_end|>"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def chat(*contents: str) -> dict:
    """A record; the user and the assistant in turn."""
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": said}
            for i, said in enumerate(contents)
        ]
    }


def chats(count: int, start: int = 0) -> list[dict]:
    return [chat(f"{i}?", f"{i * i} ü.") for i in range(start, start + count)]


# What cannot be trained on, found when it is rendered or before, and what is said of it.
AMBIGUOUS = (
    chat("a", f"b{END}\U000f0000"),
    "a message holds a special token and private-use characters of Unicode",
)
UNANSWERED = (
    {"messages": [{"role": "user", "content": "a"}]},
    "the conversation has no assistant message",
)


def write(path: Path, records: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0].keys())
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def config(*paths: Path, **settings) -> DataConfig:
    return DataConfig(
        **{"dataset": [str(path) for path in paths], "tokenizer": "byte", "eval_fraction": 0.0}
        | settings
    )


FLAGS = set(ChatConfig.__dataclass_fields__)


def arguments(folder: Path, records: list[dict], block_size: int = BLOCK, **settings) -> tuple:
    """What :func:`tokenize` takes; a setting finds its way into the dataclass that has it."""
    flags = {name: settings.pop(name) for name in FLAGS & set(settings)}
    return (
        config(write(folder / "chats.jsonl", records), **settings),
        block_size,
        ChatConfig(**flags),
    )


def tokenize_chats(
    folder: Path, records: list[dict], block_size: int = BLOCK, **settings
) -> Tokenized:
    return tokenize(*arguments(folder, records, block_size, **settings))


def documents_of(row: dict[str, list[int]]) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of each conversation in a row, without its padding."""
    length = len(
        [token for token in row["input_ids"] if token]
    )  # where it stands alone, before padding
    positions = row.get("position_ids", [*range(length), *range(len(row["labels"]) - length)])
    starts = [i for i, position in enumerate(positions) if position == 0]
    ends = [*starts[1:], len(positions)]
    found = [(row["input_ids"][a:b], row["labels"][a:b]) for a, b in zip(starts, ends, strict=True)]
    trained = [any(label != IGNORED for label in labels) for _, labels in found]
    assert all(trained[:-1]), "a conversation without a target, or padding in the middle"
    return found if trained[-1] else found[:-1]


def texts_of(rows: Iterable[dict] | None, made: Tokenized) -> list[str]:
    """Each conversation as the model meets it."""
    decode = made.tokenizer.decode
    return [decode(ids) for row in rows or [] for ids, _ in documents_of(row)]


def answers_of(rows: Iterable[dict] | None, made: Tokenized) -> list[str]:
    """Of each conversation, what is trained."""
    found = [labels for row in rows or [] for _, labels in documents_of(row)]
    return [
        made.tokenizer.decode([label for label in labels if label != IGNORED]) for labels in found
    ]


def shown(record: dict) -> str:
    """By ChatML."""
    return "\n".join(f"<|im_start|>{m['role']}\n{m['content']}{END}" for m in record["messages"])


def answers(record: dict) -> str:
    return "".join(m["content"] + END for m in record["messages"] if m["role"] == "assistant")


# The blocks stand around the answers, with or without their ends, or around all that is shown.
ENDLESS = (
    "{% for m in messages %}{{ m.role + ':' }}{% if m.role != 'assistant' %}{{ m.content + eos_token }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endif %}{% endfor %}"
)
ENDED = ENDLESS.replace("{% endgeneration %}{{ eos_token }}", "{{ eos_token }}{% endgeneration %}")
COUNTED = "{{ messages | length }}{% for m in messages %}{{ m.content + '|' }}{% endfor %}"


# --- what is trained ---

SAID = [
    chat("What is 漢字?", "Writing 🙂."),
    chat("one", "1", "two", " 2 \n", "three", "e\u0301"),
    {"messages": [{"role": "system", "content": "Be short."}, *chat("why", "so")["messages"]]},
    *(chat("x" * i, "y" * i) for i in range(1, 30, 4)),
]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
@pytest.mark.parametrize("packing", [True, False])
def test_what_is_trained_is_what_assistants_say_with_the_ends_of_their_turns(
    tmp_path, tokenizer, packing
):
    made = tokenize_chats(tmp_path, SAID, tokenizer=tokenizer, packing=packing)
    by_text = dict(zip(texts_of(made.train, made), answers_of(made.train, made), strict=True))
    assert by_text == {shown(record): answers(record) for record in SAID}
    assert made.is_packed == packing
    labels = np.array(made.train.dataset["labels"])
    assert labels.shape == (made.metadata.train_rows, BLOCK + 1)
    assert made.metadata.train_tokens == (labels != IGNORED).sum()
    assert (made.metadata.train_rows < len(SAID)) == packing


def test_what_people_say_is_not_trained_even_where_the_template_says_so(tmp_path):
    (tmp_path / "t").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if m.role == 'user' %}.{% endif %}"
        "{% endfor %}"
    )
    made = tokenize_chats(tmp_path, [chat("ab", "cd")], chat_template=str(tmp_path / "t"))
    assert texts_of(made.train, made) == ["ab.cd<|endoftext|>"]
    assert answers_of(made.train, made) == ["cd<|endoftext|>"]


def test_a_tokenizer_that_was_saved_makes_the_rows_of_the_one_that_was_trained(tmp_path):
    trained = tokenize_chats(tmp_path, SAID)
    trained.tokenizer.save_pretrained(tmp_path / "chatty")
    trained.tokenizer.chat_template = None
    trained.tokenizer.save_pretrained(tmp_path / "silent")
    for name, template in [
        ("chatty", None),
        ("chatty", "chatml"),
        ("silent", "chatml"),
        ("silent", None),
    ]:
        loaded = tokenize_chats(
            tmp_path, SAID, tokenizer=str(tmp_path / name), chat_template=template
        )
        assert loaded.metadata.data_sha256 == trained.metadata.data_sha256
        assert loaded.train.dataset[:] == trained.train.dataset[:]


# --- formats ---

FORMATS = {
    "messages": chat,
    "prompt_completion": lambda q, a: {"prompt": q, "completion": a},
    "sharegpt": lambda q, a: {
        "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
    },
    "alpaca": lambda q, a: {"instruction": q, "input": "", "output": a},
}
TURNS = [("one", "1"), ("two ü", "2"), ("three", "drei")]


@pytest.mark.parametrize(
    ("format", "suffix"),
    [*((name, suffix) for name in FORMATS for suffix in ("jsonl", "parquet")), ("alpaca", "csv")],
)
def test_every_format_is_recognised_and_gives_the_same_rows(tmp_path, capsys, format, suffix):
    reference = tokenize_chats(tmp_path, [chat(*turn) for turn in TURNS])
    path = write(tmp_path / f"other.{suffix}", [FORMATS[format](*turn) for turn in TURNS])
    made = tokenize(config(path), BLOCK, ChatConfig())
    assert made.train.dataset[:] == reference.train.dataset[:]
    assert made.metadata.data_sha256 == reference.metadata.data_sha256
    assert (made.metadata.task, made.metadata.records) == ("conversations", 3)
    assert f"the assistant's turns: the records are {format}\n" in capsys.readouterr().out


def test_a_record_with_the_fields_of_several_formats_needs_the_name_of_one(tmp_path):
    both = (
        chat("from", "messages")
        | FORMATS["prompt_completion"]("from", "the completion")
        | {"text": "a text"}
    )
    found = {
        format: answers_of((p := tokenize_chats(tmp_path, [both], format=format)).train, p)
        for format in ("messages", "prompt_completion")
    }
    assert found == {
        "messages": [f"messages{END}"],
        "prompt_completion": [f"the completion{END}"],
    }
    assert tokenize_chats(tmp_path, [both], block_size=4, format="text").metadata.task == "text"
    said = complaint(*arguments(tmp_path, [both]))
    assert (
        "line 1: the record has the fields of two formats, messages and prompt_completion" in said
    )
    assert "--format messages or --format prompt_completion" in said


def test_a_format_that_the_records_do_not_have_is_told_with_the_line(tmp_path):
    said = complaint(*arguments(tmp_path, chats(2), format="alpaca"))
    assert said.startswith(f"{tmp_path / 'chats.jsonl'}, line 1: field 'instruction' is None")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_text_stays_a_text(tmp_path, capsys, name):
    path = tmp_path / name
    path.write_text("some words" if name == "a.txt" else '{"text": "some words"}\n')
    plain = tokenize(config(path), 4)
    made = tokenize(config(path), 4, ChatConfig())
    assert made.metadata == plain.metadata
    assert (made.metadata.task, made.metadata.audit, made.stop_token_ids) == ("text", None, ())
    assert not made.is_packed
    out = capsys.readouterr().out
    assert "; from the cache\n" in out
    assert "fine-tuning" not in out
    assert "audit" not in out


# --- the audit ---


def size_of(record: dict) -> int:
    """Tokens by the tokenizer ``byte``."""
    return sum(len(f"{m['role']}\n{m['content']}\n".encode()) + 2 for m in record["messages"]) - 1


def printed(capsys: pytest.CaptureFixture, name: str) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    return [line[10:] for line in lines if line.startswith(name)]


LONG_SECOND_ANSWER = chat("q", "a", "q", "x" * 100)
LONG_ANSWER, LONG_QUESTION = chat("q", "x" * 100), chat("x" * 100, "a")
MANY = [
    *chats(10),
    chat("u", "v", "w", "x"),
    LONG_SECOND_ANSWER,
    LONG_ANSWER,
    LONG_QUESTION,
    AMBIGUOUS[0],
    UNANSWERED[0],
    AMBIGUOUS[0],
]


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_the_audit_is_what_one_counts_by_hand(tmp_path, capsys, overlong):
    made = tokenize_chats(tmp_path, MANY, overlong=overlong, on_bad_row="skip")
    cut = overlong == "truncate"
    whole = [size_of(record) for record in MANY[:14]]
    kept = [*whole[:11], *[size_of(chat("q", "a"))] * cut]
    tokens = sum(kept)
    lost = sum(whole[11:14]) - sum(kept[11:])
    trained = sum(len(f"{i * i} ü.".encode()) + 1 for i in range(10)) + 2 * 2 + 2 * cut
    rows = 4
    assert made.metadata.audit == {
        **vars(Audit("conversation", truncates=cut)),
        "records": 17,
        "bad": 3,
        "examples": 14,
        "overlong": 3,
        "lost_tokens": lost,
        "untrainable": 2 * cut,  # no turn of the other two ends in a row
        "kept": 11 + cut,
        "tokens": tokens,
        "targets": trained,
        "rows": rows,
        "positions": rows * (BLOCK + 1),
        "turns": 12 + cut,
        "ended_turns": 12 + cut,
    }
    assert printed(capsys, "audit") == [
        f"{11 + cut} of 17 conversations: 3 overlong {'truncated' if cut else 'dropped'} "
        f"({lost / (lost + tokens):.1%} of the tokens), "
        f"{2 * cut} without a target token and 3 bad ones left out",
        f"{trained} of {tokens} tokens are targets ({trained / tokens:.1%}), "
        f"{rows} rows are {tokens / (rows * 96):.1%} full, {12 + cut} of {12 + cut} turns train their end",
    ]


def test_the_audit_agrees_with_the_rows_without_packing_too(tmp_path):
    audit = tokenize_chats(tmp_path, MANY, on_bad_row="skip", packing=False).metadata.audit
    assert (audit["rows"], audit["kept"], audit["positions"]) == (11, 11, 11 * 96)


def test_what_messages_hold_besides_their_words_is_counted_and_told(tmp_path, capsys):
    weighted = chat("a", "b", "c", "d")
    weighted["messages"][1]["weight"] = 0
    other = chat("e", f"f{END}{END}")
    other["messages"][0] |= {"at": 1, "name": "Ann"}
    other["messages"][1] |= {"at": 2, "score": 0.5}
    made = tokenize_chats(tmp_path, [weighted, other, chat("g", "h")])
    assert sorted(answers_of(made.train, made)) == [f"d{END}", f"f{END}{END}{END}", f"h{END}"]
    audit = made.metadata.audit
    assert (audit["unweighted_turns"], audit["special_as_text"]) == (1, 2)
    assert audit["unread_fields"] == {"at": 2, "score": 1}
    assert printed(capsys, "audit")[2:] == [
        "1 turn is not trained, because its weight is 0",
        "2 special tokens in messages are encoded as text",
        "some messages have fields that are not read here: at (2), score (1); the chat template "
        "gets them",
    ]


@pytest.mark.parametrize(("suffix", "argument"), [("jsonl", '{"limit": null}'), ("parquet", "{}")])
def test_null_in_arguments_is_kept_unless_parquet_made_it(tmp_path, suffix, argument):
    call = {"function": {"name": "find", "arguments": {"limit": None}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    record = {"messages": [{"role": "user", "content": "a"}, calling]}
    path = write(tmp_path / f"a.{suffix}", [record])
    made = tokenize(config(path), BLOCK, ChatConfig())
    (answer,) = answers_of(made.train, made)
    assert f'"arguments": {argument}' in answer


# Marks the end of a turn, but not of the last one.
ENDED_BEFORE = ENDED.replace(
    "{{ eos_token }}{% endg", "{% if not loop.last %}{{ eos_token }}{% endif %}{% endg"
).replace(
    "{% endif %}{% endfor %}", "{% if loop.last %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("template", "ended"), [(ENDED, 3), (ENDED_BEFORE, 1)])
def test_a_turn_that_does_not_train_its_end_is_counted(tmp_path, capsys, template, ended):
    (tmp_path / "t").write_text(template)
    made = tokenize_chats(
        tmp_path, [chat("a", "b", "c", "d"), chat("e", "f")], chat_template=str(tmp_path / "t")
    )
    audit = Audit(**made.metadata.audit)
    assert (audit.turns, audit.ended_turns, audit.targets) == (3, ended, 3 + ended)
    train_their = "trains its" if ended == 1 else "train their"
    assert printed(capsys, "audit")[1].endswith(f"{ended} of 3 turns {train_their} end")


def test_the_audit_of_several_sources_is_their_sum(tmp_path):
    parts = [
        Audit("conversation", False, *range(start, start + 20), unread_fields={"at": 1, name: 2})
        for start, name in ((1, "a"), (100, "b"))
    ]
    total = Audit(
        "conversation", False, *range(101, 141, 2), unread_fields={"at": 2, "a": 2, "b": 2}
    )
    assert total_audit(parts) == total
    paths = [
        write(tmp_path / name, records)
        for name, records in [("a.jsonl", chats(3)), ("b.jsonl", chats(4, 50))]
    ]
    alone, beside = (tokenize(config(path), BLOCK, ChatConfig()).metadata.audit for path in paths)
    both = tokenize(config(*paths), BLOCK, ChatConfig()).metadata.audit
    assert both == vars(total_audit([Audit(**alone), Audit(**beside)]))


@pytest.mark.parametrize(
    ("room", "said"), [(1, None), (0, None), (-1, "36 tokens are more than --max_length 34 allows")]
)
def test_a_conversation_is_overlong_from_one_token_more_than_a_row_holds(
    tmp_path, cache, room, said
):
    records = [*chats(2), chat("12345678", "12345678"), *chats(2, 2)]
    given = arguments(tmp_path, records, block_size=35 + room, overlong="error")
    assert size_of(records[2]) == 36
    if said is None:
        assert tokenize(*given).metadata.audit["kept"] == 5
    else:
        assert (
            f"{tmp_path / 'chats.jsonl'}, line 3: {said}; raise it, or set --overlong"
            in complaint(*given)
        )
        assert left_behind(cache) == []


@pytest.mark.parametrize(("bad", "said"), [AMBIGUOUS, UNANSWERED], ids=["to render", "to read"])
@pytest.mark.parametrize(("suffix", "place"), [("jsonl", "line 3"), ("parquet", "row 2")])
def test_a_bad_row_is_told_with_its_place_and_what_to_do_and_leaves_nothing_behind(
    tmp_path, cache, bad, said, suffix, place
):
    path = write(tmp_path / f"a.{suffix}", [*chats(2), bad, *chats(2, 2)])
    wanted = f"{path}, {place}: {said}; fix it, or leave such records out with --on_bad_row skip."
    assert complaint(config(path, eval_fraction=0.5), BLOCK, ChatConfig()) == wanted
    assert left_behind(cache) == []


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_half_of_a_surrogate_pair_is_a_bad_row_for_every_tokenizer(tmp_path, tokenizer, on_bad_row):
    given = arguments(
        tmp_path, [*chats(3), chat("a", "b\ud83d")], tokenizer=tokenizer, on_bad_row=on_bad_row
    )
    if on_bad_row == "error":
        assert "line 4: message 2 (assistant) holds half of a surrogate pair" in complaint(*given)
    else:
        audit = tokenize(*given).metadata.audit
        assert (audit["bad"], audit["kept"]) == (1, 3)


SENSELESS = {
    "all of them overlong": (
        [LONG_ANSWER, LONG_QUESTION],
        {},
        f"chats.jsonl: all 2 conversations are longer than --max_length {BLOCK}; set --max_length 128, if the model has as many positions, or --overlong truncate.",
    ),
    "all questions overlong": (
        [LONG_QUESTION],
        {"overlong": "truncate", "on_bad_row": "skip"},
        "no token of 1 conversation would be trained (1 of 1 is longer than --max_length 95; ",
    ),
    "all of them bad": (
        [AMBIGUOUS[0]],
        {"on_bad_row": "skip"},
        "no token of 1 conversation would be trained (0 are overlong, 1 bad, the first one ",
    ),
    "none to read": (
        [UNANSWERED[0], AMBIGUOUS[0] | UNANSWERED[0]],
        {"on_bad_row": "skip"},
        f"chats.jsonl, line 1: {UNANSWERED[1]}.",
    ),
    "no turn with its end": (
        chats(10),
        {"chat_template": ENDLESS},
        "none of 10 turns trains the token that ends it",
    ),
    "no turn as prompted for": (
        chats(10),
        {"chat_template": COUNTED},
        "10 turns are shown differently from the way they are prompted for",
    ),
}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("records", "flags", "said"), SENSELESS.values(), ids=SENSELESS)
def test_a_mask_that_cannot_be_meant_is_an_error_and_leaves_nothing_behind(
    tmp_path, cache, records, flags, said, packing
):
    if "chat_template" in flags:
        (tmp_path / "t").write_text(flags["chat_template"])
        flags = {"chat_template": str(tmp_path / "t")}
    told = complaint(*arguments(tmp_path, records, packing=packing, **flags))
    assert told.startswith(f"--dataset {tmp_path / 'chats.jsonl'}")
    assert said in told
    assert left_behind(cache) == []


# --- what is held out ---


def split_of(folder: Path, records: list[dict], fraction: float) -> tuple[list[str], list[str]]:
    """The texts of both sides, in order of the rows."""
    made = tokenize_chats(folder, records, eval_fraction=fraction)
    train, held_out = (texts_of(rows, made) for rows in (made.train, made.eval))
    assert sorted(train + held_out) == sorted(map(shown, records))
    assert not set(train) & set(held_out)
    facts = made.metadata
    assert (facts.records, facts.eval_records) == (len(records), len(held_out))
    return train, held_out


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.7])
def test_every_conversation_is_either_trained_on_or_held_out(tmp_path, fraction):
    held_out = split_of(tmp_path, chats(200), fraction)[1]
    assert abs(len(held_out) / 200 - fraction) < 0.1


def test_held_out_conversations_never_move_when_others_are_added_or_all_are_shuffled(tmp_path):
    train, held_out = split_of(tmp_path, chats(100), 0.1)
    assert held_out
    more = chats(200)
    random.Random(0).shuffle(more)
    more_train, more_held_out = split_of(tmp_path, more, 0.1)
    assert set(held_out) < set(more_held_out)
    assert set(train) < set(more_train)


def test_the_sides_are_the_same_whatever_tokenizer_and_rows_are_made(tmp_path):
    sides = set()
    for variant in (
        {},
        {"packing": False},
        {"tokenizer": "bpe:300"},
        {"block_size": 200},
        {"overlong": "truncate"},
    ):
        made = tokenize_chats(tmp_path, chats(40), eval_fraction=0.2, **variant)
        sides.add(tuple(sorted(texts_of(made.eval, made))))
    assert len(sides) == 1


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.99])
def test_of_a_few_conversations_some_are_held_out_and_some_are_not(tmp_path, count, fraction):
    train, held_out = split_of(tmp_path, chats(count), fraction)
    assert train
    assert held_out


def test_a_single_conversation_is_trained_on(tmp_path):
    made = tokenize_chats(tmp_path, chats(1), eval_fraction=0.9)
    assert made.eval is None
    assert made.metadata.eval_bytes == made.metadata.eval_tokens == 0


@given(st.lists(st.sampled_from([i / 16 for i in range(16)]), max_size=30), st.floats(0, 0.999))
@settings(deadline=None)
def test_a_limit_leaves_something_on_both_sides_wherever_two_conversations_differ(places, fraction):
    limit = eval_limit_of(np.array(places), fraction)
    held_out = sum(place < limit for place in places)
    if fraction and len(set(places)) > 1:
        assert 0 < held_out < len(places)
    else:
        assert held_out == 0


def test_a_limit_is_the_fraction_where_that_holds_out_some_and_not_too_many():
    places = np.arange(100) / 100
    assert [eval_limit_of(places, fraction) for fraction in (0.0, 0.005, 0.1, 0.5, 0.9)] == [
        0.0,
        0.005,
        0.1,
        0.5,
        0.9,
    ]
    assert (
        eval_limit_of(np.array([0.01, 0.02, 0.03, 0.9]), 0.1) == 0.02
    )  # three of four are too many
    assert eval_limit_of(np.array([0.5, 0.6, 0.7, 0.8]), 0.3) == 0.7  # none of four are too few


@pytest.mark.parametrize("copies", [[0, 0, 1], [0, 1, 1], [0] * 9 + [1], [0] + [1] * 9])
def test_copies_of_one_conversation_are_on_one_side(tmp_path, copies):
    train, held_out = split_of(tmp_path, [chats(2)[copy] for copy in copies], 0.1)
    assert train
    assert held_out


def test_bytes_held_out_are_those_of_what_assistants_say(tmp_path):
    records = [*SAID, LONG_ANSWER, LONG_QUESTION]
    made = tokenize_chats(tmp_path, records, eval_fraction=0.5)
    said = "".join(answers_of(made.eval, made))
    assert END in said
    assert made.metadata.eval_bytes == len(said.replace(END, "").encode())
    assert made.metadata.eval_tokens == made.metadata.eval_bytes + said.count(END)


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_a_conversation_is_truncated_at_the_end_of_its_last_turn_that_fits(tmp_path, tokenizer):
    records = [
        chat(f"q{i}", f"{i} ü.", "r", f"{i}!", "s", str(7 ** (i + 500)), "t", "u") for i in range(8)
    ]
    made = tokenize_chats(
        tmp_path, records, eval_fraction=0.5, overlong="truncate", tokenizer=tokenizer
    )
    kept = [shown(chat(*(m["content"] for m in record["messages"][:4]))) for record in records]
    texts = texts_of(made.train, made) + texts_of(made.eval, made)
    assert sorted(texts) == sorted(kept)
    held_out = answers_of(made.eval, made)
    assert made.metadata.eval_bytes == sum(len(said.replace(END, "").encode()) for said in held_out)
    audit = Audit(**made.metadata.audit)
    assert (audit.turns, audit.ended_turns) == (2 * audit.kept, 2 * audit.kept)
    assert audit.targets == sum(label != IGNORED for row in made.train for label in row["labels"])


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_truncation_never_leaves_a_conversation_without_a_target(tmp_path, cache, on_bad_row):
    records = [*chats(2), LONG_ANSWER, *chats(2, 2), LONG_SECOND_ANSWER]
    given = arguments(tmp_path, records, overlong="truncate", on_bad_row=on_bad_row)
    if on_bad_row == "error":
        assert complaint(*given) == (
            f"{tmp_path / 'chats.jsonl'}, line 3: none of the assistant's turns ends within "
            f"--max_length {BLOCK}, so truncation would leave nothing to train on; raise it, set "
            "--overlong drop, or leave such records out with --on_bad_row skip."
        )
        assert left_behind(cache) == []
    else:
        audit = Audit(**tokenize(*given).metadata.audit)
        assert (audit.overlong, audit.untrainable, audit.kept) == (2, 1, 5)


def test_turns_that_are_examples_of_their_own_are_truncated_one_by_one(tmp_path, capsys):
    """Of a conversation that makes two examples, one fits in a row; another has no target."""
    make(QWEN3).save_pretrained(tmp_path / "tokenizer")
    thought = {"reasoning_content": "why"}
    first = chat("q", "a", "r", "x" * 200)
    for message in first["messages"][1::2]:
        message.update(thought)
    untrained = chat("s", "t")
    untrained["messages"][1]["weight"] = 0
    made = tokenize_chats(
        tmp_path,
        [first, untrained],
        overlong="truncate",
        tokenizer=str(tmp_path / "tokenizer"),
    )
    assert answers_of(made.train, made) == ["<think>\nwhy\n</think>\n\na<|im_end|>"]
    assert printed(capsys, "audit")[0].startswith("1 of 3 examples: 1 overlong truncated (")
    audit = Audit(**made.metadata.audit)
    assert (audit.records, audit.examples, audit.untrainable, audit.kept) == (2, 3, 2, 1)


def test_a_tokenizer_learns_from_what_is_trained_on_alone(tmp_path):
    records = chats(40)
    made = tokenize_chats(tmp_path, records, eval_fraction=0.5, tokenizer="bpe:270")
    data = arguments(tmp_path, records, eval_fraction=0.5)
    found = Records(
        open_source(data[0].dataset[0]),
        read=lambda fields: conversation_of(fields, "messages"),
        eval_fraction=0.5,
        skips_bad=False,
    )
    train = texts_of(made.train, made)
    expected = [
        m["content"] for record in records if shown(record) in train for m in record["messages"]
    ]
    assert list(found.texts("train")) == expected
    assert list(found.texts()) == [m["content"] for record in records for m in record["messages"]]


def test_an_unseen_question_is_a_held_out_one_without_its_answer(tmp_path):
    made = tokenize_chats(tmp_path, chats(20), eval_fraction=0.2)
    question = made.eval_prompt()
    held_out = texts_of(made.eval, made)
    asked = made.tokenizer.decode(question)
    assert asked in [
        text.split(f"{END}\n")[0] + f"{END}\n<|im_start|>assistant\n" for text in held_out
    ]
    assert made.tokenizer.convert_tokens_to_ids(END) in made.stop_token_ids


# --- found again, or not ---


def test_what_was_tokenised_is_found_again_without_reading_the_conversations(
    tmp_path, monkeypatch, capsys
):
    given = arguments(tmp_path, chats(20), eval_fraction=0.2)
    first = tokenize(*given)
    before = capsys.readouterr().out
    assert "; tokenised\n" in before
    assert before.count("\naudit ") == 2

    def unread(*_):
        raise AssertionError("the conversations were read again")

    monkeypatch.setattr(tokenizing, "Records", unread)
    second = tokenize(*given)
    assert capsys.readouterr().out == before.replace("; tokenised\n", "; from the cache\n")
    assert second.metadata == first.metadata
    for side in ("train", "eval"):
        assert [*getattr(second, side)] == [*getattr(first, side)]


def test_a_change_of_anything_that_shapes_the_rows_makes_new_ones(tmp_path, capsys):
    variants = [
        {},
        {"records": chats(9)},
        {"block_size": BLOCK + 1},
        {"eval_fraction": 0.5},
        {"packing": False},
        {"overlong": "truncate"},
        {"on_bad_row": "skip"},
        {"tokenizer": "bpe:300"},
        {"chat_template": "chatml"},
        {"format": "messages"},
    ]
    for said in ("tokenised", "from the cache"):
        for variant in variants:
            tokenize_chats(tmp_path, **{"records": chats(8)} | variant)
            assert f"; {said}\n" in capsys.readouterr().out, variant


def test_a_template_whose_file_has_changed_makes_new_rows(tmp_path, capsys):
    template = tmp_path / "t.jinja"
    for text, shown, said in [
        (ENDED, "user:0?", "tokenised"),
        (ENDED.replace("m.role +", "m.role | upper +"), "USER:0?", "tokenised"),
        (ENDED, "user:0?", "from the cache"),
    ]:
        template.write_text(text)
        made = tokenize_chats(tmp_path, chats(1), chat_template=str(template))
        assert texts_of(made.train, made)[0].startswith(shown)
        assert f"; {said}\n" in capsys.readouterr().out

    moved = template.rename(tmp_path / "moved.jinja")
    tokenize_chats(tmp_path, chats(1), chat_template=str(moved))
    assert "; from the cache\n" in capsys.readouterr().out


def test_the_data_hash_is_of_the_tokens_and_their_mask_and_their_rows(tmp_path):
    marked = ENDED.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}")
    for name, template in {"ended": ENDED, "endless": marked}.items():
        (tmp_path / name).write_text(template)
    usual, moved, mask, unpacked, wider, longer = (
        tokenize_chats(
            tmp_path, **{"records": chats(8), "chat_template": str(tmp_path / "ended")} | variant
        )
        for variant in (
            {},
            {"overlong": "truncate", "on_bad_row": "skip"},
            {"chat_template": str(tmp_path / "endless")},
            {"packing": False},
            {"block_size": BLOCK + 1},
            {"records": chats(9)},
        )
    )
    assert mask.train.dataset["input_ids"][:] == usual.train.dataset["input_ids"][:]
    assert mask.train.dataset["labels"][:] != usual.train.dataset["labels"][:]
    assert (
        moved.metadata.data_sha256 == usual.metadata.data_sha256
    )  # the flags are others, the rows are not
    assert len({p.metadata.data_sha256 for p in (usual, mask, unpacked, wider, longer)}) == 5


# --- processes ---


@pytest.mark.parametrize("preference", [False, True])
def test_rows_are_the_same_from_any_number_of_processes(tmp_path, monkeypatch, preference):
    monkeypatch.setattr(parallel_rendering, "FEWEST_FOR_PROCESSES", 20)
    monkeypatch.setattr(parallel_rendering, "CHUNK_SIZE", 5)
    if preference:
        records = [{"prompt": f"{i}?", "chosen": "a" * (i + 1), "rejected": "b"} for i in range(60)]
    else:
        records = [*chats(50), AMBIGUOUS[0], *chats(9, 50)]
    path = write(tmp_path / "many.jsonl", records)
    made = []
    for processes in (1, 2):
        monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / f"cache-{processes}"))
        chat_type = PairConfig if preference else ChatConfig
        chat = chat_type(on_bad_row="skip", dataset_num_proc=processes)
        data = config(path, eval_fraction=0.3)
        made.append(tokenize(data, BLOCK, chat))
    assert made[0].metadata == made[1].metadata
    for split in ("train", "eval"):
        assert [*getattr(made[0], split)] == [*getattr(made[1], split)]


@pytest.mark.parametrize("processes", [0, -1])
def test_a_number_of_processes_below_one_is_refused(processes):
    with pytest.raises(UserError, match=r"--dataset_num_proc .* must be at least 1"):
        ChatConfig(dataset_num_proc=processes)


# --- several sources ---


def test_sources_stand_one_after_the_other_and_a_mixture_draws_them_in_their_proportions(tmp_path):
    paths = [
        write(tmp_path / "a.jsonl", chats(30)),
        write(tmp_path / "b.parquet", [FORMATS["alpaca"](f"b{i}", "from b") for i in range(12)]),
    ]
    made = tokenize(config(*paths, mixture=[3, 1], eval_fraction=0.2), BLOCK, ChatConfig())
    facts, first = made.metadata, made.metadata.source_rows[0]
    assert sum(facts.source_rows) == facts.train_rows == len(made.train)
    from_b = [{"from b" in text for text in texts_of([row], made)} for row in made.train]
    assert from_b == [{False}] * first + [{True}] * facts.source_rows[1]
    assert facts.records == 42
    assert made.mixture is not None
    drawn = made.mixture.rows_at(np.arange(40), seed=0)
    assert (drawn < first).sum() == 30
    assert set(drawn.tolist()) == set(range(facts.train_rows))


def test_a_source_of_one_conversation_holds_out_nothing_beside_one_that_does(tmp_path):
    paths = [write(tmp_path / "a.jsonl", chats(1)), write(tmp_path / "b.jsonl", chats(20, 50))]
    for sources in (paths, paths[::-1]):
        made = tokenize(config(*sources, eval_fraction=0.2), BLOCK, ChatConfig())
        sides = texts_of(made.train, made) + texts_of(made.eval, made)
        assert sorted(sides) == sorted(map(shown, chats(1) + chats(20, 50)))
        assert shown(chats(1)[0]) in texts_of(made.train, made)
        assert made.metadata.eval_rows == len(made.eval)
        said = "".join(answers_of(made.eval, made)).replace(END, "")
        assert made.metadata.eval_bytes == len(said.encode())


def test_a_template_that_is_edited_in_the_home_folder_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    template = tmp_path / "t.jinja"
    body = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    rows = []
    for start in ("", "{# edited #}!"):
        template.write_text(start + body)
        data = config(write(tmp_path / "a.jsonl", chats(4)))
        rows.append(
            tokenize(data, BLOCK, ChatConfig(chat_template="~/t.jinja")).metadata.data_sha256
        )
    assert rows[0] != rows[1]


def test_letters_of_a_template_that_the_data_have_not_are_no_surprise(tmp_path):
    with pytest.raises(UserError, match="--tokenizer char knows only the characters of the data"):
        tokenize(
            config(write(tmp_path / "a.jsonl", chats(4)), tokenizer="char"), BLOCK, ChatConfig()
        )


def test_a_held_out_side_of_which_nothing_is_left_is_said(tmp_path, capsys):
    def place(record: dict) -> float:
        return hash_of(conversation_of(record, "messages"))

    shorts = chats(6)
    long = next(
        r for i in range(999) if place(r := chat(f"{i}?", "x" * 500)) < min(map(place, shorts))
    )
    made = tokenize_chats(tmp_path, [*shorts, long], eval_fraction=1e-9)
    assert made.eval is None
    assert "eval      0 of 1 conversation: 1 overlong dropped" in capsys.readouterr().out
