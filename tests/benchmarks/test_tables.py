"""The tables of benchmarks/: contenders take turns, a ratio is judged, and every table can be repeated."""

import ast
import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import comparison
from benchmarks.__main__ import TABLES
from benchmarks.comparison import Row, Table, take_turns
from benchmarks.runs import GPTShape, flags
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
    assert turns["b"].results == [4, 6]
    assert turns["a"].median == 4


def test_a_contender_may_return_several_numbers_by_name() -> None:
    results: Iterator[dict[str, float]] = iter(
        [{"seconds": 3, "loss": 2}, {"seconds": 1, "loss": 4}, {"seconds": 2, "loss": 9}]
    )
    turns = take_turns({"run": lambda: next(results)}, rounds=3, warm_up_rounds=0, retries=0)

    assert turns["run"].values_of("loss") == [2, 4, 9]
    assert turns["run"].median_of("seconds") == 2


def test_a_round_in_which_other_programs_were_busy_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = iter([0.5, 0.0, 0.0])
    monkeypatch.setattr(comparison._ForeignLoad, "share", lambda _: next(shares))
    results = iter([1.0, 2.0, 3.0])

    turns = take_turns({"run": lambda: next(results)}, rounds=2, warm_up_rounds=0)

    assert turns["run"].results == [2.0, 3.0]


def test_only_so_many_rounds_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison._ForeignLoad, "share", lambda _: 1.0)
    results = iter([1.0, 2.0, 3.0])

    turns = take_turns({"run": lambda: next(results)}, rounds=1, warm_up_rounds=0, retries=2)

    assert turns["run"].results == [3.0]


@pytest.mark.parametrize(
    ("ours", "target", "verdict"),
    [
        pytest.param(1.2, ">= 1.15", "met", id="above the aim"),
        pytest.param(1.1, ">= 1.15", "missed", id="below the aim"),
        pytest.param(0.8, "<= 0.85", "met", id="below the limit"),
        pytest.param(0.9, "<= 0.85", "missed", id="above the limit"),
        pytest.param(0.9, "+- 0.2", "met", id="near enough to 1"),
        pytest.param(1.3, "+- 0.2", "missed", id="too far from 1"),
        pytest.param(1.3, "", "", id="without an aim"),
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
    printed = capsys.readouterr().out
    assert "a step" in printed
    assert printed.split()[-4:] == ["1.500", "<=", "1", "missed"]

    table.write(rounds=5)
    written = json.loads((tmp_path / "results/steps.json").read_text())
    assert written["rows"][0]["ratio"] == 1.5
    assert written["details"] == {"rounds": 5}


def test_flags_are_rendered_as_people_type_them() -> None:
    rendered = flags(max_steps=3, fused=True, compile=False, lora=None, shape=(4, 2))
    assert " ".join(rendered) == "--max_steps 3 --fused --shape 4 2"


def test_a_step_is_one_micro_batch_unless_its_size_is_given() -> None:
    shape = GPTShape(layers=2, heads=2, width=32, block=16, batch=8)
    assert shape.recipe_flags("lfm2")[-1] == "8"
    assert shape.recipe_flags("lfm2", micro_batch=4)[-1] == "4"


@pytest.mark.parametrize("table", TABLES)
def test_every_table_says_how_to_repeat_it(table: str) -> None:
    tree = ast.parse((ROOT / f"benchmarks/{table}.py").read_text())
    docstring = ast.get_docstring(tree)
    assert docstring is not None
    assert "Repeat" in docstring
    assert f"python -m benchmarks.{table}" in docstring


def test_benchmarks_run_without_the_tests() -> None:
    for file in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "tests", file
            if isinstance(node, ast.Import):
                assert all(name.name.split(".")[0] != "tests" for name in node.names), file


def test_every_table_with_results_has_a_module() -> None:
    for results in (ROOT / "benchmarks/results").glob("*.json"):
        module = importlib.util.find_spec(f"benchmarks.{results.stem}")
        assert module is not None, results
