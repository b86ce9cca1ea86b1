"""docs/guides/from-trl.md: two files with the same extensions, and what a resumed run does with them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked
from tests.launching import PYTHON, ROOT, Ended, read_json, run, series

MIGRATE = ROOT / "docs" / "migrate"
PAGE = ROOT / "docs" / "guides" / "from-trl.md"


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The runs of the file with TRL, by name."""
    pytest.importorskip("trl", reason="needs trl, which comes with the extra dev")
    folder = tmp_path_factory.mktemp("trl")
    program = ["env", "-C", str(folder), *PYTHON, str(ROOT / "tests" / "system" / "trl_runs.py")]
    path = os.pathsep.join([str(ROOT), str(MIGRATE)])
    run([*program, str(folder)], {"PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}).assert_ok()
    results: dict[str, Any] = read_json(folder / "trl.json")
    return results


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the file with llmtrain."""
    folder = tmp_path_factory.mktemp("ours") / "straight"
    train(folder).assert_ok()
    return folder


def train(folder: Path, *flags: str) -> Ended:
    """Run the file with llmtrain."""
    program = [*PYTHON, str(MIGRATE / "llmtrain_own.py"), "--report_to", "none"]
    program += ["--model_name_or_path", str(folder.with_name("base"))]
    program += ["--output_dir", str(folder)]
    return run_forked([*program, *flags], {"ACCELERATE_USE_CPU": "true"})


def of_log(result: dict[str, Any], key: str) -> dict[int, float]:
    """Return a number of the Trainer's log by step."""
    return {entry["step"]: entry[key] for entry in result["log"] if key in entry}


def average(folder: Path) -> float:
    """Return the moving average in the last checkpoint of a run of llmtrain."""
    path = folder / "checkpoints" / "step-00000018" / "parts" / "Spikes" / "structure.json"
    state: dict[str, float] = dict(json.loads(path.read_text())["state"]["dict"])
    return state["average"]


def test_both_files_make_the_same_steps(trl: dict[str, Any], ours: Path) -> None:
    straight = trl["straight"]
    losses = of_log(straight, "loss")
    assert list(losses) == list(range(1, 19))
    assert series(ours, "train/loss") == pytest.approx(losses, abs=1e-4)
    rates = of_log(straight, "learning_rate")
    assert series(ours, "train/learning_rate") == pytest.approx(rates, rel=1e-9)
    norms = of_log(straight, "grad_norm")
    assert series(ours, "train/grad_norm") == pytest.approx(norms, abs=1e-3)

    for name in ("loss", "accuracy"):
        evaluated = series(ours, f"eval/{name}")
        del evaluated[0]  # the Trainer does not evaluate before the first step
        assert evaluated == pytest.approx(of_log(straight, f"eval_{name}"), abs=1e-4)
    assert average(ours) == pytest.approx(straight["end"]["attributes"]["average"], abs=1e-4)


def test_the_trainer_resumes_with_the_rates_and_the_callback_of_the_checkpoint(
    trl: dict[str, Any],
) -> None:
    resumed = trl["resumed"]
    (begin,) = resumed["begin"]
    assert begin["args"] == {"limit": 3}  # not 7, as the callback has that the script passes
    assert begin["attributes"]["average"] is not None
    assert resumed["end"]["attributes"] == trl["straight"]["end"]["attributes"]
    assert of_log(resumed, "loss") == of_log(trl["straight"], "loss")

    changed = trl["changed"]  # another learning rate, another loss, and no state of callbacks
    assert of_log(changed, "learning_rate") == of_log(trl["straight"], "learning_rate")
    assert of_log(changed, "loss")[13] > of_log(trl["straight"], "loss")[13] + 0.5
    (begin,) = changed["begin"]
    assert begin == {"args": {"limit": 7}, "attributes": {"average": None, "count": 0}}


def test_the_trainer_starts_two_callbacks_of_one_class_anew(trl: dict[str, Any]) -> None:
    assert [begin["args"]["limit"] for begin in trl["two"]["begin"]] == [3, 4]
    assert {begin["attributes"]["average"] for begin in trl["two"]["begin"]} == {None}


def test_llmtrain_resumes_the_callback_and_starts_a_changed_command_anew(
    ours: Path, tmp_path: Path
) -> None:
    checkpoint = ours / "checkpoints" / "step-00000012"
    train(tmp_path / "resumed", "--resume_from_checkpoint", str(checkpoint)).assert_ok()
    assert average(tmp_path / "resumed") == average(ours)
    assert series(tmp_path / "resumed", "train/loss") == series(ours, "train/loss")

    changed = train(ours, "--embedding_rate", "0.05", "--z_loss", "0.1", "--max_steps", "18")
    assert "straight-2 (new; " in changed.assert_ok().out
    rates = series(ours.with_name("straight-2"), "train/learning_rate")
    assert rates[1] == pytest.approx(5 * series(ours, "train/learning_rate")[1])
