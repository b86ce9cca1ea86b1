"""Judged answers -> rows: both go on from their prompt, nothing else is judged, and every pair left out is counted."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest

from llmtrain.data import prepare as tokenizing
from llmtrain.data.audit import Audit, total_audit
from llmtrain.data.config import DataConfig, PairConfig
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.sources import Fields
from llmtrain.data.store import TokenRows
from llmtrain.interfaces.answer_codes import answer_of, is_undesirable, pair_of
from llmtrain.interfaces.batches import IGNORED
from tests.data.test_prepare import complaint, left_behind
from tests.data.test_sft import END, ENDED, chat, config, printed, write

Capture: TypeAlias = pytest.CaptureFixture[str]
BLOCK = 64
FLAGS = set(PairConfig.__dataclass_fields__)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pair(prompt: str, chosen: str, rejected: str) -> Fields:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def example(prompt: str, completion: str, label: object = True) -> Fields:
    return {"prompt": prompt, "completion": completion, "label": label}


def said(role: str, content: object) -> Fields:
    return {"role": role, "content": content}


def pairs(count: int, start: int = 0) -> list[Fields]:
    return [pair(f"{i}?", f"{i * i} ü.", f"no {i}") for i in range(start, start + count)]


def examples(count: int) -> list[Fields]:
    return [example(f"{i}?", f"{i * i} ü.", i % 3 > 0) for i in range(count)]


def flags_for(block_size: int, settings: dict[str, Any]) -> tuple[int, PairConfig]:
    return block_size, PairConfig(**{name: settings.pop(name) for name in FLAGS & set(settings)})


def arguments(
    folder: Path, records: list[Fields], block_size: int = BLOCK, **settings: Any
) -> tuple[DataConfig, int, PairConfig]:
    """What :func:`tokenize` takes; a setting finds its way into the dataclass that has it."""
    block_size, flags = flags_for(block_size, settings)
    given: DataConfig = config(write(folder / "judged.jsonl", records), **settings)
    return given, block_size, flags


def tokenize_pairs(
    folder: Path, records: list[Fields], block_size: int = BLOCK, **settings: Any
) -> Tokenized:
    alone = settings.pop("alone", False)
    data, block_size, flags = arguments(folder, records, block_size, **settings)
    return tokenize(data, block_size, flags, unpaired=alone)


def complain(folder: Path, records: list[Fields], **settings: Any) -> str:
    alone = settings.pop("alone", False)
    return complaint(*arguments(folder, records, **settings), unpaired=alone)


def audit_of(made: Tokenized) -> dict[str, int]:
    assert made.metadata.audit is not None
    return made.metadata.audit


def all_of(rows: TokenRows | None) -> list[dict[str, list[int]]]:
    return [] if rows is None else [rows[i] for i in range(len(rows))]


class Answer(NamedTuple):
    """One answer in a row: the tokens it has there, from which position on, and which are judged."""

    ids: list[int]
    position: int
    judged: list[int]


class Found(NamedTuple):
    """One pair in a row."""

    first: Answer
    second: Answer
    desirable: bool

    @property
    def whole(self) -> tuple[list[int], list[int]]:
        """The tokens that lead to the end of each answer, which positions link to the first's where it is shared."""
        assert self.first.position == 0
        return self.first.ids, self.first.ids[: self.second.position] + self.second.ids


def found_in(rows: TokenRows | None) -> list[Found]:
    """Every pair in the rows, read by their columns; checks that nothing else is in them."""
    found = []
    for row in all_of(rows):
        ids, labels, codes = (np.array(row[name]) for name in ("input_ids", "labels", "answers"))
        positions = np.array(row["position_ids"]) if "position_ids" in row else None
        assert (labels[codes < 0] == IGNORED).all()
        assert (labels[labels != IGNORED] == ids[labels != IGNORED]).all()
        for number in range(pair_of(codes.max()) + 1):
            answers, desirable = list[Answer](), set[bool]()
            for which in (0, 1):
                here = np.flatnonzero(answer_of(codes) == 2 * number + which)
                assert here.tolist() == [*range(here[0], here[-1] + 1)], "an answer in two pieces"
                assert labels[here[0]] == IGNORED, (
                    "the label of a token that another answer comes before"
                )
                start = 0 if positions is None else int(positions[here[0]])
                if positions is not None:
                    assert positions[here].tolist() == [*range(start, start + len(here))]
                desirable.add(not is_undesirable(codes[here[0]]))
                judged = labels[here]
                answers.append(
                    Answer(ids[here].tolist(), start, judged[judged != IGNORED].tolist())
                )
            assert len(desirable) == 1
            found.append(Found(answers[0], answers[1], desirable.pop()))
    return found


class Told(NamedTuple):
    """A pair as text: what the model meets before and with each answer, and what of it is judged."""

    texts: tuple[str, str]
    judged: tuple[str, str]
    desirable: bool


def told(rows: TokenRows | None, made: Tokenized) -> list[Told]:

    def decode(ids: list[int]) -> str:
        return str(made.tokenizer.decode(ids))

    return [
        Told(
            (decode(found.whole[0]), decode(found.whole[1])),
            (decode(found.first.judged), decode(found.second.judged)),
            found.desirable,
        )
        for found in found_in(rows)
    ]


def asked(*messages: Fields) -> str:
    """The prompt by ChatML."""
    return (
        "".join(f"<|im_start|>{m['role']}\n{m['content']}{END}\n" for m in messages)
        + "<|im_start|>assistant\n"
    )


def expected(prompt: str, first: str, second: str, desirable: bool = True) -> Told:
    before, answers = asked(said("user", prompt)), (first + END, second + END)
    return Told((before + answers[0], before + answers[1]), answers, desirable)


