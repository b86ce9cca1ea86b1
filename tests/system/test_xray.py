"""An x-ray of a run counts what DDP sends, and names the process that is late."""

import json
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import (
    BIN,
    GPT,
    TINY,
    long_form,
    read_json,
    run,
    torchrun,
)

RANKS = 2
STEPS = [3, 4, 5]
ROWS_PER_RANK = 8


class XRay(NamedTuple):
    """An x-ray of a run on two processes, which has a folder and an output."""

    micro_batches: int  # of each step and rank
    folder: Path
    out: str
    recording: dict[str, Any]
    summary: dict[str, Any]


@pytest.fixture(scope="module", params=[4, pytest.param(1, marks=long_form)])
def xray(
    request: pytest.FixtureRequest, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> XRay:
    micro_batches = request.param
    folder = tmp_path_factory.mktemp("xray") / "run"
    command = shlex.split(
        f"xray {GPT} --processes {RANKS} --steps 3:5 "
        "--n_layer 2 --n_head 2 --n_embd 128 --block_size 32 --tokenizer byte "
        f"--global_batch_size {RANKS * ROWS_PER_RANK} "
        f"--per_device_train_batch_size {ROWS_PER_RANK // micro_batches} "
        f"--ddp_bucket_cap_mb 0.5 --dataset {text_file} --output_dir {folder}"
    )

    out = run([str(BIN / "llmtrain"), *command]).assert_ok().out
    summary = run([str(BIN / "llmtrain"), "xray", str(folder), "--json"]).assert_ok().out

    return XRay(
        micro_batches=micro_batches,
        folder=folder,
        out=out,
        recording=read_json(folder / "xray" / "recording.json"),
        summary=json.loads(summary),
    )


def test_each_bucket_is_sent_once_a_step_with_any_number_of_micro_batches(xray: XRay) -> None:
    count = len(xray.recording["buckets"])
    assert count > 1
    sent = Counter((item["step"], item["bucket"]) for item in xray.recording["transfers"])
    assert sent == {(step, bucket): RANKS for step in STEPS for bucket in range(count)}


def test_the_recording_has_each_forward_pass_and_each_parameter_in_one_bucket(xray: XRay) -> None:
    spans = [(span["rank"], span["phase"]) for span in xray.recording["spans"]]
    assert spans.count((0, "forward")) == len(STEPS) * xray.micro_batches

    buckets = xray.recording["buckets"].values()
    parameters = [name for bucket in buckets for name in bucket["parameters"]]
    assert len(parameters) == len(set(parameters))
    assert "model.layers.0.conv.conv.weight" in parameters


def test_the_sent_bytes_are_those_of_all_buckets(xray: XRay) -> None:
    summary = xray.summary
    assert summary["sent_bytes"] == sum(bucket["size"] for bucket in summary["buckets"])


def test_the_summary_has_the_times_of_each_bucket(xray: XRay) -> None:
    assert xray.summary["processes"] == RANKS
    assert xray.summary["steps"] == STEPS
    for bucket in xray.summary["buckets"]:
        assert 0 < bucket["ready"] <= bucket["began"] <= bucket["ended"]
    assert (xray.folder / "xray" / "timeline.html").stat().st_size > 2000


# --- the command


def test_the_results_are_made_again_from_the_folder_of_a_run(
    xray: XRay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(xray.folder, tmp_path / "run")
    (folder / "xray" / "timeline.html").unlink()

    status, out, err = run_cli(capsys, "xray", str(folder), "--json")

    assert (status, err) == (0, "")
    assert json.loads(out) == xray.summary
    assert (folder / "xray" / "timeline.html").exists()


WITHOUT_SPANS = '{"processes": 2, "spans": [], "transfers": [], "buckets": {}, "cost": 0}'


@pytest.mark.parametrize(
    ("words", "content", "named"),
    [
        ("{folder}", '{"a', "--xray_steps"),
        ("{folder}", '{"buckets": {}, "spans": [1]}', "--xray_steps"),
        ("{folder}", WITHOUT_SPANS, "--xray_steps"),
        ("{folder} --n_layer 2", '{"a', "--n_layer is for a recipe"),
    ],
)
def test_a_folder_without_a_recording_and_flags_beside_a_folder_are_errors_of_one_line(
    words: str, content: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "xray").mkdir()
    (tmp_path / "xray" / "recording.json").write_text(content)

    status, out, err = run_cli(capsys, "xray", *words.format(folder=tmp_path).split())

    assert (status, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1


# --- late processes

SLOW_RANK_1 = """
import os, sys, time
sys.path.insert(0, "recipes")
import gpt
from llmtrain import launch
from llmtrain.data.loader import LocalBatches

read = LocalBatches.__getitems__

def read_slowly(self, slots):
    time.sleep(0.8 * int(os.environ["RANK"]))
    return read(self, slots)

LocalBatches.__getitems__ = read_slowly
if __name__ == "__main__":
    launch(gpt.main)
"""


@long_form
def test_a_process_that_loads_data_slowly_is_named(text_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW_RANK_1)
    folder = tmp_path / "run"
    flags = shlex.split(
        "--max_steps 11 --logging_steps 2 --eval_fraction 0 "
        f"--dataset {text_file} --output_dir {folder}"
    )

    output = run_forked([*torchrun(2), str(script), *TINY, *flags]).assert_ok().out

    reports = re.findall(
        r"late +rank (\d) takes ([\d.]+) ms longer per step than the others, most of it in (.*?);",
        output,
    )
    milliseconds = [
        float(time) for rank, time, phase in reports if (rank, phase) == ("1", "data loading")
    ]
    assert len(milliseconds) == 1
    assert milliseconds[0] > 600
