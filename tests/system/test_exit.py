"""A finished run ends with status 0, on a busy machine too.

gloo's threads sometimes abort a process whose work is done ("terminate called without an active exception"), or keep it
from ending, each waiting for the other. The campaign is ``make launches``; on a quiet machine every other test that
launches something sees it.
"""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import GPT, LONG, PYTHON, TINY, accelerate, bound, run

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
    load = [
        context.Process(target=spin, args=(60.0 * LAUNCHES,), daemon=True)
        for _ in range(os.cpu_count() or 1)
    ]
    for process in load:
        process.start()
    try:
        statuses = []
        for i in range(LAUNCHES):
            flags = [
                *TINY,
                "--max_steps",
                "3",
                "--dataset",
                str(text_file),
                "--output_dir",
                str(tmp_path / str(i)),
            ]
            ended = run([*accelerate("cpu_ddp"), GPT, *flags], timeout=300)
            statuses.append(ended.status)
            assert ended.status == 0, f"launch {i} of {LAUNCHES}\n{ended.out}\n{ended.err}"
    finally:
        for process in load:
            process.kill()
            process.join()
    score(
        f"launches: with a status that is not 0: {bound(sum(map(bool, statuses)), len(statuses))}"
    )


FREED = """
import threading, time
import torch, torch.distributed as dist
from llmtrain.launching.process import launch, leave_group

started = threading.Event()

def busy(_):  # on gloo's thread, which needs the interpreter's lock to go on
    started.set()
    time.sleep(1)

def main():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.barrier(async_op=True).get_future().then(busy)
    started.wait()
    leave_group()

launch(main)
"""


def test_a_model_can_be_freed_while_a_thread_of_gloo_is_still_busy() -> None:
    run([*PYTHON, "-c", FREED], timeout=60).assert_ok()