def expected_of(records: list[Fields]) -> list[Told]:
    """What pairs of texts become; or examples, each beside the answer of the one before, or the last."""
    if "chosen" in records[0]:
        return [expected(r["prompt"], r["chosen"], r["rejected"]) for r in records]
    return [
        expected(r["prompt"], r["completion"], records[i - 1]["completion"], r["label"])
        for i, r in enumerate(records)
    ]


# --- bad input ---

LONE = "a\ud83d"
DEEP = json.loads("[" * 50 + "]" * 50)
BAD_PAIRS: dict[str, tuple[Fields, str]] = {
    "no prompt beside texts": (
        {"chosen": "a", "rejected": "b"},
        "the record has no prompt, so chosen and rejected must be lists",
    ),
    "no chosen answer": ({"prompt": "q", "rejected": "b"}, "field 'chosen' is None, not text"),
    "no rejected answer": ({"prompt": "q", "chosen": "a"}, "field 'rejected' is None, not text"),
    "no field at all": ({}, "field 'completion' is None, not text"),
    "a null prompt": (pair("q", "a", "b") | {"prompt": None}, "the record has no prompt"),
    "a null answer": (pair("q", "a", "b") | {"rejected": None}, "field 'rejected' is None"),
    "a number for a prompt": (pair("q", "a", "b") | {"prompt": 3}, "field 'prompt' is 3, not text"),
    "a number for an answer": (
        pair("q", "a", "b") | {"chosen": 3.5},
        "field 'chosen' is 3.5, not text",
    ),
    "NaN for an answer": (
        pair("q", "a", "b") | {"chosen": float("nan")},
        "field 'chosen' is nan, not text",
    ),
    "an object for an answer": (
        pair("q", "a", "b") | {"chosen": {"text": "a"}},
        "field 'chosen' is {'text': 'a'}",
    ),
    "an empty answer": (pair("q", "", "b"), "chosen: message 1 (assistant) is empty"),
    "an answer of white space": (pair("q", "a", " \n"), "rejected: message 1 (assistant) is empty"),
    "identical answers": (pair("q", "a", "a"), "chosen and rejected are the same"),
    "the same as text and message": (
        pair("q", "a", "a") | {"rejected": [said("assistant", "a")]},
        "chosen and rejected are the same",
    ),
    "an empty list": (
        pair("q", "a", "b") | {"chosen": []},
        "chosen has no assistant message right after the prompt",
    ),
    "an empty prompt": (
        pair("q", "a", "b") | {"prompt": []},
        "the prompt is empty",
    ),
    "lists in lists": (
        pair("q", "a", "b") | {"chosen": [[said("assistant", "a")]]},
        "chosen: message 1 is [{'role'",
    ),
    "very nested lists": (pair("q", "a", "b") | {"chosen": DEEP}, "chosen: message 1 is [[[[[["),
    "a text in a list": (
        pair("q", "a", "b") | {"prompt": ["q"]},
        "prompt: message 1 is 'q', not an object",
    ),
    "a message without a role": (
        pair("q", "a", "b") | {"chosen": [{"content": "a"}]},
        "chosen: message 1 has the role None; the known roles are system",
    ),
    "an unknown role": (
        pair("q", "a", "b") | {"prompt": [said("narrator", "q")]},
        "prompt: message 1 has the role 'narrator'",
    ),
    "a role that is a number": (
        pair("q", "a", "b") | {"prompt": [said(3, "q")]},
        "message 1 has the role 3",
    ),  # type: ignore[arg-type]
    "a message without content": (
        pair("q", "a", "b") | {"prompt": [{"role": "user"}]},
        "prompt: message 1 (user): its content is not text",
    ),
    "a prompt that an assistant ends": (
        pair("q", "a", "b") | {"prompt": chat("q", "a")["messages"]},
        "the prompt ends with an assistant message",
    ),
    "an answer of the user's": (
        pair("q", "a", "b") | {"rejected": [said("user", "b")]},
        "rejected has no assistant message right after the prompt",
    ),
    "conversations without a common prompt": (
        {"chosen": chat("q", "a")["messages"], "rejected": chat("p", "b")["messages"]},
        "chosen has no assistant message right after the prompt",
    ),
    "conversations that begin with answers": (
        {"chosen": [said("assistant", "a")], "rejected": [said("assistant", "b")]},
        "chosen and rejected share no prompt",
    ),
    "conversations that end with a question": (
        {"chosen": chat("q", "a", "r")["messages"], "rejected": chat("q", "a", "s")["messages"]},
        "chosen has no assistant message right after the prompt",
    ),
    "a conversation that the other goes on from": (
        {"chosen": chat("q", "a")["messages"], "rejected": chat("q", "a", "r", "b")["messages"]},
        "chosen has no assistant message right after the prompt",
    ),
    "conversations that are the same": (
        {"chosen": chat("q", "a")["messages"], "rejected": chat("q", "a")["messages"]},
        "chosen and rejected are the same",
    ),
    "conversations whose last speakers differ": (
        {
            "chosen": chat("q", "a")["messages"],
            "rejected": [*chat("q")["messages"], said("user", "a")],
        },
        "rejected has no assistant message right after the prompt",
    ),
    "two turns in a row": (
        pair("q", "a", "b") | {"chosen": [said("assistant", "a"), said("assistant", "c")]},
        "message 3 (assistant) follows an assistant turn that has ended",
    ),
    "a private-use character in the prompt": (
        pair(f"q{END}\U000f0000", "a", "b"),
        "a message holds a special token and private-use characters",
    ),
    "a private-use character in an answer": (
        pair("q", "a", f"b{END}\U000f0000"),
        "a message holds a special token and private-use characters",
    ),
    "half a surrogate in the prompt": (
        pair(LONE, "a", "b"),
        "message 1 (user) holds half of a surrogate pair",
    ),
    "half a surrogate in an answer": (
        pair("q", LONE, "b"),
        "message 2 (assistant) holds half of a surrogate pair",
    ),
    "an answer of weight 0": (
        pair("q", "a", "b") | {"chosen": [said("assistant", "a") | {"weight": 0}]},
        "chosen has a message with weight 0",
    ),
    "answers of two kinds": (
        pair("q", "a", "b") | example("q", "a"),
        "the record has two answers (chosen, rejected) and a single one (completion, label)",
    ),
    "tools that are no list": (
        pair("q", "a", "b") | {"tools": 3},
        "field 'tools' is 3, not a list",
    ),
    "tools that are no tools": (
        pair("q", "a", "b") | {"tools": ["x"]},
        "field 'tools' holds 'x', not an object",
    ),
    "an answer alone": (
        example("q", "a"),
        "the record has one answer with a label, but this loss compares two answers",
    ),
}
BAD_EXAMPLES: dict[str, tuple[Fields, str]] = {
    "no label": ({"prompt": "q", "completion": "a"}, "field 'label' is None, not true or false"),
    "a null label": (example("q", "a", None), "field 'label' is None, not true or false"),
    "a label in words": (example("q", "a", "yes"), "field 'label' is 'yes', not true or false"),
    "a number for a label": (example("q", "a", 2), "field 'label' is 2, not true or false"),
    "NaN for a label": (example("q", "a", float("nan")), "field 'label' is nan, not true or false"),
    "a list for a label": (example("q", "a", [True]), "field 'label' is [True], not true or false"),
    "no answer": ({"prompt": "q", "label": True}, "field 'completion' is None, not text"),
    "an empty completion": (example("q", ""), "completion: message 1 (assistant) is empty"),
    "no question": ({"completion": "a", "label": True}, "the record has no prompt"),
    "messages and no question": (
        {"completion": [said("assistant", "a")], "label": True},
        "the record has no prompt",
    ),
    "a private-use character": (
        example("q", f"a{END}\U000f0000"),
        "a message holds a special token and private-use characters",
    ),
    "half a surrogate": (
        example("q", LONE),
        "message 2 (assistant) holds half of a surrogate pair",
    ),
}
EVERY_BAD_ROW = [
    pytest.param(bad, what, alone, id=f"{kind}: {name}")
    for kind, alone, cases in (("pair", False, BAD_PAIRS), ("example", True, BAD_EXAMPLES))
    for name, (bad, what) in cases.items()
]


