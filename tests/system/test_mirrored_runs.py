"""A mirror reads like the folder of its run."""

import json
import re
import shlex
import shutil
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
from tests.launching import GPT, PYTHON, TINY, read_json

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
