"""--extra_columns: fields of the records become columns of the micro-batch, token by token."""

import copy
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import llmtrain as lt
from llmtrain.data import corpus
from llmtrain.data.config import ChatConfig, PairConfig
from llmtrain.data.loader import train_loader
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.training.rows import tokenize
from tests.data.chat_records import chat_record, chatml, size_of, tokenize_rows
from tests.data.preparation import data_config, write_records
from tests.launching import series
from tests.training.small_runs import TWELVE_STEPS

pytestmark = pytest.mark.usefixtures("cache")

PAIR = {"prompt": "2?", "chosen": "two", "rejected": "three"}


def text_rows(folder: Path, records: list[dict[str, Any]], *columns: str) -> Tokenized:
    path = write_records(folder / "texts.jsonl", records)
    return tokenize(data_config(path, extra_columns=[*columns]), 8)


def batches_of(rows: Tokenized) -> list[Batch]:
    """Return all training rows once, in micro-batches of one."""
    loader = train_loader(rows.train, 1, 1, range(len(rows.train)), seed=1)
    return list(itertools.chain.from_iterable(batch.batches for batch in loader))


# --- each value belongs to its token


def test_text_has_the_values_of_its_own_tokens(tmp_path: Path) -> None:
    records = []
    expected: list[tuple[str, float, float, list[int]]] = []
    for number, text in enumerate(["a bird", "cats and dogs", "x" * 30], start=1):
        scores = [number + i / 64 for i in range(len(text))]
        pairs = [[ord(character), -i] for i, character in enumerate(text)]
        records.append({"text": text, "score": scores, "pair": pairs, "number": number})
        expected.append(("<|endoftext|>", number, 0, [0, 0]))  # lists have no value for it
        expected += [*zip(text, [number] * len(text), scores, pairs, strict=True)]
    expected.append(("<|endoftext|>", 0, 0, [0, 0]))

    rows = text_rows(tmp_path, records, "number", "score:float16", "pair:int32")

    actual = []
    for number in range(len(rows.train)):
        row = {name: values[number > 0 :] for name, values in rows.train[number].items()}
        tokens = [rows.tokenizer.decode([max(id, 0)]) for id in row["input_ids"]]
        actual += zip(tokens, row["number"], row["score"], row["pair"], strict=True)
    assert actual[: len(expected)] == expected
    assert all(values[1:] == (0, 0, [0, 0]) for values in actual[len(expected) :])  # padding
    batch = batches_of(rows)[0]
    dtypes = {name: batch[name].dtype for name in ("number", "score", "pair")}
    assert dtypes == {"number": torch.float32, "score": torch.float16, "pair": torch.int64}
    assert batch["pair"].shape == (1, 9, 2)