@pytest.mark.parametrize(("bad", "what", "alone"), EVERY_BAD_ROW)
def test_a_bad_row_is_told_in_one_line_with_its_place_or_skipped_and_counted(
    tmp_path: Path, cache: Path, bad: Fields, what: str, alone: bool
) -> None:
    good = examples(4) if alone else pairs(4)
    for at in (
        2,
        4,
    ):  # in the midst, and last, where its answer would have been the first one's other
        records = [*good[:at], bad, *good[at:]]
        said = complain(tmp_path, records, alone=alone, eval_fraction=0.3)
        assert said.startswith(f"{tmp_path / 'judged.jsonl'}, line {at + 1}: ")
        assert what in said
        assert said.endswith("; fix it, or leave such records out with --on_bad_row skip.")
        assert left_behind(cache) == []
    made = tokenize_pairs(tmp_path, records, alone=alone, on_bad_row="skip")
    audit = audit_of(made)
    assert [audit[name] for name in ("records", "bad", "examples", "kept")] == [5, 1, 4, 4]
    assert Counter(told(made.train, made)) == Counter(expected_of(good))


@pytest.mark.parametrize(
    "name", ["identical answers", "a null answer", "a private-use character in an answer"]
)
@pytest.mark.parametrize(("suffix", "place"), [("parquet", "row 2"), ("csv", "line 4")])
def test_a_bad_row_of_a_table_is_told_with_its_place(
    tmp_path: Path, cache: Path, name: str, suffix: str, place: str
) -> None:
    bad, what = BAD_PAIRS[name]
    if name == "a null answer" and suffix == "csv":  # which has none
        what = "rejected: message 1 (assistant) is empty"
    path = write(tmp_path / f"a.{suffix}", [*pairs(2), bad, *pairs(2, 2)])
    assert f"{path}, {place}: {what}" in complaint(config(path), BLOCK, PairConfig())
    assert left_behind(cache) == []


