"""`llmtrain diff` names the difference between two runs, and is silent about equal ones."""

import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llmtrain.commands.trial import FinishedRun
from llmtrain.lab.commands.compare import compare_groups
from llmtrain.lab.commands.diff import RunDifference, diff_lines, diff_runs
from llmtrain.lab.commands.report import differing_values
from llmtrain.lab.differences import differences
from llmtrain.record.history import History
from llmtrain.record.tolerances import QUANTITIES
from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import GPT, LONG, PYTHON, TINY, accelerate, long_form, series

SCRIPT = "tests/system/differing_runs.py"
FLAGS = [
    *TINY,
    *shlex.split("--max_steps 12 --eval_steps 4 --save_steps 4 --eval_fraction 0.2 --log_rows"),
]


class Change(NamedTuple):
    """A change of the reference run, and how `llmtrain diff` must report it.

    Attributes:
        quantity: the first quantity that differs, in the order in which a step computes them.
        cause: a part of the reported cause.
        flags: that change the run. {folder} has the data sets and the reference.
        bug: that changes the run, by its name in differing_runs.py.
    """

    quantity: str
    cause: str
    flags: str = ""
    bug: str | None = None


CHANGES = {
    # Flags.
    "seed": Change("initial_weights", "--seed 0 and 1", flags="--seed 1"),
    "learning rate": Change(
        "learning_rate", "--learning_rate 0.02 and 0.022", flags="--learning_rate 0.022"
    ),
    "weight decay": Change("weight_norm", "--weight_decay 0.1 and 0.2", flags="--weight_decay 0.2"),
    "dropout": Change("loss", "--dropout 0.0 and 0.1", flags="--dropout 0.1"),
    "optimizer": Change("weight_norm", "--optim muon and adamw", flags="--optim adamw"),
    "batch size": Change("rows", "--global_batch_size 8 and 6", flags="--global_batch_size 6"),
    "depth": Change("initial_weights", "--n_layer 2 and 3", flags="--n_layer 3"),
    "another file": Change("input_tokens", "other.jsonl", flags="--dataset {folder}/other.jsonl"),
    # Bugs.
    "order": Change("rows", "rows are shuffled", bug="another order"),
    "a mean of means": Change("grad_norm", "a mean of micro-batches' means", bug="a mean of means"),
    "unshifted labels": Change("initial_loss", "shifted", bug="unshifted labels"),
    "a token twice": Change("input_tokens", "content of the data", bug="a token twice"),
    "masked labels": Change("labels", "masked", bug="masked labels"),
    "a schedule one late": Change("learning_rate", "schedule", bug="a schedule one late"),
    "no clipping": Change("weight_norm", "clip", bug="no clipping"),
}
# Flags of runs that equal the reference.
EQUAL_RUNS = {
    "larger micro-batches": "--per_device_train_batch_size 8",
    "the same again": "",
    "other evaluations and saves": "--eval_steps 3 --save_steps 5 --async_save --run_name other",
    "resumed": "--resume_from_checkpoint {folder}/reference/checkpoints/step-00000008",
    "two processes": "",
}

SHORT = ["seed", "learning rate", "a mean of means", "a token twice", "unshifted labels"]
SHORT += ["larger micro-batches"]


def is_trained(name: str) -> bool:
    return LONG or name in SHORT


def marked(names: Iterable[str]) -> list[Any]:
    """Return the names of runs as parameters. All but a few are long forms."""
    return [pytest.param(name, marks=() if name in SHORT else long_form) for name in names]


