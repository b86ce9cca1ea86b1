"""An x-ray of a run: what it counts is what DDP sends; and who is late is named."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import BIN, GPT, ROOT, TINY, long_form, metrics, run, torchrun
from tests.test_cli import ended

MODEL = [
    *TINY[:4],
    "--n_embd",
    "128",
    *TINY[6:10],
    "--global_batch_size",
    "16",
    "--ddp_bucket_cap_mb",
    "0.5",
]


@pytest.mark.parametrize("micro_batches", [4, pytest.param(1, marks=long_form)])
def test_collectives_are_buckets_times_updates_with_any_number_of_micro_batches(
    micro_batches: int,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    flags = [
        *MODEL,
        "--per_device_train_batch_size",
        str(8 // micro_batches),
        "--dataset",
        str(text_file),
    ]
    words = [
        "xray",
        GPT,
        "--processes",
        "2",
        *flags,
        "--steps",
        "3:5",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    done = run([str(BIN / "llmtrain"), *words]).assert_ok()
    events = json.loads((tmp_path / "run" / "xray" / "trace.json").read_text())["traceEvents"]
    sent = [event for event in events if re.fullmatch(r"bucket \d+", event["name"])]
    buckets = {event["name"] for event in sent}
    assert len(buckets) > 1
    assert len(sent) == len(buckets) * 3 * 2, "updates and ranks"
    assert {event["args"]["step"] for event in sent} == {3, 4, 5}
    forwards = [event for event in events if event["name"] == "forward" and event["pid"] == 0]
    assert len(forwards) == 3 * micro_batches
    parameters = [name for event in sent[: len(buckets)] for name in event["args"]["parameters"]]
    assert len(parameters) == len(set(parameters))
    assert "model.layers.0.conv.conv.weight" in parameters
    assert (
        f"{len(buckets)} per step, in its last micro-batch, for {len(buckets)} buckets" in done.out
    )
    assert ("none in the 3 micro-batches before" in done.out) == (micro_batches == 4)
    counted = re.search(r"the network devices sent [\d.]+ MiB, ([\d.]+) of that", done.out)
    assert counted is not None
    assert float(counted[1]) > 0.9, "what DDP sends is what the kernel saw"
    assert (tmp_path / "run" / "xray" / "timeline.html").stat().st_size > 2000
    summary = json.loads((tmp_path / "run" / "xray" / "summary.json").read_text())
    assert (summary["processes"], summary["steps"]) == (2, [3, 4, 5])
    assert summary["collectives"] == [[*[0] * (micro_batches - 1), len(buckets)]] * 3
    assert summary["sent_bytes"] == sum(bucket["size"] for bucket in summary["buckets"])
    assert summary["counted_bytes"] > 0.9 * 2 * summary["ring_bytes"]
    assert all(
        0 < bucket["ready"] <= bucket["began"] <= bucket["ended"] for bucket in summary["buckets"]
    )

    # The run has only recorded; the folder draws again what the command drew.
    shutil.copytree(tmp_path / "run", tmp_path / "drawn")
    for name in ("table.txt", "summary.json", "trace.json", "timeline.html"):
        (tmp_path / "drawn" / "xray" / name).unlink()
    status, out, err = ended(capsys, "xray", str(tmp_path / "drawn"), "--json")
    assert (status, json.loads(out), err) == (0, summary, "")
    assert (tmp_path / "drawn" / "xray" / "timeline.html").exists()

    def same_run(command: list[str], **_: object) -> None:
        shutil.copytree(tmp_path / "run", command[-1])

    monkeypatch.setattr("llmtrain.lab.commands.xray.run_command", same_run)
    status, out, err = ended(capsys, *words, "--json")
    assert (status, json.loads(out), err) == (0, summary, "")

    # A recipe may have no flags at all. The run folder is then the default one.
    monkeypatch.chdir(tmp_path)
    recipe = str(ROOT / GPT)
    status, out, err = ended(capsys, "xray", recipe, "--steps", "3:5", "--json")
    assert (status, json.loads(out), err) == (0, summary, "")
    assert (tmp_path / "runs" / "xray" / "metrics.jsonl").exists()


SLOW = """
import os, sys, time; sys.path.insert(0, "recipes")
import gpt
from llmtrain import launch
from llmtrain.data.loader import Collate
honest = Collate.__call__
def slow(self, read):
    if os.environ["RANK"] == "1": time.sleep(0.8)
    return honest(self, read)
Collate.__call__ = slow
if __name__ == "__main__": launch(gpt.main)
"""


@long_form
def test_a_process_that_is_slow_in_loading_data_is_named(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    flags = [
        *TINY,
        "--max_steps",
        "11",
        "--logging_steps",
        "2",
        "--eval_fraction",
        "0",
        "--dataset",
        str(text_file),
    ]
    ended = run_forked(
        [*torchrun(2), str(tmp_path / "slow.py"), *flags, "--output_dir", str(tmp_path / "run")]
    ).assert_ok()
    late = re.findall(
        r"late +rank (\d) takes ([\d.]+) ms longer per step than the others, most of it in (.*?);",
        ended.out,
    )
    (seconds,) = [
        float(taken) for rank, taken, phase in late if (rank, phase) == ("1", "data loading")
    ]
    assert seconds > 600
    *readings, _ = [
        line["phases"] for line in metrics(tmp_path / "run") if "phases" in line
    ]  # the last has less to load
    assert all(reading["data"][1] > reading["data"][0] + 0.5 for reading in readings)
    assert all(reading["count"][0] > reading["count"][1] + 0.5 for reading in readings), (
        "rank 0 waits"
    )
