"""docs/guides/callbacks.md: a callback with a state, and an average of the weights."""

import re
import shlex
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import PYTHON, ROOT, SMALL_SIZE, Ended, read_json, series, write_chats


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = (ROOT / "docs" / "guides" / "callbacks.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    folder = tmp_path_factory.mktemp("plateau")
    (folder / "plateau.py").write_text(code)
    write_chats(folder / "chats.jsonl")
    return folder / "plateau.py"


def train(recipe: Path, folder: Path, flags: str) -> Ended:
    words = shlex.split(
        f"--config_overrides {SMALL_SIZE} --tokenizer byte --max_length 128 --report_to none "
        f"--logging_steps 1 --save_steps 5 --eval_steps 10 --output_dir {folder} "
        f"--dataset {recipe.parent}/chats.jsonl {flags}"
    )
    return run_forked([*PYTHON, str(recipe), *words]).assert_ok()


def test_the_recipe_of_the_page_evaluates_and_saves_the_average_of_its_weights(
    recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    ended = train(recipe, folder, "--max_steps 20")

    assert [*series(folder, "eval/average/loss")] == [10, 20]
    assert "average/loss" in ended.out
    assert (folder / "model-average" / "model.safetensors").exists()


def test_the_recipe_of_the_page_stops_at_a_plateau_and_again_after_a_resume(
    recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    # Without a learning rate, the loss has no trend, so some entries have no new lowest loss.
    flags = "--learning_rate 0 --max_steps 60"

    ended = train(recipe, folder, flags)

    status = read_json(folder / "status.json")
    assert status["state"] == "preempted"
    assert "asked to stop" in ended.out
    # The run stops after the step that follows the fifth entry without a new lowest loss.
    checkpoint = folder / "checkpoints" / f"step-{status['step']:08d}"
    structure = read_json(checkpoint / "parts" / "Plateau" / "structure.json")
    assert ["entries", 6] in structure["state"]["dict"]

    # The counter is restored, so the run stops again at once.
    train(recipe, folder, flags)
    assert read_json(folder / "status.json")["step"] == status["step"] + 1
