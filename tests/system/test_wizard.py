"""The files that `accelerate config` writes start a run, or end in an error with the right command."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.launching import BIN, GPT, TINY, Ended, long_form, read_json, run

pexpect = pytest.importorskip("pexpect")
pytestmark = long_form

ACCELERATE = str(BIN / "accelerate")
ENTER = "\r"
DOWN = "\x1b[B"


def answer_wizard(config: Path, steps_to_machine: int, processes: int) -> None:
    """Answer the questions of `accelerate config` at a terminal.

    Args:
        config: the file that it writes.
        steps_to_machine: how many entries below the first one the type of machine is.
        processes: the number of processes.
    """
    answers = {
        r"In which compute environment": ENTER,
        r"Which type of machine": DOWN * steps_to_machine + ENTER,
        r"How many different machines": "1" + ENTER,
        r"How many processes[^\r\n]*\?[^\r\n]*:": f"{processes}" + ENTER,
        r"on CPU only[^\r\n]*:": "yes" + ENTER,
        r"mixed precision\?": ENTER,
        r"\[yes/NO\]:": "no" + ENTER,
        r"\[[0-9a-zA-Z.]*\]:": ENTER,
    }
    saved = r"configuration saved at"
    patterns = [saved, *answers]
    wizard: Any = pexpect.spawn(
        ACCELERATE,
        ["config", "--config_file", str(config)],
        env={**os.environ, "TERM": "xterm"},
        encoding="utf-8",
        timeout=60,
        dimensions=(50, 200),
    )
    try:
        while (pattern := patterns[wizard.expect(patterns)]) != saved:
            wizard.send(answers[pattern])
        wizard.expect(pexpect.EOF)
    finally:
        wizard.close(force=True)


def launch_recipe(config: Path, dataset: Path, folder: Path) -> Ended:
    flags = shlex.split(f"--max_steps 2 --warmup_steps 1 --dataset {dataset} --output_dir {folder}")
    return run([ACCELERATE, "launch", "--config_file", str(config), GPT, *TINY, *flags])


def test_the_file_for_one_cpu_process_starts_the_recipe(text_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "wizard.yaml"
    answer_wizard(config, steps_to_machine=0, processes=1)  # "No distributed training"

    launch_recipe(config, text_file, tmp_path / "run").assert_ok()

    assert read_json(tmp_path / "run" / "status.json")["state"] == "finished"


def test_the_file_for_several_cpu_processes_is_an_error_with_a_command_that_works(
    text_file: Path, tmp_path: Path
) -> None:
    """accelerate starts a single process for it."""
    config = tmp_path / "wizard.yaml"
    answer_wizard(config, steps_to_machine=1, processes=2)  # "multi-CPU"

    ended = launch_recipe(config, text_file, tmp_path / "run")

    assert ended.status != 0
    [line] = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert "2 processes were requested, but accelerate started one" in line

    _, _, suggestion = line.partition("use: ")
    program, *arguments = shlex.split(suggestion)
    assert program == "accelerate"
    run([ACCELERATE, *arguments]).assert_ok()
    assert read_json(tmp_path / "run" / "run.json")["processes"] == 2
