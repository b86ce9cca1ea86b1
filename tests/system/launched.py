"""Run by test_launcher.py: print what the user chose, as JSON, on rank 0 only."""

import json
import os
from dataclasses import asdict

from llmtrain import launch
from llmtrain.launching.launcher import has_launcher, launched_by


def main() -> None:
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(asdict(launched_by()) | {"has_launcher": has_launcher()}))


if __name__ == "__main__":
    launch(main)
