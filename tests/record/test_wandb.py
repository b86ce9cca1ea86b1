"""W&B gets a run through its offline files and over its protocol."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate import Accelerator

from llmtrain.parallel.ranks import ranks_of
from llmtrain.record.history import read_lines
from llmtrain.record.trackers import weights_and_biases
from llmtrain.record.trackers.tracker import TrackedRun
from llmtrain.record.tracking import MetricsLog
from tests.launching import BIN, PYTHON, long_form, run
from tests.waiting import wait_until
from tests.wandb_file import read_history, read_records
from tests.wandb_server import Server, serving


def start(accelerator: Accelerator, folder: Path, **config: Any) -> MetricsLog:
    """Return metrics that report to W&B."""
    metrics = MetricsLog(ranks_of(accelerator), folder)
    metrics.start(["wandb"], TrackedRun(folder, "run", "abcd1234", config=config))
    return metrics


def newest_wandb_file(folder: Path) -> Path:
    """Return the file that W&B wrote in the newest start of a run."""
    (file,) = (folder / "wandb/latest-run").resolve().glob("*-abcd1234.wandb")
    return file


def values_in(records: list[Any], kind: str) -> dict[str, Any]:
    """Return the config or the summary that records add up to."""
    values = {}
    for record in records:
        for item in getattr(record, kind).update:
            values[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return values


@pytest.mark.parametrize(
    ("log_model", "expected"),
    [("end", [("model-abcd1234", ["finished", "latest"])]), ("false", [])],
)
def test_wandb_log_model_decides_whether_the_model_is_sent(
    log_model: str,
    expected: list[tuple[str, list[str]]],
    accelerator: Accelerator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", log_model)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()

    start(accelerator, tmp_path).close(exit_code=0, model=model)

    records = read_records(newest_wandb_file(tmp_path))
    artifacts = [
        record.request.log_artifact.artifact if record.HasField("request") else record.artifact
        for record in records
        if record.HasField("artifact") or record.request.HasField("log_artifact")
    ]
    sent = [(artifact.name, sorted(artifact.aliases)) for artifact in artifacts]
    assert sent == expected


def test_wandb_gets_config_group_tags_and_the_best_eval_metrics(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_GROUP", "a sweep")
    monkeypatch.setenv("WANDB_TAGS", "small,first")
    config = {"dataset": ["a.txt", "b.txt"], "lr": 0.5, "layout": {"processes": 2}}
    metrics = start(accelerator, tmp_path, **config)
    for step, loss in enumerate((3.0, 2.0, 2.5)):
        entry = {"step": step, "eval/loss": loss, "eval/accuracy": loss / 4, "time": 1000.0}
        metrics.write(entry)
    metrics.close(exit_code=0)

    records = read_records(newest_wandb_file(tmp_path))
    (run_record,) = [record.run for record in records if record.HasField("run")]
    assert run_record.run_group == "a sweep"
    assert [*run_record.tags] == ["small", "first"]

    config_in_file = values_in(records, "config")
    assert {name: config_in_file[name] for name in config} == config

    # Plain numbers, which Bayesian sweeps read: the lowest loss and the highest accuracy.
    summary = values_in(records, "summary")
    assert summary["eval/loss"] == 2.0
    assert summary["eval/accuracy"] == 0.75

    defined_metrics = {record.metric.name for record in records if record.HasField("metric")}
    assert {"tokens", "tokens_seen", "epoch"} <= defined_metrics


def test_samples_are_sent_before_the_run_ends(accelerator: Accelerator, tmp_path: Path) -> None:
    """They are not lost if the run is killed later."""
    metrics = start(accelerator, tmp_path)
    for step in (10, 20):
        metrics.write({"step": step, "eval/loss": 1.0, "time": 1000.0})
        with (tmp_path / "samples.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "prompt": "The", "text": "The kernel {step}"}}\n')
    metrics.write({"step": 30, "train/loss": 1.0, "time": 1000.0})
    tables = "wandb/offline-run-*/files/media/table"
    wait_until(lambda: len([*tmp_path.glob(f"{tables}/*")]) == 2)
    metrics.close(exit_code=0)

    first_table, second_table = sorted(tmp_path.glob(f"{tables}/samples*.json"))
    first_row = [10, "The", "The kernel 10"]
    second_row = [20, "The", "The kernel 20"]
    assert json.loads(first_table.read_text())["data"] == [first_row]
    assert json.loads(second_table.read_text())["data"] == [first_row, second_row]

    history = read_history(newest_wandb_file(tmp_path))
    assert [row["step"] for row in history if "samples/_type" in row] == [10, 20]
    assert [row["step"] for row in history if "step" in row] == [10, 20, 30]


def own_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Drop what W&B adds to a row."""
    return {name: row[name] for name in row if not name.startswith("_")}


