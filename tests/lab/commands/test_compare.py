"""`llmtrain compare` finds a true difference, finds none where there is none, and says what it left out."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.lab.compare import compare_groups
from llmtrain.record.history import History
from tests.lab.seed_runs import write_run, write_setting
from tests.test_cli import ended

TRUE_DIFFERENCE = -0.04


def compared(capsys: pytest.CaptureFixture, *folders: Path) -> list[str]:
    """Return the lines that the command prints."""
    status, out, err = ended(capsys, "compare", *map(str, folders))
    assert (status, err) == (0, "")
    return out.splitlines()


def as_json(capsys: pytest.CaptureFixture, *folders: Path) -> dict[str, Any]:
    status, out, err = ended(capsys, "compare", "--json", *map(str, folders))
    assert (status, err) == (0, "")
    return json.loads(out)


def test_a_true_difference_is_found_and_its_interval_covers_the_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_setting(tmp_path / "a", range(5), 2.0, learning_rate=0.02)
    write_setting(tmp_path / "b", range(5), 2.0 + TRUE_DIFFERENCE, learning_rate=0.01)
    content = as_json(capsys, tmp_path)
    assert [group["name"] for group in content["groups"]] == [
        "learning_rate 0.02",
        "learning_rate 0.01",
    ]
    (difference,) = content["differences"]
    assert difference["paired_seeds"] == [0, 1, 2, 3, 4]
    test = difference["final_loss"]
    assert test["low"] <= TRUE_DIFFERENCE <= test["high"] < 0
    assert test["more_seeds"] == 0
    assert test["p"] < 0.05
    verdict = compared(capsys, tmp_path)[-1]
    assert re.fullmatch(r"verdict   B is lower than A by 0\.0\d\d\d \(p = [\d.e-]+\)", verdict)


def test_no_difference_is_not_told_from_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_setting(tmp_path / "a", range(5), 2.0, learning_rate=0.02)
    write_setting(tmp_path / "b", range(5), 2.0, learning_rate=0.01)
    (difference,) = as_json(capsys, tmp_path)["differences"]
    test = difference["final_loss"]
    assert test["low"] <= 0 <= test["high"]
    assert test["p"] > 0.05
    assert test["more_seeds"] is None or test["more_seeds"] > 0
    assert compared(capsys, tmp_path)[-1].startswith("verdict   B - A cannot be told from noise")


@pytest.mark.parametrize("truth", [TRUE_DIFFERENCE, 0.0])
def test_of_20_intervals_19_cover_the_truth(
    truth: float, tmp_path: Path, score: Callable[[str], None]
) -> None:
    trials = 60
    covered = 0
    decided = 0
    for noise_seed in range(trials):
        folder = tmp_path / str(noise_seed)
        paths = [
            *write_setting(folder / "a", range(5), 2.0, noise_seed, learning_rate=0.02),
            *write_setting(folder / "b", range(5), 2.0 + truth, noise_seed, learning_rate=0.01),
        ]
        comparison = compare_groups([History.of_run(path) for path in paths])
        test = comparison.differences[0].final
        assert test is not None
        covered += test.low <= truth <= test.high
        decided += test.is_decided
    score(f"compare: a true difference of {truth}: {covered} of {trials} intervals cover it")
    assert covered >= 0.9 * trials
    if truth:
        assert decided == trials
    else:
        assert decided == trials - covered


def test_pairs_of_seeds_find_what_unpaired_seeds_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The noise that two settings share for the same seed falls out of their pairs."""
    write_setting(tmp_path / "a", range(5), 2.0, learning_rate=0.02)
    write_setting(tmp_path / "b", range(5), 2.0 + TRUE_DIFFERENCE, learning_rate=0.01)
    write_setting(tmp_path / "c", range(20, 25), 2.0 + TRUE_DIFFERENCE, learning_rate=0.005)
    lines = compared(capsys, tmp_path)
    tests = {line[:5]: line for line in lines if "95 % interval" in line}
    assert "(paired t-test, 5 seeds); decided" in tests["B - A"]
    assert "the seeds do not pair up: Welch's t-test" in tests["C - A"]
    assert "decided" not in tests["C - A"]
    assert any("by chance, one comparison in 20" in line for line in lines)
    assert lines[-2].startswith("verdict   B is lower than A")
    assert lines[-1].startswith("verdict   C - A cannot be told from noise: about ")
    assert lines[-1].endswith(" of each would decide it")


def test_the_best_comes_first_and_is_compared_with_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    means = {"a": 2.0, "b": 2.2, "c": 1.9, "d": 1.96}
    for name, mean in means.items():
        write_setting(tmp_path / name, range(5), mean, learning_rate=mean)
    lines = compared(capsys, tmp_path)
    table = [line[0] for line in lines if re.match(r"[A-D] +5 ", line)]
    assert table == ["C", "D", "A", "B"]
    (best,) = [line for line in lines if line.startswith("best")]
    assert best.startswith("best      C: learning_rate 1.9, final eval loss 1.9")
    assert "; next D: C is lower than D by 0.0" in best
    content = as_json(capsys, tmp_path)
    assert (content["best"]["letter"], content["best"]["next"]) == ("C", "D")


def test_the_best_of_two_is_named_though_one_seed_decides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_run(tmp_path / "a", 0, {0: 5.0, 10: 2.0}, learning_rate=0.02)
    write_run(tmp_path / "b", 0, {0: 5.0, 10: 1.5}, learning_rate=0.01)
    lines = compared(capsys, tmp_path)
    assert "best      B: learning_rate 0.01, final eval loss 1.5000" in lines
    (difference,) = as_json(capsys, tmp_path)["differences"]
    assert (difference["paired_seeds"], difference["final_loss"]) == ([], None)


