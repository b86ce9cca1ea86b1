"""Preference data as rows: the answers, their prompts, what is left out, and the cache."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest

from llmtrain.data import prepare
from llmtrain.data.audit import Audit, total_audit
from llmtrain.data.config import PairConfig
from llmtrain.data.formats import preference_of
from llmtrain.data.messages import BadRecord
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.sources import Fields
from llmtrain.data.store import TokenRows
from llmtrain.errors import UserError
from llmtrain.interfaces.answer_codes import answer_of, is_undesirable, pair_of
from llmtrain.interfaces.batches import IGNORED
from tests.data.chat_records import CHATML_END, chat_record
from tests.data.odd_templates import (
    COUNTS_WITHOUT_ROLES,
    MARKS_ANSWERS_AND_ENDS,
    MARKS_ENDS,
    write_template,
)
from tests.data.preparation import data_config, left_behind, log_lines, write_records

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


def tokenize_file(
    path: Path, max_length: int = MAX_LENGTH, unpaired: bool = False, **settings: Any
) -> Tokenized:
    """Tokenize a file. Each setting is a field of ``PairConfig`` or of ``DataConfig``."""
    pair_settings = {}
    data_settings = {}
    for name, value in settings.items():
        if name in PairConfig.__dataclass_fields__:
            pair_settings[name] = value
        else:
            data_settings[name] = value
    return tokenize(
        data_config(path, **data_settings),
        max_length,
        PairConfig(**pair_settings),
        unpaired=unpaired,
    )


def tokenize_records(folder: Path, records: list[Fields], **settings: Any) -> Tokenized:
    return tokenize_file(write_records(folder / "preferences.jsonl", records), **settings)


def refusal(path: Path, **settings: Any) -> str:
    """Return the message, of one line, with which a file is refused."""
    with pytest.raises(UserError) as refused:
        tokenize_file(path, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def audit_of(tokenized: Tokenized) -> Audit:
    """Return the counts of the training data."""
    assert tokenized.metadata.audit is not None
    return Audit(**tokenized.metadata.audit)


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


@for_all_rows
def test_the_metadata_describe_the_rows(tmp_path: Path, share_prompts: bool, packing: bool) -> None:
    tokenized = tokenize_records(tmp_path, pairs(8), share_prompts=share_prompts, packing=packing)

    metadata = tokenized.metadata
    assert tokenized.is_packed == packing
    assert metadata.shared == (share_prompts and packing)
    assert (metadata.train_rows < 8) == packing
    labels = np.array(tokenized.train.dataset["labels"])
    assert labels.shape == (metadata.train_rows, 2 * MAX_LENGTH)
    assert metadata.train_tokens == audit_of(tokenized).targets == (labels != IGNORED).sum()
    codes = np.array(tokenized.train.dataset["answers"])
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


@for_both_kinds
def test_without_sharing_each_answer_follows_its_own_copy_of_the_prompt(
    tmp_path: Path, unpaired: bool
) -> None:
    tokenized = tokenize_records(
        tmp_path, some_records(5, unpaired), unpaired=unpaired, share_prompts=False
    )

    prompts = [chatml_prompt([message("user", f"{i}?")]) for i in range(5)]
    for stored in stored_pairs(tokenized.train):
        assert stored.second.position == 0
        prompt = stored.second.tokens[: -len(stored.second.targets)]
        assert tokenized.tokenizer.decode(prompt) in prompts

    expected = expected_texts(some_records(5, unpaired))
    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected)


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


def test_a_single_answer_is_stored_with_the_answer_of_the_record_before(tmp_path: Path) -> None:
    records = [
        labelled_answer("Red?", "Yes."),
        labelled_answer("Green?", "No.", label=False),
        labelled_answer("Blue?", "Maybe."),
    ]

    tokenized = tokenize_records(tmp_path, records, unpaired=True)

    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(
        [
            answers_to("Red?", "Yes.", "Maybe."),
            answers_to("Green?", "No.", "Yes.", is_first_desirable=False),
            answers_to("Blue?", "Maybe.", "No."),
        ]
    )


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
    longest = byte_tokens(answers_to("q", "x" * 30, "").sequences[0])

    tokenized = tokenize_records(
        tmp_path, records, unpaired=True, max_length=len(longest), overlong="error"
    )

    texts = pair_texts(tokenized.train, tokenized)
    (truncated,) = [text for text in texts if "longer" in text.sequences[0]]
    assert len(byte_tokens(truncated.sequences[1])) == len(longest)
    assert truncated.targets[0] == f"y{CHATML_END}"
    assert set(truncated.targets[1]) == {"x"}
    assert audit_of(tokenized).overlong == 0


# --- formats

TEXTS = [("one", "1", "eins"), ("two ü", "2", "zwei 🙂"), ("three", " 3\n", "drei")]


def pair_of_messages(question: str, chosen: str, rejected: str) -> Fields:
    return pair(
        [message("user", question)],
        [message("assistant", chosen)],
        [message("assistant", rejected)],
    )


def pair_of_text_and_messages(question: str, chosen: str, rejected: str) -> Fields:
    return pair_of_messages(question, chosen, rejected) | {"prompt": question}


def pair_of_conversations(question: str, chosen: str, rejected: str) -> Fields:
    return {"chosen": messages(question, chosen), "rejected": messages(question, rejected)}


def pair_of_conversations_and_prompt(question: str, chosen: str, rejected: str) -> Fields:
    conversations = pair_of_conversations(question, chosen, rejected)
    return conversations | {"prompt": [message("user", question)]}


def pair_of_sharegpt(question: str, chosen: str, rejected: str) -> Fields:
    human = {"from": "human", "value": question}
    return {
        "chosen": [human, {"from": "gpt", "value": chosen}],
        "rejected": [human, {"from": "gpt", "value": rejected}],
    }


def pair_with_other_columns(question: str, chosen: str, rejected: str) -> Fields:
    others = {"id": 7, "label": "unread", "tools": None, "score": 0.5}
    return others | pair(question, chosen, rejected)


PAIR_FORMATS = {
    "texts": pair,
    "messages": pair_of_messages,
    "text-and-messages": pair_of_text_and_messages,
    "conversations": pair_of_conversations,
    "conversations-and-prompt": pair_of_conversations_and_prompt,
    "sharegpt": pair_of_sharegpt,
    "other-columns": pair_with_other_columns,
}


@pytest.mark.parametrize(
    ("format", "suffix"),
    [
        *itertools.product(PAIR_FORMATS, ("jsonl", "parquet")),
        ("texts", "csv"),
        ("other-columns", "csv"),
    ],
)
def test_every_format_of_pairs_gives_the_same_rows(
    tmp_path: Path, capsys: Capture, format: str, suffix: str
) -> None:
    as_texts = tokenize_records(tmp_path, [pair(*texts) for texts in TEXTS])
    records = [PAIR_FORMATS[format](*texts) for texts in TEXTS]

    tokenized = tokenize_file(write_records(tmp_path / f"other.{suffix}", records))

    expected = [answers_to(*texts) for texts in TEXTS]
    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected)
    assert [*tokenized.train] == [*as_texts.train]
    assert tokenized.metadata.data_sha256 == as_texts.metadata.data_sha256
    assert tokenized.metadata.task == "preferences"
    assert tokenized.metadata.records == 3
    assert "preference training: the records are pairs\n" in capsys.readouterr().out


@pytest.mark.parametrize("are_messages", [False, True], ids=["texts", "messages"])
@pytest.mark.parametrize("label_type", [bool, int, float])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_format_of_labelled_answers_gives_the_same_rows(
    tmp_path: Path, capsys: Capture, suffix: str, label_type: type, are_messages: bool
) -> None:
    as_texts = tokenize_records(tmp_path, labelled_answers(5), unpaired=True)
    records = []
    for record in labelled_answers(5):
        if are_messages:
            record["prompt"] = [message("user", record["prompt"])]
            record["completion"] = [message("assistant", record["completion"])]
        records.append(record | {"label": label_type(record["label"])})

    tokenized = tokenize_file(write_records(tmp_path / f"other.{suffix}", records), unpaired=True)

    expected = expected_texts(labelled_answers(5))
    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected)
    assert [*tokenized.train] == [*as_texts.train]
    assert tokenized.metadata.data_sha256 == as_texts.metadata.data_sha256
    out = capsys.readouterr().out
    assert "preference training: the records are labelled_answers\n" in out


@pytest.mark.parametrize("label_type", [bool, int])
def test_labels_in_csv_are_words_or_digits(tmp_path: Path, label_type: type) -> None:
    records = labelled_answers(5)
    labelled = [record | {"label": label_type(record["label"])} for record in records]

    tokenized = tokenize_file(write_records(tmp_path / "a.csv", labelled), unpaired=True)

    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected_texts(records))


# --- bad records


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        # Fields that are absent or have the wrong type.
        pytest.param({}, "field 'completion' is None, not text", id="no-fields"),
        pytest.param(
            {"chosen": "a", "rejected": "b"},
            "the record has no prompt, so chosen and rejected must be lists",
            id="texts-without-prompt",
        ),
        pytest.param(pair(None, "a", "b"), "the record has no prompt", id="null-prompt"),
        pytest.param(
            {"prompt": "q", "rejected": "b"}, "field 'chosen' is None, not text", id="no-chosen"
        ),
        pytest.param(
            {"prompt": "q", "chosen": "a"}, "field 'rejected' is None, not text", id="no-rejected"
        ),
        pytest.param(pair("q", "a", None), "field 'rejected' is None", id="null-rejected"),
        pytest.param(pair(3, "a", "b"), "field 'prompt' is 3, not text", id="prompt-is-a-number"),
        pytest.param(pair("q", 3.5, "b"), "field 'chosen' is 3.5", id="answer-is-a-number"),
        pytest.param(pair("q", float("nan"), "b"), "field 'chosen' is nan", id="answer-is-nan"),
        pytest.param(
            pair("q", {"text": "a"}, "b"),
            "field 'chosen' is {'text': 'a'}",
            id="answer-is-an-object",
        ),
        pytest.param(
            pair("q", "a", "b") | {"tools": 3}, "field 'tools' is 3, not a list", id="tools"
        ),
        # Lists of messages.
        pytest.param(
            pair(["q"], "a", "b"), "prompt: message 1 is 'q', not an object", id="prompt-of-texts"
        ),
        pytest.param(
            pair("q", json.loads("[" * 50 + "]" * 50), "b"),
            "chosen: message 1 is [[[[[[",
            id="deeply-nested-answer",
        ),
        pytest.param(
            pair("q", [{"content": "a"}], "b"),
            "chosen: message 1 has the role None; the known roles are system",
            id="message-without-role",
        ),
        # Prompts.
        pytest.param(pair([], "a", "b"), "the prompt is empty", id="empty-prompt"),
        pytest.param(
            pair(messages("q", "a"), "a", "b"),
            "the prompt ends with an assistant message",
            id="prompt-ends-with-an-answer",
        ),
        # Answers.
        pytest.param(
            pair("q", "", "b"), "chosen: message 1 (assistant) is empty", id="empty-answer"
        ),
        pytest.param(
            pair("q", [], "b"),
            "chosen has no assistant message right after the prompt",
            id="answer-without-messages",
        ),
        pytest.param(
            pair("q", "a", [message("user", "b")]),
            "rejected has no assistant message right after the prompt",
            id="answer-by-the-user",
        ),
        pytest.param(
            pair("q", [message("assistant", "a") | {"weight": 0}], "b"),
            "chosen has a message with weight 0",
            id="answer-with-weight-0",
        ),
        pytest.param(pair("q", "a", "a"), "chosen and rejected are the same", id="identical-texts"),
        pytest.param(
            pair("q", "a", [message("assistant", "a")]),
            "chosen and rejected are the same",
            id="identical-text-and-message",
        ),
        pytest.param(
            pair("q", "a", "b") | labelled_answer("q", "a"),
            "the record has two answers (chosen, rejected) and a single one (completion, label)",
            id="pair-and-labelled-answer",
        ),
        pytest.param(
            pair("q", "a", " \n"), "rejected: message 1 (assistant) is empty", id="white-space"
        ),
        pytest.param(
            pair([message("narrator", "q")], "a", "b"),
            "prompt: message 1 has the role 'narrator'",
            id="unknown-role-in-prompt",
        ),
        pytest.param(
            pair([{"role": "user"}], "a", "b"),
            "prompt: message 1 (user): its content is not text",
            id="prompt-without-content",
        ),
        # Complete conversations.
        pytest.param(
            {"chosen": messages("q", "a"), "rejected": messages("q", "a")},
            "chosen and rejected are the same",
            id="identical-conversations",
        ),
        pytest.param(
            {"chosen": messages("q", "a"), "rejected": messages("p", "b")},
            "chosen has no assistant message right after the prompt",
            id="conversations-with-different-prompts",
        ),
        pytest.param(
            {"chosen": messages("q", "a")[1:], "rejected": messages("q", "b")[1:]},
            "chosen and rejected share no prompt",
            id="conversations-without-prompts",
        ),
        pytest.param(
            {"chosen": messages("q", "a", "r"), "rejected": messages("q", "a", "s")},
            "chosen has no assistant message right after the prompt",
            id="conversations-end-with-different-questions",
        ),
        pytest.param(
            {"chosen": messages("q", "a"), "rejected": messages("q", "a", "r", "b")},
            "chosen has no assistant message right after the prompt",
            id="rejected-continues-chosen",
        ),
        pytest.param(
            {
                "chosen": messages("q", "a"),
                "rejected": [message("user", "q"), message("user", "a")],
            },
            "rejected has no assistant message right after the prompt",
            id="conversations-end-with-different-roles",
        ),
    ],
)
def test_a_record_that_is_no_pair_is_refused(record: Fields, reason: str) -> None:
    with pytest.raises(BadRecord, match=re.escape(reason)) as refused:
        preference_of(record)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        pytest.param(
            {"prompt": "q", "completion": "a"},
            "field 'label' is None, not true or false",
            id="no-label",
        ),
        pytest.param(labelled_answer("q", "a", None), "field 'label' is None", id="null-label"),
        pytest.param(labelled_answer("q", "a", "yes"), "field 'label' is 'yes'", id="word"),
        pytest.param(labelled_answer("q", "a", 2), "field 'label' is 2", id="number"),
        pytest.param(labelled_answer("q", "a", float("nan")), "field 'label' is nan", id="nan"),
        pytest.param(labelled_answer("q", "a", [True]), "field 'label' is [True]", id="list"),
        pytest.param(
            {"prompt": "q", "label": True},
            "field 'completion' is None, not text",
            id="no-completion",
        ),
        pytest.param(
            labelled_answer("q", ""),
            "completion: message 1 (assistant) is empty",
            id="empty-completion",
        ),
        pytest.param(
            {"completion": "a", "label": True}, "the record has no prompt", id="text-without-prompt"
        ),
        pytest.param(
            {"completion": [message("assistant", "a")], "label": True},
            "the record has no prompt",
            id="messages-without-prompt",
        ),
    ],
)
def test_a_record_that_is_no_labelled_answer_is_refused(record: Fields, reason: str) -> None:
    with pytest.raises(BadRecord, match=re.escape(reason)) as refused:
        preference_of(record)
    assert "\n" not in str(refused.value)


bad_records = pytest.mark.parametrize(
    ("bad", "unpaired", "reason"),
    [
        pytest.param(
            pair("q", "a", "a"),
            False,
            "chosen and rejected are the same",
            id="unreadable-pair",
        ),
        pytest.param(
            pair(f"q{AMBIGUOUS}", "a", "b"),
            False,
            "a message holds a special token and private-use characters",
            id="ambiguous-prompt",
        ),
        pytest.param(
            pair("q", "a", f"b{AMBIGUOUS}"),
            False,
            "a message holds a special token and private-use characters",
            id="ambiguous-answer",
        ),
        pytest.param(
            pair(HALF_OF_A_SURROGATE_PAIR, "a", "b"),
            False,
            "message 1 (user) holds half of a surrogate pair",
            id="surrogate-in-prompt",
        ),
        pytest.param(
            pair("q", HALF_OF_A_SURROGATE_PAIR, "b"),
            False,
            "message 2 (assistant) holds half of a surrogate pair",
            id="surrogate-in-answer",
        ),
        pytest.param(
            pair("q", [message("assistant", "a"), message("assistant", "c")], "b"),
            False,
            "message 3 (assistant) follows an assistant turn that has ended",
            id="two-turns-in-a-row",
        ),
        pytest.param(
            pair("q", "a", "b") | {"tools": ["x"]},
            False,
            "field 'tools' holds 'x', not an object",
            id="tools-of-text",
        ),
        pytest.param(
            labelled_answer("q", "a"),
            False,
            "the record has one answer with a label, but this loss compares two answers",
            id="labelled-answer-among-pairs",
        ),
        pytest.param(
            labelled_answer("q", "a", "yes"),
            True,
            "field 'label' is 'yes', not true or false",
            id="unreadable-labelled-answer",
        ),
        pytest.param(
            labelled_answer("q", f"a{AMBIGUOUS}"),
            True,
            "a message holds a special token and private-use characters",
            id="ambiguous-labelled-answer",
        ),
        pytest.param(
            labelled_answer("q", HALF_OF_A_SURROGATE_PAIR),
            True,
            "message 2 (assistant) holds half of a surrogate pair",
            id="surrogate-in-labelled-answer",
        ),
    ],
)
# The first labelled answer would be compared with the last one.
in_two_places = pytest.mark.parametrize(
    "number", [pytest.param(2, id="in-the-middle"), pytest.param(4, id="last")]
)


@bad_records
@in_two_places
def test_a_bad_record_is_an_error_with_its_line(
    tmp_path: Path, cache: Path, bad: Fields, unpaired: bool, reason: str, number: int
) -> None:
    records = some_records(4, unpaired)
    records.insert(number, bad)
    path = write_records(tmp_path / "a.jsonl", records)

    error = refusal(path, unpaired=unpaired, eval_fraction=0.3)

    assert error.startswith(f"{path}, line {number + 1}: {reason}")
    assert error.endswith("; fix it, or leave such records out with --on_bad_row skip.")
    assert left_behind(cache) == []


@bad_records
@in_two_places
def test_a_bad_record_can_be_skipped_and_is_counted(
    tmp_path: Path, bad: Fields, unpaired: bool, reason: str, number: int
) -> None:
    good = some_records(4, unpaired)
    records = [*good[:number], bad, *good[number:]]

    tokenized = tokenize_records(tmp_path, records, unpaired=unpaired, on_bad_row="skip")

    audit = audit_of(tokenized)
    assert (audit.records, audit.bad, audit.examples, audit.kept) == (5, 1, 4, 4)
    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected_texts(good))


@pytest.mark.parametrize(
    ("suffix", "place", "reason"),
    [
        pytest.param("parquet", "row 2", "field 'rejected' is None", id="parquet"),
        # The first line is the header. A CSV file has no null.
        pytest.param("csv", "line 4", "rejected: message 1 (assistant) is empty", id="csv"),
    ],
)
def test_a_bad_record_of_a_table_is_an_error_with_its_row(
    tmp_path: Path, cache: Path, suffix: str, place: str, reason: str
) -> None:
    records = [*pairs(2), pair("q", "a", None), *pairs(2, start=2)]
    path = write_records(tmp_path / f"a.{suffix}", records)

    assert refusal(path).startswith(f"{path}, {place}: {reason}")
    assert left_behind(cache) == []


def test_an_answer_that_the_template_shows_differently_after_its_prompt_is_bad(
    tmp_path: Path, cache: Path
) -> None:
    path = write_records(tmp_path / "a.jsonl", pairs(2))

    assert refusal(path, chat_template=write_template(tmp_path, COUNTS_WITHOUT_ROLES)).startswith(
        f"{path}, line 1: the chat template shows the answer differently from the way it prompts "
        "for it; fix"
    )
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("name", "content", "settings", "reason"),
    [
        pytest.param("a.jsonl", "", {}, "a.jsonl holds no records.", id="empty-file"),
        pytest.param(
            "a.csv", "prompt,chosen,rejected\n", {}, "a.csv holds no records.", id="empty-table"
        ),
        pytest.param(
            "a.csv",
            "prompt,text\nq,a\n",
            {},
            "a.csv is not preference data: its first record has prompt, text. Records need",
            id="no-answers",
        ),
        pytest.param(
            "a.csv",
            "prompt,chosen\nq,a\n",
            {},
            "a.csv is not preference data: its first record has prompt, chosen. Records need",
            id="no-rejected",
        ),
        pytest.param(
            "a.txt",
            "some words",
            {},
            "a.txt is not preference data: its first record has text. Records need",
            id="text",
        ),
        pytest.param(
            "a.jsonl",
            json.dumps(chat_record("q", "a")),
            {},
            "a.jsonl is not preference data: its first record has messages. Records need",
            id="conversations",
        ),
        pytest.param(
            "a.jsonl",
            json.dumps(labelled_answer("q", "a")),
            {},
            "a.jsonl has single answers with a label, but this loss compares two answers: use "
            "--loss_type kto",
            id="labelled-answers",
        ),
        pytest.param(
            "a.jsonl",
            json.dumps(pair("q", "a", "a")),
            {"on_bad_row": "skip"},
            "a.jsonl: the only record was skipped: ",
            id="nothing-readable",
        ),
        pytest.param(
            "a.jsonl",
            json.dumps(pair(HALF_OF_A_SURROGATE_PAIR, "a", "b")),
            {"on_bad_row": "skip"},
            "a.jsonl: none of 1 record can be compared (0 are overlong, 1 bad, the first one ",
            id="nothing-renderable",
        ),
        pytest.param(
            "a.jsonl",
            json.dumps(pair("q", "a" * MAX_LENGTH + "b", "a" * MAX_LENGTH + "c")),
            {"overlong": "truncate"},
            "; --max_length 128 holds 99.5%, 0 bad, 1 without a difference)",
            id="nothing-different-after-truncation",
        ),
    ],
)
def test_a_file_without_usable_preferences_is_an_error(
    tmp_path: Path, cache: Path, name: str, content: str, settings: dict[str, str], reason: str
) -> None:
    path = tmp_path / name
    path.write_text(content)

    error = refusal(path, **settings)

    assert str(path) in error
    assert reason in error
    assert left_behind(cache) == []


# --- overlong answers


def byte_tokens(text: str) -> list[int | str]:
    """Return the tokens of a text: its bytes, and the control tokens of ChatML."""
    tokens: list[int | str] = []
    for piece in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
        if piece in ("<|im_start|>", CHATML_END):
            tokens.append(piece)
        else:
            tokens.extend(piece.encode())
    return tokens


LONG_ANSWER = "x" * 20
LONG_LENGTH = len(byte_tokens(answers_to("q", LONG_ANSWER, "").sequences[0]))
with_a_long_answer = pytest.mark.parametrize(
    "records",
    [
        pytest.param([*pairs(1), pair("q", LONG_ANSWER, "b"), *pairs(1, start=1)], id="chosen"),
        pytest.param([*pairs(1), pair("q", "a", LONG_ANSWER), *pairs(1, start=1)], id="rejected"),
    ],
)


def without_long_end(texts: tuple[str, str]) -> tuple[str, str]:
    """Remove the end token after the long answer."""
    first, second = (text.replace(LONG_ANSWER + CHATML_END, LONG_ANSWER) for text in texts)
    return first, second


@with_a_long_answer
@pytest.mark.parametrize("overlong", ["drop", "truncate", "error"])
def test_an_answer_of_max_length_tokens_with_its_prompt_fits(
    tmp_path: Path, records: list[Fields], overlong: str
) -> None:
    tokenized = tokenize_records(tmp_path, records, max_length=LONG_LENGTH, overlong=overlong)

    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected_texts(records))
    assert audit_of(tokenized).overlong == 0


@with_a_long_answer
def test_a_pair_with_an_overlong_answer_is_dropped(tmp_path: Path, records: list[Fields]) -> None:
    tokenized = tokenize_records(tmp_path, records, max_length=LONG_LENGTH - 1, overlong="drop")

    expected = expected_texts([records[0], records[2]])
    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected)
    assert audit_of(tokenized).overlong == 1


@with_a_long_answer
def test_an_overlong_answer_is_truncated_by_its_last_token(
    tmp_path: Path, records: list[Fields]
) -> None:
    tokenized = tokenize_records(tmp_path, records, max_length=LONG_LENGTH - 1, overlong="truncate")

    expected = []
    for text in expected_texts(records):
        truncated = PairText(
            sequences=without_long_end(text.sequences), targets=without_long_end(text.targets)
        )
        expected.append(truncated)
    assert Counter(pair_texts(tokenized.train, tokenized)) == Counter(expected)
    assert audit_of(tokenized).overlong == 1


@with_a_long_answer
def test_an_overlong_answer_is_an_error_with_its_line_and_length(
    tmp_path: Path, cache: Path, records: list[Fields]
) -> None:
    path = write_records(tmp_path / "a.jsonl", records)

    assert refusal(path, max_length=LONG_LENGTH - 1, overlong="error") == (
        f"{path}, line 2: an answer with its prompt has {LONG_LENGTH} tokens, more than "
        f"--max_length {LONG_LENGTH - 1} allows; raise it, or set --overlong drop or truncate."
    )
    assert left_behind(cache) == []


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
@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_all_answers_to_a_prompt_are_in_the_same_split(
    tmp_path: Path, unpaired: bool, fraction: float
) -> None:
    tokenized = tokenize_records(
        tmp_path, answers_to_forty_prompts(unpaired), unpaired=unpaired, eval_fraction=fraction
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
    assert len(eval) / 40 == pytest.approx(fraction, abs=0.12)
    assert tokenized.metadata.records == 120
    assert tokenized.metadata.eval_records == 3 * len(eval)


def test_the_order_the_rows_and_other_records_do_not_change_a_prompts_split(
    tmp_path: Path,
) -> None:
    def eval_texts(records: list[Fields], **settings: Any) -> set[str]:
        tokenized = tokenize_records(tmp_path, records, eval_fraction=0.2, **settings)
        return {text.sequences[0] for text in pair_texts(tokenized.eval, tokenized)}

    usual = eval_texts(pairs(40))

    assert 0 < len(usual) < 20
    assert eval_texts(pairs(40)[::-1]) == usual
    assert eval_texts(pairs(40), packing=False) == usual
    assert eval_texts(pairs(40), share_prompts=False) == usual
    assert eval_texts(pairs(40), tokenizer="bpe:300") == usual
    assert eval_texts(pairs(80)) > usual


def test_eval_bytes_are_the_bytes_of_both_answers(tmp_path: Path) -> None:
    tokenized = tokenize_records(tmp_path, pairs(20), eval_fraction=0.3)

    texts = pair_texts(tokenized.eval, tokenized)
    targets = "".join(itertools.chain(*(text.targets for text in texts)))
    eval_bytes = len(targets.replace(CHATML_END, "").encode())
    assert tokenized.metadata.eval_bytes == eval_bytes > 0
    assert tokenized.metadata.eval_tokens == eval_bytes + targets.count(CHATML_END)


def test_the_prompt_for_a_sample_is_one_of_the_eval_data(tmp_path: Path) -> None:
    tokenized = tokenize_records(tmp_path, pairs(20), eval_fraction=0.3)

    prompt = tokenized.tokenizer.decode(tokenized.eval_prompt())
    texts = pair_texts(tokenized.eval, tokenized)
    assert prompt in [text.sequences[0].removesuffix(text.targets[0]) for text in texts]


# --- the audit


def various_records(unpaired: bool) -> tuple[list[Fields], list[Fields]]:
    """Return good and bad records in some order, and the good ones among them.

    Of the good ones, some are overlong, and some have no target or no difference once they are
    truncated.
    """
    generator = random.Random(5)

    def text() -> str:
        length = generator.randint(0, 14)
        return "".join(generator.choices("abü漢 ", k=length)) + "."

    long_answers = ["x" * generator.randint(10, 99) for _ in range(6)]
    if unpaired:
        good = [labelled_answer(text(), text(), generator.random() < 0.6) for _ in range(40)]
        good += [labelled_answer("q", answer) for answer in long_answers]
        good += [labelled_answer("x" * 99, "a")]
        bad = [
            labelled_answer("q", f"a{AMBIGUOUS}"),
            labelled_answer("q", HALF_OF_A_SURROGATE_PAIR),
            labelled_answer("q", "", label=False),
            labelled_answer("q", "a", label="yes"),
        ]
    else:
        good = [pair(text(), text(), text() + "-") for _ in range(40)]
        good += [pair("q", answer, text()) for answer in long_answers]
        good += [pair("q", "x" * 99 + "1", "x" * 99 + "2"), pair("x" * 99, "a", "b")]
        bad = [
            pair(f"q{AMBIGUOUS}", "a", "b"),
            pair("q", "a", HALF_OF_A_SURROGATE_PAIR),
            pair("q", "a", "a"),
            pair("q", "", "b"),
        ]

    records = good + bad
    generator.shuffle(records)
    return records, [record for record in records if record not in bad]


def count_by_hand(
    records: list[Fields],
    good: list[Fields],
    overlong: str,
    unpaired: bool,
    shares_prompts: bool,
) -> Audit:
    """Count the bytes of the records' text. No rows and no tokenizer are needed for that."""
    audit = Audit(
        unit="answer" if unpaired else "pair",
        truncates=overlong == "truncate",
        records=len(records),
        bad=len(records) - len(good),
        examples=len(good),
    )
    for text in expected_texts(good):
        sequences = [byte_tokens(sequence) for sequence in text.sequences]
        prompt_length = len(sequences[0]) - len(byte_tokens(text.targets[0]))
        tokens = sum(map(len, sequences))

        # A single answer counts, but not the one that it is compared with.
        counted = sequences[:1] if unpaired else sequences
        is_overlong = max(map(len, counted)) > MAX_LENGTH
        is_dropped = is_overlong and overlong == "drop"
        audit.overlong += is_overlong

        truncated = [sequence[:MAX_LENGTH] for sequence in sequences]
        targets = [max(len(sequence) - prompt_length, 0) for sequence in truncated]
        is_untrainable = targets[0] == 0
        if not unpaired and (targets[1] == 0 or truncated[0] == truncated[1]):
            is_untrainable = True

        is_kept = not is_dropped and not is_untrainable
        kept_tokens = sum(map(len, truncated)) if is_kept else 0
        if is_overlong:
            audit.lost_tokens += tokens - kept_tokens
        if is_untrainable and not is_dropped:
            audit.untrainable += 1

        if is_kept:
            audit.kept += 1
            audit.tokens += kept_tokens
            audit.targets += sum(targets)
            if shares_prompts:
                audit.shared_tokens += min(prompt_length, len(truncated[1])) - 1
    return audit


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
@for_both_kinds
@pytest.mark.parametrize(
    ("share_prompts", "packing"),
    [
        pytest.param(True, True, id="shared-prompts"),
        pytest.param(False, True, id="packed"),
        pytest.param(True, False, id="unpacked"),
    ],
)
def test_the_audit_has_the_counts_of_the_records(
    tmp_path: Path, overlong: str, unpaired: bool, share_prompts: bool, packing: bool
) -> None:
    records, good = various_records(unpaired)

    tokenized = tokenize_records(
        tmp_path,
        records,
        unpaired=unpaired,
        on_bad_row="skip",
        overlong=overlong,
        share_prompts=share_prompts,
        packing=packing,
    )

    expected = count_by_hand(
        records, good, overlong, unpaired, shares_prompts=share_prompts and packing
    )
    expected.rows = len(tokenized.train)
    expected.positions = expected.rows * 2 * MAX_LENGTH
    assert audit_of(tokenized) == expected
    assert expected.kept == len(stored_pairs(tokenized.train))
    assert expected.targets == tokenized.metadata.train_tokens

    # The records have examples of everything that is counted.
    assert expected.bad > 3
    assert expected.overlong > 3
    assert expected.kept > 3
    assert bool(expected.untrainable) == (overlong == "truncate")
    assert bool(expected.shared_tokens) == (share_prompts and packing)


