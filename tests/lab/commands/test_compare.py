"""`llmtrain compare` finds a true difference, and says which runs it cannot compare."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run_cli
from tests.lab.seed_runs import write_run, write_setting

TRUE_DIFFERENCE = -0.04
FIVE_SEEDS = range(5)


@pytest.fixture
def compare(capsys: pytest.CaptureFixture) -> Callable[..., list[str]]:
    """A function that returns the lines that the command prints."""

    def compare(*words: object) -> list[str]:
        status, out, err = run_cli(capsys, "compare", *map(str, words))
        assert (status, err) == (0, "")
        return out.splitlines()

    return compare


Compare = Callable[..., list[str]]


def as_json(lines: list[str]) -> dict[str, Any]:
    return json.loads("\n".join(lines))


# --- significance


def test_a_true_difference_is_found_and_its_interval_covers_it(
    tmp_path: Path, compare: Compare
) -> None:
    write_setting(tmp_path / "a", FIVE_SEEDS, mean=2.0, learning_rate=0.02)
    write_setting(tmp_path / "b", FIVE_SEEDS, mean=2.0 + TRUE_DIFFERENCE, learning_rate=0.01)

    content = as_json(compare(tmp_path, "--json"))
    names = [group["name"] for group in content["groups"]]
    assert names == ["learning_rate 0.02", "learning_rate 0.01"]
    (difference,) = content["differences"]
    assert difference["paired_seeds"] == [0, 1, 2, 3, 4]
    test = difference["final_loss"]
    assert test["low"] <= TRUE_DIFFERENCE <= test["high"] < 0
    assert test["more_seeds"] == 0
    assert test["p"] < 0.05


def test_pairs_of_seeds_find_a_difference_that_unpaired_seeds_do_not(
    tmp_path: Path, compare: Compare
) -> None:
    """Two settings share the noise of a seed, which is not in the differences of pairs."""
    write_setting(tmp_path / "a", FIVE_SEEDS, mean=2.0, learning_rate=0.02)
    write_setting(tmp_path / "b", FIVE_SEEDS, mean=2.0 + TRUE_DIFFERENCE, learning_rate=0.01)
    write_setting(tmp_path / "c", range(20, 25), mean=2.0 + TRUE_DIFFERENCE, learning_rate=0.005)

    lines = compare(tmp_path)

    (paired,) = [line for line in lines if line.startswith("B - A") and "95 % interval" in line]
    assert "(paired t-test, 5 seeds); decided" in paired
    (unpaired,) = [line for line in lines if line.startswith("C - A") and "95 % interval" in line]
    assert "the seeds do not pair up: Welch's t-test" in unpaired
    assert "decided" not in unpaired
    assert any("by chance, one comparison in 20" in line for line in lines)
    assert lines[-2].startswith("verdict   B is lower than A")
    assert lines[-1].startswith("verdict   C - A cannot be told from noise: about ")
    assert lines[-1].endswith(" of each would decide it")


# --- the table


def test_the_best_setting_comes_first_and_is_compared_with_the_next(
    tmp_path: Path, compare: Compare
) -> None:
    means = {"a": 2.0, "b": 2.2, "c": 1.9, "d": 1.96}
    for name, mean in means.items():
        write_setting(tmp_path / name, FIVE_SEEDS, mean=mean, learning_rate=mean)

    lines = compare(tmp_path)

    letters = [line[0] for line in lines if re.match(r"[A-D] +5 ", line)]
    assert letters == ["C", "D", "A", "B"]
    (best,) = [line for line in lines if line.startswith("best")]
    assert best.startswith("best      C: learning_rate 1.9, final eval loss 1.9")
    assert "; next D: C is lower than D by 0.0" in best
    best_as_json = as_json(compare(tmp_path, "--json"))["best"]
    assert (best_as_json["second"], best_as_json["first"]) == ("C", "D")


def test_the_table_has_the_losses_and_the_time_to_the_worst_final_loss(
    tmp_path: Path, compare: Compare
) -> None:
    for seed in range(2):
        write_run(
            tmp_path / f"a-{seed}", seed, losses={0: 5.0, 10: 1.5, 20: 1.75}, learning_rate=0.2
        )
        write_run(
            tmp_path / f"b-{seed}", seed, losses={0: 5.0, 10: 3.0, 20: 2.0}, learning_rate=0.1
        )

    lines = compare(tmp_path)

    table = [" ".join(line.split()) for line in lines[2:5]]
    assert table == [
        "seeds final eval loss best eval loss time to 2.0000",
        "A 2 1.7500 ± 0.0000 1.5000 ± 0.0000 10.0 s ± 0 s",
        "B 2 2.0000 ± 0.0000 2.0000 ± 0.0000 20.0 s ± 0 s",
    ]
    assert lines[5].startswith("B - A     final eval loss +0.2500, 95 % interval +0.2500")
    assert lines[6].startswith("B - A     best eval loss +0.5000")
    assert lines[-1] == "verdict   B is higher than A by 0.2500 (p = 0)"


# --- runs that cannot be compared


def test_the_command_for_more_seeds_is_named_if_there_is_only_one(
    tmp_path: Path, compare: Compare
) -> None:
    single = write_run(tmp_path / "a", seed=3, losses={0: 5.0, 10: 2.0}, learning_rate=0.2)
    (repeated,) = write_setting(tmp_path / "b", [3], mean=2.0, learning_rate=0.1)

    lines = compare(single, repeated)

    note = lines.index("one seed  A: one seed cannot tell a gain from noise")
    indent = " " * 10
    command = f"llmtrain repeat 5 recipes/gpt.py --seed 3 --output_dir {single}"
    assert lines[note + 1] == indent + command
    # The other run was made by `llmtrain repeat`, whose own flags are left out.
    assert f"{indent}llmtrain repeat 5 recipes/gpt.py" in lines
    assert any(line.startswith("best      ") for line in lines)
    assert lines[-1] == "verdict   B and A cannot be compared: each needs two seeds or more"


def test_runs_that_cannot_be_compared_are_listed(tmp_path: Path, compare: Compare) -> None:
    losses: dict[int, float | None] = {0: 5.0, 10: 2.0}
    write_setting(tmp_path / "a", range(2), mean=2.0)
    write_run(tmp_path / "b1", seed=2, losses=losses, state="preempted")
    write_run(tmp_path / "b2", seed=3, losses=losses, state="failed")
    write_run(tmp_path / "b3", seed=4, losses={})
    write_run(tmp_path / "b4", seed=5, losses={0: 5.0, 10: None})
    write_run(tmp_path / "b5", seed=None, losses=losses)

    lines = compare(tmp_path)

    left_out = [line.split()[2] for line in lines if line.startswith("left out")]
    assert left_out == [f"{tmp_path}/b{number}" for number in range(1, 6)]
    assert lines[-1] == "verdict   all runs have the same settings: there is nothing to compare"
    assert compare(tmp_path / "b1")[-1] == "verdict   no run can be compared"


def test_two_runs_of_the_same_seed_count_once(tmp_path: Path, compare: Compare) -> None:
    a = write_run(tmp_path / "a", seed=0, losses={0: 5.0, 10: 2.0})
    b = write_run(tmp_path / "b", seed=1, losses={0: 5.0, 10: 2.125})
    c = write_run(tmp_path / "c", seed=0, losses={0: 5.0, 10: 2.0})
    d = write_run(tmp_path / "d", seed=1, losses={0: 5.0, 10: 2.25})
    # Another micro-batch changes the loss by rounding.
    e = write_run(
        tmp_path / "e", seed=0, losses={0: 5.0, 10: 2.000001}, per_device_train_batch_size=2
    )

    first, second, third, *_ = compare(tmp_path)

    assert first.startswith(f"same run  {a} and {c} ")
    assert second.startswith(f"differs   {b} and {d} ")
    assert second.endswith(f"llmtrain diff {b} {d}")
    assert third.startswith(f"same run  {a} and {e} ")
    (group,) = as_json(compare(tmp_path, "--json"))["groups"]
    assert group["final_loss"]["n"] == 2


def test_a_note_names_runs_with_different_code(tmp_path: Path, compare: Compare) -> None:
    for seed, code in enumerate(["old", "old", "new"]):
        write_run(tmp_path / str(seed), seed, {0: 5.0, 10: 2.0 + seed}, code=code)

    note = compare(tmp_path)[0]

    assert note.startswith("code ")
    assert note.endswith(f"{tmp_path}/0 and {tmp_path}/2")


def test_a_folder_without_runs_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    status, out, err = run_cli(capsys, "compare", str(tmp_path))

    assert status == 2
    assert out == ""
    assert err == f"error: {tmp_path} is not a run folder, and it contains no runs.\n"
