"""The tables of benchmarks/: contenders take turns, a ratio is judged, and every table can be repeated."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import comparison
from benchmarks.comparison import Row, Table, take_turns
from tests.launching import ROOT


def test_contenders_take_turns_and_warm_up_rounds_do_not_count() -> None:
    calls: list[str] = []

    def contender(name: str) -> int:
        calls.append(name)
        return len(calls)

    turns = take_turns(
        {"a": lambda: contender("a"), "b": lambda: contender("b")},
        rounds=2,
        warm_up_rounds=1,
        retries=0,
    )

    assert calls == ["a", "b"] * 3
    assert turns["a"].results == [3, 5]
    assert turns["a"].median == 4


@pytest.mark.parametrize(
    ("busy_shares", "counted"), [([0.5, 0.0, 0.0], [2.0, 3.0]), ([1.0, 1.0, 1.0, 1.0], [3.0, 4.0])]
)
def test_a_round_in_which_other_programs_were_busy_is_repeated_twice_at_most(
    busy_shares: list[float], counted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter(busy_shares)
    monkeypatch.setattr(comparison._ForeignLoad, "share", lambda _: next(shares))
    results = iter([1.0, 2.0, 3.0, 4.0])

    turns = take_turns({"run": lambda: next(results)}, rounds=2, warm_up_rounds=0, retries=2)

    assert turns["run"].results == counted


@pytest.mark.parametrize(
    ("ours", "target", "verdict"),
    [
        (1.2, ">= 1.15", "met"),
        (1.1, ">= 1.15", "missed"),
        (0.8, "<= 0.85", "met"),
        (1.3, "+- 0.2", "missed"),
    ],
)
def test_the_aim_is_for_the_ratio(ours: float, target: str, verdict: str) -> None:
    row = Row(
        work="a step", against="a bare loop", ours=2 * ours, theirs=2.0, unit="s", target=target
    )
    assert math.isclose(row.ratio, ours)
    assert row.verdict == verdict


def test_a_row_is_printed_at_once_and_written_with_its_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "RESULTS", tmp_path / "results")
    table = Table("steps")

    table.add(work="a step", against="a bare loop", ours=3.0, theirs=2.0, unit="ms", target="<= 1")
    assert capsys.readouterr().out.split()[-4:] == ["1.500", "<=", "1", "missed"]

    table.write()
    written = json.loads((tmp_path / "results/steps.json").read_text())
    assert written["rows"][0]["ratio"] == 1.5


def test_every_file_of_results_is_written_by_a_module() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "benchmarks").glob("*.py"))
    for results in (ROOT / "benchmarks/results").glob("*.json"):
        assert f'Table("{results.stem}")' in sources, results