# One bad pair, which counts as training data, and 30 of 60 good ones are overlong.
HALF_OVERLONG = [
    *pairs(30),
    *[pair(f"{i}?", "x" * 99, "y") for i in range(30)],
    pair("q", "a", "a"),
]


for_each_outcome = pytest.mark.parametrize(
    ("overlong", "outcome"),
    [
        pytest.param("drop", "dropped", id="drop"),
        pytest.param("truncate", "truncated", id="truncate"),
    ],
)


@for_each_outcome
def test_the_log_has_two_lines_about_the_audit(
    tmp_path: Path, capsys: Capture, overlong: str, outcome: str
) -> None:
    tokenized = tokenize_records(tmp_path, HALF_OVERLONG, on_bad_row="skip", overlong=overlong)

    audit = audit_of(tokenized)
    assert (audit.records, audit.bad, audit.examples, audit.overlong) == (61, 1, 60, 30)
    lost = audit.lost_tokens / (audit.lost_tokens + audit.tokens)
    targets = audit.targets / audit.tokens
    shared = audit.shared_tokens / audit.tokens
    full = (audit.tokens - audit.shared_tokens) / audit.positions
    assert log_lines(capsys, "audit") == [
        f"{audit.kept} of 60 kept: 30 overlong {outcome} ({lost:.1%} of the tokens), "
        "0 without a difference and 1 bad one left out",
        f"{audit.targets:,} of {audit.tokens:,} tokens are targets ({targets:.1%}), "
        f"{audit.shared_tokens:,} positions saved by sharing prompts ({shared:.1%}), "
        f"{audit.rows} rows are {full:.1%} full",
    ]