def write_documents(path: Path, word: str) -> None:
    lines = []
    for number in range(40):
        text = f"document {number}: the {word} of {number * number} waits for {number % 7}"
        lines.append(json.dumps({"text": text}) + "\n")
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the reference, the changed runs and the equal runs, each in a folder of its name."""
    folder = tmp_path_factory.mktemp("runs")
    write_documents(folder / "texts.jsonl", "kernel")
    write_documents(folder / "other.jsonl", "bucket")

    def flags_of(name: str, changed_flags: str = "") -> list[str]:
        data = ["--dataset", str(folder / "texts.jsonl"), "--output_dir", str(folder / name)]
        return [*FLAGS, *data, *shlex.split(changed_flags.format(folder=folder))]

    # A bug may change the prepared rows, so it has its own cache.
    runs_of_script: list[dict[str, Any]] = [
        {"flags": flags_of("reference"), "bug": None, "cache": str(folder / "cache")}
    ]
    for name, change in CHANGES.items():
        if not is_trained(name):
            continue
        cache = folder / (f"cache {change.bug}" if change.bug else "cache")
        flags = flags_of(name, change.flags)
        runs_of_script.append({"flags": flags, "bug": change.bug, "cache": str(cache)})
    for name, changed_flags in EQUAL_RUNS.items():
        if is_trained(name) and name != "two processes":
            flags = flags_of(name, changed_flags)
            runs_of_script.append({"flags": flags, "bug": None, "cache": str(folder / "cache")})
    (folder / "runs.json").write_text(json.dumps(runs_of_script))
    run_forked([*PYTHON, SCRIPT, str(folder / "runs.json")], timeout=200).assert_ok()

    if LONG:
        command = [*accelerate("cpu_ddp"), GPT, *flags_of("two processes")]
        run_forked(command, {"LLMTRAIN_CACHE": str(folder / "cache")}).assert_ok()
    return folder


def difference_from_reference(runs: Path, name: str) -> RunDifference:
    return diff_runs(History.of_run(runs / "reference"), History.of_run(runs / name))


@pytest.mark.parametrize("name", marked(CHANGES))
def test_a_change_is_named_at_the_first_quantity_that_differs(
    name: str, runs: Path, score: Callable[[str], None]
) -> None:
    change = CHANGES[name]

    difference = difference_from_reference(runs, name)

    report = "\n".join(diff_lines(difference, "reference", name))
    assert difference.first is not None, report
    quantity = QUANTITIES[difference.first.quantity].name
    causes = [*map(str, difference.suspects), difference.hint]
    score(f"diff: {name}: {quantity} at {difference.first.step}: {'; '.join(filter(None, causes))}")

    assert difference.first.quantity == change.quantity, report
    assert any(change.cause in cause for cause in causes), report
    flags = [cause for cause in causes if cause.startswith("--")]
    assert all(change.cause in flag for flag in flags), f"another flag is named:\n{report}"


@pytest.mark.parametrize("name", marked(CHANGES))
def test_diff_report_compare_and_repeat_have_one_list(name: str, runs: Path) -> None:
    """What compare prints about the settings of groups, repeat prints, too."""
    pair = [History.of_run(runs / "reference"), History.of_run(runs / name)]
    listed = differences(pair)
    difference = diff_runs(*pair)

    without_code = [different for different in listed if not different.is_code]
    assert bool(without_code) == (CHANGES[name].bug in (None, "a token twice"))
    assert sorted([*difference.suspects, *difference.others]) == sorted(listed)
    assert differing_values(pair).keys() == {different.name for different in listed}
    names = "; ".join(group.name for group in compare_groups(pair).groups)
    for different in without_code:
        sets_apart = different.name != "--seed"
        assert (different.name.removeprefix("--") in names) == sets_apart, names


@pytest.mark.parametrize("name", marked(EQUAL_RUNS))
def test_equal_runs_have_no_difference(name: str, runs: Path, score: Callable[[str], None]) -> None:
    difference = difference_from_reference(runs, name)

    score(f"diff: equal: {name}: within {difference.largest_difference:.0e}")
    assert difference.first is None, "\n".join(diff_lines(difference, "reference", name))
    # A run in a new folder begins with the log of the run whose checkpoint it resumes.
    assert difference.common_entries == 12


def test_verify_tells_another_seed_from_another_layout(runs: Path) -> None:
    reference, layout, seed = [
        FinishedRun(name, runs / name, is_float64=False)
        for name in ("reference", "larger micro-batches", "seed")
    ]

    assert reference.compare(layout, same_bits=False).wrong == []
    faults = reference.compare(seed, same_bits=True).wrong
    assert "seed: different rows from step 1 on" in faults
    assert "some bits of the last checkpoint differ, in model" in "\n".join(faults)
    assert "seed: eval losses differ in some bits" in faults


# --- the command


def test_the_command_prints_the_losses_and_the_cause(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = runs / "reference"
    other = runs / "learning rate"

    status, out, err = run_cli(capsys, "diff", str(reference), str(other))

    assert (status, err) == (1, "")
    assert out.startswith("loss      ")
    assert "cause     --learning_rate 0.02 and 0.022" in out
    assert "also" not in out, "there is one cause"

    loss = series(reference, "eval/loss")[12]
    other_loss = series(other, "eval/loss")[12]
    assert f"eval loss {loss:.4f} in {reference} at step 12, {other_loss:.4f} in {other}" in out


def test_the_status_is_0_for_equal_runs_and_2_for_a_folder_without_a_run(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = str(runs / "reference")
    status, out, _ = run_cli(capsys, "diff", reference, reference, "--json")
    assert status == 0
    assert json.loads(out)["first"] is None

    status, _, err = run_cli(capsys, "diff", reference, str(runs))
    assert status == 2
    assert err.count("\n") == 1


def test_runs_without_a_common_log_entry_are_not_called_equal(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_text("{}")
    status, out, _ = run_cli(capsys, "diff", str(runs / "reference"), str(tmp_path))
    assert status == 1
    assert "nothing can be compared" in out
