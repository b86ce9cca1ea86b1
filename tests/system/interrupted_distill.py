"""recipes/distill.py that notes what a round does, and signals itself at a moment.

The file of the variable MARKS gets a line for each group that is written. MOMENT is JSON: the name
of a function, how often it has been called, the rank, and the signal.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmtrain as lt
from recipes import distill

moment = json.loads(os.environ.get("MOMENT", "{}"))
calls: dict[str, int] = {}


def marked(name: str, function: Callable) -> Callable:
    """Return a function that signals this process after so many calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls[name] = calls.get(name, 0) + 1
        if name == "write_sealed":
            with Path(os.environ["MARKS"]).open("a") as marks:
                marks.write(f"{args[0].parent.name}/{args[0].name}\n")
        now = {"name": name, "count": calls[name], "rank": int(os.environ.get("RANK", "0"))}
        if now.items() <= moment.items():
            os.kill(os.getpid(), moment["signal"])
        return result

    return call


def main() -> object:
    from llmtrain.training import loop, rounds

    for module, name in [
        (rounds, "answer"),  # answers are there, and not scored
        (rounds, "write_sealed"),  # a group is written
        (rounds.SetMaker, "make"),  # the rows are written, and the set has no manifest
        (rounds.SetMaker, "finish"),  # the set is complete, and its groups are there
        (loop, "train_step"),
    ]:
        setattr(module, name, marked(name, getattr(module, name)))
    return distill.main()


if __name__ == "__main__":
    lt.launch(main)
