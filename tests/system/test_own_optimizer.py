"""docs/guides/optimizers.md: an optimizer with a learning rate per group, and a schedule, of one's own."""

import re
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import PYTHON, ROOT, series, torchrun, write_text

FLAGS = ["--tokenizer", "byte", "--max_steps", "6", "--save_steps", "3", "--eval_steps", "0"]
FLAGS += ["--logging_steps", "1", "--report_to", "none"]
GROUPS = ("", "/embedding", "/head")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    page = (ROOT / "docs" / "guides" / "optimizers.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    folder = tmp_path_factory.mktemp("own")
    (folder / "three_rates.py").write_text(code)
    write_text(folder / "text.txt")
    return [str(folder / "three_rates.py"), "--dataset", str(folder / "text.txt"), *FLAGS]


def test_three_rates_keep_their_proportions_on_two_processes_and_after_a_resume(
    recipe: list[str], tmp_path: Path
) -> None:
    straight = tmp_path / "straight"
    first = run_forked([*torchrun(2), *recipe, "--output_dir", str(straight)]).assert_ok()
    assert "groups: matrices: 0.02, embedding: 0.06, head: 0.006, others: 0.006\n" in first.out
    shares = [0.2, 0.4, 0.6, 0.8, (2 / 2.4) ** 0.5, (1 / 2.4) ** 0.5]
    for group, peak in zip(GROUPS, (0.02, 0.06, 0.006), strict=True):
        logged = series(straight, f"train/learning_rate{group}")
        assert [logged[step] for step in range(1, 7)] == pytest.approx([peak * s for s in shares])

    source = str(straight / "checkpoints" / "step-00000003")
    words = [*recipe, "--resume_from_checkpoint", source, "--output_dir", str(tmp_path / "resumed")]
    second = run_forked([*torchrun(2), *words]).assert_ok()
    assert "(resumes from " in second.out
    for name in ("train/loss", *(f"train/learning_rate{group}" for group in GROUPS)):
        assert series(tmp_path / "resumed", name) == series(straight, name)


def test_a_flag_that_the_recipe_does_not_read_is_refused(recipe: list[str], tmp_path: Path) -> None:
    flags = ["--adam_beta2", "0.99", "--warmup_steps", "2", "--output_dir", str(tmp_path / "run")]
    ended = run_forked([*PYTHON, *recipe, *flags])
    assert ended.status == 2
    assert ended.err == (
        "error: flags without effect: --adam_beta2 0.99 (no parameter group has this value), "
        "--warmup_steps (the recipe has its own schedule); leave them out.\n"
    )
    assert not (tmp_path / "run").exists()
