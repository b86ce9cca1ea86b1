"""The text of a row of tokens, with marks around its target tokens."""

from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from llmtrain.console import printable
from llmtrain.interfaces.batches import IGNORED, PADDING_CODE, is_second

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# How target tokens are shown.
_TARGETS = (
    "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}{}\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
)


def row_text(row: dict[str, list[int]], tokenizer: "PreTrainedTokenizerFast | None") -> str:
    """Return the text of a row, with a line between documents or answers.

    Args:
        row: the columns of the row.
        tokenizer: turns tokens into text. Without it, the text has their numbers.
    """
    tokens = row["input_ids"]
    labels = row.get("labels", tokens)
    answers = row.get("answers")
    lines = []
    padding = 0  # tokens of the padding that ends here
    for start, end in pairwise([0, *_segment_starts(row), len(tokens)]):
        # Padding is at the end of a row, or between two answers.
        is_between_answers = answers is not None and answers[start] == PADDING_CODE
        is_padding = is_between_answers or all(label == IGNORED for label in labels[start:])
        if start > 0 and is_padding:
            padding += end - start
            continue

        lines += _padding_lines(padding)
        padding = 0
        if start > 0:
            is_second_answer = answers is not None and is_second(answers[start])
            lines.append(f"----- the {'other answer' if is_second_answer else 'next document'}")
        lines.append(_marked_text(tokens, labels, range(start, end), tokenizer))
    return "\n".join(lines + _padding_lines(padding))


def _padding_lines(tokens: int) -> list[str]:
    return [f"----- {tokens:,} padding token{'s' if tokens > 1 else ''}"] if tokens else []


def _segment_starts(row: dict[str, list[int]]) -> list[int]:
    """Return where a document, an answer or padding begins, except the beginning of the row."""
    from llmtrain.data.packing import LENGTHS

    length = len(row["input_ids"])
    answers = row.get("answers")
    if answers is not None:
        return [i for i in range(1, length) if answers[i] != answers[i - 1]]
    if "position_ids" in row:
        return [i for i in range(1, length) if row["position_ids"][i] == 0]

    end = row[LENGTHS][0] if LENGTHS in row else _end_of_content(row)
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
) -> str:
    """Return the text at some positions of a row, with marks around the target tokens."""
    from llmtrain.models.generation import continuation_text

    # The first token of a row is not predicted, and a negative one comes after the end of a text.
    marked = [(i > 0 and labels[i] != IGNORED, tokens[i]) for i in positions if tokens[i] >= 0]
    before: list[int] = []
    pieces = []
    for is_target, group in groupby(marked, key=lambda pair: pair[0]):
        numbers = [token for _, token in group]
        if tokenizer is None:
            piece = " ".join(map(str, numbers))
        else:
            piece = printable(
                continuation_text(tokenizer, before, numbers, skip_special_tokens=False)
            )
        before += numbers
        pieces.append(_TARGETS.format(piece) if is_target else piece)
    return (" " if tokenizer is None else "").join(pieces)
