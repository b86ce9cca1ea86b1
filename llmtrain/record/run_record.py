"""The content of ``run.json``: the settings, the data, and every start of a run."""

import os
import platform
import sys
import time
from pathlib import Path

import torch

from llmtrain.console import in_notebook
from llmtrain.files import digest
from llmtrain.json_types import JsonObject
from llmtrain.record.format import read_versioned, with_version
from llmtrain.record.history import History
from llmtrain.record.resume import ResumePoint
from llmtrain.record.running_code import code_digest, git_commit
from llmtrain.redaction import redacted
from llmtrain.versions import versions


def run_record(
    folder: Path,
    fingerprint: JsonObject,
    settings: dict[str, JsonObject],
    details: JsonObject,
    resume_point: ResumePoint,
    start: JsonObject,
) -> JsonObject:
    """Return the new content of ``run.json``: that of the file so far, plus this start.

    Args:
        folder: the run folder.
        fingerprint: the fingerprint of the run.
        settings: every flag with its value and origin (:func:`llmtrain.config.flags.resolved`).
        details: further keys of the file, about the data.
        resume_point: where this start begins.
        start: what else this start is recorded with, such as its processes and its device.
    """
    this_start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": resume_point.step,
        "from": str(resume_point.checkpoint) if resume_point.checkpoint else None,
        # How often the launcher has restarted the run (--max_restarts).
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "lost_checkpoints": resume_point.lost_checkpoints,
        "job": os.environ.get("SLURM_JOB_ID"),
        # The command of a notebook says nothing.
        "command": [] if in_notebook() else sys.argv,
        "directory": str(Path.cwd()),
        "host": platform.node(),
        **start,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "git_sha": git_commit(),
        "code_sha256": code_digest(),
    }
    earlier = read_versioned(folder / "run.json")
    extends = earlier.get("extends")
    if extends is None and resume_point.extended_run is not None:
        extended = History.read(resume_point.extended_run)
        extends = {
            "run": str(resume_point.extended_run),
            "run_id": extended.record.get("run_id"),
            "step": resume_point.step,  # the last one that is taken over
            "start_times": extended.all_start_times(),
        }

    recorded_settings = {}
    for name, setting in settings.items():
        # The name of a flag shows whether its value is a secret.
        recorded_settings[name] = {**redacted(setting), "value": redacted(setting["value"], name)}

    record = {
        "run_id": resume_point.run_id,
        "extends": extends,
        "fingerprint": fingerprint,
        "fingerprint_sha256": digest(fingerprint),
        "processes": start["processes"],
        "settings": recorded_settings,
        **redacted(details),
        "starts": [*earlier.get("starts", []), redacted(this_start)],
    }
    return with_version(record)
