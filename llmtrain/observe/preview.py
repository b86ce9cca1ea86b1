"""The rows that a run would be trained on, shown before its first update."""

import os
import sys
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from llmtrain.console import rank
from llmtrain.types import IGNORED, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GREEN = ("\x1b[32m", "\x1b[0m")
_QUOTES = (
    "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
    "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
)


def preview(rows: Rows, tokenizer: "PreTrainedTokenizerFast", count: int = 2) -> None:
    """Print the first rows, from rank 0, with a line between documents.

    Trained and judged tokens are green, or in angle quotes where there is no terminal.
    """
    if rank():
        return
    before, after = _GREEN if sys.stdout.isatty() and "NO_COLOR" not in os.environ else _QUOTES
    for number in range(min(count, len(rows))):
        print(f"===== row {number} of {len(rows):,}")
        row = rows[number]
        tokens, answers = row["input_ids"], row.get("answers")
        labels, at = row.get("labels", tokens), row.get("position_ids", ())
        new = [
            p
            for p in range(1, len(at))
            if (at[p] == 0 if answers is None else answers[p] != answers[p - 1])
        ]
        for first, end in pairwise([0, *new, len(tokens)]):
            answer = 0 if answers is None else answers[first]
            if first and (answer < 0 or all(label == IGNORED for label in labels[first:])):
                print(f"----- {end - first} places are padding")
                continue
            if first:
                print(
                    "----- the other answer"
                    if answer & 1
                    else "----- the next document of this row"
                )
            # a negative token comes after the end of a text; a row's first is not predicted
            document = [
                (p > 0 and labels[p] != IGNORED, tokens[p])
                for p in range(first, end)
                if tokens[p] >= 0
            ]
            for trained, pairs in groupby(document, key=itemgetter(0)):
                text = tokenizer.decode([token for _, token in pairs])
                print(f"{before}{text}{after}" if trained else text, end="")
            print()
    print("===== so far --dry_run goes; nothing was trained or written", flush=True)
