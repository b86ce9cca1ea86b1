"""Whatever a user gets wrong ends soon, in an error of one line, and leaves nothing half written."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import PYTHON, long_form, run


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 15), *(pytest.param(seed, 120, marks=long_form) for seed in (1, 2))],
)
def test_bad_input_ends_in_an_error_of_one_line_and_leaves_nothing(
    seed: int, count: int, tmp_path: Path, score: Callable[[str], None]
) -> None:
    arguments = [str(tmp_path), str(seed), str(count)]
    ended = run([*PYTHON, "tests/system/fuzz.py", *arguments], timeout=800)

    lines = (tmp_path / "attempts.jsonl").read_text().splitlines()
    attempts = [json.loads(line) for line in lines]
    outcomes = Counter(attempt["outcome"] for attempt in attempts)
    counts = [f"{outcomes[outcome]} {outcome}" for outcome in sorted(outcomes)]
    score(f"fuzz: seed {seed}: {', '.join(counts)}")

    faults = [
        attempt
        for attempt in attempts
        if attempt["outcome"] not in ("one line", "success") or attempt["temporary_files"]
    ]
    assert faults == [], json.dumps(faults[:3], indent=1)
    assert len(attempts) == count, f"an attempt hung, or ended the process:\n{ended.err[-3000:]}"
    assert outcomes["one line"] > count / 3, "few attempts succeed"
