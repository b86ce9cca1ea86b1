"""A W&B server that answers the requests of one run."""

import contextlib
import gzip
import http.server
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Server(http.server.ThreadingHTTPServer):
    """A W&B server that answers the requests of one run.

    Attributes:
        history: the rows that the run has sent.
        run_name: W&B's id of the run.
        failure: how the server fails as soon as the run sends metrics: "silent", "reset" or "500".
            It never does if this is empty.
        is_failing: whether that has begun.
        closes: set when the server is closed.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.history: list[dict[str, Any]] = []
        self.run_name = "abcd1234"
        self.failure = ""
        self.is_failing = False
        self.closes = threading.Event()

    def handle_error(self, *_: Any) -> None:
        """Print nothing. W&B's service closes its connection when a run ends."""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if "file_stream" in path:
            self.receive_history(json.loads(body))
            return {}
        return self.answer_query(json.loads(body))

    def receive_history(self, message: dict[str, Any]) -> None:
        rows = message.get("files", {}).get("wandb-history.jsonl")
        if rows:
            self.history[rows["offset"] :] = [json.loads(row) for row in rows["content"]]

    def answer_query(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request in GraphQL. An unknown one gets an empty answer."""
        name = re.findall(r"(?:query|mutation) (\w+)", request["query"])[0]
        if name == "UpsertBucket":
            self.run_name = request["variables"].get("name") or self.run_name
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "ArtifactType": self.artifact_type,
            "CreateArtifact": self.create_artifact,
            "CreateRunFiles": self.create_run_files,
            "RunResumeStatus": self.run_resume_status,
            "UpsertBucket": self.upsert_bucket,
            "Viewer": self.viewer,
        }
        return answers[name]() if name in answers else {}

    def viewer(self) -> dict[str, Any]:
        return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}"}}

    @property
    def project(self) -> dict[str, Any]:
        return {"id": "p", "name": "llmtrain", "entity": {"id": "e", "name": "me"}}

    @property
    def run(self) -> dict[str, Any]:
        return {
            "id": "r",
            "name": self.run_name,
            "displayName": "run",
            "project": self.project,
            "config": "{}",
        }

    def run_resume_status(self) -> dict[str, Any]:
        if not self.history:
            return {}
        last_row = json.dumps(self.history[-1])
        status = {
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps([last_row]),
            "eventsTail": "[]",
            "summaryMetrics": last_row,
            "wandbConfig": '{"t": 1}',
        }
        return {"model": self.project | {"bucket": self.run | status}}

    def upsert_bucket(self) -> dict[str, Any]:
        return {"upsertBucket": {"bucket": self.run, "inserted": True}}

    def create_run_files(self) -> dict[str, Any]:
        return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}

    def artifact_type(self) -> dict[str, Any]:
        return {"project": None}  # there is no artifact of this type yet

    def create_artifact(self) -> dict[str, Any]:
        """Answer as if another run had sent the same content, so that nothing is uploaded."""
        sequence = {"id": "s", "state": "READY", "latestArtifact": None}
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}


class Handler(http.server.BaseHTTPRequestHandler):
    """Passes each request to the server, and sends its answer."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        if self.server.failure and "file_stream" in self.path:
            self.server.is_failing = True
        if self.server.is_failing:
            self.fail()
            return

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)

        answer = json.dumps({"data": self.server.answer(self.path, body)}).encode()

        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def fail(self) -> None:
        self.close_connection = True
        if self.server.failure == "500":
            self.send_error(500)
        elif self.server.failure == "reset":
            no_linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        else:
            self.server.closes.wait()


@contextlib.contextmanager
def serving(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Run a W&B server to which the processes of a test are logged in.

    Args:
        home: their home folder.
        monkeypatch: sets their environment.
    """
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("HOME", str(home))
        # The service of another test may have another umask.
        monkeypatch.delenv("WANDB_SERVICE", raising=False)
        yield server
        server.closes.set()
        server.shutdown()
