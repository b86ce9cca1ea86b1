"""The rows that a run would be trained on, printed before its first step."""

import contextlib
import os
import sys
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from llmtrain.console import printable, rank
from llmtrain.interfaces.answer_codes import PADDING, is_second
from llmtrain.interfaces.batches import IGNORED, RowSequence

_LENGTHS = "lengths"  # the column of unpacked rows that has their number of tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# How target tokens are shown.
_GREEN = "\x1b[32m{}\x1b[0m"
_QUOTES = (
    "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}{}\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
)


def preview(rows: RowSequence, tokenizer: "PreTrainedTokenizerFast | None", count: int = 2) -> None:
    """Print the first rows, from rank 0, with a line between documents.

    Target tokens are green on a terminal, and in angle quotes elsewhere.

    Args:
        rows: the rows of the run.
        tokenizer: turns tokens into text. Without it, their numbers are printed.
        count: how many rows to print.
    """
    if rank() != 0:
        return

    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    with contextlib.suppress(BrokenPipeError):  # `... --dry_run | head`
        for number in range(min(count, len(rows))):
            print(f"===== row {number} of {len(rows):,}")
            _print_row(rows[number], tokenizer, marks=_GREEN if is_coloured else _QUOTES)
        print("===== end of --dry_run: nothing was trained or written", flush=True)


def _print_row(
    row: dict[str, list[int]], tokenizer: "PreTrainedTokenizerFast | None", marks: str
) -> None:
    tokens = row["input_ids"]
    labels = row.get("labels", tokens)
    answers = row.get("answers")
    padding = 0  # tokens of the padding that ends here
    for start, end in pairwise([0, *_segment_starts(row), len(tokens)]):
        # Padding is at the end of a row, or between two answers.
        is_between_answers = answers is not None and answers[start] == PADDING
        is_padding = is_between_answers or all(label == IGNORED for label in labels[start:])
        if start > 0 and is_padding:
            padding += end - start
            continue

        _print_padding(padding)
        padding = 0
        if start > 0:
            is_second_answer = answers is not None and is_second(answers[start])
            print("----- the other answer" if is_second_answer else "----- the next document")
        print(_marked_text(tokens, labels, range(start, end), tokenizer, marks))
    _print_padding(padding)


def _print_padding(tokens: int) -> None:
    if tokens:
        print(f"----- {tokens:,} padding token{'s' if tokens > 1 else ''}")


def _segment_starts(row: dict[str, list[int]]) -> list[int]:
    """Return where a document, an answer or padding begins, except the beginning of the row."""
    length = len(row["input_ids"])
    answers = row.get("answers")
    if answers is not None:
        return [i for i in range(1, length) if answers[i] != answers[i - 1]]
    if "position_ids" in row:
        return [i for i in range(1, length) if row["position_ids"][i] == 0]

    end = row[_LENGTHS][0] if _LENGTHS in row else _end_of_content(row)
    return [end] if 0 < end < length else []


def _end_of_content(row: dict[str, list[int]]) -> int:
    """Return where the padding of a row begins that was made elsewhere.

    Padding repeats one token and is not trained.
    """
    tokens = row["input_ids"]
    labels = row.get("labels", tokens)
    end = len(tokens)
    while end > 0 and labels[end - 1] == IGNORED and tokens[end - 1] == tokens[-1]:
        end -= 1
    return end


def _marked_text(
    tokens: list[int],
    labels: list[int],
    positions: range,
    tokenizer: "PreTrainedTokenizerFast | None",
    marks: str,
) -> str:
    """Return the text at some positions of a row, with marks around the target tokens."""
    marked_tokens = []
    for i in positions:
        # The first token of a row is not predicted.
        is_target = i > 0 and labels[i] != IGNORED
        # A negative token comes after the end of a text.
        if tokens[i] >= 0:
            marked_tokens.append((is_target, tokens[i]))

    pieces = []
    for is_target, group in groupby(marked_tokens, key=itemgetter(0)):
        numbers = [token for _, token in group]
        if tokenizer is None:
            piece = " ".join(map(str, numbers))
        else:
            piece = printable(str(tokenizer.decode(numbers)))
        pieces.append(marks.format(piece) if is_target else piece)
    return (" " if tokenizer is None else "").join(pieces)