@for_each_outcome
def test_the_log_has_a_line_about_eval_pairs_that_are_left_out(
    tmp_path: Path, capsys: Capture, overlong: str, outcome: str
) -> None:
    tokenized = tokenize_records(
        tmp_path, HALF_OVERLONG, on_bad_row="skip", eval_fraction=0.4, overlong=overlong
    )

    train = audit_of(tokenized)
    assert tokenized.metadata.eval_audit is not None
    eval = Audit(**tokenized.metadata.eval_audit)
    assert train.records + eval.records == 61
    assert train.overlong + eval.overlong == 30
    assert (train.bad, eval.bad) == (1, 0)
    lost = eval.lost_tokens / (eval.lost_tokens + eval.tokens)
    assert log_lines(capsys, "eval") == [
        f"{eval.kept} of {eval.examples} kept: {eval.overlong} overlong {outcome} "
        f"({lost:.1%} of the tokens), 0 without a difference and 0 bad ones left out"
    ]


def test_special_tokens_and_unread_fields_are_counted_and_logged(
    tmp_path: Path, capsys: Capture
) -> None:
    special = pair(f"q{CHATML_END}", f"a{CHATML_END}", "b")
    fields = pair(
        [message("user", "q") | {"at": 1, "weight": 0}],
        [message("assistant", "a") | {"at": 1, "weight": 1}],
        [message("assistant", "b") | {"score": 1}],
    )

    audit = audit_of(tokenize_records(tmp_path, [special, fields]))

    assert audit.special_as_text == 2
    assert audit.unread_fields == {"at": 2, "score": 1}
    assert log_lines(capsys, "audit")[2:] == [
        "2 special tokens in messages are encoded as text",
        "some messages have fields that are not read here: at (2), score (1); the chat template "
        "gets them",
    ]


