"""The scripts in docs/tables make their pages, with the numbers that are there."""

import json
import random

import pytest
import transformers

from docs.tables.memory_table import MEASURED, METHODS, MODELS, measured_lines, planned_lines
from docs.tables.memory_table import PAGE as MEMORY_PAGE
from docs.tables.models_table import FAMILIES, PAGE, TABLES, lines_of, rows_of, try_families
from docs.tables.packing_trials import ORDER, types_of_classes
from llmtrain.models.model_classes import VERDICTS
from tests.launching import long_form

VERDICT_LIST = json.loads(VERDICTS.read_text(encoding="utf-8"))


@long_form
def test_five_random_families_are_in_the_table_with_the_results_of_their_trials() -> None:
    page = PAGE.read_text()
    families = random.SystemRandom().sample([*FAMILIES], 5)
    for family, trial in try_families(families).items():
        if f"transformers {transformers.__version__}" in page:
            for line in lines_of(trial):
                assert line in page.splitlines(), f"{family}: python -m docs.tables.models_table"

        # In another version, a class may do better than the list says, but not worse.
        verdict = VERDICT_LIST["classes"][trial.cells["class"]]
        assert ORDER.index(verdict) <= ORDER.index(trial.packing.verdict), family


def test_the_table_of_models_has_every_family_with_its_verdict() -> None:
    assert set(VERDICT_LIST["classes"].values()) == set(ORDER)
    if transformers.__version__ == VERDICT_LIST["transformers"]:
        assert VERDICT_LIST["classes"].keys() <= types_of_classes().keys()

    trials, details = (rows_of(PAGE.read_text(), columns) for columns in TABLES)
    assert [row["family"] for row in trials] == [*FAMILIES]
    for trial, detail in zip(trials, details, strict=True):
        verdict = VERDICT_LIST["classes"][detail["class"]]
        assert trial["packs"].startswith("no") == (verdict == "leaks"), trial
        assert trial["prompts shared"].startswith("yes") == (verdict == "shares"), trial


@long_form
def test_a_random_line_of_memory_is_the_one_that_the_memory_model_computes() -> None:
    model = random.SystemRandom().choice([*MODELS])
    method = random.SystemRandom().choice([*METHODS])
    (line,) = planned_lines(model, [method])
    assert line in MEMORY_PAGE.read_text(), "make it again: python -m docs.tables.memory_table"


@long_form
def test_plans_are_near_the_runs_that_were_measured_on_a_gpu() -> None:
    for run, line in zip(MEASURED, measured_lines(), strict=True):
        cells = [cell.strip() for cell in line.split("|")]
        planned_gib = float(cells[5].removesuffix(" GiB"))
        planned_speed = float(cells[8].replace(",", ""))
        assert planned_gib == pytest.approx(run.gib, rel=0.05)
        assert planned_speed == pytest.approx(run.tokens_per_second, rel=0.25)
        assert line in MEMORY_PAGE.read_text()
