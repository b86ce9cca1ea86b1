"""What is trained, shown as it stands in the rows."""

import io

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.observe.preview import preview


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)


def ids(words: PreTrainedTokenizerFast, text: str) -> list[int]:
    return words(text)["input_ids"]


@pytest.fixture
def packed(words) -> datasets.Dataset:
    """Two documents and padding in a row: "abCD", of which capitals are trained, "eF", and three places."""
    tokens = ids(words, "abCDeF")
    trained = [letter.isupper() for letter in "abCDeF"]
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[*tokens, 0, 0, 0]],
            "labels": [
                [token if on else -100 for token, on in zip(tokens, trained, strict=True)]
                + [-100] * 3
            ],
            "position_ids": [[0, 1, 2, 3, 0, 1, 0, 1, 2]],
        }
    )


def test_trained_tokens_are_quoted_documents_apart_and_padding_is_named(
    packed, words, capsys, monkeypatch
):
    monkeypatch.delenv("RANK", raising=False)
    preview(packed, words)
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "===== row 0 of 1",
        "ab\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}CD\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
        "----- the next document",
        "e\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}F\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
        "----- 3 padding tokens",
    ]


def test_a_terminal_shows_them_in_green(packed, words, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    preview(packed, words)
    assert "ab\x1b[32mCD\x1b[0m" in capsys.readouterr().out


def test_of_a_text_all_but_the_first_token_is_trained(words, capsys):
    rows = datasets.Dataset.from_dict(
        {"input_ids": [[*ids(words, "abc"), -100], ids(words, "cdef")]}
    )
    preview(rows, words, count=1)
    assert "\na\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}bc" in capsys.readouterr().out


@pytest.mark.parametrize("packing", [True, False])
def test_the_answers_of_pairs_and_the_padding_between_them_are_apart(words, capsys, packing):
    tokens, on = ids(words, "pAB"), ids(words, "pC")[0 if not packing else 1 :]
    first, second = [*tokens, *[0] * (0 if packing else 2)], [*on, 0, 0]
    codes = [0] * 3 + ([] if packing else [-1] * 2) + [1] * len(on) + [-1] * 2
    both = [*first, *second]
    labels = [token if token in ids(words, "ABC") else -100 for token in both]
    row = {
        "input_ids": [both],
        "labels": [labels],
        "position_ids": [[*range(len(both))]],
        "answers": [codes],
    }
    preview(datasets.Dataset.from_dict(row), words)
    left, right = (
        "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
        "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
    )
    between = [] if packing else ["----- 2 padding tokens"]
    other = f"{left}C{right}" if packing else f"p{left}C{right}"
    told = ["===== row 0 of 1", f"p{left}AB{right}", *between, "----- the other answer", other]
    assert capsys.readouterr().out.splitlines()[:-1] == [*told, "----- 2 padding tokens"]


def test_other_ranks_are_silent(packed, words, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    preview(packed, words)
    assert capsys.readouterr().out == ""


def test_a_reader_that_has_gone_is_no_error(packed, words, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    preview(packed, words)


def test_the_padding_of_an_unpacked_row_is_summed_up(words, capsys):
    tokens = ids(words, "abCD")
    labels = [-100, -100, *tokens[2:]]
    padded = {"input_ids": [[*tokens, *[7] * 37]], "labels": [[*labels, *[-100] * 37]]}
    for lengths in ({"lengths": [[4]]}, {}):  # rows made elsewhere have no lengths
        preview(datasets.Dataset.from_dict(padded | lengths), words)
        assert capsys.readouterr().out.splitlines()[1:-1] == [
            "ab\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}CD"
            "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
            "----- 37 padding tokens",
        ]


def test_padding_of_several_documents_is_one_line(words, capsys):
    tokens = ids(words, "ab")
    row = {
        "input_ids": [[*tokens, 0, 0, 0]],
        "labels": [[*tokens, -100, -100, -100]],
        "position_ids": [[0, 1, 0, 0, 1]],
    }
    preview(datasets.Dataset.from_dict(row), words)
    assert capsys.readouterr().out.splitlines()[2:-1] == ["----- 3 padding tokens"]


def test_rows_without_a_tokenizer_are_shown_as_numbers(capsys):
    rows = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[-100, -100, 7]]})
    preview(rows, None)
    assert capsys.readouterr().out.splitlines()[1:-1] == [
        "5 6 \N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}7"
        "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
    ]
