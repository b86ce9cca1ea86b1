"""A finished run ends with status 0, also on a busy machine, and Ctrl-C ends a start with 130.

gloo's threads sometimes abort a process whose work is done ("terminate called without an active
exception"), or wait for each other, so that it does not end. `make launches` tries many launches.
On a quiet machine, every other test that launches a run would notice.
"""

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY, Ended, accelerate, bound, long_form, read_json, run

LAUNCHES = int(os.environ.get("LLMTRAIN_LAUNCHES", "1"))


@contextmanager
def busy_machine() -> Iterator[None]:
    """Keep all cores busy."""
    spinning = [*PYTHON, "-c", "while True: pass"]
    processes = [subprocess.Popen(spinning) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@long_form
@pytest.mark.timeout(60 + 60 * LAUNCHES)
def test_finished_runs_end_with_status_0_while_the_machine_is_busy(
    text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    with busy_machine():
        for number in range(LAUNCHES):
            flags = shlex.split(
                f"--max_steps 3 --dataset {text_file} --output_dir {tmp_path}/{number}"
            )
            run([*accelerate("cpu_ddp"), GPT, *TINY, *flags], timeout=300).assert_ok()
    score(f"launches: with a status that is not 0: {bound(0, LAUNCHES)}")


LEAVE_WHILE_GLOO_IS_BUSY = """
import threading
import time
import torch
import torch.distributed as dist
from llmtrain.launching.process import launch, leave_group

started = threading.Event()

def keep_busy(_):
    # This runs on a thread of gloo, which needs the interpreter's lock to continue.
    started.set()
    time.sleep(1)

def main():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.barrier(async_op=True).get_future().then(keep_busy)
    started.wait()
    leave_group()

launch(main)
"""


def test_a_model_can_be_freed_while_a_thread_of_gloo_is_busy() -> None:
    run([*PYTHON, "-c", LEAVE_WHILE_GLOO_IS_BUSY], timeout=60).assert_ok()


# Python does the same to streams that a shell has closed: `>&- 2>&-`.
CLOSED = "os.close(1); os.close(2); sys.stdout = sys.stderr = None"
FULL = "sys.stdout = sys.stderr = open('/dev/full', 'w')"
UNREAD = "reader, pipe = os.pipe(); os.close(reader); sys.stdout = sys.stderr = open(pipe, 'w')"
AFTER_STATEMENTS = """
import os, signal, sys; sys.path.insert(0, "recipes")
import gpt
from llmtrain import launch
{}
if __name__ == "__main__": launch(gpt.main)
"""


def run_after(statements: str, text_file: Path, folder: Path) -> Ended:
    """Train after some statements, with a run folder and a cache in a folder."""
    script = folder / "script.py"
    script.write_text(AFTER_STATEMENTS.format(statements))
    flags = shlex.split(f"--dataset {text_file} --output_dir {folder}/run")
    return run_forked(
        [*PYTHON, str(script), *TINY, *flags], {"LLMTRAIN_CACHE": str(folder / "cache")}
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is full")
@pytest.mark.parametrize("statement", [CLOSED, FULL, UNREAD], ids=["closed", "full", "unread"])
def test_a_run_whose_output_cannot_be_written_is_finished(
    statement: str, text_file: Path, tmp_path: Path
) -> None:
    run_after(statement, text_file, tmp_path).assert_ok()

    assert read_json(tmp_path / "run" / "status.json")["state"] == "finished"


# Python drops an exception that is raised in a destructor.
DROPS = """
class Drops:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def dropping(*arguments, function=gpt.{phase}):
    Drops()
    return function(*arguments)

gpt.{phase} = dropping
"""


@pytest.mark.parametrize("phase", ["tokenized", "build"])
def test_ctrl_c_that_a_destructor_drops_ends_the_start(
    phase: str, text_file: Path, tmp_path: Path
) -> None:
    ended = run_after(DROPS.format(phase=phase), text_file, tmp_path)

    assert ended.status == 130
    assert ended.err.count("Traceback") == ended.err.count("Exception ignored") == 1
    assert not (tmp_path / "run" / "run.json").exists()
    has_rows = any(tmp_path.glob("cache/*/manifest.json"))
    assert has_rows == (phase == "build")
