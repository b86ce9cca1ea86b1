"""docs/guides/from-trl.md: the same extensions in TRL and llmtrain, and their state after a resume."""

import json
import os
import re
import shutil
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


def test_the_code_of_the_page_stands_in_the_files() -> None:
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    files = [(MIGRATE / name).read_text() for name in ("trl_own.py", "llmtrain_own.py")]
    assert len(blocks) == 13
    for block in blocks:
        assert any(block in file for file in files), block


def test_both_files_make_the_same_steps(trl: dict[str, Any], ours: Path) -> None:
    straight = trl["straight"]
    losses = of_log(straight, "loss")
    assert list(losses) == list(range(1, 19))
    assert series(ours, "train/loss") == pytest.approx(losses, rel=1e-5)
    rates = of_log(straight, "learning_rate")
    assert series(ours, "train/learning_rate") == pytest.approx(rates, rel=1e-9)
    norms = of_log(straight, "grad_norm")
    assert series(ours, "train/grad_norm") == pytest.approx(norms, rel=1e-4)

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


def killed_after_step_12(ours: Path, name: str) -> Path:
    """Return a copy of a run as it would be if it had been killed after step 12."""
    folder = ours.with_name(name)
    shutil.copytree(ours, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000018")
    status = read_json(folder / "status.json")
    (folder / "status.json").write_text(json.dumps(status | {"state": "running", "step": 12}))
    return folder


def test_llmtrain_resumes_the_callback_and_starts_a_changed_command_anew(ours: Path) -> None:
    resumed = killed_after_step_12(ours, "resumed")
    assert "resumes from step 12" in train(resumed).assert_ok().out
    assert average(resumed) == average(ours)
    assert series(resumed, "train/loss") == series(ours, "train/loss")

    for flag, difference in {
        "--embedding_rate": "group_learning_rates [0.01, 0.001] there, [0.05, 0.001] here",
        "--z_loss": "a different objective: weight 0.001 there, 0.05 here",
    }.items():
        changed = killed_after_step_12(ours, flag.strip("-"))
        started = train(changed, flag, "0.05").assert_ok()
        assert re.search(rf"{changed.name}-2 \(new; .*{re.escape(difference)}", started.out)
