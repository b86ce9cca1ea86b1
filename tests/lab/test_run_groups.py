"""Runs are grouped by all that determines their numbers but the seed; report draws a group as one curve."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.errors import UserError
from llmtrain.lab.report.charts import charts, colors_of, drawn_groups
from llmtrain.lab.report.page import html, summary
from llmtrain.lab.run_groups import find_runs, group_runs
from llmtrain.record.history import History
from tests.lab.seed_runs import write_run, write_setting


def runs_of(tmp_path: Path, *settings: dict[str, Any]) -> list[History]:
    folders = [
        write_run(tmp_path / str(number), losses={0: 3.0, 10: 2.0 + number / 100}, **values)
        for number, values in enumerate(settings)
    ]
    return [History.of_run(folder) for folder in folders]


def test_seeds_and_what_changes_no_numbers_are_one_group_without_a_name(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path,
        {"seed": 0, "logging_steps": 1, "report_to": ["none"], "learning_rate": 0.1},
        {"seed": 1, "logging_steps": 5, "report_to": ["wandb"], "learning_rate": 0.1},
    )
    assert group_runs(runs) == [("", [0, 1])]


def test_what_changes_only_the_rounding_makes_no_other_group(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path,
        {"seed": 0, "ddp_timeout": 60, "per_device_train_batch_size": 4, "bitwise": True},
        {"seed": 1, "ddp_timeout": 1800, "per_device_train_batch_size": 16, "bitwise": False},
    )
    assert group_runs(runs) == [("", [0, 1])]


def test_a_setting_sets_groups_apart_and_names_them_also_if_the_package_does_not_know_it(
    tmp_path: Path,
) -> None:
    runs = runs_of(
        tmp_path,
        {"seed": 0, "learning_rate": 0.1, "invented": "a"},
        {"seed": 0, "learning_rate": 0.2, "invented": "a"},
        {"seed": 1, "learning_rate": 0.1, "invented": "a"},
        {"seed": 0, "learning_rate": 0.1, "invented": "b"},
    )
    assert group_runs(runs) == [
        ("learning_rate 0.1, invented a", [0, 2]),
        ("learning_rate 0.2, invented a", [1]),
        ("learning_rate 0.1, invented b", [3]),
    ]


def test_other_data_under_the_same_name_is_another_group(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path,
        {"seed": 0, "data": "1" * 64},
        {"seed": 0, "data": "2" * 64},
    )
    names = [group.name for group in group_runs(runs)]
    assert names == [
        "content of the data 111111111111...",
        "content of the data 222222222222...",
    ]


def test_code_sets_runs_apart_if_it_has_changed_the_loss_of_a_seed_and_only_then(
    tmp_path: Path,
) -> None:
    runs = runs_of(
        tmp_path,
        {"seed": 0, "code": "a" * 64},
        {"seed": 1, "code": "b" * 64},
        {"seed": 0, "code": "b" * 64},
    )
    assert group_runs(runs[:2]) == [("", [0, 1])]
    assert group_runs(runs) == [
        ("code aaaaaaaaaaaa...", [0]),
        ("code bbbbbbbbbbbb...", [1, 2]),
    ]


def test_code_that_has_changed_a_loss_by_rounding_only_sets_no_runs_apart(tmp_path: Path) -> None:
    runs = [
        History.of_run(write_run(tmp_path / code, 0, {0: 3.0, 10: loss}, code=code * 64))
        for code, loss in (("a", 2.0), ("b", 2.0000001))
    ]
    assert group_runs(runs) == [("", [0, 1])]


def test_names_are_short(tmp_path: Path) -> None:
    many = {f"invented_{i}": i for i in range(8)}
    runs = runs_of(
        tmp_path, {"seed": 0, "model": "m" * 100}, {"seed": 0, "model": "n" * 100, **many}
    )
    first, second = (group.name for group in group_runs(runs))
    assert first.startswith(f"model {'m' * 40}..., invented_0 None")
    assert second.endswith("invented_3 3, and 4 more")


def test_runs_are_found_in_folders_each_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    paths = write_setting(folder / "gpt", seeds=range(3), mean=2.0)
    runs = find_runs([str(paths[2]), str(folder), str(folder / "." / "gpt-seed-0")])
    assert [run.folder.name for run in runs] == ["gpt-seed-2", "gpt-seed-0", "gpt-seed-1"]
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(UserError, match="contains no runs"):
            find_runs([str(path)])


def test_a_group_is_drawn_as_its_mean_with_a_band_and_a_single_run_as_itself(
    tmp_path: Path,
) -> None:
    folders = [
        write_run(tmp_path / "a-0", 0, {0: 5.0, 10: 2.0, 20: 1.0}, learning_rate=0.1),
        write_run(tmp_path / "other", 0, {0: 4.0, 10: 2.5}, learning_rate=0.2),
        write_run(tmp_path / "a-1", 1, {0: 3.0, 10: 3.0}, learning_rate=0.1),
    ]
    runs = [History.of_run(folder) for folder in folders]
    group, single = charts(runs)[0].curves[:2]
    assert group.name == "learning_rate 0.1, train: mean of 2 seeds, min to max"
    assert group.x["step"] == [0, 10]  # the steps that both seeds have reached
    assert group.x["tokens"] == [0, 1000]
    assert (group.y, group.low, group.high) == ([4.0, 2.5], [3.0, 2.0], [5.0, 3.0])
    assert (single.name, single.y, single.low) == ("other, train", [4.0, 2.5], [])
    assert colors_of(runs) == [0, 1, 0]
    assert (group.color, single.color) == (0, 1)
    page = html(runs)
    assert "share a curve" in page
    assert summary(runs)["seed_groups"] == [{"name": "learning_rate 0.1", "runs": ["a-0", "a-1"]}]


def test_runs_without_another_seed_are_drawn_one_by_one(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"seed": 0}, {"seed": 0}, {"seed": None})
    assert [group.name for group in drawn_groups(runs)] == ["0", "1", "2"]
    assert colors_of(runs) == [0, 1, 2]
    assert "share a curve" not in html(runs)


def test_only_seeds_on_a_page_need_no_name(tmp_path: Path) -> None:
    paths = write_setting(tmp_path / "gpt", seeds=range(3), mean=2.0)
    curves = charts([History.of_run(path) for path in paths])[0].curves
    assert [curve.name for curve in curves] == [
        "train: mean of 3 seeds, min to max",
        "eval: mean of 3 seeds, min to max",
    ]
