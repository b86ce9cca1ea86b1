"""The lessons hold, and docs/explanation/ddp.md shows what they print. LLMTRAIN_WRITE_DOCS=1 writes it there instead."""

import re
from pathlib import Path
from typing import Any

import pytest

from llmtrain.lessons import LESSONS
from llmtrain.lessons.learn import title
from tests.launching import BIN, ROOT, WRITE_DOCS, long_form, run

PAGE = ROOT / "docs" / "explanation" / "ddp.md"
QUICK = ("replicas",)
# They fail if a process waits for other programs. The others only show what they measure.
MEASURING = ("overlap", "late")


def block_of(lesson: str) -> re.Pattern[str]:
    return re.compile(rf"```\n\$ llmtrain learn {lesson}\n(.*?)```\n", re.DOTALL)


def comparable(text: str) -> list[str]:
    """Without the numbers that were measured, and the spaces before them."""
    return [
        " ".join(re.sub(r"[\d.,]+", "#", line).split()) if line.startswith("measured") else line
        for line in text.splitlines()
    ]


def marked(lesson: str) -> Any:
    """Return a lesson as a parameter. All but the quick ones are long forms."""
    if lesson in MEASURING:
        return pytest.param(lesson, marks=[long_form, pytest.mark.measures])
    return lesson if lesson in QUICK else pytest.param(lesson, marks=long_form)


@pytest.mark.parametrize("lesson", [*map(marked, LESSONS)])
def test_a_lesson_holds_and_prints_what_the_page_shows(lesson: str) -> None:
    ended = run([str(BIN / "llmtrain"), "learn", lesson]).assert_ok()
    page = PAGE.read_text()
    shown = block_of(lesson).search(page)
    assert shown is not None, f"docs/explanation/ddp.md does not show {lesson}"
    if WRITE_DOCS:
        PAGE.write_text(page[: shown.start(1)] + ended.out + page[shown.end(1) :])
    else:
        assert comparable(shown[1]) == comparable(ended.out)


def test_every_lesson_is_listed_with_its_title_and_stands_on_the_page_in_order() -> None:
    listed = run([str(BIN / "llmtrain"), "learn"]).assert_ok().out
    for lesson in LESSONS:
        assert re.search(rf"^  {lesson} +{re.escape(title(lesson))}$", listed, re.MULTILINE)
    assert re.findall(r"^\$ llmtrain learn (\w+)$", PAGE.read_text(), re.MULTILINE) == list(LESSONS)


LOSSY_RING = """
import torch.distributed as dist
honest = dist.batch_isend_irecv
def lossy(operations):
    operations[0].tensor.zero_()
    return honest(operations)
dist.batch_isend_irecv = lossy
"""
BLIND_CHECK = """
from llmtrain.observe import replicas
replicas.check_replicas = lambda *_: None
"""


@long_form
@pytest.mark.parametrize(
    ("lesson", "bug"), [("ring", LOSSY_RING), ("replicas", BLIND_CHECK)], ids=["ring", "replicas"]
)
def test_a_lesson_that_does_not_hold_says_so(lesson: str, bug: str, tmp_path: Path) -> None:
    """The bug is planted: processes that add nothing, or a check that sees nothing."""
    (tmp_path / "sitecustomize.py").write_text(bug)
    ended = run([str(BIN / "llmtrain"), "learn", lesson], env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert ended.status == 2
    assert re.search("AssertionError|WrongAnswerError", ended.err)
    assert f"error: the lesson {lesson} failed on this machine;" in ended.err
