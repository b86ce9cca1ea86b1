"""A crash at any instant leaves every checkpoint whole and loses none that was said to be saved."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from llmtrain import files
from llmtrain.record import checkpoint, saver
from llmtrain.record.checkpoint import checkpoints, find_fault, newest_valid
from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState
from tests.launching import ROOT, bound
from tests.record.power import Disk, watched
from tests.record.test_checkpoint import Files
from tests.waiting import wait_until

KILLS = int(os.environ.get("LLMTRAIN_WRITER_KILLS", "20"))
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class CrashError(BaseException):
    """The process ends here."""


def save(writer: Saver, step: int) -> None:
    weights = {"w": torch.full((500,), float(step))}
    writer.save(
        step,
        weights,
        {"optimizer": FlatState({}, {"w.exp_avg": weights["w"] * 2})},
        {"step": step},
    )


def faults(folder: Path, at_least: int) -> list[str]:
    """Return what a restart would suffer from: a checkpoint that is not whole, or the loss of one that counts."""
    wrong = [f"{path.name}: {fault}" for path in checkpoints(folder) if (fault := find_fault(path))]
    steps = [
        checkpoint.read_state(path)["step"] for path in checkpoints(folder) if not find_fault(path)
    ]
    return wrong + (
        [] if max(steps, default=0) >= at_least else [f"step {at_least} is lost; there are {steps}"]
    )


def power_cuts(tmp_path: Path) -> tuple[int, list[str]]:
    """Cut the power before each operation of two saves; the number of cuts, and what went wrong in them."""
    root = tmp_path / "checkpoints"
    writer = Saver(root, Files(), keep=2)
    for step in (10, 20):
        save(writer, step)
    disk, found, acknowledged, cuts = Disk(root), [], 20, 0

    def cut(what: str) -> None:
        nonlocal cuts
        for eager in (False, True):
            cuts += 1
            wrong = faults(disk.after_power_cut(tmp_path / "after", eager), acknowledged)
            found.extend(
                f"before {what}, {'eager' if eager else 'lost'}: {fault}" for fault in wrong
            )

    with watched(disk, cut) as look:
        for step in (30, 40):
            save(writer, step)
            acknowledged = step
            look("the next step")
    return cuts, found


@linux
def test_the_power_may_go_at_any_operation(tmp_path: Path, score: Callable[[str], None]) -> None:
    cuts, found = power_cuts(tmp_path)
    assert not found
    assert cuts > 60
    score(
        f"power: checkpoints lost or broken in cuts at every operation: {bound(len(found), cuts)}"
    )


@linux
@pytest.mark.parametrize("forgotten", ["the files", "the folders", "the commit"])
def test_without_one_kind_of_fsync_a_power_cut_would_show(
    forgotten: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgotten == "the files":
        monkeypatch.setattr(files.os, "fsync", lambda handle: None)
        monkeypatch.setattr(files, "sync_file", lambda path: None)
    elif forgotten == "the folders":
        monkeypatch.setattr(files, "sync_folder", lambda path: None)
    else:
        monkeypatch.setattr(saver, "sync_folder", lambda path: None)
    _, found = power_cuts(tmp_path)
    assert found


def crash_at_each_operation(tmp_path: Path) -> tuple[int, list[str]]:
    """End the process before its k-th operation, writes included, for every k; what stands then, a restart finds."""
    found: list[str] = []
    k = 0
    while True:
        root = tmp_path / str(k)
        for step in (10, 20):
            save(Saver(root, Files(), keep=2), step)
        left = k

        def count(what: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CrashError(what)

        def counted(*words: bytes, honest: Callable = files.hashlib.sha256) -> object:
            count("write")  # one is made for each file that is written or read
            return honest(*words)

        crashed = True
        with pytest.MonkeyPatch.context() as patch:
            # after a crash nobody tidies up
            patch.setattr(
                files.shutil,
                "rmtree",
                lambda path, **more: count("rmtree") or shutil_rmtree(path, **more),
            )
            patch.setattr(files.hashlib, "sha256", counted)
            with watched(Disk(root), count):
                try:
                    save(Saver(root, Files(), keep=2), 30)
                    crashed = False
                except CrashError as crash:
                    where = str(crash)
        if not crashed:
            return k, found
        found += [f"at operation {k}, {where}: {fault}" for fault in faults(root, 20)]
        shutil_rmtree(root)
        k += 1


shutil_rmtree = shutil.rmtree


def test_lines_of_a_ledger_that_are_no_readings_are_dropped(tmp_path: Path) -> None:
    ledger = tmp_path / "metrics.jsonl"
    ledger.write_bytes(
        b'{"step": 1}\n7\n[1]\n{"step": null}\n{"loss": 2}\n\xff\n{"step": 2}\n{"step": 3}\n{"ste'
    )
    files.drop_lines_after(ledger, 2)
    assert ledger.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_the_process_may_end_at_any_operation(tmp_path: Path, score: Callable[[str], None]) -> None:
    operations, found = crash_at_each_operation(tmp_path)
    assert not found
    assert operations > 20
    score(
        f"crash: checkpoints lost or broken by an end at each operation of a save: {len(found)} of {operations}"
    )


class WriterEndedError(Exception):
    """A writer ended before it was killed; the message is what it wrote to stderr."""


class Writers:
    """Writers that are killed, one after the other."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder = folder
        self.errors = folder.with_name("errors.txt")
        command = [sys.executable, "-m", "tests.record.writer", str(folder), how]
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
            "bufsize": 1,
        }
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, start_new_session=True, stderr=errors, **pipes
            )

    def kill_one(self, first_step: int, wait: Callable[[int], None]) -> int:
        """Start a writer and kill it; return the last step that it said to be saved.

        Args:
            first_step: the step of its first save.
            wait: called with its process id after its first save. It returns when to kill it.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{first_step}\n")
        pid, said, killed = None, 0, False
        for line in stdout:
            if line.startswith("pid"):
                pid = int(line.split()[1])
            elif line == "ended\n":
                return said
            else:
                said = int(line)
            if pid is not None and said and not killed:
                wait(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    while stdout.readline() not in ("ended\n", ""):
                        pass
                    raise WriterEndedError(self.errors.read_text()) from None
                killed = True
        raise AssertionError("the writers ended")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def writers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Writers]:
    made = Writers(tmp_path / "checkpoints", request.param)
    yield made
    made.close()


@pytest.mark.timeout(120 + KILLS)
@pytest.mark.parametrize("writers", ["ours"], indirect=True)
def test_a_writer_may_be_killed_at_any_instant(
    writers: Writers, score: Callable[[str], None]
) -> None:
    draw, saved, inside, found = random.Random(KILLS), 0, 0, []
    for _ in range(KILLS):
        saved = writers.kill_one(saved + 1, lambda _: time.sleep(draw.uniform(0, 0.03)))
        inside += bool(list(writers.folder.glob(".tmp-step-*")))
        found += faults(writers.folder, saved)
        newest = newest_valid(writers.folder)
        assert newest is not None
        saved = checkpoint.read_state(newest)["step"]
        assert float(load_file(newest / "model/model.safetensors")["w"][0]) == saved
    score(
        f"writer: checkpoints lost or broken by kills: {bound(len(found), KILLS)}; {inside} were inside a write"
    )
    assert not found
    assert inside, "no kill fell into a write: the test is too slow to mean anything"


def save_state_faults(folder: Path, at_least: int) -> list[str]:
    """Ask the same of the folders of `accelerator.save_state`: is the newest one whole, none lost."""
    wrong, good = [], []
    for path in sorted(
        folder.glob("checkpoints/checkpoint_*"), key=lambda path: int(path.name.split("_")[1])
    ):
        try:
            assert float(load_file(path / "model.safetensors")["weight"][0, 0]) == int(
                path.name.split("_")[1]
            )
            assert list(path.glob("random_states_*"))  # the last file that it writes
            good.append(int(path.name.split("_")[1]))
        except Exception as error:
            wrong.append(f"{path.name}: {type(error).__name__}")
    return wrong + (
        [] if max(good, default=-1) >= at_least else [f"step {at_least} is lost; there are {good}"]
    )


def is_inside_save_state(folder: Path) -> bool:
    """Return whether the newest folder lacks the last file that ``accelerator.save_state`` writes."""
    newest = max(
        folder.glob("checkpoints/checkpoint_*"), key=lambda path: int(path.name.split("_")[1])
    )
    return not list(newest.glob("random_states_*"))


@linux
@pytest.mark.parametrize("writers", ["plain"], indirect=True)
def test_a_kill_inside_a_save_breaks_what_save_state_writes(writers: Writers) -> None:
    """The harness can fail."""

    def stop_inside_a_save(pid: int) -> None:
        writer = psutil.Process(pid)
        while True:
            writer.suspend()
            wait_until(lambda: writer.status() == psutil.STATUS_STOPPED)
            if is_inside_save_state(writers.folder):
                return
            writer.resume()

    said = writers.kill_one(1, stop_inside_a_save)
    assert save_state_faults(writers.folder, said)


def test_saving_in_the_background_is_of_the_moment_and_tells_its_errors_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, values, done = Saver(tmp_path, Files(), 2, in_background=True), torch.ones(1000), []
    weights = {"w": values}
    states = {"optimizer": FlatState({}, {"w.exp_avg": values})}
    for step in (1, 2):
        writer.save(step, weights, states, {"step": step}, lambda step=step: done.append(step))
        values += 1  # training goes on
    writer.wait()
    assert done == [1, 2]
    assert [
        float(load_file(path / "model/model.safetensors")["w"][7]) for path in checkpoints(tmp_path)
    ] == [1, 2]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver, "write_tensors", full)
    writer.save(3, weights, states, {"step": 3}, lambda: done.append(3))
    with pytest.raises(files.UserError, match="could not be written"):
        writer.wait()
    assert not writer.failed
    assert done == [1, 2]
