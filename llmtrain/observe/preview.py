"""What a run would be trained on, shown before its first update."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmtrain.console import rank
from llmtrain.contract import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BORDER = "----- the next document of this row"


def preview(rows: Sequence[dict[str, Any]], tokenizer: "PreTrainedTokenizerFast", count: int = 2) -> None:
    """Print the first rows, from rank 0: what is trained in green, or in angle quotes where there is no terminal, and a
    line between documents."""
    if rank():
        return
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    before, after = (
        ("\x1b[32m", "\x1b[0m")
        if colour
        else ("\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}", "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}")
    )
    for number in range(min(count, len(rows))):
        print(f"===== row {number} of {len(rows):,}")
        row = rows[number]
        labels = row.get("labels", row["input_ids"])
        positions = row.get("position_ids", range(len(labels)))
        spans: list[tuple[bool, list[int]]] = []
        for place, (token, label, position) in enumerate(zip(row["input_ids"], labels, positions, strict=True)):
            if place and position == 0:
                _print_spans(spans, tokenizer, before, after)
                spans = []
                if all(later == IGNORED for later in labels[place:]):
                    print(f"----- {len(labels) - place} places are padding")
                    break
                print(_BORDER)
            if token < 0:  # a text that has ended
                break
            trained = place > 0 and label != IGNORED
            if not spans or spans[-1][0] != trained:
                spans.append((trained, []))
            spans[-1][1].append(token)
        _print_spans(spans, tokenizer, before, after)
    print("===== so far --dry_run goes; nothing was trained or written", flush=True)


def _print_spans(
    spans: list[tuple[bool, list[int]]], tokenizer: "PreTrainedTokenizerFast", before: str, after: str
) -> None:
    if spans:
        texts = [(trained, str(tokenizer.decode(ids))) for trained, ids in spans]
        print("".join(f"{before}{text}{after}" if trained else text for trained, text in texts))
