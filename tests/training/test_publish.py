"""The finished model is uploaded to the hub, or a note says why not."""

import contextlib
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from llmtrain import model_folders
from llmtrain.errors import UserError
from llmtrain.models.hub_models import local_folder
from llmtrain.training.summary import publish


class FakeHub:
    """Stands for `HfApi`: keeps the calls, and refuses to create a repository if told to."""

    def __init__(self) -> None:
        self.created: dict[str, dict[str, Any]] = {}
        self.uploads: list[dict[str, Any]] = []
        self.refusal: Exception | None = None

    def create_repo(self, repository: str, **options: Any) -> None:
        if self.refusal:
            raise self.refusal
        self.created[repository] = options

    def upload_folder(self, **options: Any) -> None:
        assert options["repo_id"] in self.created
        self.uploads.append(options)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def test_a_model_is_uploaded_to_a_private_repository(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    publish(tmp_path, None)
    assert hub.created == {}

    publish(tmp_path, "someone/model")
    assert hub.created == {"someone/model": {"private": True, "exist_ok": True}}
    (upload,) = hub.uploads
    assert upload["folder_path"] == tmp_path
    assert f"{tmp_path} to someone/model" in capsys.readouterr().out


def test_a_refusal_of_the_hub_is_a_note_of_one_line_without_secrets(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    hub.refusal = ValueError("401: token hf_Abcdefghijklmnopqrst\nand an essay")

    publish(tmp_path, "someone/model")

    note = capsys.readouterr().err
    assert note.startswith("note: uploading to someone/model failed: ")
    assert f"hf upload someone/model {tmp_path}" in note
    assert note.count("\n") == 1
    assert "hf_Abc" not in note
    assert "essay" not in note


class NeverAnswers(socketserver.BaseRequestHandler):
    """Answers a request with headers that do not end."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.recv(1000)
            self.request.sendall(b"HTTP/1.1 200 OK\r\nA: ")
            self.server.ends.wait()


@pytest.fixture
def dead_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[socketserver.ThreadingTCPServer]:
    """A hub that never answers, which all requests go to."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), NeverAnswers) as server:
        server.daemon_threads = True
        server.ends = threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        yield server
        server.ends.set()
        server.shutdown()


@pytest.mark.usefixtures("dead_hub")
def test_a_download_from_a_silent_hub_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folders, "_HUB_SECONDS", 0.5)
    huggingface_hub.close_session()

    model_folders.limit_hub_waits()

    with pytest.raises(UserError, match="someone/model is no folder, and the hub did not provide"):
        local_folder("someone/model")
