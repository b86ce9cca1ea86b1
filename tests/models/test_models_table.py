"""The table of models and the list of verdicts on packing agree with trials of small models."""

import json
import random

import pytest
import transformers

from llmtrain.models.packing_support import VERDICTS
from tests.data.published_templates import TEMPLATES_PAGE
from tests.families import FAMILIES as TRAINED
from tests.launching import long_form
from tests.models.models_table import FAMILIES, PAGE, TABLES, lines_of, rows_of, try_families
from tests.models.packing_trials import ORDER, types_of_classes

TEXT = PAGE.read_text()
VERDICT_LIST = json.loads(VERDICTS.read_text(encoding="utf-8"))
IS_VERSION_OF_TABLE = f"transformers {transformers.__version__}" in TEXT
HINT = (
    f"Make the tables again with transformers {VERDICT_LIST['transformers']}, the lowest that "
    "setup.cfg allows: python -m tests.models.models_table"
)


@long_form
def test_five_random_families_are_in_the_table_with_the_results_of_their_trials() -> None:
    families = random.SystemRandom().sample([*FAMILIES], 5)
    for family, trial in try_families(families).items():
        if IS_VERSION_OF_TABLE:
            for line in lines_of(trial):
                assert line in TEXT.splitlines(), f"{family}: {HINT}"

        # In another version, a class may do better than the list says, but not worse.
        verdict = VERDICT_LIST["classes"][trial.cells["class"]]
        assert ORDER.index(verdict) <= ORDER.index(trial.packing.verdict), f"{family}: {HINT}"


@pytest.mark.parametrize("columns", TABLES, ids=["tried", "details"])
def test_each_table_has_every_family_once(columns: tuple[str, ...]) -> None:
    assert [row["family"] for row in rows_of(TEXT, columns)] == [*FAMILIES]


def test_the_families_that_are_tested_are_in_the_table() -> None:
    assert set(TRAINED) <= FAMILIES.keys()


def test_the_table_has_the_verdicts_of_the_list() -> None:
    trial_columns, detail_columns = TABLES
    trials = rows_of(TEXT, trial_columns)
    details = rows_of(TEXT, detail_columns)
    for trial, detail in zip(trials, details, strict=True):
        verdict = VERDICT_LIST["classes"][detail["class"]]
        packs, _, _ = trial["packs"].partition(":")
        assert packs == ("no" if verdict == "leaks" else "yes"), trial
        shares_prompts, _, _ = trial["prompts shared"].partition(":")
        assert shares_prompts == ("yes" if verdict == "shares" else "no"), trial


def test_the_list_has_verdicts_on_classes_of_transformers() -> None:
    assert set(VERDICT_LIST["classes"].values()) == set(ORDER)
    if transformers.__version__ == VERDICT_LIST["transformers"]:
        assert VERDICT_LIST["classes"].keys() <= types_of_classes().keys()


def test_the_templates_of_families_are_in_the_table_of_templates() -> None:
    lines = TEMPLATES_PAGE.read_text().splitlines()
    names = {line.split("|")[1].strip() for line in lines if "|" in line}
    templates = " ".join(FAMILIES.values()).replace(",", " ").split()
    assert set(templates) <= names
