"""The documentation site: Sphinx builds it without a warning, and its pages need no network."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, long_form


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("sphinx", reason="needs Sphinx, which comes with the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"),
            *(str(ROOT / "docs"), str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return folder


@long_form
@pytest.mark.timeout(660)
def test_sphinx_builds_the_site_without_a_warning(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert built.is_file(), page


@long_form
@pytest.mark.timeout(660)
def test_pages_load_nothing_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(
            r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(https?:[^"]*)"', text
        )
        assert not loaded, page


@long_form
@pytest.mark.timeout(660)
def test_the_search_index_has_the_words_of_the_pages(site: Path) -> None:
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    pages: dict[str, set[str]] = {}
    for word, numbers in index["terms"].items():
        listed = [numbers] if isinstance(numbers, int) else numbers
        pages[word] = {index["docnames"][number] for number in listed}

    # The terms are word stems from the text of the pages. Titles and names have indices of their own.
    assert "explanation/ddp" in pages["bucket"]
    assert "guides/trackers" in pages["wandb"]
    assert set().union(*pages.values()) == set(index["docnames"])


@long_form
@pytest.mark.timeout(660)
def test_links_lead_to_pages_and_sections(site: Path) -> None:
    anchors: dict[Path, set[str]] = {}

    def anchors_of(page: Path) -> set[str]:
        if page not in anchors:
            anchors[page] = set(re.findall(r'\bid="([^"]+)"', page.read_text()))
        return anchors[page]

    for page in site.rglob("*.html"):
        for link in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', page.read_text()):
            if re.match(r"\w+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page}: {link}"
            if anchor and target.suffix == ".html":
                assert anchor in anchors_of(target), f"{page}: {link}"
