"""The tables in docs/explanation/memory-table.md are those that `llmtrain plan` computes."""

import random

import pytest

from tests.models.memory_table import METHODS, MODELS, PAGE, planned_lines

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