GOOD = "".join(json.dumps(record) + "\n" for record in pairs(3)).encode()
BAD_FILES: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "a broken line": ("a.jsonl", GOOD + b'{"prompt": "q",\n', {}, "a.jsonl, line 4: not JSON"),
    "a line that is no object": (
        "a.jsonl",
        GOOD + b'["q", "a", "b"]\n',
        {},
        'a.jsonl, line 4: \'["q"',
    ),
    "bytes that are no UTF-8": (
        "a.jsonl",
        GOOD + b'{"prompt": "\xff"}\n',
        {},
        "a.jsonl, line 4: byte 0xff",
    ),
    "brackets without end": ("a.jsonl", GOOD + b"[" * 99_999, {}, "a.jsonl, line 4: not JSON"),
    "an empty file": (
        "a.jsonl",
        b"",
        {},
        "a.jsonl holds no records.",
    ),
    "an empty table": (
        "a.csv",
        b"prompt,chosen,rejected\n",
        {},
        "a.csv holds no records.",
    ),
    "no parquet": ("a.parquet", GOOD, {}, "a.parquet is not a parquet file"),
    "too many columns": (
        "a.csv",
        b"prompt,chosen,rejected\nq,a,b,c\n",
        {},
        "a.csv, line 2: the line has more fields than the",
    ),
    "columns without answers": (
        "a.csv",
        b"prompt,text\nq,a\n",
        {},
        "a.csv is not preference data: its first record has prompt, text. Records need",
    ),
    "columns without the rejected": (
        "a.csv",
        b"prompt,chosen\nq,a\n",
        {},
        "a.csv is not preference data: its first record has prompt, chosen. Records need",
    ),
    "text": (
        "a.txt",
        b"some words",
        {},
        "a.txt is not preference data: its first record has text. Records need",
    ),
    "conversations that nobody judged": (
        "a.jsonl",
        json.dumps(chat("q", "a")).encode(),
        {},
        "a.jsonl is not preference data: its first record has messages. Records need",
    ),
    "labels for a loss that compares two": (
        "a.jsonl",
        json.dumps(example("q", "a")).encode(),
        {},
        "a.jsonl has single answers with a label, but this loss compares two answers: use --loss_type kto",
    ),
    "examples after pairs": (
        "a.jsonl",
        GOOD + json.dumps(example("q", "a")).encode(),
        {},
        "a.jsonl, line 4: the record has one answer",
    ),
    "no good row": (
        "a.jsonl",
        json.dumps(pair("q", "a", "a")).encode(),
        {"on_bad_row": "skip"},
        "a.jsonl: the only record was skipped: ",
    ),
    "no row that can be rendered": (
        "a.jsonl",
        json.dumps(pair(LONE, "a", "b")).encode(),
        {"on_bad_row": "skip"},
        "a.jsonl: none of 1 record can be compared (0 are overlong, 1 bad, the first one ",
    ),
    "answers that are all too long": (
        "a.jsonl",
        json.dumps(pair("q", "a" * BLOCK, "b")).encode(),
        {},
        f"a.jsonl: the only pair is longer than --max_length {BLOCK}; set --max_length 128, if the model has as many positions, or --overlong truncate.",
    ),
    "answers that differ behind the cut": (
        "a.jsonl",
        json.dumps(pair("q", "a" * BLOCK + "b", "a" * BLOCK + "c")).encode(),
        {"overlong": "truncate"},
        "; --max_length 128 holds 99.5%, 0 bad, 1 without a difference)",
    ),
    "letters for tokens": (
        "a.jsonl",
        GOOD,
        {"tokenizer": "char"},
        "--tokenizer char knows only the characters of the data",
    ),
    "no such template": (
        "a.jsonl",
        GOOD,
        {"chat_template": "absent"},
        "--chat_template absent is neither chatml, none nor a readable file",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, cache: Path, case: tuple[str, bytes, dict[str, Any], str]
) -> None:
    name, content, settings, what = case
    path, given = tmp_path / name, dict(settings)
    path.write_bytes(content)
    block_size, flags = flags_for(BLOCK, given)
    message = complaint(config(path, **given), block_size, flags)
    assert what in message
    assert str(path) in message or path.name not in what
    assert left_behind(cache) == []


def test_an_answer_that_the_template_shows_otherwise_than_it_prompts_for_is_a_bad_row(
    tmp_path: Path, cache: Path
) -> None:
    template = tmp_path / "counted"
    template.write_text(
        "{{ messages | length }}{% for m in messages %}{{ m.content + '|' }}{% endfor %}"
    )
    said = complain(tmp_path, pairs(2), chat_template=str(template))
    assert (
        "judged.jsonl, line 1: the chat template shows the answer differently from the way it prompts for it; fix"
        in said
    )
    assert left_behind(cache) == []


# --- formats ---

LINES = [("one", "1", "eins"), ("two ü", "2", "zwei 🙂"), ("three", " 3\n", "drei")]


def messages_of(question: str, chosen: str, rejected: str) -> Fields:
    return {
        "prompt": [said("user", question)],
        "chosen": [said("assistant", chosen)],
        "rejected": [said("assistant", rejected)],
    }


def conversations_of(question: str, chosen: str, rejected: str) -> Fields:
    return {
        "chosen": chat(question, chosen)["messages"],
        "rejected": chat(question, rejected)["messages"],
    }


def repeated_of(question: str, chosen: str, rejected: str) -> Fields:
    return {"prompt": [said("user", question)], **conversations_of(question, chosen, rejected)}


def sharegpt_of(question: str, chosen: str, rejected: str) -> Fields:
    asks = {"from": "human", "value": question}
    answers = {"chosen": chosen, "rejected": rejected}
    return {name: [asks, {"from": "gpt", "value": answer}] for name, answer in answers.items()}


def with_more_of(question: str, chosen: str, rejected: str) -> Fields:
    return {
        "id": 7,
        **pair(question, chosen, rejected),
        "label": "unread",
        "tools": None,
        "score": 0.5,
    }


FORMATS = {
    "texts": pair,
    "messages": messages_of,
    "a text and messages": lambda q, a, b: messages_of(q, a, b) | {"prompt": q},
    "conversations": conversations_of,
    "conversations beside their prompt": repeated_of,
    "shareGPT's conversations": sharegpt_of,
    "other columns": with_more_of,
}


