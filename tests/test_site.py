"""The documentation site: Sphinx builds it without a warning, and its pages need no network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, long_form


def links_that_lead_nowhere(site: Path) -> list[str]:
    """Return the links inside the site whose page or section does not exist."""
    texts = {page: page.read_text() for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}

    dead = []
    for page, text in texts.items():
        for link in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text):
            if re.match(r"\w+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                dead.append(f"{page}: {link}")
    return dead


@long_form
@pytest.mark.timeout(660)
def test_sphinx_builds_a_site_whose_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs Sphinx, which comes with the extra docs")
    options = ("--fail-on-warning", "--keep-going", "--quiet")
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr

    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    from_network = r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(https?:[^"]*)"'
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(from_network, page.read_text()), page
    assert links_that_lead_nowhere(tmp_path) == []