def merged_by_step(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the log entries of each step."""
    by_step: dict[int, dict[str, Any]] = {}
    for entry in entries:
        by_step.setdefault(entry["step"], {}).update(entry)
    return [*by_step.values()]


def test_the_file_of_each_offline_start_has_the_complete_history(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    """Therefore it is enough to sync the last one."""
    for steps in ([1, 2, 3], [4, 5]):
        metrics = start(accelerator, tmp_path, seed=3)
        for step in steps:
            metrics.write({"step": step, "train/loss": step / 4, "time": 1000.0})
        metrics.write({"step": steps[-1], "eval/loss": 2.5, "time": 1000.0})
        metrics.close(exit_code=0)

        children = [child.name() for child in psutil.Process().children()]
        assert "wandb-core" not in children, "it is still writing"
        history = read_history(newest_wandb_file(tmp_path))
        rows = [own_columns(row) for row in history]
        assert rows == merged_by_step(read_lines(tmp_path / "metrics.jsonl"))


def test_a_run_is_logged_offline_if_the_server_does_not_answer(
    accelerator: Accelerator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(weights_and_biases, "_INIT_SECONDS", 2)

    metrics = start(accelerator, tmp_path)
    metrics.write({"step": 0, "train/loss": 0.5, "time": 1000.0})
    metrics.close(exit_code=0)

    printed = capsys.readouterr()
    assert "W&B does not answer" in printed.err
    assert "wandb sync" in printed.out
    assert [row["train/loss"] for row in read_history(newest_wandb_file(tmp_path))] == [0.5]


def test_only_rank_0_reports(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    ranks = ranks_of(accelerator)
    monkeypatch.setattr(ranks, "is_main", False)

    metrics = MetricsLog(ranks, tmp_path)
    metrics.start(["wandb"], TrackedRun(tmp_path, "run", "abcd1234", config={}))
    metrics.write({"step": 1, "train/loss": 1.0, "time": 1000.0})
    metrics.close(exit_code=0)

    assert [*tmp_path.iterdir()] == []


# --report_to auto

CLOUD = "machine api.wandb.ai login user password " + "0" * 40
NO_LOGIN = CLOUD.replace("api.wandb.ai", "example.com")
OWN_SERVER = {"WANDB_BASE_URL": "http://example.com:8080"}
SETTINGS = "[default]\nbase_url = http://example.com:8080\n"


@pytest.mark.parametrize(
    ("variables", "files", "is_logged_in"),
    [
        ({}, {}, False),
        ({"WANDB_PROJECT": "mine", "WANDB_MODE": "online"}, {}, False),
        ({"WANDB_API_KEY": "0" * 40}, {}, True),
        ({"WANDB_IDENTITY_TOKEN_FILE": "token"}, {}, True),
        ({}, {"netrc": CLOUD}, True),
        ({}, {"netrc": CLOUD.replace("wandb.ai", "forge.coreweave.com")}, True),
        ({}, {"netrc": NO_LOGIN}, False),
        (OWN_SERVER, {"netrc": CLOUD}, False),
        (OWN_SERVER, {"netrc": NO_LOGIN.replace(".com", ".com:8080")}, True),
        ({}, {"netrc": NO_LOGIN.replace(".com", ".com:8080"), "config/settings": SETTINGS}, True),
        ({}, {"config/settings": f"[default]\napi_key = {'0' * 40}\n"}, True),
        ({}, {"netrc": "machine", "config/settings": "no settings"}, False),
    ],
)
def test_auto_logs_the_runs_of_whom_wandb_takes_as_logged_in(
    variables: dict[str, str],
    files: dict[str, str],
    is_logged_in: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answers are those of ``wandb.login(prompt=False, verify=False)`` of W&B 0.31."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert weights_and_biases.is_wanted(tmp_path / "run") == is_logged_in


def test_auto_follows_the_mode_of_wandb_and_tells_who_set_a_project_how_to_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))  # without settings of the user
    is_wanted = weights_and_biases.is_wanted
    assert not is_wanted(tmp_path)
    assert capsys.readouterr().out == ""

    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert not is_wanted(tmp_path)
    assert capsys.readouterr().out.endswith("to log runs: wandb login\n")

    monkeypatch.setenv("WANDB_MODE", "offline")
    assert is_wanted(tmp_path)

    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert not is_wanted(tmp_path)
    assert capsys.readouterr().out == ""


# A run that is online

START_SCRIPT = """
import os
import sys
from pathlib import Path

os.umask(0o077)

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.record.trackers.tracker import TrackedRun
from llmtrain.record.tracking import MetricsLog

folder = Path(sys.argv[1])
metrics = MetricsLog(start_accelerator().ranks, folder)
metrics.start(
    ["auto", "tensorboard"], TrackedRun(folder, "run", "abcd1234", config={"seed": 3})
)
for step in sys.argv[2:]:
    metrics.write({"step": int(step), "train/loss": int(step) / 4, "time": 1000.0})
metrics.close(exit_code=0)
os._exit(0)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run folder with an empty log, which no other user can read."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").touch(mode=0o600)
    return folder


