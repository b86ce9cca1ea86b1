"""docs/guides/from-trl.md: the same extensions in TRL and llmtrain, and their state after a resume."""

import re
import shlex
import shutil
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked
from tests.launching import PYTHON, ROOT, long_form, make_look_killed, read_json, series

MIGRATE = ROOT / "docs" / "migrate"
PAGE = ROOT / "docs" / "guides" / "from-trl.md"

TrainerState = dict[str, Any]


def test_the_code_of_the_page_is_in_the_files() -> None:
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    files = [(MIGRATE / name).read_text() for name in ("llmtrain_own.py", "trl_grpo.py")]

    assert len(blocks) == 5
    for block in blocks:
        assert any(block in file for file in files), block


def test_each_argument_of_a_distillation_with_trl_is_on_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("trl", reason="needs trl, which comes with the extra dev")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl import DistillationConfig, SFTConfig
    from trl.experimental.gkd import GKDConfig
    from trl.trainer.base_config import _BaseConfig

    [section] = re.findall(r"^### Distillation\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.M)
    first_cells = "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    patterns = re.findall("`([a-z0-9_*]+)`", first_cells)

    for config, base in [(DistillationConfig, _BaseConfig), (GKDConfig, SFTConfig)]:
        own = {field.name for field in fields(config)} - {field.name for field in fields(base)}
        assert len(own) > 5
        for name in own:
            assert any(fnmatch(name, pattern) for pattern in patterns), name


# --- runs with TRL


@pytest.fixture(scope="module")
def trainer_state(tmp_path_factory: pytest.TempPathFactory) -> TrainerState:
    """The last state of a run of the file with TRL."""
    pytest.importorskip("trl", reason="needs trl, which comes with the extra dev")
    folder = tmp_path_factory.mktemp("trl")
    command = [*PYTHON, str(MIGRATE / "trl_own.py"), "--output_dir", "run"]
    run_forked(command, {"ACCELERATE_USE_CPU": "true"}, folder=folder).assert_ok()

    state: TrainerState = read_json(folder / "run" / "checkpoint-18" / "trainer_state.json")
    return state


def trainer_series(trainer_state: TrainerState, key: str) -> dict[int, float]:
    """Return the values of one key of the Trainer's log by step."""
    return {entry["step"]: entry[key] for entry in trainer_state["log_history"] if key in entry}


# --- runs with llmtrain


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the file with llmtrain that is not interrupted."""
    folder = tmp_path_factory.mktemp("llmtrain") / "straight"
    train(folder)
    return folder


def train(folder: Path) -> None:
    """Run the file with llmtrain. All runs in the folder above share a base model."""
    program = str(MIGRATE / "llmtrain_own.py")
    base = folder.with_name("base")
    flags = shlex.split(f"--report_to none --model_name_or_path {base} --output_dir {folder}")
    run_forked([*PYTHON, program, *flags], {"ACCELERATE_USE_CPU": "true"}).assert_ok()


def last_average(folder: Path) -> float:
    """Return the moving average of the callback in the last checkpoint of a run."""
    path = folder / "checkpoints" / "step-00000018" / "parts" / "Spikes" / "structure.json"
    state: dict[str, float] = read_json(path)["state"]
    return state["average"]


# --- both make the same run


@long_form
def test_both_files_make_the_same_run(trainer_state: TrainerState, straight: Path) -> None:
    losses = trainer_series(trainer_state, "loss")
    learning_rates = trainer_series(trainer_state, "learning_rate")
    gradient_norms = trainer_series(trainer_state, "grad_norm")

    assert list(losses) == list(range(1, 19))
    assert series(straight, "train/loss") == pytest.approx(losses, rel=1e-5)
    assert series(straight, "train/learning_rate") == pytest.approx(learning_rates, rel=1e-9)
    assert series(straight, "train/grad_norm") == pytest.approx(gradient_norms, rel=1e-4)

    for name in ("loss", "accuracy"):
        values = series(straight, f"eval/{name}")
        del values[0]  # the Trainer does not evaluate before the first step
        assert values == pytest.approx(trainer_series(trainer_state, f"eval_{name}"), abs=1e-4)
    average = trainer_state["stateful_callbacks"]["Spikes"]["attributes"]["average"]
    assert last_average(straight) == pytest.approx(average, abs=1e-4)


# --- resuming with llmtrain


@long_form
def test_llmtrain_resumes_with_the_state_of_the_callback(straight: Path) -> None:
    killed = straight.with_name("killed")
    shutil.copytree(straight, killed)
    make_look_killed(killed, step=12)

    train(killed)

    assert len(read_json(killed / "run.json")["starts"]) == 2
    assert last_average(killed) == last_average(straight)
    assert series(killed, "train/loss") == series(straight, "train/loss")
