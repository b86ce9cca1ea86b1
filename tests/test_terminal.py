"""Text of data, of models and of files shows up on a terminal, and does nothing else there."""

import io
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from llmtrain import console
from llmtrain.commands import chat, generate
from llmtrain.commands.rows import row_text
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from tests.command_line import run_cli
from tests.lab.seed_runs import write_run
from tests.record.checkpoint_files import save_checkpoint

# A window title, text for the clipboard, a line that overwrites itself, and a code without ESC.
EVIL = "a\x1b]0;title\x07 \x1b]52;c;Y3A=\x1b\\ c\rd\x08\x7f \x9b31m ü 漢"
SHOWN = r"a\x1b]0;title\x07 \x1b]52;c;Y3A=\x1b" + r"\ c\rd\x08\x7f \x9b31m ü 漢"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _is_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def assert_shown(text: str) -> None:
    assert SHOWN in text
    assert not CONTROLS.search(text)


def test_lines_of_the_log(capsys: Capture) -> None:
    console.say("data", f"{EVIL}.jsonl\n\tand more")
    assert_shown(capsys.readouterr().out)
    for write in (console.note, console.print_error):
        write(f"{EVIL}.jsonl")
        assert_shown(capsys.readouterr().err)


def test_an_error_of_a_command(tmp_path: Path, capsys: Capture) -> None:
    for command in (["runs", "check"], ["report"], ["diff", "a"], ["compare"], ["generate"]):
        status, _, err = run_cli(capsys, *command, str(tmp_path / EVIL))
        assert status == 2
        assert not CONTROLS.search(err)


def test_the_text_of_a_row() -> None:
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    assert_shown(row_text({"input_ids": tokenizer(f"<{EVIL}")["input_ids"]}, tokenizer))


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("command", [generate, chat])
def test_the_text_of_a_model(
    command: ModuleType, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    model = SimpleNamespace(stream=lambda *_, **__: iter(EVIL), context=999)
    prompts = SimpleNamespace(of_text=list, of_messages=lambda *_: [], chat_renderer=lambda: None)
    sampling = SimpleNamespace(max_new_tokens=9)
    monkeypatch.setattr(command, "load_model", lambda _: (model, prompts, sampling))
    monkeypatch.setattr("sys.stdin", io.StringIO("a question\n"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)

    name = command.__name__.rpartition(".")[2]
    _, out, _ = run_cli(capsys, name, "a model")

    if is_terminal:
        assert_shown(out)
    else:
        assert out.endswith(f"{EVIL}\n"), "a file or a pipe gets the text as it is"


def test_tables_of_runs(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "runs"
    for seed, name in enumerate(("plain", EVIL, f"{EVIL}2")):
        run = write_run(folder / name, seed, {10: 2.0 + seed, 20: 1.0}, dataset=[name])
    checkpoint = save_checkpoint(run / "checkpoints", step=10)
    (checkpoint / EVIL).write_text("not in the manifest")

    for command in (
        ["runs", str(folder)],
        ["runs", "check", str(run)],
        ["compare", str(folder)],
        ["diff", str(folder / "plain"), str(folder / EVIL)],
    ):
        _, out, _ = run_cli(capsys, *command)
        assert_shown(out)