@pytest.mark.parametrize("eval_fraction", [0.0, 0.5])  # a single document is cut in two
def test_tokens_have_the_values_of_the_spans_that_they_overlap(
    eval_fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_SEGMENT_CHARACTERS", 20)
    words = ["one", "\N{LATIN SMALL LETTER E WITH ACUTE}t\N{SLIGHTLY SMILING FACE}", "three"]
    text = " ".join(words * 40)
    # The value of a word is the number of its first character.
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    spans = [
        {"start": start, "stop": start + len(word), "value": start + 1}
        for start, word in zip(starts, text.split(), strict=True)
    ]
    path = write_records(tmp_path / "a.jsonl", [{"text": text, "place": spans}])
    config = data_config(path, eval_fraction=eval_fraction, extra_columns=["place"])

    rows = tokenize(dataclasses.replace(config, tokenizer="bpe:300"), 8)

    seen: dict[int, list[int]] = {}
    for split in filter(None, [rows.train, rows.eval]):
        for number in range(len(split)):
            row = split[number]
            for id, place in [*zip(row["input_ids"], row["place"], strict=True)][:-1]:
                if place:
                    seen.setdefault(int(place) - 1, []).append(id)
    assert [*seen] == starts
    spelled = [rows.tokenizer.decode(ids).strip() for ids in seen.values()]
    assert spelled == text.split()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("max_length", [99, 40])
def test_tokens_of_conversations_keep_their_values(
    packing: bool, max_length: int, tmp_path: Path
) -> None:
    records = [chat_record("1?", "one"), chat_record("2?", "two", "3?", "three")]
    pieces = [re.findall(r"<\|\w+\|>|.", chatml(record), re.DOTALL) for record in records]
    for number, record in enumerate(records, start=1):
        record["score"] = [1000 * number + i for i in range(size_of(record))]
        record["number"] = number
        record["pair"] = [[score, -score] for score in record["score"]]
    path = write_records(tmp_path / "chats.jsonl", records)

    rows = tokenize_rows(
        ChatConfig,
        path,
        max_length=max_length,
        packing=packing,
        overlong="truncate",
        extra_columns=["score", "number", "pair:int32"],
    )

    seen = []
    for batch in batches_of(rows):
        assert batch["score"].shape == batch["number"].shape == batch["input_ids"].shape
        assert batch["pair"].equal(torch.stack([batch["score"], -batch["score"]], dim=-1).long())
        for id, score, number in zip(
            batch["input_ids"][0], batch["score"][0], batch["number"][0], strict=True
        ):
            record, index = divmod(int(score), 1000)
            assert record == number
            if record:
                assert rows.tokenizer.decode([id]) == pieces[record - 1][index]
                seen.append((record, index))
    if max_length == 40:  # the second turn does not fit
        pieces[1] = pieces[1][: size_of(chat_record("2?", "two"))]
    expected = [(number, i) for number in (1, 2) for i in range(len(pieces[number - 1]))]
    assert sorted(seen) == expected


@pytest.mark.parametrize("unpaired", [True, False])
@pytest.mark.parametrize("packing", [True, False])
def test_answers_have_the_number_of_their_record(
    packing: bool, unpaired: bool, tmp_path: Path
) -> None:
    records = [{**PAIR, "prompt": f"{i}?", "loss_mask": i / 4} for i in range(1, 5)]
    path = write_records(tmp_path / "pairs.jsonl", records)

    rows = tokenize_rows(
        PairConfig,
        path,
        max_length=31,
        unpaired=unpaired,
        packing=packing,
        extra_columns=["loss_mask"],
    )

    seen = set()
    for batch in batches_of(rows):
        for codes, weights, ids in zip(
            batch["answers"], batch["loss_weight"], batch["input_ids"], strict=True
        ):
            assert not weights[codes < 0].any()
            for pair in set((codes[codes >= 0] // 4).tolist()):
                text = rows.tokenizer.decode(ids[codes // 4 == pair])
                (weight,) = set(weights[codes // 4 == pair].tolist())
                seen.add((text.partition("?")[0][-1:], weight))
    assert seen == {(str(i), i / 4) for i in range(1, 5)}


# --- the data hash


def test_other_values_are_other_data(tmp_path: Path) -> None:
    def data_hash(value: object, *columns: str) -> str:
        records = [{"text": "ab", "score": value}] * 9
        return text_rows(tmp_path, records, *columns).metadata.data_sha256

    assert data_hash(1) == data_hash(2)
    assert len({data_hash(1, "score"), data_hash([1, 2], "score"), data_hash(2)}) == 3
    assert data_hash(1, "score") == data_hash(1.0, "score")


def test_other_values_of_conversations_are_other_data(tmp_path: Path) -> None:
    hashes = set()
    for value in (1, 2):
        path = write_records(tmp_path / "a.jsonl", [{**chat_record("1?", "one"), "score": value}])
        rows = tokenize_rows(ChatConfig, path, max_length=99, extra_columns=["score"])
        hashes.add(rows.metadata.data_sha256)
    assert len(hashes) == 2


# --- errors


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"line 2: score is null, not a number or a list of shape \[2\]"),
        ("1", r'line 2: score is "1", not a number'),
        ([1], r"line 2: score is \[1\], not a number or a list of shape \[2\]"),
        ([[1, 2], [3, 4]], "line 2: score is .*, not a number or a list of shape"),
        ([[1], 2], "line 2: score is .*, not a number or a list of shape"),
        (float("nan"), "line 2: score holds nan, no valid score in float16"),
        (1e6, "line 2: score holds 1000000.0, no valid score in float16"),
    ],
)
def test_wrong_values_are_one_line(value: object, message: str, tmp_path: Path) -> None:
    records = [{"text": "ab", "score": 1}, {"text": "ab", "score": value}]
    with pytest.raises(UserError, match=message):
        text_rows(tmp_path, records, "score:float16")
    chats = [{**chat_record("1?", "one"), "score": record["score"]} for record in records]
    path = write_records(tmp_path / "chats.jsonl", chats)
    message = message.replace("[2", rf"[{size_of(chats[0])}")
    with pytest.raises(UserError, match=message):
        tokenize_rows(ChatConfig, path, max_length=99, extra_columns=["score:float16"])


@pytest.mark.parametrize(
    ("record", "column", "message"),
    [
        ({"loss_mask": -0.5}, "loss_mask", "loss_weight holds -0.5, no valid loss_weight"),
        ({"ids": 1.5}, "ids:int32", "ids holds 1.5, no valid ids in int32"),
        ({"ids": 1 << 31}, "ids:int32", "ids holds 2147483648, no valid ids in int32"),
        ({"a": [{"start": 1, "stop": 3, "value": 1}]}, "a", "no spans with .* of 2 characters"),
        ({"a": [{"start": 1, "stop": 2}]}, "a", "no spans with start, stop and value"),
        ({}, "labels", "--extra_columns labels: write NAME or NAME:DTYPE"),
        ({}, "text", "--extra_columns text: write NAME or NAME:DTYPE"),
        ({}, "a:bfloat16", "--extra_columns a:bfloat16: .* float16, float32 or int32"),
        ({}, ":int32", "--extra_columns :int32: write NAME"),
    ],
)
def test_wrong_columns_are_one_line(
    record: dict[str, Any], column: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        text_rows(tmp_path, [{"text": "ab", **record}], column)


def test_a_list_needs_a_record_with_one_sequence(tmp_path: Path) -> None:
    path = write_records(tmp_path / "pairs.jsonl", [{**PAIR, "score": [1, 2]}])
    with pytest.raises(UserError, match="line 1: it makes several sequences, so extra columns"):
        tokenize_rows(PairConfig, path, max_length=31, extra_columns=["score"])


def test_a_record_with_a_wrong_value_can_be_skipped(tmp_path: Path) -> None:
    records = [{**chat_record("1?", "one"), "score": i} for i in (1.0, None, 2.0)]
    path = write_records(tmp_path / "chats.jsonl", records)
    rows = tokenize_rows(
        ChatConfig, path, max_length=99, on_bad_row="skip", extra_columns=["score"]
    )
    assert {*itertools.chain(*(row["score"].unique().tolist() for row in batches_of(rows)))} == {
        0,
        1,
        2,
    }


# --- Tokenized.of


IDS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def own_rows(*extra_columns: str, **columns: list[Any]) -> Tokenized:
    dataset = datasets.Dataset.from_dict({"input_ids": IDS, **columns})
    return Tokenized.of(dataset, None, dataset, extra_columns=extra_columns)


def test_own_rows_have_extra_columns() -> None:
    scores = np.arange(8.0).reshape(2, 4)
    pairs = np.arange(16).reshape(2, 4, 2) - 8

    rows = own_rows(
        *("loss_mask", "score:float16", "pair:int32"),
        **{"loss_mask": [0.5, 1.5], "score": scores.tolist(), "pair": pairs.tolist()},
    )

    (first, second) = sorted(batches_of(rows), key=lambda batch: batch["input_ids"][0, 0].item())
    assert first["loss_weight"].tolist() == [[0.5] * 4]
    assert second["loss_weight"].tolist() == [[1.5] * 4]
    assert second["score"].equal(torch.from_numpy(scores[1:]).half())
    assert second["pair"].equal(torch.from_numpy(pairs[1:]))
    assert rows.vocabulary == 9


def test_own_columns_are_hashed_and_those_without_a_name_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def data_hash(values: list[float], *columns: str) -> str:
        return own_rows(*columns, loss_mask=values).metadata.data_sha256

    assert data_hash([1, 2]) == data_hash([1, 3])
    assert "the column loss_mask is not used; name it in extra_columns" in capsys.readouterr().err
    assert data_hash([1, 2], "loss_mask") != data_hash([1, 3], "loss_mask")
    assert "not used" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0] * 3] * 2, r"score is .*, not a number or a list of shape \[2, 4\]"),
        ([[1.0] * 4, [1.0] * 3], "score is .*, not a number or a list of shape"),
        ([1.0, float("inf")], "score holds inf, no valid score in float32"),
        (["1", "2"], "score is .*, not a number or a list"),
    ],
)
def test_wrong_own_columns_are_one_line(values: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^Tokenized.of: {message}"):
        own_rows("score", score=values)
    with pytest.raises(UserError, match=r"^Tokenized\.of: .*other"):
        own_rows("other", score=values)


# --- in a run


class Advantages(lt.Objective):
    """A loss of the user that reads a column."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []

    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        self._batches.append(batch)
        nll = model.nll(**batch, per_target=True)
        return lt.LossSums((nll * batch["advantage"][:, 1:].flatten()).sum())


def test_a_loss_reads_its_column(tmp_path: Path) -> None:
    records = [{"text": "some words, " * 9, "advantage": i / 8} for i in range(1, 9)]
    path = write_records(tmp_path / "texts.jsonl", records)
    settings = dataclasses.replace(
        TWELVE_STEPS,
        data=data_config(path, global_batch_size=2, extra_columns=["advantage"]),
        optim=lt.OptimConfig(optim="adamw", max_steps=1),
        run=lt.RunConfig(output_dir=str(tmp_path / "run"), report_to=["none"]),
    )
    rows = lt.tokenize(settings.data, 16)
    model = lt.GPT(settings.model, rows.vocabulary, seed=0)
    first_model = copy.deepcopy(model)
    bundle = lt.ModelBundle(model, model.files(rows.tokenizer, rows.metadata.dataset))
    objective = Advantages()

    lt.fit(settings, rows, lambda *_: bundle, objective=objective)

    loss = torch.tensor(0.0)
    for batch in objective._batches:
        logits = first_model(batch["input_ids"][:, :-1]).flatten(0, 1)
        nll = cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="none")
        loss += (nll * batch["advantage"][:, 1:].flatten()).sum() / (2 * 16)
    assert {*torch.cat([b["advantage"] for b in objective._batches]).unique().tolist()} <= {
        i / 8 for i in range(1, 9)
    }
    assert series(tmp_path / "run", "train/loss")[1] == pytest.approx(loss.item(), rel=1e-5)
