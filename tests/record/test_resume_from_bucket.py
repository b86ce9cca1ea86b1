"""A start resumes from the mirror of a run: what is newer and intact wins, there or in the folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from llmtrain.errors import UserError
from llmtrain.files import digest, write_json
from llmtrain.record import checkpoint
from llmtrain.record.history import is_free
from llmtrain.record.resume import ResumePoint, choose_folder
from llmtrain.record.run_record import FORMAT_VERSION
from llmtrain.record.saver import Saver
from llmtrain.storage import Storage
from tests.buckets import Proxy, bucket_server
from tests.record.checkpoint_files import DAMAGE, Files, flip, save_step

ADDRESS = "s3://bucket/run"
NEWEST = "checkpoints/step-00000030"


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with bucket_server() as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def empty_bucket(
    server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storage]:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    storage = Storage(ADDRESS)
    yield storage
    storage.delete(storage.sizes())


def make_run(folder: Path, *steps: int, run_id: str = "abc", best: int | None = None) -> Path:
    """Make an unfinished run with the seed 0, and with a checkpoint of each step."""
    identity = {"fingerprint": {"seed": 0}, "fingerprint_sha256": digest({"seed": 0})}
    saver = Saver(folder / "checkpoints", Files(), keep=100)
    for step in steps:
        state = {"best": None if best is None else {"step": best}}
        save_step(saver, step, **state, **identity)
    starts = [{"time": "2026-01-01T00:00:00+0000"}] * len(steps)
    folder.mkdir(exist_ok=True)
    record = {"format_version": FORMAT_VERSION, "run_id": run_id, "starts": starts, **identity}
    write_json(folder / "run.json", record)
    write_json(folder / "status.json", {"state": "running", "step": max(steps, default=0)})
    lines = [json.dumps({"step": step}) for step in range(max(steps, default=0))]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def upload(folder: Path, address: str = ADDRESS) -> None:
    storage = Storage(address)
    for name in checkpoint.file_names(folder) - {".lock"}:
        storage.upload(name, folder / name)


def start(folder: Path, resume: str = ADDRESS, seed: int = 0, **options: str) -> ResumePoint:
    with choose_folder(str(folder), resume, {"seed": seed}, **options) as resume_point:
        return resume_point


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in checkpoint.file_names(folder)}


def test_a_bare_machine_continues_the_run_of_the_mirror(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirrored = make_run(tmp_path / "mirrored", 10, 20, 30, best=10)
    upload(mirrored)

    resume_point = start(tmp_path / "run")

    assert resume_point.folder == tmp_path / "run"
    assert (resume_point.run_id, resume_point.step, resume_point.extends) == ("abc", 30, None)
    assert resume_point.checkpoint == tmp_path / "run" / NEWEST
    assert f"uses {ADDRESS}/{NEWEST}" in capsys.readouterr().out
    expected = contents(mirrored)
    for name in contents(mirrored):  # step 10 is the best one
        if name == "status.json" or "step-00000020" in name:
            del expected[name]
    assert contents(tmp_path / "run") == {".lock": b"", **expected}


@pytest.mark.parametrize("damage", [*DAMAGE, "a flipped bit", "a missing file"])
def test_a_damaged_checkpoint_of_the_mirror_is_passed_over(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirrored = make_run(tmp_path / "mirrored", 10, 30)
    weights = mirrored / NEWEST / "model/model.safetensors"
    if damage == "a flipped bit":
        flip(weights)
    elif damage == "a missing file":
        weights.unlink()
    else:
        DAMAGE[damage](mirrored / NEWEST)
    upload(mirrored)

    resume_point = start(tmp_path / "run")

    names_damage = f"{ADDRESS}/{NEWEST} is damaged" in capsys.readouterr().out
    # Without a manifest, there is no checkpoint. Other files are not downloaded.
    expected_step = 30 if damage == "a file that is not in the manifest" else 10
    assert resume_point.step == expected_step
    assert names_damage is (expected_step == 10 and damage != "a missing manifest")


@pytest.mark.parametrize(
    ("local_steps", "has_damage", "expected_step", "expected_starts"),
    [
        ((10, 20), False, 30, 3),
        ((10, 20, 30), False, 30, 4),
        ((10, 20, 30, 40), False, 40, 5),
        ((10, 40), True, 30, 3),
        ((40,), True, 30, 3),
        ((), False, 30, 3),
    ],
)
def test_the_newer_intact_checkpoint_wins(
    local_steps: tuple[int, ...],
    has_damage: bool,
    expected_step: int,
    expected_starts: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    upload(make_run(tmp_path / "mirrored", 10, 20, 30))
    folder = make_run(tmp_path / "run", *local_steps)
    record = json.loads((folder / "run.json").read_text())
    local_starts = [{"time": "2026-01-02T00:00:00+0000"}] * (len(local_steps) + 1)
    write_json(folder / "run.json", {**record, "starts": local_starts})
    if has_damage:
        flip(checkpoint.path_of(folder / "checkpoints", 40) / "model/model.safetensors")

    resume_point = start(folder)

    assert (resume_point.folder, resume_point.step) == (folder, expected_step)
    assert len(resume_point.earlier_record["starts"]) == expected_starts
    wins = capsys.readouterr().out
    is_of_mirror = expected_starts == 3
    assert (f"uses {ADDRESS}/{NEWEST}" in wins) is is_of_mirror
    assert (f"uses {folder}/checkpoints/step-000000{expected_step}" in wins) is not is_of_mirror


def test_two_runs_with_the_same_settings_stay_two_runs(tmp_path: Path) -> None:
    upload(make_run(tmp_path / "mirrored", 10, run_id="abc"))
    other = make_run(tmp_path / "run", 20, run_id="other")
    before = contents(other)

    resume_point = start(other)

    assert (resume_point.folder, resume_point.step) == (tmp_path / "run-2", 10)
    assert contents(other) == before


def test_a_start_that_is_killed_while_it_downloads_leaves_a_free_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(make_run(tmp_path / "mirrored", 10))

    def download(storage: Storage, name: str, path: Path) -> None:
        original(storage, name, path)
        if "optimizer" in name:
            raise KeyboardInterrupt

    original = Storage.download
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "download", download)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "run")
    assert (tmp_path / "run/.tmp-download").is_dir()

    resume_point = start(tmp_path / "run")

    assert (resume_point.folder, resume_point.step) == (tmp_path / "run", 10)


def test_another_run_extends_the_one_at_the_address_with_its_logs(tmp_path: Path) -> None:
    mirrored = make_run(tmp_path / "mirrored", 10, 20)
    upload(mirrored)

    resume_point = start(tmp_path / "run", f"{ADDRESS}/checkpoints/step-00000010/")

    assert (resume_point.step, resume_point.state["best"]) == (10, None)
    assert resume_point.run_id != "abc"
    extended = Path(resume_point.extends["run"])
    assert extended.is_relative_to(tmp_path / "cache")
    assert (extended / "metrics.jsonl").read_text() == (mirrored / "metrics.jsonl").read_text()
    assert (resume_point.extends["run_id"], resume_point.extends["step"]) == ("abc", 10)


@pytest.mark.parametrize(
    ("resume", "steps", "seed", "message"),
    [
        (ADDRESS, (10,), 1, f"{ADDRESS} differs in seed: 0 there, 1 here"),
        (ADDRESS, (), 1, f"{ADDRESS}: there is no checkpoint yet"),
        (f"{ADDRESS}/checkpoints/step-00000020", (10,), 0, "step-00000020: there is no checkpoint"),
        (f"{ADDRESS}/checkpoints/step-(((", (10,), 0, "there is no checkpoint yet"),
        ("s3://bucket/none", (10,), 0, "s3://bucket/none is not a run folder"),
    ],
)
def test_what_cannot_be_resumed_is_a_line(
    resume: str, steps: tuple[int, ...], seed: int, message: str, tmp_path: Path
) -> None:
    upload(make_run(tmp_path / "mirrored", *steps))

    with pytest.raises(UserError) as caught:
        start(tmp_path / "run", resume, seed=seed)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert is_free(tmp_path / "run")


def test_a_name_that_leads_out_of_the_folder_is_not_downloaded(
    empty_bucket: Storage, tmp_path: Path
) -> None:
    with mock.patch.object(empty_bucket, "download") as download:
        empty_bucket.download_all(["run.json", "../run.json", "a/../../run.json"], tmp_path / "a")

    download.assert_called_once_with("run.json", tmp_path / "a" / "run.json")
