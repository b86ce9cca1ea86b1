"""docs/guides/from-trl.md: its four files have the same losses.

LLMTRAIN_WRITE_DOCS=1 writes the losses into the page.
"""

import re
from pathlib import Path

import pytest

from tests.launching import (
    BIN,
    PYTHON,
    ROOT,
    WRITE_DOCS,
    long_form,
    series,
    start_process,
    torchrun,
    wait,
)

PAGE = ROOT / "docs" / "guides" / "from-trl.md"
CPU_DDP = ROOT / "accelerate_configs" / "cpu_ddp.yaml"
ACCELERATE = [str(BIN / "accelerate"), "launch", "--config_file", str(CPU_DDP)]


def losses_in(text: str) -> dict[int, float]:
    lines = re.findall(r"step +(\d+)  loss ([\d.]+)", text)
    return {int(step): float(loss) for step, loss in lines}


def start(launcher: list[str], name: str, folder: Path, flags: str = "") -> str:
    """Start a file of docs/migrate, and return its output. All files share one base model."""
    script = ROOT / "docs" / "migrate" / f"{name}.py"
    command = [*launcher, str(script), *flags.split()]
    process = start_process(command, {"ACCELERATE_USE_CPU": "true"}, tree=folder)
    return wait(process).assert_ok().out


@long_form
def test_the_four_files_and_the_page_have_the_same_losses(tmp_path: Path) -> None:
    printed = start(PYTHON, "1_plain", tmp_path)
    losses = losses_in(printed)
    assert list(losses) == [5, 10, 15, 20]
    assert losses[20] < losses[5]

    expected = pytest.approx(losses, abs=2e-4)
    assert losses_in(start(torchrun(2), "2_ddp", tmp_path)) == expected
    assert losses_in(start(ACCELERATE, "3_accelerate", tmp_path)) == expected
    start(ACCELERATE, "4_llmtrain", tmp_path, "--report_to none --output_dir run")
    assert series(tmp_path / "run", "train/loss") == expected

    page = PAGE.read_text()
    block = re.search(r"```\n(step .*?)```", page, re.DOTALL)
    assert block is not None
    if WRITE_DOCS:
        PAGE.write_text(page[: block.start(1)] + printed + page[block.end(1) :])
    else:
        # The documentation of another Python differs in some words, and so do the losses.
        assert losses_in(block[1]) == pytest.approx(losses, abs=0.1)
