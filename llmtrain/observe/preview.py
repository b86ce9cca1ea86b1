"""The rows that a run would be trained on, shown before its first update."""

import os
import sys
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from llmtrain.console import rank
from llmtrain.contract import IGNORED, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GREEN = ("\x1b[32m", "\x1b[0m")
_QUOTES = ("\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}", "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}")


def preview(rows: Rows, tokenizer: "PreTrainedTokenizerFast", count: int = 2) -> None:
    """Print the first rows, from rank 0, with a line between documents.

    What is trained is green, or in angle quotes where there is no terminal.
    """
    if rank():
        return
    before, after = _GREEN if sys.stdout.isatty() and "NO_COLOR" not in os.environ else _QUOTES
    for number in range(min(count, len(rows))):
        print(f"===== row {number} of {len(rows):,}")
        tokens = rows[number]["input_ids"]
        labels = rows[number].get("labels", tokens)
        restarts = [place for place, at in enumerate(rows[number].get("position_ids", ())) if place and at == 0]
        for first, end in pairwise([0, *restarts, len(tokens)]):
            if first and all(label == IGNORED for label in labels[first:]):
                print(f"----- {len(tokens) - first} places are padding")
                break
            if first:
                print("----- the next document of this row")
            # a negative token comes after the end of a text; a row's first is not predicted
            document = [(p > 0 and labels[p] != IGNORED, tokens[p]) for p in range(first, end) if tokens[p] >= 0]
            for trained, pairs in groupby(document, key=itemgetter(0)):
                text = tokenizer.decode([token for _, token in pairs])
                print(f"{before}{text}{after}" if trained else text, end="")
            print()
    print("===== so far --dry_run goes; nothing was trained or written", flush=True)
