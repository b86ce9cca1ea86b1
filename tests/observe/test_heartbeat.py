"""The rank that others wait for is named.

Real processes that hang are in tests/system/test_faults.py.
"""

import os
import platform
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.distributed import HashStore

from llmtrain.files import json_text
from llmtrain.observe import heartbeat as heartbeat_module
from llmtrain.observe.heartbeat import Beat, Heartbeat, describe_missing
from llmtrain.phases import Phases
from tests.waiting import wait_until


def beat(
    number: int, phase: str, step: int = 7, host: str = "another machine", pid: int = 1
) -> Beat:
    phases = Phases(torch.device("cpu"), model=torch.nn.Linear(1, 1))
    phases.begin(phase, step)
    return Beat(
        number=number,
        location=phases.location,
        is_waiting=phases.is_waiting,
        seconds=12.0,
        host=host,
        pid=pid,
    )


def describe(beat_of_rank_1: Beat | None, is_silent: bool = False) -> str:
    """Describe why ranks 0 and 2 wait for rank 1 in the token count."""
    beats = {0: beat(8, "count"), 2: beat(8, "count")}
    if beat_of_rank_1 is not None:
        beats[1] = beat_of_rank_1
    return describe_missing(
        rank=0,
        location="the token count after step 7",
        beats=beats,
        silent=[1] if is_silent else [],
    )


LAST = beat(5, "data", step=6)


@pytest.mark.parametrize(
    ("last", "is_silent", "description"),
    [
        pytest.param(LAST, True, "rank 1 is silent, .*data loading after step 6 ", id="silent"),
        pytest.param(None, True, "rank 1 is silent, ", id="never seen"),
        pytest.param(beat(8, "a save"), False, "rank 1 is in a save ", id="elsewhere"),
        pytest.param(beat(8, "count"), False, "all ranks are alive", id="same place"),
    ],
)
def test_the_rank_that_others_wait_for_is_named_with_its_last_phase(
    last: Beat | None, is_silent: bool, description: str
) -> None:
    assert re.match(description, describe(last, is_silent))


@pytest.mark.parametrize(
    ("pid", "state"),
    [
        pytest.param(os.getpid(), "is running", id="running"),
        pytest.param(2**22 + 1, "is gone", id="above the largest pid of Linux"),
    ],
)
def test_the_process_of_a_silent_rank_on_this_machine_is_looked_up(pid: int, state: str) -> None:
    last = beat(5, "data", host=platform.node(), pid=pid)

    assert f"(process {pid} {state})" in describe(last, is_silent=True)


class HeartbeatOfTwo(Heartbeat):
    """The heartbeat of one of two ranks. The other one is not there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            ranks=SimpleNamespace(rank=0, world_size=2),
            phases=Phases(torch.device("cpu"), model=torch.nn.Linear(1, 1)),
            folder=folder,
            timeout=600,
            on_failure=lambda reason, step: None,
        )

    def _connect(self) -> None:
        self.store = HashStore()


def test_the_thread_that_sends_beats_ends_with_the_run(tmp_path: Path) -> None:
    heartbeat = HeartbeatOfTwo(tmp_path)
    with heartbeat.context():
        wait_until(lambda: heartbeat.number > 0)
        [thread] = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
        assert thread.is_alive()

    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_rank_is_silent_until_its_next_beat(tmp_path: Path) -> None:
    heartbeat = HeartbeatOfTwo(tmp_path)
    heartbeat._connect()
    start = time.monotonic()
    for number, silent_ranks in ((5, []), (5, [1]), (6, [])):
        heartbeat.store.set("llmtrain/beat/1", json_text(beat(number, "data")))
        heartbeat._look()
        assert heartbeat._silent_ranks(since=start) == silent_ranks
        start = time.monotonic()


def test_a_process_that_is_stopped_may_continue_and_another_silent_one_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_module, "_SILENCE_SECONDS", 0.0)
    with subprocess.Popen(["sleep", "100"]) as process:
        heartbeat = HeartbeatOfTwo(tmp_path)
        last = beat(5, "data", host=platform.node(), pid=process.pid)
        monkeypatch.setattr(heartbeat, "_look", lambda: None)
        heartbeat.beats = {1: last}
        try:
            assert heartbeat._some_process_is_silent()
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
            assert not heartbeat._some_process_is_silent()
        finally:
            process.kill()
