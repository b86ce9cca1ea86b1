"""The files by which a repository is kept. Each is checked by the tool for it."""

import re
import subprocess

import pytest

import llmtrain
from tests.environments import environment_with
from tests.launching import ROOT, long_form

TOOLS = ["check-jsonschema>=0.39", "pre-commit>=4.7", "zizmor>=1.32"]
SCHEMA = ("check-jsonschema", "--builtin-schema")
# A check, and the files for it.
CHECKS = {
    (*SCHEMA, "vendor.github-workflows"): ".github/workflows/*.yml",
    (*SCHEMA, "custom.github-workflows-require-timeout"): ".github/workflows/*.yml",
    # Pinned actions, and no permissions but those that a job needs.
    ("zizmor", "--offline", "--no-progress", "--persona", "pedantic"): ".github/workflows/*.yml",
    (*SCHEMA, "vendor.dependabot"): ".github/dependabot.yml",
    (*SCHEMA, "vendor.github-issue-forms"): ".github/ISSUE_TEMPLATE/[!c]*.yml",
    (*SCHEMA, "vendor.github-issue-config"): ".github/ISSUE_TEMPLATE/config.yml",
    (*SCHEMA, "vendor.citation-file-format"): "CITATION.cff",
    ("pre-commit", "validate-config"): ".pre-commit-config.yaml",
}


@long_form
@pytest.mark.parametrize("check", CHECKS, ids=" ".join)
def test_a_file_of_the_repository_passes_its_check(check: tuple[str, ...]) -> None:
    program, *options = check
    paths = sorted(ROOT.glob(CHECKS[check]))
    assert paths
    binaries = environment_with("repository-tools", TOOLS) / "bin"

    ended = subprocess.run(
        [binaries / program, *options, *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_changelog_and_citation_have_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == llmtrain.__version__
    assert f"\nversion: {llmtrain.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_target_that_a_workflow_makes_is_there() -> None:
    for workflow in ROOT.glob(".github/workflows/*.yml"):
        for target in re.findall(r"run: make (\S+)", workflow.read_text()):
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target
