"""A terminal gets a progress bar, and a log file gets lines."""

import io

import pytest

from llmtrain.observe import progress
from llmtrain.observe.progress import ProgressBar

ENTRY = {"train/loss": 2.5, "train/tokens_per_second": 1234.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(
    monkeypatch: pytest.MonkeyPatch,
    stderr: io.StringIO,
    shown: bool = True,
    every_entry: bool = False,
) -> str:
    """Make 40 steps of 3 seconds with a log entry each, and return what is on stderr."""
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr("sys.stderr", stderr)
    bar = ProgressBar(shown=shown, step=10, max_steps=50, every_entry=every_entry)
    for step in range(11, 51):
        now += 3.0
        bar.bar.update()
        bar.on_log(step, ENTRY)
    bar.on_train_end()
    return stderr.getvalue()


def test_a_log_file_gets_a_line_every_ten_seconds_and_no_frames(monkeypatch) -> None:
    text = train(monkeypatch, io.StringIO())
    assert "\r" not in text
    lines = text.splitlines()
    assert len(lines) == 10
    assert lines[0] == "step     14/50  loss 2.5000, 1,234 tokens/s, 01:48 left"
    assert lines[-1] == "step     50/50  loss 2.5000, 1,234 tokens/s, 00:00 left"


def test_a_log_file_gets_a_line_for_every_entry_that_was_asked_for(monkeypatch) -> None:
    text = train(monkeypatch, io.StringIO(), every_entry=True)
    assert [int(line.split()[1].split("/")[0]) for line in text.splitlines()] == [*range(11, 51)]


def test_a_terminal_gets_a_bar(monkeypatch) -> None:
    text = train(monkeypatch, Terminal())
    assert "\rtraining:" in text
    assert "50/50" in text


def test_other_ranks_show_nothing(monkeypatch) -> None:
    assert train(monkeypatch, io.StringIO(), shown=False) == ""
    assert train(monkeypatch, Terminal(), shown=False) == ""


def test_an_evaluation_is_a_line_in_a_log_file_too(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    ProgressBar(shown=True, step=0, max_steps=5).on_log(5, {"epoch": 1.0, "eval/loss": 2.0})
    assert capsys.readouterr().out == "step      5  eval: loss 2.0000\n"