@pytest.mark.parametrize(
    ("format", "suffix"),
    [*itertools.product(FORMATS, ("jsonl", "parquet")), ("texts", "csv"), ("other columns", "csv")],
)
def test_every_format_of_pairs_gives_the_same_rows(
    tmp_path: Path, capsys: Capture, format: str, suffix: str
) -> None:
    reference = tokenize_pairs(tmp_path, [pair(*line) for line in LINES])
    assert sorted(told(reference.train, reference)) == sorted(expected(*line) for line in LINES)
    path = write(tmp_path / f"other.{suffix}", [FORMATS[format](*line) for line in LINES])
    made = tokenize(config(path), BLOCK, PairConfig())
    assert all_of(made.train) == all_of(reference.train)
    assert made.metadata.data_sha256 == reference.metadata.data_sha256
    assert (made.metadata.task, made.metadata.records) == ("preferences", 3)
    assert "preference training: the records are pairs\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("suffix", "kind", "whole"),
    [
        *itertools.product(("jsonl", "parquet"), (bool, int, float), (False, True)),
        ("csv", bool, False),
        ("csv", int, False),
    ],
)
def test_every_format_of_examples_gives_the_same_rows(
    tmp_path: Path, capsys: Capture, suffix: str, whole: bool, kind: type
) -> None:
    records = examples(5)
    reference = tokenize_pairs(tmp_path, records, alone=True)
    assert Counter(told(reference.train, reference)) == Counter(expected_of(records))
    for record in records if whole else ():
        record["prompt"] = [said("user", record["prompt"])]
        record["completion"] = [said("assistant", record["completion"])]
    path = write(
        tmp_path / f"other.{suffix}",
        [record | {"label": kind(record["label"])} for record in records],
    )
    made = tokenize(config(path), BLOCK, PairConfig(), unpaired=True)
    assert all_of(made.train) == all_of(reference.train)
    assert made.metadata.data_sha256 == reference.metadata.data_sha256
    assert "preference training: the records are labelled_answers\n" in capsys.readouterr().out


# --- what rows hold ---

SYSTEM, SEVERAL = said("system", "Be short."), chat("why", "so", "and?")["messages"]
LONG_TALK = {"prompt": [SYSTEM, *SEVERAL], "chosen": "first ü", "rejected": "second"}
COMMON = pair("q", "begins alike, ends so", "begins alike, ends otherwise")


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
@pytest.mark.parametrize(
    ("share", "packing"), [(True, True), (False, True), (True, False), (False, False)], ids=str
)
def test_what_is_judged_is_each_answer_with_its_end(
    tmp_path: Path, tokenizer: str, share: bool, packing: bool
) -> None:
    records = [*pairs(6), COMMON, LONG_TALK]
    settings = {"tokenizer": tokenizer, "share_prompts": share, "packing": packing}
    made = tokenize_pairs(tmp_path, records, 150, **settings)
    wanted = expected_of(records[:-1])
    before, answers = asked(SYSTEM, *SEVERAL), (f"first ü{END}", f"second{END}")
    wanted.append(Told((before + answers[0], before + answers[1]), answers, True))
    assert Counter(told(made.train, made)) == Counter(wanted)
    assert (made.is_packed, made.metadata.shared) == (packing, share and packing)
    assert (made.metadata.train_rows < len(records)) == packing
    last_pairs = [pair_of(max(row["answers"])) for row in all_of(made.train)]
    assert made.metadata.pairs == max(last_pairs) + 1
    labels = np.array(made.train.dataset["labels"])
    assert labels.shape == (made.metadata.train_rows, 300)
    assert made.metadata.train_tokens == (labels != IGNORED).sum() == audit_of(made)["targets"]
    if not packing:  # each answer has half of a row
        assert all(row["answers"].index(1) == 150 for row in all_of(made.train))


@pytest.mark.parametrize("alone", [False, True])
def test_both_answers_share_a_prompt_but_for_its_last_token_with_which_each_begins(
    tmp_path: Path, alone: bool
) -> None:
    records = examples(5) if alone else [*pairs(4), COMMON]
    made, apart = (
        tokenize_pairs(tmp_path, records, alone=alone, share_prompts=share)
        for share in (True, False)
    )
    encode = made.tokenizer.backend_tokenizer.encode
    prompts = {tuple(encode(asked(said("user", record["prompt"]))).ids) for record in records}
    for found in found_in(made.train):
        prompt = found.first.ids[: found.second.position + 1]
        assert tuple(prompt) in prompts
        assert found.second.ids == prompt[-1:] + found.second.judged
        assert found.first.ids == prompt + found.first.judged
    for found in found_in(apart.train):
        assert found.second.position == 0
        assert tuple(found.second.ids[: -len(found.second.judged)]) in prompts
    assert Counter(told(made.train, made)) == Counter(told(apart.train, apart))


def test_an_answer_of_several_turns_is_judged_but_not_what_others_say_in_it(tmp_path: Path) -> None:
    turns = [said("assistant", "one"), said("user", "go on"), said("assistant", "two")]
    made = tokenize_pairs(tmp_path, [{"prompt": "q", "chosen": turns, "rejected": "no"}], 150)
    (found,) = told(made.train, made)
    assert found.judged == (f"one{END}two{END}", f"no{END}")
    assert f"user\ngo on{END}" in found.texts[0]


def test_of_what_generation_marks_in_a_template_that_alone_is_judged_and_the_data_hash_tells(
    tmp_path: Path,
) -> None:
    hashes = set()
    for name, template, judged in [
        ("whole", ENDED, ("a<|endoftext|>", "b<|endoftext|>")),
        (
            "ends",
            ENDED.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}"),
            None,
        ),
    ]:
        (tmp_path / name).write_text(template)
        made = tokenize_pairs(tmp_path, [pair("q", "a", "b")], chat_template=str(tmp_path / name))
        (found,) = told(made.train, made)
        assert found.judged == (judged or ("<|endoftext|>", "<|endoftext|>"))
        assert [text[-len("a<|endoftext|>") :] for text in found.texts] == [
            "a<|endoftext|>",
            "b<|endoftext|>",
        ]
        hashes.add(made.metadata.data_sha256)
    assert len(hashes) == 2


