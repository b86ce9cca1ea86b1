"""docs/guides/from-trl.md: the same extensions in TRL and llmtrain, and their state after a resume."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked
from tests.launching import PYTHON, ROOT, Ended, read_json, run, series

MIGRATE = ROOT / "docs" / "migrate"
PAGE = ROOT / "docs" / "guides" / "from-trl.md"

# A run of the Trainer: its log, and the state of its callbacks at the beginning and at the end.
TrainerRun = dict[str, Any]


def test_the_code_of_the_page_is_in_the_files() -> None:
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    files = [(MIGRATE / name).read_text() for name in ("trl_own.py", "llmtrain_own.py")]

    assert len(blocks) == 13
    for block in blocks:
        assert any(block in file for file in files), block


# --- runs with TRL


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainerRun]:
    """The runs of the file with TRL, by name."""
    pytest.importorskip("trl", reason="needs trl, which comes with the extra dev")
    folder = tmp_path_factory.mktemp("trl")
    program = str(ROOT / "tests" / "system" / "trl_runs.py")
    python_path = os.pathsep.join([str(ROOT), str(MIGRATE)])
    run(
        ["env", "-C", str(folder), *PYTHON, program, str(folder)],
        env={"PYTHONPATH": python_path, "ACCELERATE_USE_CPU": "true"},
    ).assert_ok()

    runs: dict[str, TrainerRun] = read_json(folder / "trl.json")
    return runs


def trainer_series(trainer_run: TrainerRun, key: str) -> dict[int, float]:
    """Return the values of one key of the Trainer's log by step."""
    return {entry["step"]: entry[key] for entry in trainer_run["log"] if key in entry}


# --- runs with llmtrain


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the file with llmtrain that is not interrupted."""
    folder = tmp_path_factory.mktemp("llmtrain") / "straight"
    train(folder).assert_ok()
    return folder


def train(folder: Path, flags: str = "") -> Ended:
    """Run the file with llmtrain. All runs in the folder above share a base model."""
    program = str(MIGRATE / "llmtrain_own.py")
    flags = (
        f"--report_to none --model_name_or_path {folder.with_name('base')} "
        f"--output_dir {folder} {flags}"
    )
    return run_forked([*PYTHON, program, *shlex.split(flags)], {"ACCELERATE_USE_CPU": "true"})


def last_average(folder: Path) -> float:
    """Return the moving average of the callback in the last checkpoint of a run."""
    path = folder / "checkpoints" / "step-00000018" / "parts" / "Spikes" / "structure.json"
    state: dict[str, float] = dict(read_json(path)["state"]["dict"])
    return state["average"]


def copy_as_killed_after_step_12(finished: Path, name: str) -> Path:
    """Copy a finished run to a folder beside it, as if it had been killed after step 12."""
    folder = finished.with_name(name)
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000018")
    status = read_json(folder / "status.json")
    (folder / "status.json").write_text(json.dumps(status | {"state": "running", "step": 12}))
    return folder


# --- both make the same run


def test_both_files_make_the_same_steps(trl: dict[str, TrainerRun], straight: Path) -> None:
    losses = trainer_series(trl["straight"], "loss")
    learning_rates = trainer_series(trl["straight"], "learning_rate")
    gradient_norms = trainer_series(trl["straight"], "grad_norm")

    assert list(losses) == list(range(1, 19))
    assert series(straight, "train/loss") == pytest.approx(losses, rel=1e-5)
    assert series(straight, "train/learning_rate") == pytest.approx(learning_rates, rel=1e-9)
    assert series(straight, "train/grad_norm") == pytest.approx(gradient_norms, rel=1e-4)


@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_both_files_have_the_same_eval_metrics(
    name: str, trl: dict[str, TrainerRun], straight: Path
) -> None:
    values = series(straight, f"eval/{name}")
    del values[0]  # the Trainer does not evaluate before the first step

    assert values == pytest.approx(trainer_series(trl["straight"], f"eval_{name}"), abs=1e-4)


def test_both_callbacks_end_with_the_same_average(
    trl: dict[str, TrainerRun], straight: Path
) -> None:
    trainer_average = trl["straight"]["end"]["attributes"]["average"]

    assert last_average(straight) == pytest.approx(trainer_average, abs=1e-4)


# --- resuming with TRL


def test_the_trainer_resumes_with_the_callback_of_the_checkpoint(
    trl: dict[str, TrainerRun],
) -> None:
    resumed = trl["resumed"]
    (state_at_start,) = resumed["begin"]

    # The callback of the script has the limit 7.
    assert state_at_start["args"] == {"limit": 3}
    assert state_at_start["attributes"]["average"] is not None
    assert resumed["end"]["attributes"] == trl["straight"]["end"]["attributes"]
    assert trainer_series(resumed, "loss") == trainer_series(trl["straight"], "loss")


def test_the_trainer_resumes_with_the_learning_rates_of_the_checkpoint(
    trl: dict[str, TrainerRun],
) -> None:
    """The resumed command has another learning rate and another loss, and only the loss counts."""
    changed = trl["changed"]
    learning_rates = trainer_series(trl["straight"], "learning_rate")
    losses = trainer_series(trl["straight"], "loss")

    assert trainer_series(changed, "learning_rate") == learning_rates
    assert trainer_series(changed, "loss")[13] > losses[13] + 0.5


def test_the_trainer_can_leave_the_states_of_callbacks_in_the_checkpoint(
    trl: dict[str, TrainerRun],
) -> None:
    (state_at_start,) = trl["changed"]["begin"]

    assert state_at_start == {"args": {"limit": 7}, "attributes": {"average": None, "count": 0}}


def test_the_trainer_restores_no_state_of_two_callbacks_of_one_class(
    trl: dict[str, TrainerRun],
) -> None:
    first, second = trl["two"]["begin"]

    assert first["args"]["limit"] == 3
    assert second["args"]["limit"] == 4
    assert first["attributes"]["average"] is None
    assert second["attributes"]["average"] is None


# --- resuming with llmtrain


def test_llmtrain_resumes_with_the_state_of_the_callback(straight: Path) -> None:
    killed = copy_as_killed_after_step_12(straight, "resumed")

    ended = train(killed).assert_ok()

    assert "resumes from step 12" in ended.out
    assert last_average(killed) == last_average(straight)
    assert series(killed, "train/loss") == series(straight, "train/loss")


@pytest.mark.parametrize(
    ("flag", "difference"),
    [
        pytest.param(
            "--embedding_rate",
            "group_learning_rates [0.01, 0.001] there, [0.05, 0.001] here",
            id="learning-rate",
        ),
        pytest.param(
            "--z_loss", "a different objective: weight 0.001 there, 0.05 here", id="objective"
        ),
    ],
)
def test_llmtrain_starts_a_new_run_if_the_command_has_changed(
    flag: str, difference: str, straight: Path
) -> None:
    killed = copy_as_killed_after_step_12(straight, flag.strip("-"))

    ended = train(killed, f"{flag} 0.05").assert_ok()

    assert re.search(rf"{killed.name}-2 \(new; .*{re.escape(difference)}", ended.out)