def test_a_table_has_the_losses_and_the_time_to_the_worst_final_one(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    quick = {0: 5.0, 10: 1.5, 20: 1.75}
    slow = {0: 5.0, 10: 3.0, 20: 2.0}
    for seed in range(2):
        write_run(tmp_path / f"a-{seed}", seed, quick, learning_rate=0.2)
        write_run(tmp_path / f"b-{seed}", seed, slow, learning_rate=0.1)
    lines = compared(capsys, tmp_path)
    table = [" ".join(line.split()) for line in lines[2:5]]
    assert table == [
        "seeds final eval loss best eval loss time to 2.0000",
        "A 2 1.7500 ± 0.0000 1.5000 ± 0.0000 10.0 s ± 0 s",
        "B 2 2.0000 ± 0.0000 2.0000 ± 0.0000 20.0 s ± 0 s",
    ]
    assert lines[5].startswith("B - A     final eval loss +0.2500, 95 % interval +0.2500")
    assert lines[6].startswith("B - A     best eval loss +0.5000")
    assert lines[-1] == "verdict   B is higher than A by 0.2500 (p = 0)"


def test_one_seed_cannot_tell_and_the_command_for_more_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    a = write_run(tmp_path / "a", 3, {0: 5.0, 10: 2.0}, learning_rate=0.2)
    (b,) = write_setting(tmp_path / "b", [3], 2.0, learning_rate=0.1)
    lines = compared(capsys, a, b)
    assert "one seed  A: one seed cannot tell a gain from noise" in lines
    command = f"llmtrain repeat 5 recipes/gpt.py --seed 3 --output_dir {a}"
    assert lines[lines.index("one seed  A: one seed cannot tell a gain from noise") + 1] == (
        f"{'':<10}{command}"
    )
    # b is one of several seeds already; the words that made it one are left out.
    assert f"{'':<10}llmtrain repeat 5 recipes/gpt.py" in lines
    assert lines[-1] == "verdict   B and A cannot be compared: each needs two seeds or more"


def test_what_cannot_be_compared_is_left_out_with_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    losses: dict[int, float | None] = {0: 5.0, 10: 2.0}
    write_setting(tmp_path / "a", range(2), 2.0)
    write_run(tmp_path / "b1", 2, losses, state="preempted")
    write_run(tmp_path / "b2", 3, losses, state="failed")
    write_run(tmp_path / "b3", 4, {})
    write_run(tmp_path / "b4", 5, {0: 5.0, 10: None})
    write_run(tmp_path / "b5", None, losses)
    lines = compared(capsys, tmp_path)
    left_out = [line for line in lines if line.startswith("left out  ")]
    assert [line.removeprefix(f"left out  {tmp_path}/") for line in left_out] == [
        "b1 is not finished: preempted at step 10; start its command again",
        "b2 is not finished: failed at step 10; start its command again",
        "b3 has no eval loss; set --eval_steps above 0, and keep eval rows",
        "b4 ended with an eval loss that is not a number: it has diverged",
        "b5 has no seed in run.json",
    ]
    assert lines[-1] == "verdict   all runs have the same settings: there is nothing to compare"
    assert compared(capsys, tmp_path / "b1")[-1] == "verdict   no run can be compared"


def test_a_seed_that_was_run_twice_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_run(tmp_path / "a", 0, {0: 5.0, 10: 2.0})
    write_run(tmp_path / "b", 1, {0: 5.0, 10: 2.125})
    write_run(tmp_path / "c", 0, {0: 5.0, 10: 2.0})
    write_run(tmp_path / "d", 1, {0: 5.0, 10: 2.25})
    # Another micro-batch changes the loss by rounding.
    write_run(tmp_path / "e", 0, {0: 5.0, 10: 2.000001}, per_device_train_batch_size=2)
    lines = compared(capsys, tmp_path)
    a, b, c, d, e = (tmp_path / name for name in "abcde")
    assert lines[0] == f"same run  {a} and {c} are the same run, of seed 0: it counts as one"
    assert lines[2] == f"same run  {a} and {e} are the same run, of seed 0: it counts as one"
    assert lines[1].startswith(
        f"differs   {b} and {d} have the same settings and seed 1, but eval losses 2.125 and 2.25"
    )
    assert lines[1].endswith(f"llmtrain diff {b} {d}")
    (group,) = as_json(capsys, tmp_path)["groups"]
    assert group["final_loss"]["n"] == 2


def test_code_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for seed in range(3):
        code = "old" if seed < 2 else "new"
        write_run(tmp_path / str(seed), seed, {0: 5.0, 10: 2.0 + seed}, code=code)
    lines = compared(capsys, tmp_path)
    assert lines[0] == (
        f"code      the runs were started with different code: {tmp_path / '0'} and {tmp_path / '2'}"
    )


def test_settings_that_change_nothing_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for seed in range(2):
        for name in ("a", "b"):
            write_run(tmp_path / f"{name}{seed}", seed, {0: 5.0, 10: 2.0 + seed}, invented=name)
    verdict = compared(capsys, tmp_path)[-1]
    assert verdict == "verdict   B and A have the same losses: the settings make no difference"


def test_a_folder_without_runs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, err = ended(capsys, "compare", str(tmp_path))
    assert (status, out) == (2, "")
    assert err == f"error: {tmp_path} is not a run folder, and it contains no runs.\n"
