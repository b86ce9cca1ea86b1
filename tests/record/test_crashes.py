"""After a crash at any instant, every checkpoint is intact, and none is lost that was reported."""

import hashlib
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
from llmtrain.record.checkpoint import checkpoints, find_fault, newest_valid, read_state
from llmtrain.record.history import read_lines
from llmtrain.record.saver import Saver
from tests.launching import ROOT, bound
from tests.record.checkpoint_files import Files, save_step
from tests.record.power import Disk, watched
from tests.waiting import wait_until

KILLS = int(os.environ.get("LLMTRAIN_WRITER_KILLS", "20"))
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def faults_at_restart(folder: Path, reported_step: int) -> list[str]:
    """Return which checkpoints are damaged, and whether the reported step is lost."""
    faults = []
    intact_steps = []
    for path in checkpoints(folder):
        fault = find_fault(path)
        if fault:
            faults.append(f"{path.name}: {fault}")
        else:
            intact_steps.append(read_state(path)["step"])

    if max(intact_steps, default=0) < reported_step:
        faults.append(f"step {reported_step} is lost; there are {intact_steps}")
    return faults


# --- power cuts


def cut_power_at_each_operation(tmp_path: Path) -> dict[str, list[str]]:
    """Save twice, and cut the power before each operation; return the faults after each cut."""
    folder = tmp_path / "checkpoints"
    saver = Saver(folder, Files(), keep=2)
    for step in (10, 20):
        save_step(saver, step)

    disk = Disk(folder)
    reported_step = 20
    faults_by_cut: dict[str, list[str]] = {}

    def cut_power(operation: str) -> None:
        for eager in (False, True):
            remains = disk.after_power_cut(tmp_path / "after", eager)
            cut = f"cut {len(faults_by_cut)}, before {operation}, eager={eager}"
            faults_by_cut[cut] = faults_at_restart(remains, reported_step)

    with watched(disk, cut_power) as call_back:
        for step in (30, 40):
            save_step(saver, step)
            reported_step = step
            call_back("the next step")
    return faults_by_cut