def test_the_audit_of_several_files_is_the_sum_of_their_audits(tmp_path: Path) -> None:
    first_path = write_records(tmp_path / "a.jsonl", pairs(3))
    second_path = write_records(tmp_path / "b.parquet", pairs(5, start=50))

    first = tokenize_file(first_path)
    second = tokenize_file(second_path)
    both = tokenize(data_config(first_path, second_path), MAX_LENGTH, PairConfig())

    assert audit_of(both) == total_audit([audit_of(first), audit_of(second)])
    assert both.metadata.source_rows == [first.metadata.train_rows, second.metadata.train_rows]


# --- the cache and the data hash


def test_rows_in_the_cache_are_used_again_without_reading_the_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the pairs were read again")

    first = tokenize_records(tmp_path, pairs(20), eval_fraction=0.2)
    first_log = capsys.readouterr().out
    monkeypatch.setattr(prepare, "Records", fail)
    second = tokenize_records(tmp_path, pairs(20), eval_fraction=0.2)
    second_log = capsys.readouterr().out

    assert "; tokenised\n" in first_log
    assert second_log == first_log.replace("; tokenised\n", "; from the cache\n")
    assert second.metadata == first.metadata
    assert [*second.train] == [*first.train]


# Settings of `tokenize_records` for rows that differ from those of eight pairs.
VARIANTS: dict[str, dict[str, Any]] = {
    "another-record": {"records": pairs(9)},
    "another-order": {"records": pairs(8)[::-1]},
    "max_length": {"max_length": MAX_LENGTH + 1},
    "eval_fraction": {"eval_fraction": 0.5},
    "packing": {"packing": False},
    "share_prompts": {"share_prompts": False},
    "tokenizer": {"tokenizer": "bpe:300"},
    "unpaired": {"unpaired": True},
}


