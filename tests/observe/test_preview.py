"""Rows are printed as they are trained, with target tokens in angle quotes or in green."""

import io

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.observe.preview import preview

HEADER = "===== row 0 of 1"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each letter."""
    return as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)


@pytest.fixture(autouse=True)
def _is_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def one_row(**columns: list[int]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({name: [values] for name, values in columns.items()})


class RowMaker:
    """Makes columns from text, in which capital letters are targets and ``_`` is padding."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        token_of_padding = 0
        self.input_ids = []
        self.labels = []
        for letter in text:
            (token,) = tokenizer(letter)["input_ids"]
            self.input_ids.append(token_of_padding if letter == "_" else token)
            self.labels.append(token if letter.isupper() else -100)

    def row(self, **columns: list[int]) -> datasets.Dataset:
        return one_row(input_ids=self.input_ids, labels=self.labels, **columns)


def quoted(text: str) -> str:
    """Replace [ and ] by the angle quotes around target tokens."""
    left = "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}"
    right = "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
    return text.replace("[", left).replace("]", right)


def printed(capsys: pytest.CaptureFixture) -> list[str]:
    """Return the printed lines, except for the last one, which ends the preview."""
    *lines, last_line = capsys.readouterr().out.splitlines()
    assert last_line == "===== end of --dry_run: nothing was trained or written"
    return lines


@pytest.fixture
def packed(tokenizer: PreTrainedTokenizerFast) -> datasets.Dataset:
    """A row of two documents and three places of padding."""
    return RowMaker(tokenizer, "abCDeF___").row(position_ids=[0, 1, 2, 3, 0, 1, 0, 1, 2])


# --- marks


def test_target_tokens_are_in_angle_quotes(
    packed: datasets.Dataset, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture
) -> None:
    preview(packed, tokenizer)

    assert printed(capsys) == [
        HEADER,
        quoted("ab[CD]"),
        "----- the next document",
        quoted("e[F]"),
        "----- 3 padding tokens",
    ]


def test_target_tokens_are_green_on_a_terminal(
    packed: datasets.Dataset,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)

    preview(packed, tokenizer)

    assert "ab\x1b[32mCD\x1b[0m" in capsys.readouterr().out


def test_all_tokens_of_a_text_are_targets_except_for_the_first(
    tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture
) -> None:
    preview(one_row(input_ids=[*tokenizer("abc")["input_ids"], -100]), tokenizer)

    assert printed(capsys) == [HEADER, quoted("a[bc]"), "----- 1 padding token"]


def test_tokens_are_shown_as_numbers_without_a_tokenizer(capsys: pytest.CaptureFixture) -> None:
    preview(one_row(input_ids=[5, 6, 7], labels=[-100, -100, 7]), None)

    assert printed(capsys) == [HEADER, quoted("5 6 [7]")]


# --- padding


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"lengths": [4]}, id="with lengths"),
        pytest.param({}, id="made elsewhere, without lengths"),
    ],
)
def test_the_padding_of_an_unpacked_row_is_counted(
    columns: dict[str, list[int]],
    tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture,
) -> None:
    preview(RowMaker(tokenizer, "abCD" + "_" * 37).row(**columns), tokenizer)

    assert printed(capsys) == [HEADER, quoted("ab[CD]"), "----- 37 padding tokens"]


def test_adjacent_parts_of_padding_are_counted_together(
    tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture
) -> None:
    preview(RowMaker(tokenizer, "aB___").row(position_ids=[0, 1, 0, 0, 1]), tokenizer)

    assert printed(capsys) == [HEADER, quoted("a[B]"), "----- 3 padding tokens"]


# --- preference pairs


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        pytest.param(
            "pABC__",
            [0, 0, 0, 1, -1, -1],
            ["p[AB]", "----- the other answer", "[C]"],
            id="packed, with one prompt",
        ),
        pytest.param(
            "pAB__pC__",
            [0, 0, 0, -1, -1, 1, 1, -1, -1],
            ["p[AB]", "----- 2 padding tokens", "----- the other answer", "p[C]"],
            id="unpacked, with padding after each answer",
        ),
    ],
)
def test_the_two_answers_of_a_pair_are_separated(
    text: str,
    answers: list[int],
    expected: list[str],
    tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture,
) -> None:
    positions = [*range(len(text))]
    preview(RowMaker(tokenizer, text).row(position_ids=positions, answers=answers), tokenizer)

    lines = [quoted(line) for line in expected]
    assert printed(capsys) == [HEADER, *lines, "----- 2 padding tokens"]


# --- where it is printed


def test_other_ranks_print_nothing(
    packed: datasets.Dataset,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("RANK", "1")

    preview(packed, tokenizer)

    assert capsys.readouterr().out == ""


def test_a_closed_pipe_is_no_error(
    packed: datasets.Dataset, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            attempts.append(text)
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", ClosedPipe())

    preview(packed, tokenizer)

    assert len(attempts) == 1
