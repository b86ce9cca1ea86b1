"""All tables, or those that are named; each writes benchmarks/results/NAME.json.

python -m benchmarks [--nanogpt FOLDER] [--text FILE] [overhead processes trainer sft data loss scale ...]
"""

import argparse
import os
import subprocess
import sys

from benchmarks.runs import ROOT

TABLES = [
    "overhead",
    "processes",
    "trainer",
    "sft",
    "preference",
    "data",
    "chats",
    "loss",
    "scale",
    "links",
    "plan",
    "steps",
]
TABLES += ["time_to_loss", "middle"]
NEEDS_NANOGPT = {"steps", "time_to_loss", "middle"}
NEEDS_TEXT = {"middle"}
NEEDS_ROOT = {"links", "plan"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", help=" ".join(TABLES))
    parser.add_argument(
        "--nanogpt", metavar="FOLDER", help="a checkout of github.com/karpathy/nanoGPT"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="for time_to_loss and middle; tinyshakespeare, say"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - set(TABLES):
        parser.error(f"no table {', '.join(sorted(unknown))}: there are {' '.join(TABLES)}")
    failed = []
    for table in arguments.tables or TABLES:
        if table in NEEDS_NANOGPT and not arguments.nanogpt:
            print(f"{table:<10}skipped: it needs --nanogpt FOLDER")
            continue
        if table in NEEDS_TEXT and not arguments.text:
            print(f"{table:<10}skipped: it needs --text FILE")
            continue
        if table in NEEDS_ROOT and os.geteuid():
            print(f"{table:<10}skipped: it needs root, for network namespaces")
            continue
        more = ["--nanogpt", arguments.nanogpt] if table in NEEDS_NANOGPT else []
        more += (
            ["--text", arguments.text]
            if table in ("time_to_loss", "middle") and arguments.text
            else []
        )
        if subprocess.run(
            [sys.executable, "-m", f"benchmarks.{table}", *more], cwd=ROOT, check=False
        ).returncode:
            failed.append(table)
    if failed:
        print(f"failed    {' '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
