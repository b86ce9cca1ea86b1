"""Runs that differ only in the seed are a group."""

from pathlib import Path
from typing import Any

from llmtrain.lab.run_groups import find_runs, group_runs
from llmtrain.record.history import History
from tests.lab.seed_runs import write_run, write_setting


def write_runs(tmp_path: Path, settings: list[dict[str, Any]]) -> list[History]:
    """Write a run for each dictionary of settings, all with different losses."""
    runs = []
    for number, values in enumerate(settings):
        losses = {0: 3.0, 10: 2.0 + number / 100}
        folder = write_run(tmp_path / str(number), losses=losses, **values)
        runs.append(History.of_run(folder))
    return runs


def grouped(runs: list[History]) -> list[tuple[str, list[int]]]:
    """Return the names of groups, and the numbers of the runs in each."""
    return [(name, [int(run.folder.name) for run in group]) for name, group in group_runs(runs)]


# --- groups


def test_two_seeds_are_one_group_whatever_changes_no_numbers_or_only_their_rounding(
    tmp_path: Path,
) -> None:
    settings = {"logging_steps": 1, "per_device_train_batch_size": 4, "bitwise": True}
    other_settings = {"logging_steps": 5, "per_device_train_batch_size": 16, "bitwise": False}

    runs = write_runs(tmp_path, [{"seed": 0, **settings}, {"seed": 1, **other_settings}])

    assert grouped(runs) == [("", [0, 1])]


def test_groups_are_named_by_the_settings_that_differ(tmp_path: Path) -> None:
    """The setting ``invented`` is one that the package does not know."""
    runs = write_runs(
        tmp_path,
        [
            {"seed": 0, "learning_rate": 0.1, "invented": "a"},
            {"seed": 0, "learning_rate": 0.2, "invented": "a"},
            {"seed": 1, "learning_rate": 0.1, "invented": "a"},
            {"seed": 0, "learning_rate": 0.1, "invented": "b"},
        ],
    )

    assert grouped(runs) == [
        ("learning_rate 0.1, invented a", [0, 2]),
        ("learning_rate 0.2, invented a", [1]),
        ("learning_rate 0.1, invented b", [3]),
    ]


def test_a_group_is_not_named_by_a_setting_that_its_runs_lack(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, [{"seed": 0}, {"seed": 0, "invented": "a"}])

    assert grouped(runs) == [("", [0]), ("invented a", [1])]


def test_runs_on_different_data_under_the_same_name_are_two_groups(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, [{"seed": 0, "data": "1" * 64}, {"seed": 0, "data": "2" * 64}])

    assert grouped(runs) == [
        ("content of the data 111111111111...", [0]),
        ("content of the data 222222222222...", [1]),
    ]


def test_a_run_that_has_not_recorded_its_data_does_not_join_those_on_different_data(
    tmp_path: Path,
) -> None:
    runs = write_runs(
        tmp_path,
        [{"seed": 0, "data": "1" * 64}, {"seed": 1, "data": "2" * 64}, {"seed": 2, "data": None}],
    )

    assert [numbers for _, numbers in grouped(runs)] == [[0], [1], [2]]
    assert [numbers for _, numbers in grouped([runs[0], runs[2]])] == [[0, 2]]


def test_code_separates_runs_only_if_it_changed_the_loss_of_a_seed(tmp_path: Path) -> None:
    runs = write_runs(
        tmp_path,
        [
            {"seed": 0, "code": "a" * 64},
            {"seed": 1, "code": "b" * 64},
            {"seed": 0, "code": "b" * 64},
        ],
    )

    assert grouped(runs[:2]) == [("", [0, 1])], "no seed has two losses"
    assert grouped(runs) == [
        ("code aaaaaaaaaaaa...", [0]),
        ("code bbbbbbbbbbbb...", [1, 2]),
    ]


# --- finding runs


def test_a_run_that_is_named_and_found_in_a_folder_counts_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    paths = write_setting(folder / "gpt", seeds=range(3), mean=2.0)

    runs = find_runs([str(paths[2]), str(folder), str(folder / "." / "gpt-seed-0")])

    assert [run.folder.name for run in runs] == ["gpt-seed-2", "gpt-seed-0", "gpt-seed-1"]
