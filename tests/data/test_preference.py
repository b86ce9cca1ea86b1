"""Preference data as rows: the answers, their prompts, what is left out, and the cache."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch

from llmtrain.data.audit import Audit
from llmtrain.data.config import PairConfig
from llmtrain.data.readers import Fields
from llmtrain.data.shards import TokenRows
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import (
    IGNORED,
    answer_code,
    answer_of,
    is_second,
    is_undesirable,
    pair_of,
)
from tests.data.chat_records import (
    CHATML_END,
    audit_of,
    chat_record,
    multiple_of_64,
    tokenize_rows,
)
from tests.data.odd_templates import (
    MARKS_ANSWERS_AND_ENDS,
    MARKS_ENDS,
    write_template,
)
from tests.data.preparation import left_behind, write_records

pytestmark = pytest.mark.usefixtures("cache")

Capture: TypeAlias = pytest.CaptureFixture[str]
MAX_LENGTH = 64
EOS = "<|endoftext|>"

# A special token cannot be told from text if the message has private-use characters, too.
AMBIGUOUS = f"{CHATML_END}\U000f0000"
HALF_OF_A_SURROGATE_PAIR = "a\ud83d"

for_both_kinds = pytest.mark.parametrize(
    "unpaired",
    [pytest.param(False, id="pairs"), pytest.param(True, id="labelled-answers")],
)


# --- records


def pair(prompt: object, chosen: object, rejected: object) -> Fields:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def labelled_answer(prompt: object, completion: object, label: object = True) -> Fields:
    return {"prompt": prompt, "completion": completion, "label": label}


def message(role: object, content: object) -> Fields:
    return {"role": role, "content": content}


def messages(*contents: str) -> list[Fields]:
    """Return messages of the user and the assistant in turn."""
    result: list[Fields] = chat_record(*contents)["messages"]
    return result


def pairs(count: int, start: int = 0) -> list[Fields]:
    return [pair(f"{i}?", f"{i * i} ü.", f"no {i}") for i in range(start, start + count)]


def labelled_answers(count: int) -> list[Fields]:
    """Return single answers. The label of every third one is false."""
    return [labelled_answer(f"{i}?", f"{i * i} ü.", label=i % 3 > 0) for i in range(count)]


def some_records(count: int, unpaired: bool) -> list[Fields]:
    return labelled_answers(count) if unpaired else pairs(count)


# --- tokenizing


def tokenize_file(path: Path, max_length: int = MAX_LENGTH, **settings: Any) -> Tokenized:
    return tokenize_rows(PairConfig, path, max_length=max_length, **settings)


def tokenize_records(folder: Path, records: list[Fields], **settings: Any) -> Tokenized:
    return tokenize_file(write_records(folder / "preferences.jsonl", records), **settings)


def refusal(path: Path, **settings: Any) -> str:
    """Return the message, of one line, with which a file is refused."""
    with pytest.raises(UserError) as refused:
        tokenize_file(path, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- reading rows back


class StoredAnswer(NamedTuple):
    """An answer in a row.

    Attributes:
        tokens: the tokens in the row that belong to it.
        position: the position of the first of these.
        targets: the tokens among them that are labels.
    """

    tokens: list[int]
    position: int
    targets: list[int]


class StoredPair(NamedTuple):
    """Two answers in a row."""

    first: StoredAnswer
    second: StoredAnswer
    is_first_desirable: bool

    @property
    def sequences(self) -> tuple[list[int], list[int]]:
        """The tokens up to the end of each answer. The positions tell if a prompt is shared."""
        assert self.first.position == 0
        shared_prompt = self.first.tokens[: self.second.position]
        return self.first.tokens, shared_prompt + self.second.tokens


def stored_answer(row: dict[str, list[int]], number: int) -> StoredAnswer:
    """Return an answer, given its number in the row, and check that its columns agree."""
    indices = np.flatnonzero(answer_of(np.array(row["answers"])) == number)
    section = slice(indices[0], indices[-1] + 1)
    tokens = row["input_ids"][section]
    labels = row["labels"][section]
    assert len(indices) == len(tokens), "the tokens of an answer follow each other"
    assert labels[0] == IGNORED, "another answer may come before the first token"

    position = 0
    if "position_ids" in row:
        positions = row["position_ids"][section]
        position = positions[0]
        assert positions == [*range(position, position + len(tokens))]

    targets = [label for label in labels if label != IGNORED]
    return StoredAnswer(tokens, position, targets)


def stored_pairs(rows: TokenRows | None) -> list[StoredPair]:
    """Return all pairs in the rows, and check that these hold no other labels."""
    result = []
    for row in rows or []:
        ids = np.array(row["input_ids"])
        labels = np.array(row["labels"])
        codes = np.array(row["answers"])
        assert (labels[codes < 0] == IGNORED).all()
        assert ((labels == IGNORED) | (labels == ids)).all()

        for number in range(pair_of(codes.max()) + 1):
            are_undesirable = is_undesirable(codes[pair_of(codes) == number])
            assert len(set(are_undesirable)) == 1
            stored = StoredPair(
                first=stored_answer(row, 2 * number),
                second=stored_answer(row, 2 * number + 1),
                is_first_desirable=not are_undesirable[0],
            )
            result.append(stored)
    return result


class PairText(NamedTuple):
    """Two answers as text.

    Attributes:
        sequences: each answer after its prompt.
        targets: the targets of each.
        is_first_desirable: whether the first answer is desirable.
    """

    sequences: tuple[str, str]
    targets: tuple[str, str]
    is_first_desirable: bool = True


def pair_texts(rows: TokenRows | None, tokenized: Tokenized) -> list[PairText]:
    """Return all pairs in the rows as text."""
    decode = tokenized.tokenizer.decode
    texts = []
    for stored in stored_pairs(rows):
        first_sequence, second_sequence = stored.sequences
        text = PairText(
            sequences=(decode(first_sequence), decode(second_sequence)),
            targets=(decode(stored.first.targets), decode(stored.second.targets)),
            is_first_desirable=stored.is_first_desirable,
        )
        texts.append(text)
    return texts


# --- the text that is expected


def chatml_prompt(messages: list[Fields]) -> str:
    turns = [f"<|im_start|>{m['role']}\n{m['content']}{CHATML_END}\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def answers_after(
    prompt: list[Fields], first: str, second: str, is_first_desirable: bool = True
) -> PairText:
    """Return two answers to some messages, in ChatML."""
    before = chatml_prompt(prompt)
    return PairText(
        sequences=(before + first + CHATML_END, before + second + CHATML_END),
        targets=(first + CHATML_END, second + CHATML_END),
        is_first_desirable=is_first_desirable,
    )


def answers_to(
    question: object, first: str, second: str, is_first_desirable: bool = True
) -> PairText:
    """Return two answers to a question, in ChatML."""
    prompt = [message("user", question)]
    return answers_after(prompt, first, second, is_first_desirable)


def expected_texts(records: list[Fields]) -> list[PairText]:
    """Return the text of pairs, or of labelled answers. All their fields are text."""
    if "chosen" in records[0]:
        return [answers_to(r["prompt"], r["chosen"], r["rejected"]) for r in records]

    texts = []
    for i, record in enumerate(records):
        previous = records[i - 1]  # the first answer is compared with the last one
        text = answers_to(
            record["prompt"],
            record["completion"],
            previous["completion"],
            is_first_desirable=record["label"],
        )
        texts.append(text)
    return texts


# --- rows

CONVERSATION = [message("system", "Be short."), *messages("why", "so", "and?")]
ALIKE_AT_FIRST = pair("q", "begins alike, ends so", "begins alike, ends otherwise")

for_all_rows = pytest.mark.parametrize(
    ("share_prompts", "packing"),
    [
        pytest.param(True, True, id="shared-prompts"),
        pytest.param(False, True, id="packed"),
        pytest.param(True, False, id="unpacked-with-share_prompts"),
        pytest.param(False, False, id="unpacked"),
    ],
)


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
@for_all_rows
def test_the_targets_are_each_answer_and_its_end_token(
    tmp_path: Path, tokenizer: str, share_prompts: bool, packing: bool
) -> None:
    texts = [*pairs(6), ALIKE_AT_FIRST]

    tokenized = tokenize_records(
        tmp_path,
        [*texts, pair(CONVERSATION, "first ü", "second")],
        max_length=150,
        tokenizer=tokenizer,
        share_prompts=share_prompts,
        packing=packing,
    )

    expected = [*expected_texts(texts), answers_after(CONVERSATION, "first ü", "second")]
    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected)

    metadata = tokenized.metadata
    assert tokenized.is_packed == packing
    assert metadata.shared == (share_prompts and packing)
    assert (metadata.train_rows < 8) == packing
    labels = tokenized.train.column("labels")
    assert labels.shape == (metadata.train_rows, 2 * 150)
    assert metadata.train_tokens == audit_of(tokenized).targets == (labels != IGNORED).sum()
    codes = tokenized.train.column("answers")
    assert metadata.pairs == pair_of(codes.max()) + 1


def test_without_packing_each_answer_has_half_of_a_row(tmp_path: Path) -> None:
    tokenized = tokenize_records(tmp_path, pairs(4), packing=False)

    second_answers = [row["answers"].index(1) for row in tokenized.train]
    assert second_answers == [MAX_LENGTH] * 4


@for_both_kinds
def test_a_shared_prompt_is_stored_once_except_for_its_last_token(
    tmp_path: Path, unpaired: bool
) -> None:
    records = some_records(5, unpaired)
    if not unpaired:
        records.append(ALIKE_AT_FIRST)

    tokenized = tokenize_records(tmp_path, records, unpaired=unpaired, share_prompts=True)

    prompts = [chatml_prompt([message("user", record["prompt"])]) for record in records]
    encode = tokenized.tokenizer.encode
    prompt_ids = [encode(prompt, add_special_tokens=False) for prompt in prompts]
    for stored in stored_pairs(tokenized.train):
        prompt = stored.first.tokens[: stored.second.position + 1]
        assert prompt in prompt_ids
        assert stored.first.tokens == prompt + stored.first.targets
        assert stored.second.tokens == prompt[-1:] + stored.second.targets


def test_user_messages_inside_an_answer_are_no_targets(tmp_path: Path) -> None:
    turns = [message("assistant", "one"), message("user", "go on"), message("assistant", "two")]

    tokenized = tokenize_records(tmp_path, [pair("q", turns, "no")], max_length=150)

    (text,) = pair_texts(tokenized.train, tokenized)
    assert text.targets == (f"one{CHATML_END}two{CHATML_END}", f"no{CHATML_END}")
    assert f"user\ngo on{CHATML_END}" in text.sequences[0]


def test_generation_marks_limit_the_targets_and_change_the_data_hash(tmp_path: Path) -> None:
    records = [pair("q", "a", "b")]

    answers = tokenize_records(
        tmp_path, records, chat_template=write_template(tmp_path, MARKS_ANSWERS_AND_ENDS)
    )
    ends = tokenize_records(tmp_path, records, chat_template=write_template(tmp_path, MARKS_ENDS))

    (answer_text,) = pair_texts(answers.train, answers)
    (end_text,) = pair_texts(ends.train, ends)
    assert answer_text.targets == (f"a{EOS}", f"b{EOS}")
    assert end_text.targets == (EOS, EOS)
    assert end_text.sequences == answer_text.sequences
    assert end_text.sequences[0].endswith(f"a{EOS}")
    assert ends.metadata.data_sha256 != answers.metadata.data_sha256


def test_the_prompt_of_both_answers_has_the_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    as_list = pair("q", "a", "b") | {"tools": tools}
    as_json = pair("q", "a", "b") | {"tools": json.dumps(tools)}

    tokenized = tokenize_records(tmp_path, [as_list, as_json], max_length=200)

    first, second = pair_texts(tokenized.train, tokenized)
    assert first == second
    assert '"name": "add"' in first.sequences[0]
    assert '"name": "add"' in first.sequences[1]


# --- single answers


def test_a_pair_is_two_single_answers_if_the_loss_takes_these(tmp_path: Path) -> None:
    records = [pair("Red?", "Yes.", "What?"), pair("Blue?", "Maybe.", "Go away.")]

    tokenized = tokenize_records(tmp_path, records, unpaired=True)

    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(
        [
            answers_to("Red?", "Yes.", "Maybe."),
            answers_to("Red?", "What?", "Maybe.", is_first_desirable=False),
            answers_to("Blue?", "Maybe.", "Yes."),
            answers_to("Blue?", "Go away.", "Yes.", is_first_desirable=False),
        ]
    )
    audit = audit_of(tokenized)
    assert (audit.records, audit.examples, audit.kept) == (2, 4, 4)


def test_a_single_answer_is_compared_with_one_of_its_own_split(tmp_path: Path) -> None:
    records = labelled_answers(30)

    tokenized = tokenize_records(tmp_path, records, unpaired=True, eval_fraction=0.3)

    train = pair_texts(tokenized.train, tokenized)
    eval = pair_texts(tokenized.eval, tokenized)
    assert len(train) + len(eval) == 30
    for split in (train, eval):
        answers = {text.targets[0].removesuffix(CHATML_END) for text in split}
        records_of_split = [record for record in records if record["completion"] in answers]
        assert Counter(split) == Counter(expected_texts(records_of_split))


def test_an_answer_that_is_only_compared_with_is_truncated_and_not_overlong(
    tmp_path: Path,
) -> None:
    records = [
        labelled_answer("p", "short"),
        labelled_answer("q", "x" * 30),
        labelled_answer("a longer question", "y"),
    ]
    longest = token_count(answers_to("q", "x" * 30, "").sequences[0])

    tokenized = tokenize_records(
        tmp_path, records, unpaired=True, max_length=longest, overlong="error"
    )

    texts = pair_texts(tokenized.train, tokenized)
    (truncated,) = [text for text in texts if "longer" in text.sequences[0]]
    assert token_count(truncated.sequences[1]) == longest
    assert truncated.targets[0] == f"y{CHATML_END}"
    assert set(truncated.targets[1]) == {"x"}
    assert audit_of(tokenized).overlong == 0


# --- formats

QUESTION = [message("user", "one ü?")]
ANSWERS = {
    "chosen": [message("assistant", " 1\n")],
    "rejected": [message("assistant", "eins 🙂")],
}
# The same pair in every format.
SAME: dict[str, Fields] = {
    "texts": pair("one ü?", " 1\n", "eins 🙂"),
    "other-columns": {"id": 7, "label": "unread"} | pair("one ü?", " 1\n", "eins 🙂"),
    "messages": {"prompt": QUESTION} | ANSWERS,
    "text-and-messages": {"prompt": "one ü?"} | ANSWERS,
    "conversations": {name: QUESTION + answer for name, answer in ANSWERS.items()},
    "conversations-and-prompt": {
        "prompt": QUESTION,
        **{name: QUESTION + answer for name, answer in ANSWERS.items()},
    },
    "sharegpt": {
        "chosen": [{"from": "human", "value": "one ü?"}, {"from": "gpt", "value": " 1\n"}],
        "rejected": [{"from": "human", "value": "one ü?"}, {"from": "gpt", "value": "eins 🙂"}],
    },
}


@pytest.mark.parametrize(
    ("format", "suffix"),
    [*itertools.product(SAME, ("jsonl", "parquet")), ("other-columns", "csv")],
)
def test_every_format_of_pairs_gives_the_same_rows(
    tmp_path: Path, capsys: Capture, format: str, suffix: str
) -> None:
    as_texts = tokenize_records(tmp_path, [SAME["texts"]])
    assert pair_texts(as_texts.train, as_texts) == [answers_to("one ü?", " 1\n", "eins 🙂")]

    tokenized = tokenize_file(write_records(tmp_path / f"other.{suffix}", [SAME[format]]))

    assert [*tokenized.train] == [*as_texts.train]
    assert tokenized.metadata.data_sha256 == as_texts.metadata.data_sha256
    assert tokenized.metadata.task == "preferences"
    assert tokenized.metadata.records == 1
    assert "the records are pairs\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("suffix", "label_type"),
    [("jsonl", bool), ("jsonl", float), ("parquet", int), ("csv", bool), ("csv", int)],
)
def test_labels_are_true_and_false_or_1_and_0(
    tmp_path: Path, capsys: Capture, suffix: str, label_type: type
) -> None:
    records = labelled_answers(5)
    labelled = [record | {"label": label_type(record["label"])} for record in records]

    tokenized = tokenize_file(write_records(tmp_path / f"a.{suffix}", labelled), unpaired=True)

    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected_texts(records))
    assert "the records are labelled_answers\n" in capsys.readouterr().out


# --- bad records

BAD_PAIRS: dict[str, Fields] = {
    "no-fields": {},
    "texts-without-prompt": {"chosen": "a", "rejected": "b"},
    "no-chosen": {"prompt": "q", "rejected": "b"},
    "null-rejected": pair("q", "a", None),
    "prompt-is-a-number": pair(3, "a", "b"),
    "deeply-nested-answer": pair("q", json.loads("[" * 50 + "]" * 50), "b"),
    "empty-prompt": pair([], "a", "b"),
    "prompt-ends-with-an-answer": pair(messages("q", "a"), "a", "b"),
    "empty-answer": pair("q", "", "b"),
    "answer-by-the-user": pair("q", "a", [message("user", "b")]),
    "answer-with-weight-0": pair("q", [message("assistant", "a") | {"weight": 0}], "b"),
    "two-turns-in-a-row": pair("q", [message("assistant", "a"), message("assistant", "c")], "b"),
    "identical-texts": pair("q", "a", "a"),
    "different-questions": {"chosen": messages("q", "a"), "rejected": messages("p", "b")},
    "no-questions": {"chosen": messages("q", "a")[1:], "rejected": messages("q", "b")[1:]},
    "rejected-continues-chosen": {
        "chosen": messages("q", "a"),
        "rejected": messages("q", "a", "r", "b"),
    },
    "labelled-answer-among-pairs": labelled_answer("q", "a"),
    "ambiguous-answer": pair("q", "a", f"b{AMBIGUOUS}"),
    "surrogate-in-answer": pair("q", HALF_OF_A_SURROGATE_PAIR, "b"),
}
BAD_LABELLED_ANSWERS: dict[str, Fields] = {
    "no-label": {"prompt": "q", "completion": "a"},
    "label-is-a-word": labelled_answer("q", "a", "yes"),
    "no-completion": {"prompt": "q", "label": True},
    "text-without-prompt": {"completion": "a", "label": True},
    "surrogate-in-labelled-answer": labelled_answer("q", HALF_OF_A_SURROGATE_PAIR),
}


@pytest.mark.parametrize(
    ("bad", "unpaired"),
    [
        *[pytest.param(bad, False, id=name) for name, bad in BAD_PAIRS.items()],
        *[pytest.param(bad, True, id=name) for name, bad in BAD_LABELLED_ANSWERS.items()],
    ],
)
def test_a_bad_record_is_an_error_with_its_line_or_is_left_out(
    tmp_path: Path, cache: Path, bad: Fields, unpaired: bool
) -> None:
    good = some_records(4, unpaired)
    # The first labelled answer would be compared with the last one.
    path = write_records(tmp_path / "a.jsonl", [*good[:2], bad, *good[2:], bad])

    error = refusal(path, unpaired=unpaired, eval_fraction=0.3)

    assert error.startswith(f"{path}, line 3: ")
    assert "--on_bad_row skip" in error
    assert left_behind(cache) == []

    tokenized = tokenize_file(path, unpaired=unpaired, on_bad_row="skip")

    audit = audit_of(tokenized)
    assert (audit.records, audit.bad, audit.examples, audit.kept) == (6, 2, 4, 4)
    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected_texts(good))


@pytest.mark.parametrize(
    ("record", "settings", "hint"),
    [
        (chat_record("q", "a"), {}, "messages"),
        (labelled_answer("q", "a"), {}, "--loss_type kto"),
        (pair("q", "a", "a"), {"on_bad_row": "skip"}, "line 1"),
        (pair("q" * MAX_LENGTH, "a", "b"), {"overlong": "truncate"}, "--max_length 64 to"),
    ],
)
def test_a_useless_record_is_an_error_that_names_the_reason(
    tmp_path: Path, cache: Path, record: Fields, settings: dict[str, str], hint: str
) -> None:
    path = write_records(tmp_path / "a.jsonl", [record])

    error = refusal(path, **settings)

    assert str(path) in error
    assert hint in error
    assert left_behind(cache) == []


# --- overlong answers


def token_count(text: str) -> int:
    """Return the number of tokens of a text: its bytes, and the control tokens of ChatML."""
    controls = re.findall(r"<\|im_start\|>|<\|im_end\|>", text)
    return len(text.encode()) - len("".join(controls)) + len(controls)


def test_overlong_answers_are_dropped_truncated_or_an_error(tmp_path: Path, cache: Path) -> None:
    long = "x" * 20
    length = token_count(answers_to("q", long, "").sequences[0])
    records = [*pairs(1), pair("q", long, "b"), pair("q", "a", long)]
    path = write_records(tmp_path / "a.jsonl", records)

    def texts(max_length: int, overlong: str) -> list[PairText]:
        tokenized = tokenize_file(path, max_length, overlong=overlong, packing=False)
        return pair_texts(tokenized.train, tokenized)

    assert texts(length, "error") == expected_texts(records)
    error = refusal(path, max_length=length - 1, overlong="error")
    assert error.startswith(f"{path}, line 2: ")
    assert f"{length} tokens are more than --max_length {length - 1}" in error

    assert texts(length - 1, "drop") == expected_texts(records[:1])

    def without_end(texts: tuple[str, str]) -> tuple[str, str]:
        first, second = (text.replace(long + CHATML_END, long) for text in texts)
        return first, second

    assert texts(length - 1, "truncate") == [
        text._replace(sequences=without_end(text.sequences), targets=without_end(text.targets))
        for text in expected_texts(records)
    ]


# --- the eval data


def answers_to_forty_prompts(unpaired: bool) -> list[Fields]:
    """Return three records for each of 40 prompts. One of the three has a list of messages."""
    records = []
    for repetition in range(3):
        for i in range(40):
            question = f"{i}?"
            prompt = [message("user", question)] if repetition == 1 else question
            answer = f"{i} {repetition}"
            if unpaired:
                records.append(labelled_answer(prompt, answer, label=repetition != 1))
            else:
                records.append(pair(prompt, answer, f"not {answer}"))
    return records


@for_both_kinds
def test_all_answers_to_a_prompt_are_in_the_same_split(tmp_path: Path, unpaired: bool) -> None:
    tokenized = tokenize_records(
        tmp_path, answers_to_forty_prompts(unpaired), unpaired=unpaired, eval_fraction=0.3
    )

    def records_per_prompt(rows: TokenRows | None) -> Counter[str]:
        return Counter(
            text.sequences[0].partition(CHATML_END)[0] for text in pair_texts(rows, tokenized)
        )

    train = records_per_prompt(tokenized.train)
    eval = records_per_prompt(tokenized.eval)
    assert set(train.values()) == set(eval.values()) == {3}
    assert train.keys().isdisjoint(eval)
    assert len(train) + len(eval) == 40
    assert len(eval) / 40 == pytest.approx(0.3, abs=0.12)
    assert tokenized.metadata.records == 120
    assert tokenized.metadata.eval_records == 3 * len(eval)


def test_eval_bytes_are_those_of_both_answers(tmp_path: Path) -> None:
    long = [pair(f"long {i}?", "x" * 99, "y") for i in range(20)]

    tokenized = tokenize_records(
        tmp_path, [*pairs(20), *long], eval_fraction=0.3, overlong="truncate"
    )

    texts = pair_texts(tokenized.eval, tokenized)
    targets = "".join(itertools.chain(*(text.targets for text in texts)))
    assert "x" in targets
    eval_bytes = len(targets.replace(CHATML_END, "").encode())
    assert tokenized.metadata.eval_bytes == eval_bytes > 0
    assert tokenized.metadata.eval_tokens == eval_bytes + targets.count(CHATML_END)


# --- the audit


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
@for_both_kinds
@for_all_rows
def test_the_audit_has_the_counts_of_the_records_and_of_the_rows(
    tmp_path: Path, overlong: str, unpaired: bool, share_prompts: bool, packing: bool
) -> None:
    if unpaired:
        long = [labelled_answer("x" * 99, "a")]
        bad = [labelled_answer("q", f"a{AMBIGUOUS}"), labelled_answer("q", "a", label="yes")]
        truncated = 0  # the prompt leaves no place for an answer
    else:
        long = [pair("x" * 99, "a", "b"), pair("q", "ü" * 99, "b"), pair("q", "a", "x" * 99)]
        bad = [pair("q", "a", HALF_OF_A_SURROGATE_PAIR), pair("q", "a", "a")]
        truncated = 2 if overlong == "truncate" else 0
    good = some_records(10, unpaired)

    tokenized = tokenize_records(
        tmp_path,
        [*good[:5], *long, *bad, *good[5:]],
        unpaired=unpaired,
        on_bad_row="skip",
        overlong=overlong,
        share_prompts=share_prompts,
        packing=packing,
    )

    stored = stored_pairs(tokenized.train)
    tokens = sum(len(first) + len(second) for first, second in (s.sequences for s in stored))
    texts = expected_texts([*good[:5], *long, *good[5:]])
    all_tokens = sum(token_count(text) for text in itertools.chain(*(t.sequences for t in texts)))
    own_texts = [text for t in texts for text in t.sequences[: 1 if unpaired else 2]]
    end = tokenized.tokenizer.convert_tokens_to_ids(CHATML_END)
    audit = audit_of(tokenized)
    assert audit == Audit(
        unit="answer" if unpaired else "pair",
        records=len(good + long + bad),
        bad=2,
        examples=len(good + long),
        dropped=len(long) if overlong == "drop" else 0,
        truncated=len(long) if overlong == "truncate" else 0,
        lost_tokens=all_tokens - tokens,
        untrained=1 if overlong == "truncate" else 0,
        kept=10 + truncated,
        tokens=tokens,
        targets=tokenized.metadata.train_tokens,
        shared_tokens=sum(pair.second.position for pair in stored),
        rows=len(tokenized.train),
        positions=len(tokenized.train) * 2 * MAX_LENGTH,
        bytes=audit.bytes,
        pairs=tokenized.metadata.pairs,
        ended=sum(end in [*s.first.targets, *s.second.targets] for s in stored),
        needed_length=multiple_of_64(max(map(token_count, own_texts))),
        first_fault=audit.first_fault,
    )
    assert audit.kept == len(stored)
    assert f", line {5 + len(long) + 1}: " in audit.first_fault
    assert bool(audit.shared_tokens) == (share_prompts and packing)


# --- the cache and the data hash


def test_other_rows_have_another_hash_and_cache_entry(tmp_path: Path, capsys: Capture) -> None:
    usual = pairs(8)
    swapped = [pair(r["prompt"], chosen=r["rejected"], rejected=r["chosen"]) for r in usual]
    relabelled = [*labelled_answers(7), labelled_answer("7?", "49 ü.", label=False)]
    variants: dict[str, dict[str, Any]] = {
        "usual": {},
        "another-record": {"records": pairs(9)},
        "another-order": {"records": usual[::-1]},
        "share_prompts": {"share_prompts": False},
        "unpaired": {"unpaired": True},
        "swapped-answers": {"records": swapped},
        "another-answer": {"records": [*usual[:-1], usual[-1] | {"rejected": "another"}]},
        "another-prompt": {"records": [*usual[:-1], usual[-1] | {"prompt": "another"}]},
        "labelled-answers": {"records": labelled_answers(8), "unpaired": True},
        "another-label": {"records": relabelled, "unpaired": True},
    }

    names_by_hash: dict[str, str] = {}
    for name, variant in variants.items():
        tokenized = tokenize_records(tmp_path, **{"records": usual} | variant)
        assert "; tokenised\n" in capsys.readouterr().out, name
        data_hash = tokenized.metadata.data_sha256
        assert data_hash not in names_by_hash, f"{name} and {names_by_hash[data_hash]}"
        names_by_hash[data_hash] = name


# --- the codes of answers on disk


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_a_code_has_the_pair_the_answer_and_the_label(array: Callable[..., Any]) -> None:
    codes = array([0, 1, 2, 3, 4, 23])

    assert pair_of(codes).tolist() == [0, 0, 0, 0, 1, 5]
    assert answer_of(codes).tolist() == [0, 1, 0, 1, 2, 11]
    assert is_second(codes).tolist() == [False, True, False, True, False, True]
    assert is_undesirable(codes).tolist() == [False, False, True, True, False, True]
    assert answer_code(1, is_second=False, is_undesirable=False) == 4
    assert answer_code(5, is_second=True, is_undesirable=True) == 23

    padding = array([-1])
    assert pair_of(padding).tolist() == answer_of(padding).tolist() == [-1]