def test_tools_are_shown_to_both_answers(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    given = [pair("q", "a", "b") | {"tools": form} for form in (tools, json.dumps(tools))]
    first, second = told((made := tokenize_pairs(tmp_path, given, 200)).train, made)
    assert first == second
    assert all('"name": "add"' in text for text in first.texts)


# --- answers that are judged alone ---


def test_an_answer_alone_stands_beside_that_of_the_record_before(tmp_path: Path) -> None:
    records = examples(7)
    made = tokenize_pairs(tmp_path, records, alone=True)
    assert Counter(told(made.train, made)) == Counter(
        [
            expected("0?", "0 ü.", "36 ü.", False),
            *(
                expected(f"{i}?", f"{i * i} ü.", f"{(i - 1) ** 2} ü.", i % 3 > 0)
                for i in range(1, 7)
            ),
        ]
    )


def test_pairs_for_a_loss_of_single_answers_are_two_examples_each(tmp_path: Path) -> None:
    made = tokenize_pairs(tmp_path, pairs(3), alone=True)
    wanted = []
    for i in range(3):
        other = f"{(i - 1) % 3 * ((i - 1) % 3)} ü."
        wanted += [
            expected(f"{i}?", f"{i * i} ü.", other),
            expected(f"{i}?", f"no {i}", other, False),
        ]
    assert Counter(told(made.train, made)) == Counter(wanted)
    audit = audit_of(made)
    assert [audit[name] for name in ("records", "examples", "kept")] == [3, 6, 6]


def test_an_answer_alone_and_the_other_are_on_one_side(tmp_path: Path) -> None:
    records = examples(30)
    made = tokenize_pairs(tmp_path, records, alone=True, eval_fraction=0.3)
    sides = [told(made.train, made), told(made.eval, made)]
    for side in sides:
        texts = {found.texts[0] for found in side}
        kept = [
            record
            for record in records
            if expected(record["prompt"], record["completion"], "").texts[0] in texts
        ]
        assert Counter(side) == Counter(expected_of(kept))
    assert sum(map(len, sides)) == 30


def test_only_the_answer_that_is_judged_is_overlong_and_the_other_is_cut(tmp_path: Path) -> None:
    records = [example("p", "short"), example("q", "x" * 30), example("a longer question", "y")]
    block_size = len(tokens_of(expected("q", "x" * 30, "").texts[0]))
    made = tokenize_pairs(tmp_path, records, block_size, alone=True, overlong="error")
    (cut,) = [found for found in told(made.train, made) if "longer" in found.texts[0]]
    assert len(tokens_of(cut.texts[1])) == block_size
    assert cut.judged == (f"y{END}", "x" * len(cut.judged[1]))
    assert audit_of(made)["overlong"] == 0


# --- overlong answers ---


def tokens_of(text: str) -> list[int | str]:
    """What the tokenizer ``byte`` makes of it."""
    pieces = re.split(r"(<\|im_start\|>|<\|im_end\|>)", text)
    return [
        token for i, piece in enumerate(pieces) for token in ([piece] if i % 2 else piece.encode())
    ]


ROOM = len(tokens_of(asked(said("user", "q")))) + len("x" * 20) + 1


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
@pytest.mark.parametrize("overlong", ["drop", "truncate", "error"])
@pytest.mark.parametrize("room", [ROOM, ROOM - 1])
def test_an_answer_is_overlong_from_one_token_more_than_the_block(
    tmp_path: Path, cache: Path, longer: str, overlong: str, room: int
) -> None:
    big = pair("q", "a", "b") | {longer: "x" * 20}
    records = [pair("0", "1", "2"), big, pair("3", "4", "5")]
    if room < ROOM and overlong == "error":
        said = complain(tmp_path, records, block_size=room, overlong=overlong)
        assert said == (
            f"{tmp_path / 'judged.jsonl'}, line 2: an answer with its prompt has {ROOM} tokens, more "
            f"than --max_length {room} allows; raise it, or set --overlong drop or truncate."
        )
        assert left_behind(cache) == []
        return
    made = tokenize_pairs(tmp_path, records, room, overlong=overlong)
    by_judged = {found.judged: found.texts for found in told(made.train, made)}
    wanted = {found.judged: found.texts for found in expected_of(records)}
    if room < ROOM:
        first, second = wanted.pop(next(judged for judged in wanted if "xx" in "".join(judged)))
        if overlong == "truncate":
            first, second = (
                text.removesuffix(END) if "xx" in text else text for text in (first, second)
            )
            wanted[first.partition("assistant\n")[2], second.partition("assistant\n")[2]] = (
                first,
                second,
            )
    assert by_judged == wanted
    assert audit_of(made)["overlong"] == (room < ROOM)


# --- what is held out ---


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_no_prompt_is_on_both_sides(tmp_path: Path, alone: bool, fraction: float) -> None:
    makes = example if alone else pair
    records = [
        makes(f"{i}?", f"{i} {k}", *([k != 1] if alone else [f"-{i} {k}"]))
        for k in range(3)
        for i in range(40)
    ]
    for record in records[40:80]:
        record["prompt"] = [said("user", record["prompt"])]  # the same in another form
    made = tokenize_pairs(tmp_path, records, alone=alone, eval_fraction=fraction)
    train, held_out = (
        Counter(found.texts[0].partition(END)[0] for found in told(rows, made))
        for rows in (made.train, made.eval)
    )
    assert not set(train) & set(held_out)
    assert {*train.values()} == {*held_out.values()} == {3}
    assert len(train) + len(held_out) == 40
    assert abs(len(held_out) / 40 - fraction) < 0.12
    assert (made.metadata.records, made.metadata.eval_records) == (120, 3 * len(held_out))


def test_the_sides_are_the_same_however_the_rows_are_made_and_whatever_else_there_is(
    tmp_path: Path,
) -> None:
    def side(records: list[Fields], **settings: Any) -> set[str]:
        made = tokenize_pairs(tmp_path, records, eval_fraction=0.2, **settings)
        return {found.texts[0] for found in told(made.eval, made)}

    usual = side(pairs(40))
    assert 0 < len(usual) < 20
    assert side(pairs(40)[::-1]) == usual
    assert side(pairs(40), packing=False) == side(pairs(40), share_prompts=False) == usual
    assert side(pairs(40), tokenizer="bpe:300") == usual
    assert side(pairs(80)) > usual


def test_bytes_held_out_are_those_of_the_answers_and_a_question_is_one_of_them(
    tmp_path: Path,
) -> None:
    made = tokenize_pairs(tmp_path, pairs(20), eval_fraction=0.3)
    held_out = told(made.eval, made)
    said = "".join(itertools.chain(*(found.judged for found in held_out)))
    assert made.metadata.eval_bytes == len(said.replace(END, "").encode()) > 0
    assert made.metadata.eval_tokens == made.metadata.eval_bytes + said.count(END)
    question = str(made.tokenizer.decode(made.eval_prompt() or []))
    assert any(found.texts[0] == question + found.judged[0] for found in held_out)


# --- the audit ---


def some_records(alone: bool) -> list[Fields]:
    """Good ones, and each kind that is left out, in some order."""
    draw = random.Random(5)

    def text(most: int = 14) -> str:
        return "".join(draw.choice("abü漢 ") for _ in range(draw.randint(0, most))) + "."

    if alone:
        found = [example(text(), text(), draw.random() < 0.6) for _ in range(40)]
        found += [example("q", "x" * draw.randint(10, 99)) for _ in range(6)] + [
            example("x" * 99, "a")
        ]
        found += [
            example("q", f"a{END}\U000f0000"),
            example("q", LONE),
            example("q", "", False),
            example("q", "a", "yes"),
        ]
    else:
        found = [pair(text(), text(), text() + "-") for _ in range(40)]
        found += [pair("q", "x" * draw.randint(10, 99), text()) for _ in range(6)]
        found += [
            pair("q", "x" * 99 + "1", "x" * 99 + "2"),
            pair("x" * 99, "a", "b"),
        ]  # have no difference when cut
        found += [
            pair(f"q{END}\U000f0000", "a", "b"),
            pair("q", "a", LONE),
            pair("q", "a", "a"),
            pair("q", "", "b"),
        ]
    draw.shuffle(found)
    return found


def by_brute_force(
    records: list[Fields], overlong: str, alone: bool, shares: bool
) -> dict[str, int]:
    """The counts, from the texts of the records."""
    count: Counter[str] = Counter(records=len(records))
    good = []
    for record in records:
        values = [record[name] for name in ("prompt", "completion" if alone else "chosen")]
        values += [] if alone else [record["rejected"]]
        texts = "".join(values)
        same = not alone and values[1] == values[2]
        bad = (
            END in texts
            or LONE in texts
            or "" in values[1:]
            or same
            or record.get("label") == "yes"
        )
        count["bad"] += bad
        good += [] if bad else [record]
    for wanted in expected_of(good):
        count["examples"] += 1
        documents = [tokens_of(text) for text in wanted.texts]
        prompt = len(documents[0]) - len(tokens_of(wanted.judged[0]))
        too_long = max(map(len, documents[:1] if alone else documents)) > BLOCK
        count["overlong"] += too_long
        if too_long and overlong == "drop":
            count["lost_tokens"] += sum(map(len, documents))
            continue
        if too_long:
            count["lost_tokens"] += sum(max(len(document) - BLOCK, 0) for document in documents)
        documents = [document[:BLOCK] for document in documents]
        judged = [max(len(document) - prompt, 0) for document in documents]
        if not judged[0] or (not alone and (not judged[1] or documents[0] == documents[1])):
            count["untrainable"] += 1
            if too_long:
                count["lost_tokens"] += sum(map(len, documents))
            continue
        count["kept"] += 1
        count["tokens"] += sum(map(len, documents))
        count["targets"] += sum(judged)
        count["shared_tokens"] += (min(prompt, len(documents[1])) - 1) * shares
    return count


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("share", "packing"), [(True, True), (False, True), (True, False)])
def test_the_audit_is_what_brute_force_counts(
    tmp_path: Path, overlong: str, alone: bool, share: bool, packing: bool
) -> None:
    records = some_records(alone)
    settings: dict[str, Any] = {
        "overlong": overlong,
        "alone": alone,
        "share_prompts": share,
        "packing": packing,
    }
    made = tokenize_pairs(tmp_path, records, on_bad_row="skip", **settings)
    facts, wanted = made.metadata, by_brute_force(records, overlong, alone, share and packing)
    rows = {"rows": len(made.train), "positions": len(made.train) * 2 * BLOCK}
    unit = "answer" if alone else "pair"
    assert facts.audit == {**vars(Audit(unit, truncates=overlong == "truncate")), **wanted, **rows}
    assert min(wanted["bad"], wanted["overlong"], wanted["kept"], wanted["targets"]) > 3
    assert bool(wanted["untrainable"]) == (overlong == "truncate")
    assert bool(wanted["shared_tokens"]) == (share and packing)
    assert wanted["kept"] == len(found_in(made.train))
    assert facts.train_tokens == wanted["targets"]


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_the_audit_is_told_in_two_lines_and_that_of_the_other_side_where_it_lacks_something(
    tmp_path: Path, capsys: Capture, overlong: str
) -> None:
    records = [*pairs(30), *(pair(f"{i}?", "x" * 99, "y") for i in range(30)), pair("q", "a", "a")]
    made = tokenize_pairs(
        tmp_path, records, on_bad_row="skip", eval_fraction=0.4, overlong=overlong
    )
    train, held_out = audit_of(made), made.metadata.eval_audit or {}
    assert train["records"] + held_out["records"] == 61
    assert (train["bad"], held_out["bad"]) == (1, 0)
    assert train["overlong"] + held_out["overlong"] == 30
    word = {"drop": "dropped", "truncate": "truncated"}[overlong]
    words = [
        f"{word} ({side['lost_tokens'] / (side['lost_tokens'] + side['tokens']):.1%} of the tokens)"
        for side in (train, held_out)
    ]
    out = capsys.readouterr().out
    held, kept, of = train["tokens"] - train["shared_tokens"], train["kept"], train["examples"]
    for line in (
        f"audit     {kept} of {of} kept: {train['overlong']} overlong {words[0]}, 0 without a difference and 1 bad one "
        "left out",
        f"audit     {train['targets']} of {train['tokens']:,} tokens are targets "
        f"({train['targets'] / train['tokens']:.1%}), {train['shared_tokens']:,} positions saved by sharing prompts "
        f"({train['shared_tokens'] / train['tokens']:.1%}), {train['rows']} rows are {held / train['positions']:.1%} full",
        f"eval      {held_out['kept']} of {held_out['examples']} kept: {held_out['overlong']} overlong {words[1]}, 0 without a "
        "difference and 0 bad ones left out",
    ):
        assert f"{line}\n" in out
    tokenize_pairs(tmp_path, records, on_bad_row="skip", eval_fraction=0.4, overlong=overlong)
    assert len(printed(capsys, "audit")) == 2


