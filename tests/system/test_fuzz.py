"""Whatever a user gets wrong ends in one line, soon, and leaves nothing half-written."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import LONG, PYTHON, run

COUNT = 150 if LONG else 25
SEEDS = range(6) if LONG else range(1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_bad_input_ends_in_one_line_and_leaves_nothing(
    seed: int, tmp_path: Path, score: Callable[[str], None]
) -> None:
    ended = run(
        [*PYTHON, "tests/system/fuzz.py", str(tmp_path), str(seed), str(COUNT)], timeout=800
    )
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    counts = Counter(one["ended"] for one in found)
    score(f"fuzz: seed {seed}: {', '.join(f'{counts[how]} {how}' for how in sorted(counts))}")
    wrong = [one for one in found if one["ended"] not in ("one line", "did it") or one["left"]]
    assert not wrong, json.dumps(wrong[:3], indent=1)
    assert len(found) == COUNT, f"it hung, or died:\n{ended.err[-3000:]}"
    assert counts["one line"] > COUNT / 3
