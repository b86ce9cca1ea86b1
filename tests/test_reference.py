"""The reference pages are what docs/generate_reference.py writes."""

import runpy

import pytest

from llmtrain.config.flags import configs_of, flags_of
from tests.launching import ROOT

GENERATOR = ROOT / "docs" / "generate_reference.py"
FOLDER = ROOT / "docs" / "reference"
ADVICE = "run python docs/generate_reference.py"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return runpy.run_path(str(GENERATOR))["pages"]()


def test_the_reference_pages_are_up_to_date(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert (FOLDER / name).read_text() == text, ADVICE


def test_every_flag_is_on_the_page_of_its_recipe(pages: dict[str, str]) -> None:
    for recipe in ("gpt", "finetune", "preference"):
        settings = runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))["DEFAULTS"]
        for config in configs_of(settings).values():
            for flag in flags_of(config):
                is_listed = f"| `--{flag}" in pages[f"{recipe}.md"]
                assert is_listed or f"| `--no_{flag}" in pages[f"{recipe}.md"], flag
