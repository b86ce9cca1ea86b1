import gzip
import http.server
import json
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from accelerate import Accelerator

from llmtrain.record import tracking
from llmtrain.record.tracking import Metrics
from tests.launching import BIN, PYTHON, run
from tests.wandb_file import read_history, read_records


class Tracker:
    """Stands for a tracker; ``behave`` is called with every step that it is told."""

    def __init__(self, name: str, behave: Callable[[int], Any]) -> None:
        self.name, self.behave = name, behave
        self.tracker, self.starting_step = self, 0
        self.told: list[dict[str, float]] = []
        self.finished = threading.Event()
        self.id, self.sent = "abcd1234", []

    def log(self, values: dict[str, float], step: int) -> None:
        self.behave(step)
        self.told.append(values)

    def log_artifact(self, artifact: Any) -> None:
        self.sent.append((artifact.name, artifact.type, sorted(artifact.manifest.entries)))

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code
        self.finished.set()


@pytest.fixture
def opened(accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Metrics in ``tmp_path`` with these trackers, by name."""

    def go(model_seconds: float = 1500, **trackers: Any) -> Metrics:
        monkeypatch.setattr(Metrics, "_open_wandb", lambda *_: trackers["wandb"])
        monkeypatch.setattr(Metrics, "_open", lambda self, name, *_: trackers[name])
        metrics = Metrics(accelerator, tmp_path, model_seconds)
        metrics.start(list(trackers), {}, "run", "abcd1234")
        return metrics

    return go


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """The event that a stalled tracker waits for; set when the test is over, so that its thread ends."""
    event = threading.Event()
    yield event
    event.set()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def nothing(step: int) -> None: ...


def test_trackers_are_told_every_reading_and_how_the_run_ended(opened, tmp_path: Path) -> None:
    wandb, tensorboard = Tracker("wandb", nothing), Tracker("tensorboard", nothing)
    metrics = opened(wandb=wandb, tensorboard=tensorboard)
    for step in range(1000):
        metrics.write({"step": step, "train/loss": step / 3})
    metrics.close(exit_code=1)
    assert wandb.told == tensorboard.told == lines(tmp_path)
    assert wandb.told[-1] == {"step": 999, "train/loss": 333.0}
    assert wandb.exit_code == 1
    assert tensorboard.finished.is_set()


def test_trackers_are_sent_the_largest_value_of_any_rank(opened) -> None:
    """The rank that will run out of memory first, and the one that the others wait for."""
    wandb = Tracker("wandb", nothing)
    metrics = opened(wandb=wandb)
    metrics.write(
        {
            "step": 1,
            "memory": {"cuda": [10.0, 79.0], "host": [4.0, 2.0]},
            "phases": {"forward": [0.1, 0.5]},
        }
    )
    metrics.close(exit_code=0)

    (sent,) = wandb.told
    assert sent == {"step": 1, "memory/cuda": 79.0, "memory/host": 4.0, "phases/forward": 0.5}


def test_a_tracker_that_stalls_holds_up_neither_the_run_nor_another_tracker(
    opened,
    never: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 2)
    wandb, tensorboard = Tracker("wandb", lambda _: never.wait()), Tracker("tensorboard", nothing)
    metrics = opened(wandb=wandb, tensorboard=tensorboard)
    for step in range(100):  # ends only if no write waits
        metrics.write({"step": step, "train/loss": 1.0})
    metrics.close(exit_code=0)
    assert not never.is_set()
    assert len(lines(tmp_path)) == len(tensorboard.told) == 100
    assert tensorboard.finished.is_set()
    assert not wandb.finished.is_set()
    said = capsys.readouterr().err
    assert (
        said == "note: wandb: no answer in 2 s, so it is abandoned; metrics.jsonl has everything.\n"
    )


def test_a_tracker_that_never_finishes_is_left_behind(
    opened, never: threading.Event, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 1)
    wandb = Tracker("wandb", nothing)
    monkeypatch.setattr(wandb, "finish", lambda **_: never.wait())
    opened(wandb=wandb).close(exit_code=0)
    assert capsys.readouterr().err.count("abandoned") == 1


def test_a_tracker_that_raises_is_told_nothing_more_and_no_other_notices(
    opened, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    wandb = Tracker("wandb", lambda step: 1 / (step - 2))
    tensorboard = Tracker("tensorboard", nothing)
    metrics = opened(wandb=wandb, tensorboard=tensorboard)
    for step in range(5):
        metrics.write({"step": step, "train/loss": 1.0})
    metrics.close(exit_code=0)
    assert [line["step"] for line in wandb.told] == [0, 1]
    assert len(tensorboard.told) == len(lines(tmp_path)) == 5
    assert wandb.finished.is_set()
    said = capsys.readouterr().err
    assert (
        said == "note: wandb: tracking stopped: division by zero; metrics.jsonl is still written.\n"
    )


def test_a_tracker_that_does_not_open_is_left_out(
    accelerator: Accelerator,
    never: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(tracking, "_START_SECONDS", 1)
    tensorboard = Tracker("tensorboard", nothing)
    monkeypatch.setattr(Metrics, "_open_wandb", lambda *_: never.wait())
    monkeypatch.setattr(Metrics, "_open", lambda *_: tensorboard)
    metrics = Metrics(accelerator, tmp_path)
    metrics.start(["wandb", "tensorboard"], {}, "run", "abcd1234")
    assert capsys.readouterr().err == (
        "note: wandb: tracking is off: no answer in 1 s; metrics.jsonl has everything.\n"
    )
    metrics.write({"step": 1})
    metrics.close(exit_code=0)
    assert tensorboard.told == [{"step": 1}]


def test_a_tracker_that_goes_on_with_a_run_is_sent_what_it_lacks(opened, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "a": 1}}\n' for step in (0, 0, 1, 2, 3))
    )
    wandb, tensorboard = Tracker("wandb", nothing), Tracker("tensorboard", nothing)
    wandb.starting_step = 2
    (tmp_path / "events.out.tfevents.1").touch()  # of an earlier start
    metrics = opened(wandb=wandb, tensorboard=tensorboard)
    metrics.write({"step": 4, "a": float("nan")})
    metrics.close(exit_code=0)
    assert [line["step"] for line in wandb.told] == [2, 3, 4]
    assert wandb.told[-1]["a"] != wandb.told[-1]["a"]
    assert [line["step"] for line in tensorboard.told] == [4]


def test_a_tracker_without_a_file_is_sent_everything(opened, tmp_path: Path) -> None:
    """A run that extends another one begins with its log."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 1}\n')
    wandb, tensorboard = Tracker("wandb", nothing), Tracker("tensorboard", nothing)
    metrics = opened(wandb=wandb, tensorboard=tensorboard)
    metrics.write({"step": 3, "a": 1})
    metrics.close(exit_code=0)
    assert [line["step"] for line in wandb.told] == [1, 2, 3]
    assert [line["step"] for line in tensorboard.told] == [1, 2, 3]


@pytest.mark.parametrize(
    ("base_url", "api_key", "known"),
    [
        ("https://api.wandb.ai", None, False),
        ("http://wandb.local:8080", None, True),
        ("https://api.wandb.ai", "0" * 40, True),
    ],
)
def test_who_is_logged_in_is_whom_wandb_takes_for_it(
    base_url: str, api_key: str | None, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine wandb.local:8080 login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    settings = SimpleNamespace(base_url=base_url, api_key=api_key, identity_token_file=None)
    monkeypatch.setattr("wandb.setup", lambda: SimpleNamespace(settings=settings))
    assert tracking._is_logged_in() is known


def test_a_model_is_sent_for_no_longer_than_the_other_processes_wait(
    opened,
    never: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    wandb = Tracker("wandb", nothing)
    wandb.log_artifact = lambda _: never.wait()
    (tmp_path / "model").mkdir()
    opened(model_seconds=1, wandb=wandb).close(exit_code=0, model=tmp_path / "model")
    assert "no answer in 1 s, so it is abandoned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "asked"), [("end", True), ("True", True), ("false", False), (None, False)]
)
def test_the_finished_model_is_sent_where_that_was_asked_for(
    said: str | None, asked: bool, opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said is not None:
        monkeypatch.setenv("WANDB_LOG_MODEL", said)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text(name)
    wandb = Tracker("wandb", nothing)
    opened(wandb=wandb).close(exit_code=0, model=tmp_path / "model")
    assert wandb.sent == (
        [("model-abcd1234", "model", ["config.json", "model.safetensors"])] if asked else []
    )
    assert wandb.finished.is_set()


def test_a_model_that_is_to_be_sent_and_is_not_is_told(
    opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    opened(tensorboard=Tracker("tensorboard", nothing)).close(exit_code=0)
    assert capsys.readouterr().err == (
        "note: WANDB_LOG_MODEL is set, but the model is not sent: that needs --report_to wandb.\n"
    )


def test_the_best_loss_group_and_tags_stand_in_what_wandb_is_told(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_GROUP", "a sweep")
    monkeypatch.setenv("WANDB_TAGS", "small,first")
    metrics = Metrics(accelerator, tmp_path)
    metrics.start(["wandb"], {"seed": 3, "git_sha": "0" * 39 + "1"}, "run", "abcd1234")
    for step, loss in enumerate((3.0, 2.0, 2.5)):
        metrics.write({"step": step, "eval/loss": loss})
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "prompt": "The", "text": "The kernel"}\n')
    metrics.close(exit_code=0)
    (file,) = (tmp_path / "wandb/latest-run").resolve().glob("*-abcd1234.wandb")
    records = read_records(file)
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.run_group, [*run.tags]) == ("a sweep", ["small", "first"])
    told = [item for record in records for item in (*record.config.update, *record.summary.update)]
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in told}
    assert values["git_sha"] == "0" * 39 + "1"
    assert values["eval/loss"] == {"min": 2}
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/samples*.json")
    assert json.loads(table.read_text())["data"] == [[1, "The", "The kernel"]]


def test_half_a_line_is_not_sent(opened, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1}\n{"step": 1, ')
    wandb = Tracker("wandb", nothing)
    opened(wandb=wandb).close(exit_code=0)
    assert wandb.told == [{"step": 0, "a": 1}]
    assert capsys.readouterr().err == ""


def test_every_start_of_an_offline_run_holds_the_whole_history(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    """Syncing the last one suffices."""
    for steps in ((1, 2, 3), (4, 5)):
        metrics = Metrics(accelerator, tmp_path)
        metrics.start(["wandb"], {"seed": 3}, "run", "abcd1234")
        for step in steps:
            metrics.write({"step": step, "train/loss": step / 4})
        metrics.write({"step": step, "eval/loss": 2.5})
        metrics.close(exit_code=0)
        assert "wandb-core" not in [child.name() for child in psutil.Process().children()], (
            "it still writes"
        )
        (file,) = (tmp_path / "wandb/latest-run").resolve().glob("*-abcd1234.wandb")
        told = [{k: v for k, v in row.items() if k[0] != "_"} for row in read_history(file)]
        merged: dict[int, dict[str, Any]] = {}
        for line in lines(tmp_path):
            merged.setdefault(line["step"], {}).update(line)
        assert told == list(merged.values())


ONE_START = """
import os, sys
from pathlib import Path
os.umask(0o077)
from llmtrain.record.tracking import Metrics
from llmtrain.launching.accelerator import start_accelerator
metrics = Metrics(start_accelerator(), Path(sys.argv[1]))
metrics.start(["wandb", "tensorboard"], {"seed": 3}, "run", "abcd1234")
for step in sys.argv[2:]:
    metrics.write({"step": int(step), "train/loss": int(step) / 4})
metrics.close(exit_code=0)
os._exit(0)
"""


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


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A W&B server that processes started from here are logged in to; their home is ``tmp_path``."""
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("WANDB_SERVICE", raising=False)  # another test's, of another umask
        yield server
        server.shutdown()


def steps_of(server: Server) -> list[int]:
    return [row["step"] for row in server.history]


def start_once(folder: Path, *steps: int) -> None:
    folder.mkdir(exist_ok=True)
    run([*PYTHON, "-c", ONE_START, str(folder), *map(str, steps)]).assert_ok()


def test_wandb_goes_on_with_a_run_and_is_sent_what_it_lacks(server: Server, tmp_path: Path) -> None:
    start_once(tmp_path / "run", 0, 1, 2)
    assert steps_of(server) == [0, 1, 2]
    with (tmp_path / "run/metrics.jsonl").open(
        "a"
    ) as file:  # a start that W&B was not reached from
        file.write('{"step": 3, "train/loss": 0.75}\n{"step": 4, "train/loss": 1.0}\n')
    start_once(tmp_path / "run", 5, 6)
    assert steps_of(server) == [0, 1, 2, 3, 4, 5, 6]
    assert [row["train/loss"] for row in server.history] == [step / 4 for step in range(7)]

    found = [
        path for path in tmp_path.rglob("*") if path != tmp_path / "run" and not path.is_symlink()
    ]
    assert {".wandb", ".jsonl", ".log", ".yaml"} <= {path.suffix for path in found}
    readable = [path for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert readable == [], "others may read, under umask 077"


def test_an_offline_start_that_is_synced_replaces_what_wandb_has(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_once(tmp_path / "run", 0, 1, 2)
    monkeypatch.setenv("WANDB_MODE", "offline")
    start_once(tmp_path / "run", 3, 4)
    monkeypatch.delenv("WANDB_MODE")
    (offline,) = (tmp_path / "run/wandb").glob("offline-run-*")
    run([str(BIN / "wandb"), "sync", str(offline)]).assert_ok()
    assert steps_of(server) == [0, 1, 2, 3, 4]
