"""A W&B server, as much of it as one run needs."""

import gzip
import http.server
import json
import re
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """A W&B server, as much of it as one run needs; ``history`` is what it was sent of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []
        self.history: list[dict[str, Any]] = []

    def handle_error(self, *_: Any) -> None: ...  # W&B's service hangs up when its run ends

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if "file_stream" in path:
            lines = json.loads(body).get("files", {}).get("wandb-history.jsonl")
            if lines:
                self.history[lines["offset"] :] = [json.loads(line) for line in lines["content"]]
            return {}
        (name,) = re.findall(r"(?:query|mutation) (\w+)", json.loads(body)["query"])[:1]
        self.asked.append(name)
        project = {"id": "p", "name": "llmtrain", "entity": {"id": "e", "name": "me"}}
        run = {
            "id": "r",
            "name": "abcd1234",
            "displayName": "run",
            "project": project,
            "config": "{}",
        }
        if name == "RunResumeStatus" and self.history:
            tail = json.dumps([json.dumps(self.history[-1])])
            counts = {
                "historyLineCount": len(self.history),
                "eventsLineCount": 0,
                "logLineCount": 0,
            }
            last = {
                "historyTail": tail,
                "eventsTail": "[]",
                "summaryMetrics": json.dumps(self.history[-1]),
            }
            return {
                "model": project | {"bucket": run | counts | last | {"wandbConfig": '{"t": 1}'}}
            }
        if name == "UpsertBucket":
            return {"upsertBucket": {"bucket": run, "inserted": True}}
        if name == "CreateRunFiles":
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
        return {}


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
