"""Which process is named when others wait. Real processes that hang are in tests/system/test_faults.py."""

import os
import platform

import pytest

from llmtrain.observe.heartbeat import Beat, describe_missing


def beat(number: int, phase: str, step: int = 7, host: str = "elsewhere", pid: int = 1) -> Beat:
    return Beat(
        number=number,
        step=step,
        phase=phase,
        seconds=12.0,
        collective=30,
        host=host,
        pid=pid,
    )


def missing(before: dict[int, Beat], now: dict[int, Beat], size: int = 3) -> str:
    return describe_missing(
        rank=0, world_size=size, location="the token count after step 7", before=before, now=now
    )


WAITING = {0: beat(8, "count"), 2: beat(8, "count")}
BEFORE = {0: beat(5, "count"), 2: beat(5, "count")}
OTHERS_WAIT = "the others wait in the token count after step 7 (collective 30)."


def test_a_silent_process_is_named_with_the_phase_and_step_of_its_last_beat() -> None:
    last = beat(5, "data", step=6)
    assert missing({**BEFORE, 1: last}, {**WAITING, 1: last}) == (
        "rank 1 is silent, last seen in data loading after step 6 (stopped, cut off or gone); "
        + OTHERS_WAIT
    )


def test_a_silent_process_of_this_machine_is_looked_up() -> None:
    last = beat(5, "data", host=platform.node(), pid=os.getpid())
    assert f"(process {os.getpid()} is running)" in missing(
        {**BEFORE, 1: last}, {**WAITING, 1: last}
    )
    gone = last._replace(pid=2**22 + 1)  # above the largest pid of Linux
    assert f"(process {gone.pid} is gone)" in missing({**BEFORE, 1: gone}, {**WAITING, 1: gone})


def test_a_process_without_an_earlier_heartbeat_is_silent() -> None:
    assert missing(BEFORE, WAITING) == (
        f"rank 1 is silent, and no earlier heartbeat of it is known; {OTHERS_WAIT}"
    )


@pytest.mark.parametrize(("phase", "place"), [("data", "data loading"), ("a save", "a save")])
def test_a_process_that_beats_and_does_not_come_is_named_with_its_phase(
    phase: str, place: str
) -> None:
    said = missing({**BEFORE, 1: beat(5, phase)}, {**WAITING, 1: beat(8, phase)})
    assert said == f"rank 1 is in {place} after step 7, for 12 s; {OTHERS_WAIT}"


def test_processes_in_the_same_place_are_not_blamed() -> None:
    before = {**BEFORE, 1: beat(5, "count")}
    now = {**WAITING, 1: beat(8, "count")}
    assert missing(before, now) == "all ranks are alive, and in the same phase and step."
