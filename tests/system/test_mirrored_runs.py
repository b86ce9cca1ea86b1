"""A run whose machine is gone goes on from its mirror, and a mirror reads like the run's folder."""

import json
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from llmtrain.record.checkpoint import file_names
from llmtrain.storage import Storage
from tests.buckets import bucket_server
from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY, interrupt, read_json, series, torchrun
from tests.record.checkpoint_files import tensors_digest

FLAGS = [*TINY, *shlex.split("--max_steps 40 --save_steps 10 --dropout 0.1 --bitwise --log_rows")]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with bucket_server():
        yield "s3://bucket"


@pytest.fixture(scope="module")
def undisturbed(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    flags = ["--dataset", str(text_file), "--output_dir", str(folder)]
    run_forked([*PYTHON, GPT, *FLAGS, *flags]).assert_ok()
    return folder


def upload(folder: Path, address: str) -> str:
    """Make what a mirror of a run has: its files, without the lock and the finished model."""
    storage = Storage(address)
    for name in file_names(folder):
        if not name.startswith((".", "model/", "checkpoints/.")):
            storage.upload(name, folder / name)
    return address


def test_a_run_of_two_processes_goes_on_from_its_mirror_on_one_with_the_same_bits(
    bucket: str, text_file: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "first" / "run"
    flags = [GPT, *FLAGS, "--dataset", str(text_file), "--output_dir"]
    interrupt([*torchrun(2), *flags, str(folder)], folder, signal.SIGKILL, 15)
    record = read_json(folder / "run.json")
    mirror = upload(folder, f"{bucket}/killed")
    shutil.rmtree(folder)

    resumed = tmp_path / "second" / "run"
    command = [*PYTHON, *flags, str(resumed), "--resume_from_checkpoint", mirror]
    env = {"LLMTRAIN_CACHE": str(tmp_path / "cache")}
    ended = run_forked(command, env).assert_ok()

    assert f"uses {mirror}/checkpoints/step-" in ended.out
    last = "checkpoints/step-00000040"
    assert tensors_digest(resumed / last) == tensors_digest(undisturbed / last)
    assert (resumed / "rows.jsonl").read_text() == (undisturbed / "rows.jsonl").read_text()
    assert series(resumed, "train/loss") == series(undisturbed, "train/loss")
    new_record = read_json(resumed / "run.json")
    assert new_record["run_id"] == record["run_id"]
    assert [start["processes"] for start in new_record["starts"]] == [2, 1]


def test_a_run_with_another_learning_rate_extends_the_one_at_the_address(
    bucket: str, text_file: Path, undisturbed: Path, tmp_path: Path
) -> None:
    mirror = upload(undisturbed, f"{bucket}/extended")
    flags = ["--dataset", str(text_file), "--output_dir"]

    def run_from(name: str, checkpoint: str, *more: str) -> tuple[Path, str]:
        command = [*torchrun(2), GPT, *FLAGS, *flags, str(tmp_path / name), *more]
        env = {"LLMTRAIN_CACHE": str(tmp_path / "cache")}
        ended = run_forked([*command, "--resume_from_checkpoint", checkpoint], env)
        return tmp_path / name, ended.err if ended.status else ended.assert_ok().out

    step = "checkpoints/step-00000030"
    rate = shlex.split("--learning_rate 0.001")
    local, _ = run_from("local", f"{undisturbed}/{step}", *rate)
    remote, out = run_from("remote", f"{mirror}/{step}", *rate)
    _, refusal = run_from("other", mirror, "--seed", "1")

    assert f"uses {mirror}/{step}, which is intact" in out
    last = "checkpoints/step-00000040"
    assert tensors_digest(remote / last) == tensors_digest(local / last)
    assert (remote / "rows.jsonl").read_text() == (local / "rows.jsonl").read_text()
    extends = [read_json(folder / "run.json")["extends"] for folder in (local, remote)]
    assert [entry["run_id"] for entry in extends] == [extends[0]["run_id"]] * 2
    assert f"error: --resume_from_checkpoint {mirror} differs in seed: 0 there, 1 here" in refusal


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("runs {}", 0),
        ("runs {} --json", 0),
        ("runs --finished {}/a", 0),
        ("runs --finished {}/b", 1),
        ("diff {0}/a {0}/b", 0),
        ("report {0}/a {0}/b --json", 0),
        ("report {}/b --output {output}", 0),
    ],
)
def test_the_commands_print_of_a_mirror_what_they_print_of_the_folder(
    command: str,
    status: int,
    bucket: str,
    undisturbed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    outputs = []
    for name in ("a", "b"):
        shutil.copytree(undisturbed, tmp_path / "runs" / name)
    stopped = read_json(undisturbed / "status.json") | {"state": "preempted"}
    (tmp_path / "runs/b/status.json").write_text(json.dumps(stopped))
    upload(tmp_path / "runs", f"{bucket}/runs")
    for place in (str(tmp_path / "runs"), f"{bucket}/runs"):
        output = tmp_path / "page.html"
        words = command.format(place, output=output).split()
        ended, out, err = run_cli(capsys, *words)
        assert (ended, err) == (status, "")
        page = output.read_text() if output.exists() else ""
        # A column is as wide as its longest name.
        outputs.append(re.sub(" +", " ", f"{out}{page}".replace(place, "runs")))
    assert outputs[0] == outputs[1]
    assert "killed" not in outputs[1]
