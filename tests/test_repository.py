"""The files by which a repository is kept: workflows, forms, hooks, the citation. Each is checked by the tool for it.

Each check is also run on a faulty copy, which it must refuse.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import llmtrain
from tests.environments import environment_with
from tests.launching import ROOT, long_form

TOOLS = ["check-jsonschema>=0.39", "pre-commit>=4.7", "zizmor>=1.32"]
GITHUB = ROOT / ".github"


@dataclass(frozen=True)
class Check:
    """A command that checks one kind of file, and a change that makes such a file faulty."""

    command: tuple[str, ...]
    paths: tuple[Path, ...]
    text: str
    fault: str

    def run(self, binaries: Path, paths: tuple[Path, ...]) -> subprocess.CompletedProcess:
        program, *options = self.command
        return subprocess.run(
            [binaries / program, *options, *paths],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def schema(name: str) -> tuple[str, ...]:
    return ("check-jsonschema", "--builtin-schema", name)


WORKFLOWS = (GITHUB / "workflows" / "ci.yml", GITHUB / "workflows" / "release.yml")
FORMS = (GITHUB / "ISSUE_TEMPLATE" / "bug.yml", GITHUB / "ISSUE_TEMPLATE" / "feature.yml")
AUDIT = ("zizmor", "--offline", "--no-progress", "--persona", "pedantic")
CHECKS = {
    "workflows": Check(
        command=schema("vendor.github-workflows"),
        paths=WORKFLOWS,
        text="runs-on:",
        fault="run-on:",
    ),
    "time limits": Check(
        command=schema("custom.github-workflows-require-timeout"),
        paths=WORKFLOWS,
        text="timeout-minutes:",
        fault="# timeout-minutes:",
    ),
    "pinned actions": Check(
        command=AUDIT,
        paths=WORKFLOWS,
        text="@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1",
        fault="@v7",
    ),
    "permissions": Check(
        command=AUDIT,
        paths=WORKFLOWS,
        text="permissions: {}",
        fault="permissions: write-all",
    ),
    "dependabot": Check(
        command=schema("vendor.dependabot"),
        paths=(GITHUB / "dependabot.yml",),
        text="interval: monthly",
        fault="interval: sometimes",
    ),
    "issue forms": Check(
        command=schema("vendor.github-issue-forms"),
        paths=FORMS,
        text="type: textarea",
        fault="type: text area",
    ),
    "issue settings": Check(
        command=schema("vendor.github-issue-config"),
        paths=(GITHUB / "ISSUE_TEMPLATE" / "config.yml",),
        text="false",
        fault="never",
    ),
    "citation": Check(
        command=schema("vendor.citation-file-format"),
        paths=(ROOT / "CITATION.cff",),
        text="authors:",
        fault="writers:",
    ),
    "hooks": Check(
        command=("pre-commit", "validate-config"),
        paths=(ROOT / ".pre-commit-config.yaml",),
        text="entry:",
        fault="command:",
    ),
}


@long_form
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_a_file_of_the_repository_passes_its_check_and_a_faulty_copy_does_not(
    check: Check, tmp_path: Path
) -> None:
    binaries = environment_with("repository-tools", TOOLS) / "bin"

    passed = check.run(binaries, check.paths)
    assert passed.returncode == 0, passed.stdout + passed.stderr

    original = check.paths[0].read_text()
    assert check.text in original
    # zizmor takes a file for a workflow if it is in a folder with this name.
    faulty = tmp_path / ".github" / "workflows" / check.paths[0].name
    faulty.parent.mkdir(parents=True)
    faulty.write_text(original.replace(check.text, check.fault))

    failed = check.run(binaries, (faulty,))
    assert failed.returncode != 0
    assert "Traceback" not in failed.stderr


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {llmtrain.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_target_that_a_workflow_makes_is_there() -> None:
    for workflow in WORKFLOWS:
        for line in workflow.read_text().splitlines():
            command = line.partition("run: ")[2]
            if command.startswith("make "):
                target = command.removeprefix("make ")
                assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"{workflow}: {command}"
