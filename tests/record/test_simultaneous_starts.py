"""Starts at the same moment never share a run folder, and the numbers of the folders have no gap."""

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from llmtrain.record.resume import choose_folder

STARTS = 5
ROUNDS = 4

fork = multiprocessing.get_context("fork")


def choose_and_hold(output_dir: Path, name: str, begin: Barrier, end: Barrier) -> None:
    """Choose a folder when all other starts do, record it, and hold it until all have chosen."""
    begin.wait(timeout=30)
    with choose_folder(str(output_dir), "auto", {"data": name}) as point:
        record = point.folder / f"chosen-by-{name}"
        record.touch()
        end.wait(timeout=30)


def chosen_folders(output_dir: Path) -> dict[str, str]:
    """Start several runs at the same moment. Return the name of each start's folder."""
    begin = fork.Barrier(STARTS)
    end = fork.Barrier(STARTS)
    starts = [
        fork.Process(
            target=choose_and_hold, args=(output_dir, str(number), begin, end), daemon=True
        )
        for number in range(STARTS)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join(timeout=40)

    assert [start.exitcode for start in starts] == [0] * STARTS
    records = output_dir.parent.glob("*/chosen-by-*")
    return {record.name: record.parent.name for record in records}


@pytest.mark.parametrize("is_there", [False, True], ids=["absent", "empty"])
def test_starts_at_the_same_moment_take_one_folder_each(is_there: bool, tmp_path: Path) -> None:
    for number in range(ROUNDS):
        output_dir = tmp_path / str(number) / "run"
        if is_there:
            output_dir.mkdir(parents=True)

        folders = chosen_folders(output_dir)

        expected = ["run", *(f"run-{number}" for number in range(2, STARTS + 1))]
        assert sorted(folders.values()) == expected
