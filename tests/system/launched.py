"""Run by test_launcher.py: print what the user chose, as JSON, on rank 0 only.

With a number as its argument, it ends as a run does that a signal stopped, with that exit status.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass

from llmtrain import launch
from llmtrain.launching.launcher import has_launcher, launched_by


@dataclass
class Stopped:
    """The result of a run that was stopped."""

    exit_status: int


def main() -> Stopped:
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(asdict(launched_by()) | {"has_launcher": has_launcher()}))
    return Stopped(exit_status=int(sys.argv[1]) if sys.argv[1:2] == ["130"] else 0)


if __name__ == "__main__":
    launch(main)
