"""Each extra alone has all that its feature needs; without it, the feature names the extra.

The environments have the packages of `pip install 'llmtrain[EXTRA]'` and no others.
"""

import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.environments import environment_with_extras
from tests.launching import FINETUNE, SMALL_LLAMA, Ended, long_form, read_json, run, write_chats

TRAIN = "--block_size 64 --max_steps 3 --eval_fraction 0"


class Environment:
    """An environment with some extras, and the commands that the tests run in it."""

    def __init__(self, folder: Path, *extras: str) -> None:
        self.python = str(environment_with_extras(folder / "environment", *extras))
        self.chats = write_chats(folder / "chats.jsonl")

    def train(self, run_folder: Path, flags: str = "--report_to none") -> Ended:
        """Train a small Llama with random weights."""
        return self._finetune(run_folder, f"{shlex.join(SMALL_LLAMA)} {flags}")

    def train_adapter(self, run_folder: Path, base: Path) -> Ended:
        """Train an adapter for the model of a run."""
        flags = f"--model_name_or_path {base / 'model'} --lora_r 4 --report_to none"
        return self._finetune(run_folder, flags)

    def _finetune(self, run_folder: Path, flags: str) -> Ended:
        options = f"{flags} --dataset {self.chats} --output_dir {run_folder} {TRAIN}"
        return run([self.python, FINETUNE, *shlex.split(options)])

    def llmtrain(self, command: str) -> Ended:
        return run([self.python, "-m", "llmtrain", *shlex.split(command)])


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("without-extras"))


@pytest.fixture(scope="module")
def finished_run(without_extras: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained without any extra."""
    folder = tmp_path_factory.mktemp("runs") / "finetune"
    without_extras.train(folder).assert_ok()
    assert read_json(folder / "status.json")["state"] == "finished"
    return folder


@long_form
def test_an_adapter_without_the_extra_lora_names_it(
    without_extras: Environment, finished_run: Path, tmp_path: Path
) -> None:
    ended = without_extras.train_adapter(tmp_path / "run", base=finished_run)

    assert ended.status == 2
    assert ended.err == "error: --lora_r needs peft: pip install 'llmtrain[lora]'.\n"


@long_form
def test_tensorboard_without_its_extra_is_named(
    without_extras: Environment, tmp_path: Path
) -> None:
    ended = without_extras.train(tmp_path / "run", "--report_to tensorboard")

    assert ended.status == 2
    assert ended.err == (
        "error: --report_to tensorboard: its package is not installed; install it with pip "
        "install tensorboard.\n"
    )


@long_form
def test_a_command_without_its_extra_names_it(
    without_extras: Environment, finished_run: Path
) -> None:
    ended = without_extras.llmtrain(f"report {finished_run}")

    assert ended.status == 2
    assert ended.err == "error: llmtrain report needs plotly: pip install 'llmtrain[lab]'.\n"


@long_form
def test_an_adapter_is_trained_with_the_extra_lora_alone(
    finished_run: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path, "lora")

    environment.train_adapter(tmp_path / "run", base=finished_run).assert_ok()

    adapter = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert any("lora_A" in name for name in adapter)


@long_form
def test_metrics_are_logged_with_the_extra_tensorboard_alone(tmp_path: Path) -> None:
    environment = Environment(tmp_path, "tensorboard")

    environment.train(tmp_path / "run", "--report_to tensorboard").assert_ok()

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


@long_form
def test_a_report_is_written_with_the_extra_lab_alone(finished_run: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    shutil.copytree(finished_run, run_folder)

    Environment(tmp_path, "lab").llmtrain(f"report {run_folder}").assert_ok()

    assert "<html" in (run_folder / "report.html").read_text()