@linux
def test_no_checkpoint_is_lost_whenever_the_power_is_cut(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    faults_by_cut = cut_power_at_each_operation(tmp_path)

    faulty_cuts = {cut: faults for cut, faults in faults_by_cut.items() if faults}
    assert not faulty_cuts
    assert len(faults_by_cut) > 60
    count = bound(len(faulty_cuts), len(faults_by_cut))
    score(f"power: checkpoints lost or broken in cuts at every operation: {count}")


@linux
@pytest.mark.parametrize("not_synced", ["files", "folders", "commit"])
def test_power_cuts_lose_checkpoints_if_something_is_not_synced(
    not_synced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would notice a missing fsync."""
    sync = files.sync
    if not_synced == "files":
        monkeypatch.setattr(os, "fsync", lambda handle: None)
        monkeypatch.setattr(files, "sync", lambda path: path.is_dir() and sync(path))
    elif not_synced == "folders":
        monkeypatch.setattr(files, "sync", lambda path: path.is_dir() or sync(path))
    else:
        monkeypatch.setattr("llmtrain.record.saver.sync", lambda path: None)

    faults_by_cut = cut_power_at_each_operation(tmp_path)

    assert any(faults_by_cut.values())


# --- crashes of the process


class CrashError(BaseException):
    """Stands for the end of the process."""


class CrashAfter:
    """Raises CrashError before every operation, except for the first ones.

    Later operations fail, too: a process that has ended does not clean up.
    """

    def __init__(self, operations: int) -> None:
        self.remaining = operations

    def __call__(self, operation: str) -> None:
        if self.remaining == 0:
            raise CrashError(operation)
        self.remaining -= 1


def crash_in_save(folder: Path, crash: CrashAfter) -> str | None:
    """Save, and return the operation before which it crashed, or None if it did not."""
    real_rmtree = shutil.rmtree
    real_sha256 = hashlib.sha256

    def rmtree(path: Path, **options: object) -> None:
        crash("rmtree")
        real_rmtree(path, **options)

    def sha256(*data: bytes) -> object:
        crash("write")  # a hash is made for each file that is written or read
        return real_sha256(*data)

    saver = Saver(folder, Files(), keep=2)
    with pytest.MonkeyPatch.context() as patch, watched(Disk(folder), crash):
        patch.setattr(shutil, "rmtree", rmtree)
        patch.setattr(hashlib, "sha256", sha256)
        try:
            save_step(saver, 30)
        except CrashError as error:
            return str(error)
    return None


def test_no_checkpoint_is_lost_if_the_process_ends_at_any_operation(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    faults = []
    operations = 0
    while True:
        folder = tmp_path / str(operations)
        for step in (10, 20):
            save_step(Saver(folder, Files(), keep=2), step)

        crash = crash_in_save(folder, CrashAfter(operations))
        if crash is None:
            break
        for fault in faults_at_restart(folder, reported_step=20):
            faults.append(f"before operation {operations}, {crash}: {fault}")
        operations += 1

    assert not faults
    assert operations > 20
    score(
        "crash: checkpoints lost or broken by an end at each operation of a save: "
        f"{len(faults)} of {operations}"
    )


def test_only_damaged_lines_of_a_log_are_dropped_with_those_after_the_step(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    not_objects = b"7\n[1]\n"
    without_step = b'{"step": null}\n{"loss": 2}\n'
    not_text = b"\xff\n"
    half_a_line = b'{"ste'
    log.write_bytes(
        b'{"step": 1}\n'
        + not_objects
        + without_step
        + not_text
        + b'{"step": 2}\n{"step": 3}\n'
        + half_a_line
    )
    files.append_json_line(log, {"step": 4})
    assert [entry["step"] for entry in read_lines(log)] == [1, 2, 3, 4]

    files.copy_lines_up_to(log, log, step=2)

    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


# --- kills of the process


class WriterEndedError(Exception):
    """A writer ended before it was killed. The message is its stderr."""


class Writers:
    """Processes that save until they are killed, one after the other; see writer.py."""

    def __init__(self, folder: Path, writer: str) -> None:
        self.folder = folder
        self.errors = folder.with_name("errors.txt")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.record.writer", str(folder), writer],
                cwd=ROOT,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )

    def start_and_kill(self, first_step: int, before_kill: Callable[[psutil.Process], None]) -> int:
        """Start a writer and kill it.

        Args:
            first_step: the step of its first save.
            before_kill: called after its first save. The writer is killed when this returns.

        Returns:
            The last step that it reported as saved.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(f"{first_step}\n")
        writer = None
        reported_step = 0
        while writer is None or not reported_step:
            line = self._read_line()
            if line.startswith("pid"):
                writer = psutil.Process(int(line.split()[1]))
            else:
                reported_step = int(line)

        before_kill(writer)
        try:
            os.kill(writer.pid, signal.SIGKILL)
        except ProcessLookupError:
            raise WriterEndedError(self.errors.read_text()) from None

        while (line := self._read_line()) != "ended":
            reported_step = int(line)
        return reported_step

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WriterEndedError(self.errors.read_text())
        return line.rstrip("\n")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def stop_inside_save(writer: psutil.Process, is_inside_save: Callable[[], bool]) -> None:
    """Suspend a writer in the middle of a save, however fast or slow the machine is."""
    while True:
        wait_until(is_inside_save, seconds=60)  # the writer goes on meanwhile
        writer.suspend()
        wait_until(lambda: writer.status() == psutil.STATUS_STOPPED, seconds=60)
        if is_inside_save():
            return
        writer.resume()


@pytest.fixture
def writers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Writers]:
    writers = Writers(tmp_path / "checkpoints", request.param)
    yield writers
    writers.close()


@pytest.mark.timeout(120 + KILLS)
@pytest.mark.parametrize("writers", ["saver"], indirect=True)
def test_no_checkpoint_is_lost_if_the_process_is_killed(
    writers: Writers, score: Callable[[str], None]
) -> None:
    """Every second kill comes at a random instant, the others in the middle of a save."""
    draw = random.Random(KILLS)
    step = 0
    kills_inside_save = 0
    faults: list[str] = []
    # What a killed save has left stays there, and must not hinder the next save of the same step.
    earlier_remains: set[Path] = set()

    def unfinished_saves() -> set[Path]:
        return {*writers.folder.glob(".tmp-step-*")} - earlier_remains

    def wait_for_random_instant(writer: psutil.Process) -> None:
        time.sleep(draw.uniform(0, 0.03))

    def wait_for_save(writer: psutil.Process) -> None:
        stop_inside_save(writer, is_inside_save=lambda: bool(unfinished_saves()))

    for kill in range(KILLS):
        before_kill = wait_for_save if kill % 2 else wait_for_random_instant
        reported_step = writers.start_and_kill(step + 1, before_kill)

        faults += faults_at_restart(writers.folder, reported_step)
        newest = newest_valid(writers.folder)
        assert newest is not None
        step = read_state(newest)["step"]
        assert load_file(newest / "model/model.safetensors")["w"][0].item() == step

        kills_inside_save += bool(unfinished_saves())
        earlier_remains |= unfinished_saves()

    score(
        f"writer: checkpoints lost or broken by kills: {bound(len(faults), KILLS)}; "
        f"{kills_inside_save} were inside a write"
    )
    assert not faults
    assert kills_inside_save >= KILLS // 2


@pytest.mark.parametrize("writers", ["without_commit"], indirect=True)
def test_a_kill_inside_a_save_without_a_commit_leaves_a_broken_checkpoint(
    writers: Writers,
) -> None:
    """The test above would notice it."""

    def is_inside_save() -> bool:
        newest = checkpoints(writers.folder)[-1]
        return not (newest / "MANIFEST.json").exists()

    reported_step = writers.start_and_kill(
        first_step=1,
        before_kill=lambda writer: stop_inside_save(writer, is_inside_save),
    )

    assert faults_at_restart(writers.folder, reported_step)


# --- saving in the background


def test_the_error_of_a_background_save_is_raised_by_the_next_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    background_saver = Saver(tmp_path, Files(), keep=2, in_background=True)

    def fail_to_write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llmtrain.record.saver.write_tensors", fail_to_write)
    committed = []

    background_saver.save(
        step=3,
        weights={"w": torch.ones(1000)},
        states={},
        state={"step": 3},
        on_commit=lambda: committed.append(3),
    )

    with pytest.raises(files.UserError, match="could not be written"):
        background_saver.wait()
    assert not background_saver.failed
    assert committed == []
