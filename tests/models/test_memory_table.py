"""The tables in docs/explanation/memory-table.md are those that `llmtrain plan` computes."""

import random

import pytest

from tests.models.memory_table import MEASURED, METHODS, MODELS, PAGE, measured_lines, planned_lines

HINT = "Make the tables again: python -m tests.models.memory_table"


def lines_of(model: str) -> list[str]:
    """Return the lines of a model's table on the page, below its head."""
    _, _, part = PAGE.read_text().partition(f"<!-- {model} -->")
    part, _, _ = part.partition(f"<!-- end of {model} -->")
    return [line for line in part.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("model", MODELS)
def test_each_table_has_every_method_once(model: str) -> None:
    assert [line.split("|")[1].strip() for line in lines_of(model)] == [*METHODS]


def test_a_random_line_is_the_one_that_the_memory_model_computes() -> None:
    model = random.SystemRandom().choice([*MODELS])
    method = random.SystemRandom().choice([*METHODS])
    (line,) = planned_lines(model, [method])
    assert line in lines_of(model), f"{model}, {method}: {HINT}"


def test_plans_are_near_the_runs_that_were_measured_on_a_gpu() -> None:
    lines = measured_lines()

    for run, line in zip(MEASURED, lines, strict=True):
        cells = [cell.strip() for cell in line.split("|")]
        planned_gib = float(cells[5].removesuffix(" GiB"))
        planned_speed = float(cells[8].replace(",", ""))
        assert planned_gib == pytest.approx(run.gib, rel=0.05)
        assert planned_speed == pytest.approx(run.tokens_per_second, rel=0.25)
    assert "\n".join(lines) in PAGE.read_text()
