"""Rows are shown as they are trained, with target tokens in angle quotes."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmtrain.commands.rows import row_text
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer

# The angle quotes around target tokens, which the tests write as brackets.
TO_BRACKETS = str.maketrans(
    {
        "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}": "[",
        "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}": "]",
    }
)
NEXT = "----- the next document"
OTHER = "----- the other answer"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each letter."""
    return as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)


def row_of(
    tokenizer: PreTrainedTokenizerFast, text: str, **columns: list[int]
) -> dict[str, list[int]]:
    """Return a row of text, in which capital letters are targets and ``_`` is padding."""
    ids = [0 if letter == "_" else tokenizer(letter)["input_ids"][0] for letter in text]
    labels = [token if letter.isupper() else -100 for token, letter in zip(ids, text, strict=True)]
    return {"input_ids": ids, "labels": labels, **columns}


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        pytest.param(
            "abCDeF____",
            {"position_ids": [0, 1, 2, 3, 0, 1, 0, 0, 1, 2]},
            ["ab[CD]", NEXT, "e[F]", "----- 4 padding tokens"],
            id="packed, with two parts of padding",
        ),
        pytest.param(
            "abCD" + "_" * 37,
            {"lengths": [4]},
            ["ab[CD]", "----- 37 padding tokens"],
            id="unpacked",
        ),
        pytest.param(
            "abCD" + "_" * 37,
            {},
            ["ab[CD]", "----- 37 padding tokens"],
            id="made elsewhere, without lengths",
        ),
        pytest.param(
            "pABC__",
            {"answers": [0, 0, 0, 1, -1, -1]},
            ["p[AB]", OTHER, "[C]", "----- 2 padding tokens"],
            id="a packed pair, with one prompt",
        ),
        pytest.param(
            "pAB__pC__",
            {"answers": [0, 0, 0, -1, -1, 1, 1, -1, -1]},
            ["p[AB]", "----- 2 padding tokens", OTHER, "p[C]", "----- 2 padding tokens"],
            id="an unpacked pair, with padding after each answer",
        ),
    ],
)
def test_targets_documents_answers_and_padding_are_marked(
    text: str,
    columns: dict[str, list[int]],
    expected: list[str],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    row = row_of(tokenizer, text, **columns)
    assert row_text(row, tokenizer).translate(TO_BRACKETS).splitlines() == expected


def test_all_tokens_of_a_text_are_targets_except_for_the_first(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    row = {"input_ids": [*tokenizer("abc")["input_ids"], -100]}
    text = row_text(row, tokenizer)
    assert text.translate(TO_BRACKETS).splitlines() == ["a[bc]", "----- 1 padding token"]


def test_tokens_are_shown_as_numbers_without_a_tokenizer() -> None:
    row = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}
    assert row_text(row, None).translate(TO_BRACKETS) == "5 6 [7]"


def test_the_text_is_that_of_all_tokens_together_if_a_decoder_drops_the_first_space() -> None:
    words = {"\N{LOWER ONE EIGHTH BLOCK}a": 0, "\N{LOWER ONE EIGHTH BLOCK}b": 1, "c": 2}
    trained = Tokenizer(models.WordLevel(words, unk_token="c"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained)
    assert tokenizer.decode([0, 1, 1, 2, 0]) == "a b bc a"

    columns = {"input_ids": [0, 1, 1, 2, 0], "labels": [-100, -100, 1, 2, -100], "lengths": [5]}
    assert row_text(columns, tokenizer).translate(TO_BRACKETS) == "a b[ bc] a"
