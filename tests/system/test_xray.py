"""An x-ray of a run: what it counts is what DDP sends; and who is late is named."""

import json
import re
from pathlib import Path

from tests.launching import BIN, GPT, TINY, metrics, run, torchrun

MODEL = [*TINY[:4], "--n_embd", "128", *TINY[6:10], "--global_batch_size", "16", "--ddp_bucket_cap_mb", "0.5"]


def test_collectives_are_buckets_times_updates_with_four_micro_batches_as_with_one(
    text_file: Path, tmp_path: Path
) -> None:
    found = {}
    for micro in ("2", "8"):
        flags = [*MODEL, "--per_device_train_batch_size", micro, "--dataset", str(text_file)]
        command = [str(BIN / "llmtrain"), "xray", GPT, "--processes", "2", *flags, "--updates", "3:5"]
        ended = run([*command, "--output_dir", str(tmp_path / micro)]).assert_ok()
        events = json.loads((tmp_path / micro / "xray" / "trace.json").read_text())["traceEvents"]
        sent = [e for e in events if re.fullmatch(r"bucket \d+", e["name"])]
        buckets = {event["name"] for event in sent}
        assert len(buckets) > 1
        assert len(sent) == len(buckets) * 3 * 2, "updates and ranks"
        assert {event["args"]["update"] for event in sent} == {3, 4, 5}
        forwards = [event for event in events if event["name"] == "forward" and event["pid"] == 0]
        assert len(forwards) == 3 * (8 // int(micro))
        parameters = [name for event in sent[: len(buckets)] for name in event["args"]["parameters"]]
        assert len(parameters) == len(set(parameters))
        assert "transformer.h.0.attn.c_attn.weight" in parameters
        found[micro] = ended.out
        assert f"{len(buckets)} an update, in its last micro-batch, for {len(buckets)} buckets" in ended.out
        assert (tmp_path / micro / "xray" / "timeline.html").stat().st_size > 2000
    assert "none in the 3 micro-batches before" in found["2"]
    assert "micro-batches before" not in found["8"]
    counted = re.search(r"the network devices sent ([\d.]+), ([\d.]+) of that", found["8"])
    assert counted is not None
    assert 0.9 < float(counted[2]) < 1.5, "what DDP sends is what the kernel saw, and little besides"


SLOW = """
import os, sys, time; sys.path.insert(0, "recipes")
import gpt
from llmtrain import launch
from llmtrain.data.loader import Collate
honest = Collate.__call__
def slow(self, items):
    if os.environ["RANK"] == "1": time.sleep(0.05)
    return honest(self, items)
Collate.__call__ = slow
if __name__ == "__main__": launch(gpt.main)
"""


def test_a_process_that_is_slow_in_loading_data_is_named(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    flags = [*TINY, "--max_steps", "12", "--logging_steps", "5", "--eval_fraction", "0", "--dataset", str(text_file)]
    ended = run([*torchrun(2), str(tmp_path / "slow.py"), *flags, "--output_dir", str(tmp_path / "run")]).assert_ok()
    late = re.findall(
        r"late +rank (\d) takes ([\d.]+) ms an update more than the others, most of it in (.*?):", ended.out
    )
    assert len(late) == 1, "it is said once"
    assert (late[0][0], late[0][2]) == ("1", "data loading")
    assert float(late[0][1]) > 40
    *readings, _ = [
        line["phases"] for line in metrics(tmp_path / "run") if "phases" in line
    ]  # the last has less to load
    assert all(reading["data"][1] > reading["data"][0] + 0.03 for reading in readings)
    assert all(reading["count"][0] > reading["count"][1] + 0.03 for reading in readings), "rank 0 waits"
