"""`accelerate config`, answered at a terminal, and what its answers start."""

import os
from pathlib import Path

import pytest

from tests.launching import BIN, GPT, TINY, long_form, read_json, run

pexpect = pytest.importorskip("pexpect")

DOWN, ENTER = "\x1b[B", "\r"


def answer(config: Path, machine: str, processes: int) -> None:
    """Go through the wizard, choosing ``machine`` and answering each question by what it asks."""
    wizard = pexpect.spawn(
        str(BIN / "accelerate"),
        ["config", "--config_file", str(config)],
        env={**os.environ, "TERM": "xterm"},
        encoding="utf-8",
        timeout=60,
        dimensions=(50, 200),
    )
    steps_down = {"No distributed training": 0, "multi-CPU": 1}[machine]
    answers = [
        (r"In which compute environment", ENTER),
        (r"Which type of machine", DOWN * steps_down + ENTER),
        (r"How many different machines", "1\r"),
        (r"How many processes[^\r\n]*\?[^\r\n]*:", f"{processes}\r"),
        (r"on CPU only[^\r\n]*:", "yes\r"),
        (r"mixed precision\?", ENTER),
        (r"configuration saved at", None),
        (r"\[yes/NO\]:", "no\r"),
        (r"\[[0-9a-zA-Z.]*\]:", "\r"),
    ]
    try:
        while True:
            which = wizard.expect([pattern for pattern, _ in answers])
            reply = answers[which][1]
            if reply is None:
                break
            wizard.send(reply)
        wizard.expect(pexpect.EOF)
    finally:
        wizard.close(force=True)


@long_form
def test_the_wizards_file_for_one_cpu_process_starts_the_recipe(
    text_file: Path, tmp_path: Path
) -> None:
    answer(tmp_path / "wizard.yaml", "No distributed training", 1)
    flags = [
        *TINY,
        "--max_steps",
        "2",
        "--warmup_steps",
        "1",
        "--dataset",
        str(text_file),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    run(
        [
            str(BIN / "accelerate"),
            "launch",
            "--config_file",
            str(tmp_path / "wizard.yaml"),
            GPT,
            *flags,
        ]
    ).assert_ok()
    assert read_json(tmp_path / "run" / "status.json")["state"] == "finished"


@long_form
def test_where_the_wizards_file_leads_into_a_trap_the_guard_prints_what_works(
    text_file: Path, tmp_path: Path
) -> None:
    answer(tmp_path / "wizard.yaml", "multi-CPU", 2)
    flags = [
        *TINY,
        "--max_steps",
        "2",
        "--warmup_steps",
        "1",
        "--dataset",
        str(text_file),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    ended = run(
        [
            str(BIN / "accelerate"),
            "launch",
            "--config_file",
            str(tmp_path / "wizard.yaml"),
            GPT,
            *flags,
        ]
    )
    assert ended.status != 0
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert "2 processes were requested, but accelerate started one" in line
    works = line.partition("use: ")[2].split()
    assert works[:2] == ["accelerate", "launch"]
    run([str(BIN / "accelerate"), *works[1:]]).assert_ok()
    assert read_json(tmp_path / "run" / "run.json")["processes"] == 2
