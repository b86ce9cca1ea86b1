"""A W&B server, as much of it as one run needs."""

import contextlib
import gzip
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Server(http.server.ThreadingHTTPServer):
    """A W&B server, as much of it as one run needs; ``history`` is what it was sent of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []
        self.history: list[dict[str, Any]] = []
        self.run_name = "abcd1234"

    def handle_error(self, *_: Any) -> None: ...  # W&B's service hangs up when its run ends

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if "file_stream" in path:
            lines = json.loads(body).get("files", {}).get("wandb-history.jsonl")
            if lines:
                self.history[lines["offset"] :] = [json.loads(line) for line in lines["content"]]
            return {}
        request = json.loads(body)
        (name,) = re.findall(r"(?:query|mutation) (\w+)", request["query"])[:1]
        if name == "UpsertBucket":
            self.run_name = request["variables"].get("name") or self.run_name
        self.asked.append(name)
        answers = {
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
        last = json.dumps(self.history[-1])
        status = {
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps([last]),
            "eventsTail": "[]",
            "summaryMetrics": last,
            "wandbConfig": '{"t": 1}',
        }
        return {"model": self.project | {"bucket": self.run | status}}

    def upsert_bucket(self) -> dict[str, Any]:
        return {"upsertBucket": {"bucket": self.run, "inserted": True}}

    def create_run_files(self) -> dict[str, Any]:
        return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}

    def artifact_type(self) -> dict[str, Any]:
        return {"project": None}  # no artifact of this type is there yet

    def create_artifact(self) -> dict[str, Any]:
        """Answer as if another run had sent the same content, so that nothing is uploaded."""
        sequence = {"id": "s", "state": "READY", "latestArtifact": None}
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}


class Answer(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        told = json.dumps({"data": self.server.answer(self.path, body)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)


@contextlib.contextmanager
def serving(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A W&B server that processes started from here are logged in to.

    Args:
        home: their home folder.
        monkeypatch: sets their environment.
    """
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.delenv("WANDB_SERVICE", raising=False)  # another test's, of another umask
        yield server
        server.shutdown()
