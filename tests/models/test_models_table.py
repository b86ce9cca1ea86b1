"""The table of models says what trials of small models give, and so does the list that rows are packed by."""

import json
import random

import pytest
import transformers

from llmtrain.models.packing_support import VERDICTS
from tests.data.test_published_templates import PAGE as TEMPLATES_PAGE
from tests.families import FAMILIES as TRAINED
from tests.models.models_table import FAMILIES, PAGE, TABLES, lines_of, rows_of, try_families
from tests.models.packing_trials import ORDER, types_of_classes

TEXT = PAGE.read_text()
LISTED = json.loads(VERDICTS.read_text(encoding="utf-8"))
IS_ITS_VERSION = f"transformers {transformers.__version__}" in TEXT
AGAIN = (
    f"Make the tables again with transformers {LISTED['transformers']}, the lowest version that "
    "setup.cfg allows: python -m tests.models.models_table"
)


def test_five_families_by_lot_are_in_the_table_as_trials_find_them() -> None:
    families = random.SystemRandom().sample([*FAMILIES], 5)
    for family, trial in try_families(families).items():
        if IS_ITS_VERSION:
            for line in lines_of(trial):
                assert line in TEXT.splitlines(), f"{family}: {AGAIN}"
        # Another version may keep documents apart that this one does not. Rows of it are not packed.
        listed = LISTED["classes"][trial.cells["class"]]
        assert ORDER.index(listed) <= ORDER.index(trial.packing.verdict), f"{family}: {AGAIN}"


@pytest.mark.parametrize("columns", TABLES, ids=["tried", "details"])
def test_each_table_has_every_family_once(columns: tuple[str, ...]) -> None:
    assert [row["family"] for row in rows_of(TEXT, columns)] == [*FAMILIES]
    assert {*TRAINED} <= {*FAMILIES}


def test_the_table_has_the_verdicts_that_rows_are_packed_by() -> None:
    tried, details = (rows_of(TEXT, columns) for columns in TABLES)
    for row, names in zip(tried, details, strict=True):
        verdict = LISTED["classes"][names["class"]]
        assert row["packs"].startswith("no" if verdict == "leaks" else "yes"), row
        assert row["prompts shared"].startswith("yes" if verdict == "shares" else "no"), row


def test_the_list_has_only_verdicts_on_classes_of_transformers() -> None:
    assert {*LISTED["classes"].values()} == {*ORDER}
    if transformers.__version__ == LISTED["transformers"]:
        assert {*LISTED["classes"]} <= types_of_classes().keys()


def test_the_templates_of_a_family_are_in_their_own_table() -> None:
    names = {
        line.split("|")[1].strip()
        for line in TEMPLATES_PAGE.read_text().splitlines()
        if "|" in line
    }
    templates = " ".join(FAMILIES.values()).replace(",", " ").split()
    assert {*templates} <= names
