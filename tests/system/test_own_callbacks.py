"""docs/guides/callbacks.md: a callback with a state, and an average of the weights."""

import re
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import PYTHON, ROOT, read_json, series, write_chats

SMALL = [
    *("--config_overrides", "hidden_size=32,num_hidden_layers=1,intermediate_size=64,head_dim=8"),
    *("--tokenizer", "byte", "--max_length", "128", "--report_to", "none"),
    *("--logging_steps", "1", "--save_steps", "5"),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = (ROOT / "docs" / "guides" / "callbacks.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    folder = tmp_path_factory.mktemp("plateau")
    (folder / "plateau.py").write_text(code)
    write_chats(folder / "chats.jsonl")
    return folder / "plateau.py"


def test_the_recipe_of_the_page_logs_the_average_and_stops_at_a_plateau(
    recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = ["--dataset", str(recipe.with_name("chats.jsonl")), "--output_dir", str(folder)]
    flags += ["--max_steps", "20", "--eval_steps", "10", *SMALL]
    done = run_forked([*PYTHON, str(recipe), *flags]).assert_ok()
    assert [*series(folder, "eval/average/loss")] == [10, 20]
    assert "average/loss" in done.out
    assert (folder / "model-average" / "model.safetensors").exists()

    # Without a learning rate, the loss has no trend, and some entries have no new lowest loss.
    ended = run_forked(
        [*PYTHON, str(recipe), *flags, "--learning_rate", "0", "--max_steps", "60"]
    ).assert_ok()
    stopped = tmp_path / "run-2"
    assert read_json(stopped / "status.json")["state"] == "preempted"
    step = read_json(stopped / "status.json")["step"]
    structure = read_json(
        stopped / "checkpoints" / f"step-{step:08d}" / "parts" / "Plateau" / "structure.json"
    )
    # The fifth entry without a new low is written during the next step. The loop asks before the
    # step after that one, and stops after it.
    assert ["entries", 7] in structure["state"]["dict"]
    assert "asked to stop" in ended.out

    # The counter is restored, so the run stops again at once.
    run_forked(
        [*PYTHON, str(recipe), *flags, "--learning_rate", "0", "--max_steps", "60"]
    ).assert_ok()
    assert read_json(stopped / "status.json")["step"] == step + 1