def start_process(folder: Path, steps: list[int]) -> None:
    """Start the run in another process, which logs these steps and ends."""
    arguments = [str(step) for step in steps]
    run([*PYTHON, "-c", START_SCRIPT, str(folder), *arguments]).assert_ok()


def add_to_log(folder: Path, steps: list[int]) -> None:
    """Log steps without reporting them."""
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(f'{{"step": {step}, "train/loss": {step / 4}, "time": 1000.0}}\n')


def steps_on(server: Server) -> list[int]:
    return [row["step"] for row in server.history]


@long_form
def test_wandb_gets_each_step_once_whichever_start_has_logged_it(
    server: Server, run_folder: Path, tmp_path: Path
) -> None:
    add_to_log(run_folder, [1, 2])  # copied from the run that this one extends
    start_process(run_folder, [3])
    assert steps_on(server) == [1, 2, 3]

    add_to_log(run_folder, [4, 5])  # in a start that did not reach W&B
    start_process(run_folder, [6, 7])
    assert steps_on(server) == [1, 2, 3, 4, 5, 6, 7]
    assert [row["train/loss"] for row in server.history] == [step / 4 for step in range(1, 8)]

    entries = [*tmp_path.rglob("*")]
    written = [path for path in entries if path != run_folder and not path.is_symlink()]
    assert {".wandb", ".jsonl", ".log", ".yaml"} <= {path.suffix for path in written}
    readable_by_others = [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert readable_by_others == [], "the umask is 077"


@long_form
def test_a_login_or_a_logout_between_two_starts_loses_no_step(
    server: Server, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    start_process(run_folder, [1, 2])
    assert not (run_folder / "wandb").exists()

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    start_process(run_folder, [3])
    assert steps_on(server) == [1, 2, 3]

    monkeypatch.delenv("WANDB_API_KEY")
    start_process(run_folder, [4])
    history = read_history(newest_wandb_file(run_folder))
    assert [row["step"] for row in history] == [1, 2, 3, 4]


@long_form
@pytest.mark.parametrize("failure", ["silent", "reset", "500"])
def test_a_server_that_fails_in_mid_run_costs_one_note(
    failure: str, server: Server, run_folder: Path
) -> None:
    server.failure = failure
    shorter = "from llmtrain.record import tracking\ntracking._CLOSE_SECONDS = 13\n"

    ended = run([*PYTHON, "-c", f"{shorter}{START_SCRIPT}", str(run_folder), "1", "2", "3"])

    assert server.is_failing
    ended.assert_ok()
    assert ended.err.count("note: ") == 1, ended.err
    assert "Traceback" not in ended.err
    assert [entry["step"] for entry in read_lines(run_folder / "metrics.jsonl")] == [1, 2, 3]


@long_form
def test_an_offline_start_that_is_synced_later_leaves_no_gap_in_wandb(
    server: Server, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_process(run_folder, [0, 1, 2])
    monkeypatch.setenv("WANDB_MODE", "offline")
    start_process(run_folder, [3, 4])
    monkeypatch.delenv("WANDB_MODE")

    (offline_start,) = (run_folder / "wandb").glob("offline-run-*")
    # The command writes its log below WANDB_DIR, or else in the current directory.
    env = {"WANDB_DIR": str(run_folder)}
    run([str(BIN / "wandb"), "sync", str(offline_start)], env).assert_ok()

    assert steps_on(server) == [0, 1, 2, 3, 4]
