"""The reference pages are what docs/generate_reference.py writes."""

import runpy

from tests.launching import ROOT


def test_the_reference_pages_are_up_to_date() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))["pages"]()
    for name, text in pages.items():
        page = (ROOT / "docs" / "reference" / name).read_text()
        assert page == text, "run python docs/generate_reference.py"
