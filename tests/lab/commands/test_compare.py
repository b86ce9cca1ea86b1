"""`llmtrain compare` finds a true difference, and says which runs it cannot compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from benchmarks import verdicts
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
    assert difference["seeds"] == [0, 1, 2, 3, 4]
    test = difference["loss"]
    assert test["low"] <= TRUE_DIFFERENCE <= test["high"] < 0
    assert test["p"] < 0.05


def test_settings_are_compared_by_the_seeds_that_they_have_in_common(
    tmp_path: Path, compare: Compare
) -> None:
    """Two settings share the noise of a seed, which is not in the differences of pairs."""
    write_setting(tmp_path / "a", FIVE_SEEDS, mean=2.0, learning_rate=0.02)
    write_setting(tmp_path / "b", range(2, 9), mean=2.0 + TRUE_DIFFERENCE, learning_rate=0.01)
    write_setting(tmp_path / "c", range(4, 25), mean=2.0 + TRUE_DIFFERENCE, learning_rate=0.005)

    lines = compare(tmp_path)

    (paired,) = [line for line in lines if line.startswith("B - A")]
    assert paired.endswith(" (3 seeds): B is lower")
    (unpaired,) = [line for line in lines if line.startswith("C - A")]
    assert unpaired == "C - A     cannot be compared: C and A need two seeds in common"
    assert lines[-1].startswith("note      by chance, one comparison in 20")


# --- the verdict


def judged(capsys: pytest.CaptureFixture, *words: object) -> dict[str, Any]:
    """Return what the command prints with --verdict --json, after checking its exit status."""
    status, out, err = run_cli(capsys, "compare", *map(str, words), "--verdict", "--json")
    content = json.loads(out)
    assert (status, err) == (content["exit_status"], "")
    return content


@pytest.mark.parametrize(
    ("mean", "looks", "verdict", "exit_status"),
    [
        (1.96, 1, "better", 0),
        (2.04, 1, "worse", 10),
        (2.0, 1, "not told apart", 11),
        (1.96, 3000, "not told apart", 11),
    ],
)
def test_a_setting_is_judged_as_scipy_says(
    mean: float,
    looks: int,
    verdict: str,
    exit_status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    write_setting(tmp_path / "a", FIVE_SEEDS, mean=2.0, learning_rate=0.02)
    write_setting(tmp_path / "b", FIVE_SEEDS, mean=mean, learning_rate=0.01)

    content = judged(capsys, tmp_path, "--looks", looks)
    _, text, _ = run_cli(capsys, "compare", str(tmp_path), "--verdict", "--looks", str(looks))

    first, second = ([run["loss"] for run in group["runs"]] for group in content["groups"])
    paired = stats.ttest_rel(second, first)
    interval = paired.confidence_interval(1 - 0.01 / looks)
    assert content["p"] == pytest.approx(paired.pvalue)
    assert content["adjusted_p"] == pytest.approx(min(1, looks * paired.pvalue))
    assert (content["low"], content["high"]) == pytest.approx(interval)
    assert (content["verdict"], content["exit_status"]) == (verdict, exit_status)
    assert (content["level"], content["looks"], content["seeds"]) == (0.01, looks, [0, 1, 2, 3, 4])
    assert (content["more_seeds"] == 0) == (verdict in ("better", "worse"))
    assert content["reasons"] == []
    assert text.splitlines()[-1].startswith(f"verdict   {verdict}")


MEASURE = {
    "eval_sha256": "e" * 64,
    "block_size": 64,
    "fingerprint": {
        "objective": {"class": "PreferenceObjective", "answers_per_row": 4, "reference_size": 4},
        "initial_weights": {"weights": "a"},
    },
}
FINGERPRINT = MEASURE["fingerprint"]
LOSSES: dict[int, float | None] = {0: 5.0, 40: 2.0}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"record": MEASURE | {"eval_sha256": "f" * 64}}, "different eval rows"),
        ({"record": MEASURE | {"block_size": 128}}, "different lengths of a row"),
        (
            {"record": MEASURE | {"fingerprint": FINGERPRINT | {"initial_weights": {}}}},
            "different loss functions",
        ),
        ({"seed": 7}, "B and A need two seeds in common"),
        ({"state": "running"}, "changed is not finished: killed at step 40"),
        ({"state": "failed"}, "changed is not finished: failed at step 40"),
        ({"losses": {0: 5.0, 40: None}}, "changed ended with an eval loss that is not a number"),
        ({"learning_rate": 0.3}, "these are 3: learning_rate 0.1; learning_rate 0.2; "),
        ({"learning_rate": 0.1, "seed": 2}, "B and A need two seeds in common"),
    ],
)
def test_runs_that_cannot_be_judged_are_not_comparable_for_a_reason(
    changed: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    values: dict[str, Any] = {"losses": LOSSES, "record": MEASURE}
    for seed in range(2):
        write_run(tmp_path / f"a-{seed}", seed, **values, learning_rate=0.1)
    write_run(tmp_path / "b", **values, seed=1, learning_rate=0.2)
    write_run(tmp_path / "changed", **{**values, "seed": 0, "learning_rate": 0.2, **changed})

    content = judged(capsys, tmp_path)

    assert content["verdict"] == "not comparable"
    assert content["exit_status"] == 12
    assert reason in "; ".join(content["reasons"])
    assert content["p"] is None


def test_more_training_data_and_packed_answers_do_not_change_what_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    objective = FINGERPRINT["objective"] | {"answers_per_row": 8, "reference_size": 8}
    more = MEASURE | {"fingerprint": FINGERPRINT | {"objective": objective}}
    write_setting(tmp_path / "a", FIVE_SEEDS, mean=2.0, record=MEASURE)
    write_setting(tmp_path / "b", FIVE_SEEDS, mean=1.9, data="more", record=more)

    assert judged(capsys, tmp_path)["verdict"] == "better"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--level 0.05", "--level and --looks need --verdict, which they are for."),
        ("--verdict --level 5", "--level 5: it must be above 0 and below 1, such as 0.01."),
        ("--verdict --looks 0", "--looks 0: it must be at least 1."),
    ],
)
def test_a_wrong_level_or_number_of_looks_is_an_error_of_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run_cli(capsys, "compare", str(tmp_path), *words.split()) == (
        2,
        "",
        f"error: {message}\n",
    )


def test_equal_settings_are_told_apart_as_rarely_as_the_level_says() -> None:
    """`python -m benchmarks.verdicts` does the same 2,000 times, with other noise and seeds."""
    count = verdicts.false_verdicts("normal", seeds=3, level=0.05, pairs=400)

    assert stats.binomtest(count, 400, 0.05).pvalue > 0.001, count
    assert verdicts.search(seeds=8, effect=0.04, number=0) == (2, 0)


# --- the table


def test_the_table_begins_with_the_lowest_mean_loss(tmp_path: Path, compare: Compare) -> None:
    for seed in range(2):
        losses_of_a = {0: 5.0, 10: 1.5, 20: 2.0 + seed / 1000}
        losses_of_b = {0: 5.0, 10: 3.0, 20: 1.75 + seed / 1000}
        write_run(tmp_path / f"a-{seed}", seed, losses_of_a, learning_rate=0.2)
        write_run(tmp_path / f"b-{seed}", seed, losses_of_b, learning_rate=0.1)

    lines = compare(tmp_path)

    assert lines[0].startswith("B         learning_rate 0.1: ")
    table = [" ".join(line.split()) for line in lines[2:5]]
    assert table == ["seeds eval loss", "B 2 1.7505 ± 0.0007", "A 2 2.0005 ± 0.0007"]
    assert lines[5] == (
        "B - A     -0.2500, 95 % interval -0.2500 to -0.2500, p = 0 (2 seeds): B is lower"
    )


# --- runs that cannot be compared


def test_a_setting_with_one_seed_is_named(tmp_path: Path, compare: Compare) -> None:
    write_setting(tmp_path / "a", [3], mean=2.0, learning_rate=0.2)
    write_setting(tmp_path / "b", [3, 4], mean=2.0, learning_rate=0.1)

    *_, difference, note = compare(tmp_path)

    assert difference.endswith("cannot be compared: B and A need two seeds in common")
    assert note.startswith("one seed  A: one seed cannot tell a gain from noise")


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
    assert lines[-1] == "same      all runs have the same settings: there is nothing to compare"
    assert compare(tmp_path / "b1")[-1] == "none      no run can be compared"


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
    assert [item["seed"] for item in group["runs"]] == [0, 1]


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
