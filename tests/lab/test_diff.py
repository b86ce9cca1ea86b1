"""`llmtrain diff` tells rounding errors from other differences, and knows when bits must agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.lab.commands.diff import RunDifference, diff_lines, diff_runs
from llmtrain.lab.differences import differences, tolerance_between
from llmtrain.record.history import History
from llmtrain.record.tolerances import NO_TOLERANCE, tolerance_of
from tests.command_line import run_cli
from tests.lab.seed_runs import write_run
from tests.launching import read_json
from tests.recorded_settings import EFFECTS

START = {
    "step": 0,
    "device": "cpu",
    "host": "node",
    "processes": 1,
    "threads": 1,
    "versions": {"torch": "2"},
    "mixed_precision": "no",
}


def history(
    folder: Path, losses: dict[int, Any], starts: list[dict[str, Any]], **settings: Any
) -> History:
    """Write a run, and read it.

    Args:
        folder: the run folder.
        losses: the losses by step.
        starts: for each start of the run, the keys in which it differs from ``START``.
        settings: the settings of the run.
    """
    write_run(folder, seed=0, losses=losses, **settings)
    record = read_json(folder / "run.json")
    record["starts"] = [START | start for start in starts]
    (folder / "run.json").write_text(json.dumps(record))
    return History.of_run(folder)


def differing_runs(tmp_path: Path, relative_differences: dict[int, float]) -> RunDifference:
    """Compare a run with one on two processes, whose losses differ by these factors, by step."""
    losses = dict.fromkeys(relative_differences, 2.0)
    other_losses = {step: 2.0 * (1 - factor) for step, factor in relative_differences.items()}
    run = history(tmp_path / "a", losses, starts=[{}])
    other = history(tmp_path / "b", other_losses, starts=[{"processes": 2}])
    return diff_runs(run, other)


def text_of(comparison: RunDifference) -> str:
    return "\n".join(diff_lines(comparison, "a", "b"))


def test_a_quantity_that_must_be_equal_is_no_relative_difference(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, losses={1: 2.0})
    write_run(tmp_path / "b", seed=0, losses={1: 2.0 * (1 - 1e-6)})
    for name, batch in (("a", "11-22-33"), ("b", "44-22-33")):
        log = tmp_path / name / "metrics.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        lines = [line | {"batch": batch} if "train/loss" in line else line for line in lines]
        log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    difference = diff_runs(History.of_run(tmp_path / "a"), History.of_run(tmp_path / "b"))

    assert difference.largest_difference == pytest.approx(1e-6, rel=1e-3)


def test_a_difference_that_has_grown_slowly_may_come_from_rounding(tmp_path: Path) -> None:
    comparison = differing_runs(tmp_path, {1: 1e-6, 2: 1e-5, 3: 1.2e-5, 4: 2e-5, 5: 0.5})

    assert comparison.first is not None
    assert comparison.first.step == 3
    assert comparison.suspects == []
    assert "rounding errors may have grown" in comparison.hint
    assert "the runs agree within 1e-05" in comparison.hint
    text = text_of(comparison)
    assert "differs   at step 3: loss" in text
    assert "rounding explains" not in text, "it is above the tolerance"


def test_a_jump_does_not_come_from_rounding(tmp_path: Path) -> None:
    comparison = differing_runs(tmp_path, {1: 1e-6, 2: 1e-6, 3: 0.5})

    assert comparison.first is not None
    assert comparison.first.step == 3
    assert [str(other) for other in comparison.others] == ["processes 1 and 2"]
    assert "rounding" not in comparison.hint


def test_settings_that_differ_have_what_they_affect(tmp_path: Path) -> None:
    settings = {"learning_rate": 0, "tokenizer": "a", "invented": 1, "ddp_timeout": 1}
    other_settings = {"learning_rate": 1, "tokenizer": "b", "invented": 2, "ddp_timeout": 2}
    run = history(tmp_path / "a", {1: 2.0}, starts=[{}], **settings)
    other = history(tmp_path / "b", {1: 1.0}, starts=[{}], **other_settings)

    assert differences([run, other]) == [
        ("--learning_rate", [0, 1], "numbers"),
        ("--tokenizer", ["a", "b"], "data"),
        ("--invented", [1, 2], "numbers"),
    ]
    text = text_of(diff_runs(run, other))
    assert "perhaps   --learning_rate 0 and 1" in text
    assert "cause" not in text, "there are two"
    assert "also      --tokenizer a and b" in text, "its hash is the same"


def test_the_only_setting_that_differs_is_the_cause(tmp_path: Path) -> None:
    run = history(tmp_path / "a", {1: 2.0}, starts=[{}], learning_rate=0)
    other = history(tmp_path / "b", {1: 1.0}, starts=[{"processes": 2}], learning_rate=1)

    text = text_of(diff_runs(run, other))

    assert "cause     --learning_rate 0 and 1" in text
    assert "also      processes 1 and 2" in text


def test_another_commit_or_name_of_the_same_data_is_no_cause(tmp_path: Path) -> None:
    """Most runs have another commit, so where to look is said all the same."""
    run = history(tmp_path / "a", {1: 2.0}, starts=[{"git_sha": "1" * 40}], dataset="a.txt")
    other = history(tmp_path / "b", {1: 1.0}, starts=[{"git_sha": "2" * 40}], dataset="b.txt")

    text = text_of(diff_runs(run, other))

    assert "cause" not in text
    assert "perhaps   commit 111111111111..." in text
    assert "perhaps   the model or the loss is computed differently" in text
    assert "also      --dataset a.txt and b.txt" in text


def test_nan_differs_from_a_number_but_not_from_nan(tmp_path: Path) -> None:
    run = history(tmp_path / "a", {1: 2.0, 2: 2.0, 3: 2.0}, starts=[{}])
    with_nan = history(tmp_path / "b", {1: 2.0, 2: None, 3: 2.0}, starts=[{}])

    ends_in_nan = history(tmp_path / "c", {1: 2.0, 2: 2.0, 3: None}, starts=[{}])
    assert "nan in" in text_of(diff_runs(run, ends_in_nan))

    first = diff_runs(run, with_nan).first

    assert first is not None
    assert (first.quantity, first.step) == ("loss", 2)
    assert diff_runs(with_nan, with_nan).first is None


def test_a_run_that_ended_in_nan_has_no_last_loss_in_any_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    finite = str(history(folder / "finite", {1: 3.0, 2: 2.0}, starts=[{}]).folder)
    diverged = str(history(folder / "diverged", {1: 1.0, 2: None}, starts=[{}]).folder)

    _, out, _ = run_cli(capsys, "runs", str(folder), "--sort", "eval_loss", "--json")
    assert [(run["run"], run["eval_loss"]) for run in json.loads(out)] == [
        (finite, 2.0),
        (diverged, None),
    ]
    _, out, _ = run_cli(capsys, "runs", str(folder), "--sort", "loss")
    assert out.splitlines()[-1].split()[:5] == [diverged, "finished", "2", "nan", "nan"]
    _, out, _ = run_cli(capsys, "report", diverged, "--json")
    assert json.loads(out)["runs"]["diverged"]["loss"] is None
    _, out, _ = run_cli(capsys, "diff", finite, diverged)
    assert f"eval loss 2.0000 in {finite} at step 2, nan in {diverged}\n" in out
    _, out, _ = run_cli(capsys, "compare", finite, diverged)
    assert f"left out  {diverged} ended with an eval loss that is not a number" in out


def test_losses_that_only_round_differently_are_not_called_equal_to_the_last_bit(
    tmp_path: Path,
) -> None:
    run = history(tmp_path / "a", {1: 2.0}, starts=[{}])
    other = history(tmp_path / "b", {1: 2.0}, starts=[{}])
    assert "to the last bit" in text_of(diff_runs(run, other))

    other.entries[-1]["eval/loss"] = 2.0 * (1 + 1e-7)
    assert "within 1e-07, which rounding explains" in text_of(diff_runs(run, other))


def test_the_precision_is_listed_once_as_each_run_has_chosen_it(tmp_path: Path) -> None:
    run = history(tmp_path / "a", {1: 2.0}, starts=[{}], mixed_precision="auto")
    half = {"mixed_precision": "bf16"}
    other = history(tmp_path / "b", {1: 2.0}, starts=[half], mixed_precision="bf16")

    assert list(map(str, differences([run, other]))) == ["--mixed_precision no and bf16"]


def test_another_commit_or_changed_files_are_a_difference(tmp_path: Path) -> None:
    clean = history(tmp_path / "a", {1: 2.0}, starts=[{"git_sha": "0" * 40}])
    dirty = history(tmp_path / "b", {1: 2.0}, starts=[{"git_sha": "0" * 40 + "-dirty"}])

    ddp = history(tmp_path / "c", {1: 2.0}, starts=[{"sharded": None}])
    fsdp2 = history(tmp_path / "d", {1: 2.0}, starts=[{"sharded": "1x2"}])
    assert list(map(str, differences([ddp, fsdp2]))) == ["sharded None and 1x2"]
    assert differences([clean, clean]) == []
    assert list(map(str, differences([clean, dirty]))) == [
        "commit 000000000000... and 000000000000...-dirty"
    ]


def test_the_flags_of_the_package_say_what_they_affect() -> None:
    expected = {
        "seed": "data",
        "output_dir": "nothing",
        "ddp_timeout": "nothing",
        "learning_rate": "numbers",
        "dataset": "data",
        "packing": "data",
        "n_layer": "numbers",
        "lora_r": "numbers",
        "tokenizer": "data",
        "dropout": "numbers",
        "sync_each_batch": "nothing",
        "bitwise": "nothing",
        "per_device_train_batch_size": "nothing",
        "gradient_checkpointing": "nothing",
    }
    assert {name: EFFECTS[name] for name in expected} == expected


BITWISE = {"bitwise": True}


@pytest.mark.parametrize(
    ("settings", "other_settings", "other_start", "must_be_equal"),
    [
        ({}, {}, {}, False),
        (BITWISE, {}, {}, False),
        (BITWISE, BITWISE, {}, True),
        (BITWISE, BITWISE, {"processes": 2}, True),
        (BITWISE, BITWISE, {"threads": 2}, False),
        (BITWISE, {**BITWISE, "per_device_train_batch_size": 2}, {}, False),
        (BITWISE, BITWISE, {"mixed_precision": "bf16"}, False),
    ],
)
def test_bits_must_be_equal_only_with_bitwise(
    settings: dict[str, Any],
    other_settings: dict[str, Any],
    other_start: dict[str, Any],
    must_be_equal: bool,
    tmp_path: Path,
) -> None:
    run = history(tmp_path / "a", {1: 2.0}, starts=[{}], **settings)
    other = history(tmp_path / "b", {1: 2.0}, starts=[{}, other_start], **other_settings)

    assert (tolerance_between(run, other) == NO_TOLERANCE) == must_be_equal
    assert (tolerance_between(other, run) == NO_TOLERANCE) == must_be_equal


def test_the_lowest_precision_of_all_starts_sets_the_tolerance(tmp_path: Path) -> None:
    run = history(tmp_path / "a", {1: 2.0}, starts=[{}])
    other = history(tmp_path / "b", {1: 2.0}, starts=[{}, {"mixed_precision": "bf16"}])

    assert tolerance_between(run, other) == tolerance_of("bf16")
    assert tolerance_between(other, run) == tolerance_of("bf16")
