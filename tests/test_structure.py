"""Rules about the structure of the package that neither a type checker nor import-linter checks."""

import inspect
import re
from pathlib import Path

import llmtrain
from llmtrain.training.step import train_step

PACKAGE = Path(llmtrain.__file__).parent

# Packages that make the processes, or start and teach about them.
MAY_READ_RANKS = ("parallel", "launching", "lessons", "doctor", "commands")
READS_RANKS = re.compile(
    r"\.(num_processes|process_index|local_process_index|is_main_process|is_local_main_process)\b"
    r"|\bget_(rank|world_size)\("
)


def lines_that_read_ranks() -> list[str]:
    """Lines that read ranks from Accelerate or torch, outside the packages that may."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0]
        if package in MAY_READ_RANKS:
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if READS_RANKS.search(line):
                found.append(f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}")
    return found


def test_ranks_are_read_from_the_engine() -> None:
    """Else an engine that changes the number of processes during a run would leave copies behind."""
    assert READS_RANKS.search("if accelerator.is_main_process:")
    assert READS_RANKS.search("rank = dist.get_rank()")
    assert lines_that_read_ranks() == []


def test_a_training_step_has_few_parameters() -> None:
    assert len(inspect.signature(train_step).parameters) <= 6
