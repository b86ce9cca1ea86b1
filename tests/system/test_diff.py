"""`llmtrain diff` names what was planted, and is silent about runs that are the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llmtrain.lab.diff import RunDifference, diff_lines, diff_runs
from llmtrain.record.history import History
from llmtrain.record.tolerances import QUANTITIES
from tests.forked import run_forked
from tests.launching import GPT, LONG, PYTHON, TINY, accelerate, series
from tests.test_cli import ended

DRIVER = "tests/system/differing_runs.py"
FLAGS = [
    *TINY,
    "--max_steps",
    "12",
    "--eval_steps",
    "4",
    "--save_steps",
    "4",
    "--eval_fraction",
    "0.2",
]


class Pair(NamedTuple):
    """How the other run differs, and where that is to be seen first."""

    link: str
    cause: str  # a part of what is said
    flags: tuple[str, ...] = ()
    plant: str | None = None


PAIRS = {
    "seed": Pair("initial_weights", "--seed 0 and 1", ("--seed", "1")),
    "learning rate": Pair(
        "learning_rate", "--learning_rate 0.02 and 0.022", ("--learning_rate", "0.022")
    ),
    "weight decay": Pair("weight_norm", "--weight_decay 0.1 and 0.2", ("--weight_decay", "0.2")),
    "dropout": Pair("loss", "--dropout 0.0 and 0.1", ("--dropout", "0.1")),
    "optimizer": Pair("weight_norm", "--optim muon and adamw", ("--optim", "adamw")),
    "batch size": Pair("rows", "--global_batch_size 8 and 6", ("--global_batch_size", "6")),
    "depth": Pair("initial_weights", "--n_layer 2 and 3", ("--n_layer", "3")),
    "another file": Pair("input_tokens", "other.jsonl", ("--dataset", "OTHER")),
    "order": Pair("rows", "rows are shuffled", plant="another order"),
    "a mean of means": Pair("grad_norm", "a mean of micro-batches' means", plant="a mean of means"),
    "unshifted labels": Pair("initial_loss", "shifted", plant="unshifted labels"),
    "a token twice": Pair("input_tokens", "added twice", plant="a token twice"),
    "masked labels": Pair("labels", "masked", plant="masked labels"),
    "a schedule one late": Pair("learning_rate", "schedule", plant="a schedule one late"),
    "no clipping": Pair("weight_norm", "clip", plant="no clipping"),
}
SHORT = ["seed", "learning rate", "a mean of means", "a token twice", "unshifted labels"]
EQUAL: dict[str, tuple[str, ...]] = {
    "the same again": (),
    "larger micro-batches": ("--per_device_train_batch_size", "8"),
    "other evaluations and saves": (
        "--eval_steps",
        "3",
        "--save_steps",
        "5",
        "--async_save",
        "--run_name",
        "other",
    ),
    "gone on": ("--resume_from_checkpoint", "HALF"),
    "two processes": (),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    for name, word in (("texts", "kernel"), ("other", "bucket")):
        documents = [
            f"document {number}: the {word} of {number * number} waits for {number % 7}"
            for number in range(40)
        ]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in documents)
        )
    wanted: list[dict[str, Any]] = []

    def want(name: str, flags: tuple[str, ...] = (), plant: str | None = None) -> None:
        words = [
            *FLAGS,
            "--log_rows",
            "--dataset",
            str(folder / "texts.jsonl"),
            "--output_dir",
            str(folder / name),
        ]
        stands_for = {
            "OTHER": folder / "other.jsonl",
            "HALF": folder / "reference/checkpoints/step-00000008",
        }
        words += [str(stands_for.get(word, word)) for word in flags]
        cache = str(folder / (f"cache {plant}" if plant else "cache"))
        wanted.append({"flags": words, "plant": plant, "cache": cache})

    want("reference")
    for name in PAIRS if LONG else SHORT:
        want(name, PAIRS[name].flags, PAIRS[name].plant)
    for name, flags in EQUAL.items():
        if name != "two processes" and (LONG or name == "larger micro-batches"):
            want(name, flags)
    (folder / "wanted.json").write_text(json.dumps(wanted))
    run_forked([*PYTHON, DRIVER, str(folder / "wanted.json")], timeout=200).assert_ok()
    if LONG:
        flags = [*wanted[0]["flags"][:-1], str(folder / "two processes")]
        run_forked(
            [*accelerate("cpu_ddp"), GPT, *flags], {"LLMTRAIN_CACHE": str(folder / "cache")}
        ).assert_ok()
    return folder


def compared(runs: Path, name: str) -> RunDifference:
    return diff_runs(History.of_run(runs / "reference"), History.of_run(runs / name))


@pytest.mark.parametrize("name", PAIRS if LONG else SHORT)
def test_what_was_planted_is_named_at_the_first_link_that_it_parts(
    name: str, runs: Path, score: Callable
) -> None:
    found, pair = compared(runs, name), PAIRS[name]
    said = "\n".join(diff_lines(found, "a", "b"))
    assert found.first is not None, said
    score(
        f"diff: {name}: {QUANTITIES[found.first.link].name} at {found.first.step}: {'; '.join(found.causes)}"
    )
    assert found.first.link == pair.link, said
    assert any(pair.cause in cause for cause in found.causes), said
    wrong = [cause for cause in found.causes if cause.startswith("--") and pair.cause not in cause]
    assert not wrong, said


@pytest.mark.parametrize("name", EQUAL if LONG else ["larger micro-batches"])
def test_of_runs_that_are_the_same_nothing_parts(name: str, runs: Path, score: Callable) -> None:
    found = compared(runs, name)
    score(f"diff: equal: {name}: losses within {found.largest_loss_difference:.0e}")
    assert found.first is None, "\n".join(diff_lines(found, "a", "b"))
    assert found.common_entries == (4 if name == "gone on" else 12)


def test_the_command_says_it_in_lines_or_for_programs(
    runs: Path, capsys: pytest.CaptureFixture
) -> None:
    one, other = str(runs / "reference"), str(runs / "learning rate")
    status, out, err = ended(capsys, "diff", one, other)
    assert (status, err) == (1, "")
    assert "cause     --learning_rate 0.02 and 0.022" in out
    assert "also" not in out
    losses = {}
    for name in ("reference", "learning rate"):
        losses[name] = list(series(runs / name, "eval/loss").items())[-1]
    step, loss = losses["reference"]
    _, other_loss = losses["learning rate"]
    assert (
        f"eval loss {loss:.4f} in {one} at step {step}, {other_loss:.4f} in {other}: "
        f"{other_loss - loss:+.4f}\n"
    ) in out
    assert out.startswith("loss      ")
    status, out, _ = ended(capsys, "diff", one, other, "--json")
    assert (status, json.loads(out)["first"]["link"]) == (1, "learning_rate")
    assert ended(capsys, "diff", one, one)[0] == 0
    status, _, err = ended(capsys, "diff", one, str(runs))
    assert (status, err.count("\n")) == (2, 1)


def test_runs_that_have_no_reading_in_common_are_not_called_the_same(
    runs: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "status.json").write_text("{}")
    status, out, _ = ended(capsys, "diff", str(runs / "reference"), str(tmp_path))
    assert status == 1
    assert "nothing can be compared" in out