@pytest.mark.parametrize(
    "variant",
    [
        *VARIANTS.values(),
        {"overlong": "truncate"},
        {"on_bad_row": "skip"},
        {"chat_template": "chatml"},
    ],
    ids=[*VARIANTS, "overlong", "on_bad_row", "chat_template"],
)
def test_settings_that_can_shape_the_rows_have_their_own_cache_entry(
    tmp_path: Path, capsys: Capture, variant: dict[str, Any]
) -> None:
    settings = {"records": pairs(8)} | variant
    tokenize_records(tmp_path, pairs(8))
    capsys.readouterr()

    tokenize_records(tmp_path, **settings)
    assert "; tokenised\n" in capsys.readouterr().out
    tokenize_records(tmp_path, **settings)
    assert "; from the cache\n" in capsys.readouterr().out


def test_batch_sizes_and_file_names_do_not_change_the_cache_entry(
    tmp_path: Path, capsys: Capture
) -> None:
    tokenize_records(tmp_path, pairs(8))
    tokenize_records(tmp_path, pairs(8), global_batch_size=7, per_device_train_batch_size=3)
    tokenize_file((tmp_path / "preferences.jsonl").rename(tmp_path / "elsewhere.jsonl"))

    assert capsys.readouterr().out.count("; from the cache\n") == 2


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({"overlong": "truncate", "on_bad_row": "skip"}, id="unused-settings"),
        pytest.param(
            {"records": [*pairs(8), pair("q", "a", "a")], "on_bad_row": "skip"}, id="skipped-record"
        ),
        pytest.param(
            {"records": [{"more": 1, **pair_of_messages(*p.values())} for p in pairs(8)]},
            id="another-format",
        ),
    ],
)
def test_the_data_hash_is_that_of_the_rows_however_they_were_made(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    usual = tokenize_records(tmp_path, pairs(8))

    tokenized = tokenize_records(tmp_path, **{"records": pairs(8)} | variant)

    assert tokenized.metadata.data_sha256 == usual.metadata.data_sha256


def test_the_data_hash_differs_if_the_rows_differ(tmp_path: Path) -> None:
    usual = pairs(8)
    swapped = [pair(r["prompt"], chosen=r["rejected"], rejected=r["chosen"]) for r in usual]
    relabelled = [*labelled_answers(7), labelled_answer("7?", "49 ü.", label=False)]
    variants: dict[str, dict[str, Any]] = {
        **VARIANTS,
        "usual": {},
        "swapped-answers": {"records": swapped},
        "another-answer": {"records": [*usual[:-1], usual[-1] | {"rejected": "another"}]},
        "another-prompt": {"records": [*usual[:-1], usual[-1] | {"prompt": "another"}]},
        "labelled-answers": {"records": labelled_answers(8), "unpaired": True},
        "another-label": {"records": relabelled, "unpaired": True},
    }

    names_by_hash: dict[str, str] = {}
    for name, variant in variants.items():
        tokenized = tokenize_records(tmp_path, **{"records": usual} | variant)
        data_hash = tokenized.metadata.data_sha256
        assert data_hash not in names_by_hash, f"{name} and {names_by_hash[data_hash]}"
        names_by_hash[data_hash] = name
