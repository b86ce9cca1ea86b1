"""Checkpoints are written, checked, found again and pruned."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.errors import UserError
from llmtrain.record.checkpoint import checkpoints, find_fault, newest_valid, prune, read_state
from tests.record.checkpoint_files import DAMAGE, flip, save_checkpoint


def steps_in(folder: Path) -> list[int]:
    return [read_state(path)["step"] for path in checkpoints(folder)]


def test_a_checkpoint_holds_the_tensors_and_the_state_that_were_saved(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 7)

    assert path.name == "step-00000007"
    assert find_fault(path) is None
    assert read_state(path)["step"] == 7
    weights = load_file(path / "model/model.safetensors")
    torch.testing.assert_close(weights, {"w": torch.full((300,), 7.0)}, rtol=0, atol=0)
    moments = load_file(path / "optimizer/state.safetensors")
    torch.testing.assert_close(moments, {"w.exp_avg": torch.full((300,), 14.0)}, rtol=0, atol=0)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_manifest_has_the_size_and_hash_of_every_other_file(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 7)
    manifest = json.loads((path / "MANIFEST.json").read_text())

    expected = {}
    for file in path.rglob("*"):
        if file.is_file() and file.name != "MANIFEST.json":
            data = file.read_bytes()
            name = str(file.relative_to(path))
            expected[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert manifest["files"] == expected


# --- damage


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_is_used(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    older = save_checkpoint(tmp_path, 10)
    newer = save_checkpoint(tmp_path, 20)
    assert newest_valid(tmp_path) == newer

    DAMAGE[damage](newer)

    assert newest_valid(tmp_path) == older
    assert checkpoints(tmp_path) == [older, newer], "reading alone changes nothing"

    assert newest_valid(tmp_path, set_aside=True) == older
    assert checkpoints(tmp_path) == [older]
    assert (tmp_path / "damaged-step-00000020").is_dir()
    assert "step-00000020 is damaged" in capsys.readouterr().out


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    flip(save_checkpoint(tmp_path, 10) / "model/model.safetensors")

    for _attempt in ("finds the damage", "finds what was set aside"):
        with pytest.raises(UserError, match=r"no checkpoint in .* is intact"):
            newest_valid(tmp_path, set_aside=True)


# --- failed saves


@pytest.mark.parametrize("function", ["write_tensors", "write_hashed"])
def test_a_save_that_fails_leaves_earlier_checkpoints_and_nothing_else(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = save_checkpoint(tmp_path, 10)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"llmtrain.record.saver.{function}", fail)
    with pytest.raises(UserError, match=r"could not be written.*No space left.*untouched"):
        save_checkpoint(tmp_path, 20)

    assert [*tmp_path.iterdir()] == [earlier]
    assert find_fault(earlier) is None


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("llmtrain.record.saver.prune", fail)

    assert find_fault(save_checkpoint(tmp_path, 20)) is None
    assert "old checkpoints could not be deleted" in capsys.readouterr().err


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = save_checkpoint(tmp_path, 10)
    usage = SimpleNamespace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(
        "llmtrain.record.saver.write_tensors", lambda *_: pytest.fail("tensors are written")
    )

    message = r"16\.\d MiB are needed and 1\.00 MiB are free on that disk\); older checkpoints"
    with pytest.raises(UserError, match=message):
        save_checkpoint(tmp_path, 20)

    assert checkpoints(tmp_path) == [earlier]


# --- pruning


@pytest.mark.parametrize(
    ("keep", "remaining"),
    [
        pytest.param(3, [11, 100, 1000], id="the newest"),
        pytest.param(1, [100, 1000], id="never fewer than two verified ones"),
    ],
)
def test_pruning_keeps_the_newest_checkpoints(
    keep: int, remaining: list[int], tmp_path: Path
) -> None:
    for step in (9, 100, 11, 1000):
        save_checkpoint(tmp_path, step)

    prune(tmp_path, keep, verified=checkpoints(tmp_path))

    assert steps_in(tmp_path) == remaining
    assert [*tmp_path.glob(".tmp-*")] == []


def test_a_file_that_cannot_be_deleted_does_not_stop_the_pruning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step)

    def fail(*_: object, **__: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "unlink", fail)
    prune(tmp_path, keep=2, verified=[])

    assert steps_in(tmp_path) == [20, 30]
