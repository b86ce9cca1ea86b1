"""What W&B gets: in offline files, and over its protocol."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from accelerate import Accelerator

from llmtrain.parallel.ranks import Ranks
from llmtrain.record.history import read_lines
from llmtrain.record.trackers import weights_and_biases
from llmtrain.record.trackers.tracker import TrackedRun
from llmtrain.record.tracking import Metrics
from tests.launching import BIN, PYTHON, long_form, run
from tests.waiting import wait_until
from tests.wandb_file import read_history, read_records
from tests.wandb_server import Server, serving


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
    assert weights_and_biases._is_logged_in() is known


def started(accelerator: Accelerator, folder: Path, **config: Any) -> tuple[Metrics, Any]:
    """Metrics that report to W&B, and W&B's run."""
    metrics = Metrics(Ranks(accelerator), folder)
    metrics.start(["wandb"], TrackedRun(folder, "run", "abcd1234", config=config))
    return metrics, accelerator.trackers[0].tracker


def wandb_file(folder: Path) -> Path:
    """The file of the newest start."""
    (file,) = (folder / "wandb/latest-run").resolve().glob("*-abcd1234.wandb")
    return file


def values_of(records: list[Any], kind: str) -> dict[str, Any]:
    """The config or the summary that records add up to."""
    items = [item for record in records for item in getattr(record, kind).update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.parametrize(
    ("log_model", "sent"),
    [
        ("end", ["model-abcd1234: config.json"]),
        ("True", ["model-abcd1234: config.json"]),
        ("checkpoint", ["checkpoint-abcd1234: state.json", "model-abcd1234: config.json"]),
        ("false", []),
        (None, []),
    ],
)
def test_models_and_checkpoints_are_sent_if_asked_for(
    log_model: str | None,
    sent: list[str],
    accelerator: Accelerator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if log_model is not None:
        monkeypatch.setenv("WANDB_LOG_MODEL", log_model)
    checkpoint = tmp_path / "checkpoints" / "step-00000010"
    for path in (tmp_path / "model/config.json", checkpoint / "state.json"):
        path.parent.mkdir(parents=True)
        path.write_text(path.name)
    artifacts: list[Any] = []
    metrics, wandb_run = started(accelerator, tmp_path)
    monkeypatch.setattr(
        wandb_run, "log_artifact", lambda artifact, aliases: artifacts.append((artifact, aliases))
    )
    metrics.send_checkpoint(checkpoint)
    metrics.close(exit_code=0, model=tmp_path / "model")
    assert [
        f"{artifact.name}: {' '.join(artifact.manifest.entries)}" for artifact, _ in artifacts
    ] == sent
    if log_model == "checkpoint":
        assert artifacts[0][1] == ["latest", "step-00000010"]


def test_config_group_and_best_losses_are_in_what_wandb_is_sent(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_GROUP", "a sweep")
    monkeypatch.setenv("WANDB_TAGS", "small,first")
    metrics, _ = started(
        accelerator, tmp_path, dataset=["a.txt", "b.txt"], lr=0.5, layout={"processes": 2}
    )
    for step, loss in enumerate((3.0, 2.0, 2.5)):
        metrics.write({"step": step, "eval/loss": loss, "eval/accuracy": loss / 4})
    metrics.close(exit_code=0)
    records = read_records(wandb_file(tmp_path))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.run_group, [*run.tags]) == ("a sweep", ["small", "first"])
    config = values_of(records, "config")
    assert config["dataset"] == ["a.txt", "b.txt"]
    assert config["lr"] == 0.5
    assert config["layout"] == {"processes": 2}
    summary = values_of(records, "summary")
    # Plain numbers, which Bayesian sweeps read; the lowest loss and the highest accuracy.
    assert summary["eval/loss"] == 2.0
    assert summary["eval/accuracy"] == 0.75
    step_metrics = {record.metric.name for record in records if record.HasField("metric")}
    assert {"tokens", "hours", "epoch"} <= step_metrics


def test_samples_are_in_the_history_before_the_run_ends(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    """A run that is killed later has them, too."""
    metrics, _ = started(accelerator, tmp_path)
    samples = tmp_path / "samples.jsonl"
    for step in (10, 20):
        metrics.write({"step": step, "eval/loss": 1.0})
        with samples.open("a") as file:
            file.write(f'{{"step": {step}, "prompt": "The", "text": "The kernel {step}"}}\n')
        metrics.wake()
    metrics.write({"step": 30, "train/loss": 1.0})
    wait_until(lambda: len(list(tmp_path.glob("wandb/offline-run-*/files/media/table/*"))) == 2)
    metrics.close(exit_code=0)
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json"))
    first, second = [json.loads(table.read_text())["data"] for table in tables]
    assert first == [[10, "The", "The kernel 10"]]
    assert second == [*first, [20, "The", "The kernel 20"]]
    history = read_history(wandb_file(tmp_path))
    assert [row["step"] for row in history if "samples/_type" in row] == [10, 20]
    assert [row["step"] for row in history if "step" in row] == [10, 20, 30]


def test_every_start_of_an_offline_run_holds_the_whole_history(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    """Syncing the last one suffices."""
    for steps in ((1, 2, 3), (4, 5)):
        metrics, _ = started(accelerator, tmp_path, seed=3)
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
        for line in read_lines(tmp_path / "metrics.jsonl"):
            merged.setdefault(line["step"], {}).update(line)
        assert told == list(merged.values())


ONE_START = """
import os, sys
from pathlib import Path
os.umask(0o077)
from llmtrain.record.trackers.weights_and_biases import WeightsAndBiases
from llmtrain.record.tracking import Metrics
from llmtrain.record.trackers.tracker import TrackedRun
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.ranks import Ranks
metrics = Metrics(Ranks(start_accelerator()), Path(sys.argv[1]))
folder = Path(sys.argv[1])
run = TrackedRun(folder, "run", "abcd1234", config={"seed": 3})
metrics.start(["wandb", "tensorboard"], run)
for step in sys.argv[2:]:
    metrics.write({"step": int(step), "train/loss": int(step) / 4})
metrics.close(exit_code=0)
os._exit(0)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path, monkeypatch) as server:
        yield server


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


@long_form
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


def test_only_the_first_rank_reports(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "is_main", False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    metrics = Metrics(Ranks(accelerator), tmp_path)
    metrics.start(["wandb"], TrackedRun(tmp_path, "gpt", "abcd1234"))
    metrics.write({"step": 1, "train/loss": 1.0})
    metrics.close(exit_code=0)
    assert [*tmp_path.iterdir()] == []


def test_a_run_that_extends_another_sends_the_steps_of_that_run(
    server: Server, tmp_path: Path
) -> None:
    tmp_path.joinpath("run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')  # of the other run
    start_once(tmp_path / "run", 3)
    assert steps_of(server) == [1, 2, 3]