def test_what_messages_hold_besides_their_words_is_counted_and_told(
    tmp_path: Path, capsys: Capture
) -> None:
    special = pair(f"q{END}", f"a{END}", "b")
    fields = {
        "prompt": [said("user", "q") | {"at": 1, "weight": 0}],
        "chosen": [said("assistant", "a") | {"at": 1, "weight": 1}],
        "rejected": [said("assistant", "b") | {"score": 1}],
    }
    made = tokenize_pairs(tmp_path, [special, fields])
    audit = audit_of(made)
    assert audit["special_as_text"] == 2
    assert audit["unread_fields"] == {"at": 2, "score": 1}
    assert printed(capsys, "audit")[2:] == [
        "2 special tokens in messages are encoded as text",
        "some messages have fields that are not read here: at (2), score (1); the chat template "
        "gets them",
    ]


def test_the_audit_of_several_sources_is_their_sum(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", pairs(3)), write(tmp_path / "b.parquet", pairs(5, 50))]
    one, other, both = (
        tokenize(config(*of), BLOCK, PairConfig()) for of in (paths[:1], paths[1:], paths)
    )
    total = total_audit([Audit(**audit_of(one)), Audit(**audit_of(other))])
    assert audit_of(both) == vars(total)
    assert both.metadata.source_rows == [one.metadata.train_rows, other.metadata.train_rows]


# --- found again, or not ---


def test_what_was_tokenised_is_found_again_without_reading_the_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    first = tokenize_pairs(tmp_path, pairs(20), eval_fraction=0.2)
    before = capsys.readouterr().out
    assert "; tokenised\n" in before

    def unread(*_: Any) -> None:
        raise AssertionError("the pairs were read again")

    monkeypatch.setattr(tokenizing, "Records", unread)
    second = tokenize_pairs(tmp_path, pairs(20), eval_fraction=0.2)
    assert capsys.readouterr().out == before.replace("; tokenised\n", "; from the cache\n")
    assert second.metadata == first.metadata
    assert all_of(second.train) == all_of(first.train)


def test_a_change_of_anything_that_shapes_the_rows_makes_new_ones_and_of_nothing_else(
    tmp_path: Path, capsys: Capture
) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"records": pairs(9)},
        {"records": pairs(8)[::-1]},
        {"block_size": BLOCK + 1},
        {"eval_fraction": 0.5},
        {"packing": False},
        {"share_prompts": False},
        {"overlong": "truncate"},
        {"on_bad_row": "skip"},
        {"tokenizer": "bpe:300"},
        {"chat_template": "chatml"},
        {"alone": True},
    ]
    for outcome in ("tokenised", "from the cache"):
        for variant in variants:
            tokenize_pairs(tmp_path, **{"records": pairs(8)} | variant)
            assert f"; {outcome}\n" in capsys.readouterr().out, variant
    tokenize_pairs(tmp_path, pairs(8), global_batch_size=7, per_device_train_batch_size=3)
    moved = (tmp_path / "judged.jsonl").rename(tmp_path / "elsewhere.jsonl")
    tokenize(config(moved), BLOCK, PairConfig())
    assert capsys.readouterr().out.count("; from the cache\n") == 2


