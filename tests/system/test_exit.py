"""A finished run ends with status 0, on a busy machine too.

gloo's threads sometimes abort a process whose work is done ("terminate called without an active exception"). The
campaign is ``make launches``; on a quiet machine every other test that launches something sees it.
"""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import GPT, LONG, TINY, accelerate, bound, run

LAUNCHES = int(os.environ.get("LLMTRAIN_LAUNCHES", str(int(LONG))))


def spin(seconds: float) -> None:
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.skipif(not LAUNCHES, reason="a long form: make launches runs it")
@pytest.mark.timeout(60 + 60 * LAUNCHES)
def test_finished_runs_end_with_status_0_while_the_machine_is_busy(
    text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    load = [context.Process(target=spin, args=(60.0 * LAUNCHES,), daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in load:
        process.start()
    try:
        statuses = []
        for i in range(LAUNCHES):
            flags = [*TINY, "--max_steps", "3", "--dataset", str(text_file), "--output_dir", str(tmp_path / str(i))]
            ended = run([*accelerate("cpu_ddp"), GPT, *flags], timeout=300)
            statuses.append(ended.status)
            assert ended.status == 0, f"launch {i} of {LAUNCHES}\n{ended.out}\n{ended.err}"
    finally:
        for process in load:
            process.kill()
            process.join()
    score(f"launches: with a status that is not 0: {bound(sum(map(bool, statuses)), len(statuses))}")
