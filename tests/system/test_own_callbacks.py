"""docs/guides/callbacks.md: a callback with a state, and an average of the weights."""

import re
import shlex
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import (
    PYTHON,
    ROOT,
    SMALL_SIZE,
    TINY,
    Ended,
    read_json,
    series,
    torchrun,
    write_chats,
)


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


def test_the_recipe_of_the_page_finishes_at_a_plateau(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Without a learning rate, the loss has no trend, so some entries have no new lowest loss.
    flags = "--learning_rate 0 --max_steps 60"

    train(recipe, folder, flags)

    status = read_json(folder / "status.json")
    assert (status["state"], status["reason"]) == ("finished", "Plateau has finished the run")
    assert status["step"] < 60
    assert max(series(folder, "eval/loss")) == status["step"]
    assert max(series(folder, "eval/average/loss")) == status["step"]
    for name in ("model", "model-average"):
        assert (folder / name / "model.safetensors").exists()
    # The run stops after the step that follows the fifth entry without a new lowest loss.
    checkpoint = folder / "checkpoints" / f"step-{status['step']:08d}"
    structure = read_json(checkpoint / "parts" / "Plateau" / "structure.json")
    assert structure["state"]["entries"] == 6

    # The finished run stays as it is.
    train(recipe, tmp_path / "again", f"{flags} --resume_from_checkpoint {folder}")
    assert read_json(tmp_path / "again" / "status.json")["step"] == status["step"]


@pytest.mark.parametrize(
    ("votes", "state"), [("none finish", "finished"), ("finish save", "preempted")]
)
def test_one_rank_is_enough_to_finish_a_run_and_one_that_saves_outweighs_it(
    votes: str, state: str, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = shlex.split(f"--dataset {text_file} --output_dir {folder}")
    command = [*torchrun(2), "tests/system/votes.py", *TINY, *flags]

    run_forked(command, env={"VOTES": votes}).assert_ok()

    status = read_json(folder / "status.json")
    assert (status["state"], status["step"]) == (state, 4)
    assert (folder / "model").exists() == (state == "finished")
