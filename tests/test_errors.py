"""What lies outside of the program is one line that says what to do; what is our own mistake keeps its traceback."""

import errno
import importlib
import os
import re
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
import torch.distributed as dist

from llmtrain.errors import UserError, explain
from tests.command_line import run_cli
from tests.launching import ROOT, long_form


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("ENOSPC", "free some space"),
        ("EACCES", "check the disk, the name and your permissions"),
        ("EMFILE", "ulimit"),
        ("EIO", "check the disk, the name and your permissions"),
    ],
)
def test_a_disk_that_refuses_is_explained_with_the_file_and_what_to_do(
    name: str, remedy: str
) -> None:
    number = getattr(errno, name)
    line = explain(OSError(number, os.strerror(number), "/data/run"))
    assert line is not None
    assert line.startswith(f"/data/run: {os.strerror(number)}; ")
    assert remedy in line


def test_a_full_disk_is_explained_also_without_a_file_and_in_the_error_of_a_library() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")  # as file.write() raises it
    wrapped = RuntimeError("an error occurred while generating the dataset")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device", "rows.arrow")
    for error in (full, wrapped):
        assert "No space left on device; free some space" in str(explain(error))


@pytest.mark.parametrize("command", ["generate m", "chat m", "export m", "eval m --dataset d"])
def test_advice_on_memory_names_only_flags_that_the_command_has(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    name, *words = command.split()
    _, help_text, _ = run_cli(capsys, name, "--help")
    monkeypatch.setattr(importlib.import_module(f"llmtrain.commands.{name}"), "run", fail)
    status, _, message = run_cli(capsys, name, *words)

    assert status == 2
    assert "out of memory" in message
    assert set(re.findall(r"--[a-z_]+", message)) <= set(re.findall(r"--[a-z_]+", help_text))


def test_memory_that_is_not_there_is_explained() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    of_a_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    for error in (caught.value, MemoryError(), of_a_gpu):
        assert "out of memory" in str(explain(error))


def test_processes_that_do_not_meet_are_explained(unused_port: int) -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        taken = held.getsockname()[1]
        with pytest.raises(dist.DistNetworkError) as caught:
            dist.TCPStore("127.0.0.1", taken, 1, is_master=True)
    assert f"port {taken} is in use; choose another" in str(explain(caught.value))

    second = timedelta(seconds=1)
    with pytest.raises(dist.DistError) as gone:
        dist.TCPStore("127.0.0.1", unused_port, 2, is_master=False, timeout=second)
    assert "the processes lost contact with each other" in str(explain(gone.value))


def test_a_mistake_of_the_program_is_not_explained_away() -> None:
    while_memory_is_short = KeyError("row")
    while_memory_is_short.__context__ = MemoryError()
    for error in (
        KeyError("rows"),
        RuntimeError("shapes differ"),
        FileNotFoundError(errno.ENOENT, "gone", "x"),
        OSError(),
        OSError(errno.EACCES, "no port"),
        OSError(errno.ETIMEDOUT, "no answer"),
        while_memory_is_short,
    ):
        assert explain(error) is None


def test_the_error_of_a_user_is_one_line_also_in_a_notebook() -> None:
    assert explain(UserError("two\nlines")) == "two lines"
    assert UserError("no such flag")._render_traceback_() == ["error: no such flag"]


class _Hub(BaseHTTPRequestHandler):
    """Of one owner all is gated; another is not known, as is answered for what is private, too."""

    def do_HEAD(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 401)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815 - the name that http.server asks for

    def log_message(self, *_: object) -> None:
        pass


ASK = """
import sys
import time
from llmtrain.data.tokenizer import load_tokenizer
from llmtrain.errors import UserError
time.sleep = lambda _: None  # huggingface_hub waits longer after each failed try
for name in sys.argv[1:]:
    try: load_tokenizer(name)
    except UserError as error: print(error)
"""


def asked(port: int, *names: str) -> list[str]:
    env = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", ASK, *names]
    return subprocess.check_output(command, text=True, timeout=120, env=env).splitlines()


def test_the_hub_is_quoted_with_what_to_do() -> None:
    with HTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        gated, hidden = asked(server.server_port, "gated/model", "hidden/model")
        server.shutdown()
    assert "accept the terms on its page, and log in with `hf auth login`" in gated
    assert "check the name; if the repository is private, log in" in hidden


@long_form
def test_a_hub_that_cannot_be_reached_is_named(unused_port: int) -> None:
    [unreachable] = asked(unused_port, "some/model")
    assert "the Hugging Face hub cannot be reached" in unreachable
