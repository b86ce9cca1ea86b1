"""Runs that differ only in the seed are a group, which a report draws as one curve."""

from pathlib import Path
from typing import Any

from llmtrain.lab.commands.report import html, summary
from llmtrain.lab.report.charts import charts, colors_of, drawn_groups
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


# --- groups


def test_two_seeds_are_one_group_whatever_changes_no_numbers_or_only_their_rounding(
    tmp_path: Path,
) -> None:
    settings = {"logging_steps": 1, "per_device_train_batch_size": 4, "bitwise": True}
    other_settings = {"logging_steps": 5, "per_device_train_batch_size": 16, "bitwise": False}

    runs = write_runs(tmp_path, [{"seed": 0, **settings}, {"seed": 1, **other_settings}])

    assert group_runs(runs) == [("", [0, 1])]


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

    assert group_runs(runs) == [
        ("learning_rate 0.1, invented a", [0, 2]),
        ("learning_rate 0.2, invented a", [1]),
        ("learning_rate 0.1, invented b", [3]),
    ]


def test_runs_on_different_data_under_the_same_name_are_two_groups(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, [{"seed": 0, "data": "1" * 64}, {"seed": 0, "data": "2" * 64}])

    assert group_runs(runs) == [
        ("content of the data 111111111111...", [0]),
        ("content of the data 222222222222...", [1]),
    ]


def test_code_separates_runs_only_if_it_changed_the_loss_of_a_seed(tmp_path: Path) -> None:
    runs = write_runs(
        tmp_path,
        [
            {"seed": 0, "code": "a" * 64},
            {"seed": 1, "code": "b" * 64},
            {"seed": 0, "code": "b" * 64},
        ],
    )

    assert group_runs(runs[:2]) == [("", [0, 1])], "no seed has two losses"
    assert group_runs(runs) == [
        ("code aaaaaaaaaaaa...", [0]),
        ("code bbbbbbbbbbbb...", [1, 2]),
    ]


# --- finding runs


def test_a_run_that_is_named_and_found_in_a_folder_counts_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    paths = write_setting(folder / "gpt", seeds=range(3), mean=2.0)

    runs = find_runs([str(paths[2]), str(folder), str(folder / "." / "gpt-seed-0")])

    assert [run.folder.name for run in runs] == ["gpt-seed-2", "gpt-seed-0", "gpt-seed-1"]


# --- curves


def test_a_group_is_drawn_as_a_mean_with_a_band_and_a_single_run_as_it_is(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a-0", seed=0, losses={0: 5.0, 10: 2.0, 20: 1.0}, learning_rate=0.1),
        write_run(tmp_path / "other", seed=0, losses={0: 4.0, 10: 2.5}, learning_rate=0.2),
        write_run(tmp_path / "a-1", seed=1, losses={0: 3.0, 10: 3.0}, learning_rate=0.1),
    ]
    runs = [History.of_run(folder) for folder in folders]

    group, single, *_ = charts(runs)[0].curves

    assert group.name == "learning_rate 0.1, train: mean of 2 seeds, min to max"
    assert group.x["step"] == [0, 10], "the second seed is shorter"
    assert group.x["tokens"] == [0, 1000]
    assert (group.low, group.y, group.high) == ([3.0, 2.0], [4.0, 2.5], [5.0, 3.0])
    assert (single.name, single.y, single.low) == ("other, train", [4.0, 2.5], [])
    assert colors_of(runs) == [0, 1, 0]
    assert (group.color, single.color) == (0, 1)
    assert "share a curve" in html(runs)
    assert summary(runs)["seed_groups"] == [{"name": "learning_rate 0.1", "runs": ["a-0", "a-1"]}]


def test_runs_of_the_same_seed_or_without_a_seed_are_drawn_separately(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, [{"seed": 0}, {"seed": 0}, {"seed": None}])

    assert [group.name for group in drawn_groups(runs)] == ["0", "1", "2"]
    assert "share a curve" not in html(runs)