def test_the_data_hash_is_of_the_tokens_and_what_is_judged_and_the_rows(tmp_path: Path) -> None:
    def hash_of(records: list[Fields], **variant: Any) -> str:
        digest: str = tokenize_pairs(tmp_path, records, **variant).metadata.data_sha256
        return digest

    usual, swapped = (
        pairs(8),
        [r | {"chosen": r["rejected"], "rejected": r["chosen"]} for r in pairs(8)],
    )
    same = [
        hash_of(usual),
        hash_of(usual, overlong="truncate", on_bad_row="skip"),
        hash_of([*usual, pair("q", "a", "a")], on_bad_row="skip"),
        hash_of([{"more": 1, **messages_of(*record.values())} for record in usual]),
    ]
    others = [
        hash_of(swapped),
        hash_of(usual[::-1]),
        hash_of(pairs(9)),
        hash_of([*usual[:-1], usual[-1] | {"rejected": "another"}]),
        hash_of([*usual[:-1], usual[-1] | {"prompt": "another"}]),
        hash_of(usual, packing=False),
        hash_of(usual, share_prompts=False),
        hash_of(usual, block_size=BLOCK + 1),
        hash_of(usual, eval_fraction=0.5),
        hash_of(usual, alone=True),
        hash_of(examples(8), alone=True),
        hash_of([*examples(7), example("7?", "49 ü.", False)], alone=True),  # another label
    ]
    assert len({*same}) == 1
    assert len({*same, *others}) == 1 + len(others)
