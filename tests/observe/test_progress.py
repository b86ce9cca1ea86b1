"""A terminal gets a progress bar, and a log file gets lines."""

import io
import re
from typing import Any

import pytest

from llmtrain.interfaces.callback import StepInfo
from llmtrain.observe import progress
from llmtrain.observe.progress import ProgressBar

ENTRY = {"train/loss": 2.5, "train/tokens_per_second": 1234.0, "tokens_seen": 65536.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class LogFile(io.StringIO):
    """Takes whole lines only: between the parts of a line, another thread could write."""

    def write(self, text: str) -> int:
        assert text.endswith("\n")
        return super().write(text)


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch):
    """A function that makes steps 11 to 50, and returns the text on stderr.

    Each step takes 3 seconds, and has a log entry.
    """

    def train(stderr: io.StringIO, shown: bool = True, every_entry: bool = False) -> str:
        seconds = 100.0
        unused: Any = None
        monkeypatch.setattr(progress.time, "monotonic", lambda: seconds)
        monkeypatch.setattr("sys.stderr", stderr)

        bar = ProgressBar(shown=shown, step=10, max_steps=50, every_entry=every_entry)
        for step in range(11, 51):
            seconds += 3.0
            bar.on_step_end(unused, unused, StepInfo(step, is_last=step == 50, should_stop=False))
            bar.on_log(step, ENTRY)
        bar.on_train_end()
        return stderr.getvalue()

    return train


def test_a_log_file_gets_a_line_every_ten_seconds_and_no_frames(train) -> None:
    text = train(LogFile())

    assert "\r" not in text
    lines = text.splitlines()
    assert len(lines) == 10
    assert re.match(r"step +14/50 .* 2\.5000, 1,234 tokens/s, 65,536 tokens, 01:48 left", lines[0])
    assert re.match(r"step +50/50 .* 00:00 left", lines[-1])
    assert len(train(LogFile(), every_entry=True).splitlines()) == 40


def test_a_terminal_gets_a_bar_and_other_ranks_show_nothing(train) -> None:
    text = train(Terminal())

    assert "\rtraining:" in text
    assert "50/50" in text
    for stream in (Terminal(), io.StringIO()):
        assert train(stream, shown=False) == ""


def test_an_evaluation_is_a_line_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    bar = ProgressBar(shown=True, step=0, max_steps=5)

    bar.on_log(5, {"epoch": 1.0, "eval/loss": 2.0})

    assert capsys.readouterr().out == "step      5  eval: loss 2.0000\n"
