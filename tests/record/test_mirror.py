"""A mirror has the files of a run, never half of a checkpoint, and belongs to one run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from llmtrain import storage
from llmtrain.errors import UserError
from llmtrain.files import read_object
from llmtrain.record import mirror as module
from llmtrain.record.folder import RunFolder
from llmtrain.record.history import read_lines
from llmtrain.record.mirror import Mirror
from llmtrain.record.saver import Saver
from tests.buckets import Proxy, bucket_server
from tests.record.checkpoint_files import Files, save_step
from tests.record.mirrored_files import assert_never_half, count_puts, files_at, files_of
from tests.waiting import wait_until

ADDRESS = "s3://bucket/gpt"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(storage, "PATIENCE", 0.3)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)
    with bucket_server() as proxy:
        yield proxy


class MirroredRun:
    """A start of a run that logs and saves, and has a mirror."""

    def __init__(self, folder: Path, run_id: str = "one", start_id: str = "first") -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.status = folder / "status.json"
        self.writer = RunFolder(folder, start_id, is_main=True)
        self.writer.write("run.json", {"run_id": run_id})
        self.writer.begin(step=0)
        self.saver = Saver(folder / "checkpoints", Files(), keep=2)
        self.mirror = Mirror(ADDRESS, self.writer, run_id, self.record_event)

    def record_event(self, kind: str, text: str) -> None:
        self.writer.record_event(0, kind, text)

    @property
    def events(self) -> list[str]:
        return [event["text"] for event in read_lines(self.folder / "events.jsonl")]

    def save(self, *steps: int, mirrored: bool = True) -> None:
        for step in steps:
            save_step(self.saver, step)
            self.writer.append("metrics.jsonl", {"step": step})
            self.writer.set_status("running", step)
            if mirrored:
                wait_until(lambda step=step: read_object(self.status)["mirrored_step"] == step)

    def end(self) -> None:
        self.writer.set_status("finished", 9)
        self.mirror.close()


def test_a_mirror_has_the_files_of_the_run_and_never_half_of_a_checkpoint(
    bucket: Proxy, tmp_path: Path
) -> None:
    run = MirroredRun(tmp_path / "run")
    run.mirror.start()
    run.save(1, 2, 3, 4)
    (run.folder / "model").mkdir()
    (run.folder / "model/model.safetensors").write_bytes(b"weights")
    run.end()

    assert files_at(ADDRESS) == files_of(run.folder)
    assert read_object(run.status)["mirrored_step"] == 4
    assert run.events == []
    checkpoint = run.folder / "checkpoints/step-00000004"
    assert_never_half(bucket, file_count=len(files_of(checkpoint)))


def test_if_saves_are_faster_than_the_network_the_newest_is_uploaded(
    bucket: Proxy, tmp_path: Path
) -> None:
    run = MirroredRun(tmp_path / "run")
    run.save(1, 2, mirrored=False)
    bucket.delay = 0.05
    run.mirror.start()
    wait_until(lambda: count_puts(bucket, "step-00000002/"))
    run.save(3, 4, 5, 6, mirrored=False)  # deletes step 2 during its upload
    bucket.delay = 0
    run.end()

    assert files_at(ADDRESS) == files_of(run.folder)
    assert run.events == []
    assert not count_puts(bucket, "step-00000003/")


def test_a_checkpoint_that_was_made_again_replaces_that_of_the_mirror(
    bucket: Proxy, tmp_path: Path
) -> None:
    run = MirroredRun(tmp_path / "run")
    run.mirror.start()
    run.save(1, 2)
    run.mirror.close()
    shutil.rmtree(run.folder / "checkpoints/step-00000002")

    again = MirroredRun(tmp_path / "run", start_id="second")
    save_step(again.saver, 2, note="other bits")
    bucket.requests.clear()
    again.mirror.start()
    again.end()

    assert files_at(ADDRESS) == files_of(run.folder)
    assert not count_puts(bucket, "step-00000001/")
    changes = [request[:2] for request in bucket.requests if request[0] in ("PUT", "DELETE")]
    of_checkpoint = [change for change in changes if "step-00000002/" in change[1]]
    assert of_checkpoint[0] == ("DELETE", "/bucket/gpt/checkpoints/step-00000002/MANIFEST.json")


# --- claims


def test_the_address_of_another_run_is_refused(bucket: Proxy, tmp_path: Path) -> None:
    run = MirroredRun(tmp_path / "run")
    run.mirror.start()
    run.end()
    before = files_at(ADDRESS)

    other = MirroredRun(tmp_path / "run-2", run_id="two")
    with pytest.raises(UserError, match=r"gpt is claimed by run one on .*; choose another address"):
        other.mirror.start()
    other.end()
    assert files_at(ADDRESS) == before


def test_a_later_start_takes_the_claim_over_and_the_earlier_one_stops(
    bucket: Proxy, tmp_path: Path
) -> None:
    first = MirroredRun(tmp_path / "run")
    first.mirror.start()
    first.save(1)
    shutil.copytree(first.folder, tmp_path / "elsewhere")
    second = MirroredRun(tmp_path / "elsewhere", start_id="second")
    second.mirror.start()

    wait_until(lambda: first.events != [])
    first.save(2, mirrored=False)
    first.end()
    second.save(3)
    second.end()
    assert "is claimed by run one" in first.events[0]
    assert files_at(ADDRESS) == files_of(second.folder)


# --- faults


@pytest.mark.parametrize("fault", ["503", "expired"])
def test_a_series_of_faults_is_one_event_and_later_uploads_try_again(
    bucket: Proxy, tmp_path: Path, fault: str
) -> None:
    run = MirroredRun(tmp_path / "run")
    run.mirror.start()
    for count in (1, 2):
        run.save(2 * count)
        wait_until(lambda: files_at(ADDRESS).get("status.json") == run.status.read_bytes())

        bucket.fault = lambda method, path: fault
        run.save(2 * count + 1, mirrored=False)
        wait_until(lambda count=count: len(run.events) == count)
        failures = len(bucket.requests)
        wait_until(lambda failures=failures: len(bucket.requests) > failures + 4)
        bucket.fault = lambda method, path: ""
    run.end()

    assert files_at(ADDRESS) == files_of(run.folder)
    assert len(run.events) == 2
    assert all("s3://bucket/gpt" in event for event in run.events)


@pytest.mark.parametrize("fault", ["denied", "503"])
@pytest.mark.parametrize("was_mirrored", [False, True])
def test_a_failure_ends_the_start_of_a_run_that_was_never_mirrored(
    bucket: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    was_mirrored: bool,
    fault: str,
) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 0.1)
    run = MirroredRun(tmp_path / "run")
    bucket.fault = lambda method, path: fault
    if not was_mirrored:
        with pytest.raises(UserError, match=r"the storage (refuses|does not answer)"):
            run.mirror.start()
        return
    run.writer.set_mirrored_step(7)
    run.mirror.start()
    wait_until(lambda: run.events != [])
    bucket.fault = lambda method, path: ""
    run.save(8)
    run.end()
    assert len(run.events) == 1
    assert files_at(ADDRESS) == files_of(run.folder)


def test_a_start_that_is_behind_the_mirror_is_told_to_resume_from_it(
    bucket: Proxy, tmp_path: Path
) -> None:
    newer = MirroredRun(tmp_path / "new machine")
    newer.mirror.start()
    newer.save(9)
    newer.end()
    old = MirroredRun(tmp_path / "old machine", start_id="second")
    old.save(5, mirrored=False)
    before = files_at(ADDRESS)

    with pytest.raises(UserError, match=f"has step 9 of this run.*checkpoint {ADDRESS}"):
        old.mirror.start()
    assert files_at(ADDRESS) == before


def test_a_checkpoint_that_the_run_deletes_during_its_upload_arrives(
    bucket: Proxy, tmp_path: Path
) -> None:
    run = MirroredRun(tmp_path / "run")

    def delete(method: str, path: str) -> str:
        if method == "PUT" and "step-00000003" in path:
            shutil.rmtree(run.folder / "checkpoints" / "step-00000003", ignore_errors=True)
        return ""

    run.save(3, mirrored=False)
    bucket.fault = delete
    run.mirror.start()
    wait_until(lambda: "checkpoints/step-00000003/MANIFEST.json" in files_at(ADDRESS))
    run.end()
