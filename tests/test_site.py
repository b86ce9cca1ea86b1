"""The documentation site: Sphinx builds it without a warning, and its pages need no network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, long_form


@long_form
@pytest.mark.timeout(660)
def test_sphinx_builds_the_site_and_warns_of_no_link(tmp_path: Path) -> None:
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
