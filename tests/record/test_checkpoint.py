import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import TensorConverter
from llmtrain.record import checkpoint, saver, tensor_files
from llmtrain.record.checkpoint import checkpoints, find_fault, newest_valid, path_of, prune
from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState
from llmtrain.record.tensor_files import read_tensors, unchanged
from llmtrain.training.optim import make_optimizer
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.settings import OptimConfig


class Files:
    """The files of a model folder, for no kind of model."""

    weights_name = "model.safetensors"
    may_split_weights = True

    def write(self, folder: Path, parameters: int) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")

    def tensors(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return model.state_dict()

    export_tensors = tensors

    def finished(self, dtype: str) -> "Files":
        return self

    def tensor_converter(self, model: torch.nn.Module) -> TensorConverter:
        return unchanged


def save(folder: Path, step: int) -> Path:
    weights = {"w": torch.full((64,), float(step))}
    moments = {"w.exp_avg": weights["w"] * 2}
    states = {"optimizer": FlatState({}, moments)}
    Saver(folder, Files(), keep=100).save(step, weights, states, {"step": step})
    return path_of(folder, step)


def test_a_checkpoint_gives_back_what_was_saved_and_has_a_hash_for_every_file(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, 7)
    assert path.name == "step-00000007"
    assert find_fault(path) is None
    assert float(dict(read_tensors(path / "model"))["w"][0]) == 7
    assert float(dict(read_tensors(path / "optimizer"))["w.exp_avg"][0]) == 14
    assert checkpoint.read_state(path)["step"] == 7
    manifest = json.loads((path / "MANIFEST.json").read_text())
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == files - {"MANIFEST.json"}
    assert not list(tmp_path.glob(".tmp-*"))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


DAMAGE = {
    "a flipped bit in the weights": lambda p: flip(p / "model/model.safetensors"),
    "a flipped bit in the optimizer": lambda p: flip(p / "optimizer/state.safetensors"),
    "a truncated file": lambda p: (p / "model/model.safetensors").write_bytes(b""),
    "a missing file": lambda p: (p / "state.json").unlink(),
    "a missing manifest": lambda p: (p / "MANIFEST.json").unlink(),
    "a manifest that is not JSON": lambda p: (p / "MANIFEST.json").write_text("{"),
    "a manifest that is a list": lambda p: (p / "MANIFEST.json").write_text("[]"),
    "a file that nobody wrote": lambda p: (p / "model/extra.bin").write_bytes(b"x"),
    "a link in a file's place": lambda p: (
        shutil.copy(p / "state.json", p.parent / "elsewhere.json"),
        (p / "state.json").unlink(),
        (p / "state.json").symlink_to(p.parent / "elsewhere.json"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    assert newest_valid(tmp_path) == newer
    DAMAGE[damage](newer)
    assert newest_valid(tmp_path) == older
    assert checkpoints(tmp_path) == [older, newer], "what is not ours is left alone"
    assert newest_valid(tmp_path, set_aside=True) == older
    assert checkpoints(tmp_path) == [older]
    assert (tmp_path / "damaged-step-00000020").is_dir()
    assert "step-00000020 is damaged" in capsys.readouterr().out


def test_where_all_are_damaged_the_run_stops_rather_than_start_afresh(tmp_path: Path) -> None:
    flip(save(tmp_path, 10) / "model/model.safetensors")
    for _ in range(2):  # the second time too, when the damaged one has been set aside
        with pytest.raises(UserError, match=r"no checkpoint in .* is intact"):
            newest_valid(tmp_path, set_aside=True)


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "none") is None


@pytest.mark.parametrize("where", ["write_tensors", "write_hashed"])
def test_a_write_that_fails_leaves_what_was_there(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = save(tmp_path, 10)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver, where, full)
    with pytest.raises(UserError, match=r"could not be written.*No space left.*untouched"):
        save(tmp_path, 20)
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    assert find_fault(kept) is None


def test_pruning_keeps_the_newest_and_never_fewer_than_two(tmp_path: Path) -> None:
    for step in (9, 100, 11, 1000):
        save(tmp_path, step)
    prune(tmp_path, 3, checkpoints(tmp_path))
    assert [int(p.name[5:]) for p in checkpoints(tmp_path)] == [11, 100, 1000]
    prune(tmp_path, 1, checkpoints(tmp_path))
    assert [int(p.name[5:]) for p in checkpoints(tmp_path)] == [100, 1000]
    assert not list(tmp_path.glob(".tmp-*"))


def test_pruning_deletes_a_checkpoint_although_an_earlier_start_left_half_of_it(
    tmp_path: Path,
) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    leftover = tmp_path / ".tmp-doomed-step-00000010" / "model"
    leftover.mkdir(parents=True)

    prune(tmp_path, 2, [])

    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000020", "step-00000030"]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_optimizer_goes_on_bit_for_bit_by_name(kind: str, accelerator: Accelerator) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return model, make_optimizer(accelerator, model, OptimConfig(optim=kind, learning_rate=0.1))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
        for i in range(times):
            optimizer.zero_grad()
            model(torch.arange(4.0) + i).square().sum().backward()
            optimizer.step()

    straight, optimizer = make()
    step(straight, optimizer, 3)
    structure, tensors = OptimizerState(straight, optimizer).flatten()
    of_matrices = {"adamw": {"exp_avg", "exp_avg_sq", "step"}, "muon": {"momentum_buffer"}}[kind]
    assert {f"0.weight.{key}" for key in of_matrices} < set(tensors)
    assert {"0.bias.exp_avg", "0.bias.exp_avg_sq", "0.bias.step"} < set(tensors)
    other, restored = make()
    other.load_state_dict(straight.state_dict())
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    OptimizerState(other, restored).restore(structure, copies.items())
    step(straight, optimizer, 2)
    step(other, restored, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(straight.parameters(), other.parameters(), strict=True)
    )
    forgetful, fresh = make()
    forgetful.load_state_dict(other.state_dict())
    step(straight, optimizer, 1)
    step(forgetful, fresh, 1)
    assert not all(
        torch.equal(a, b)
        for a, b in zip(straight.parameters(), forgetful.parameters(), strict=True)
    )


def test_too_little_space_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = save(tmp_path, 10)
    monkeypatch.setattr(
        saver.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30, 2**20)
    )
    monkeypatch.setattr(saver, "write_tensors", lambda *_: pytest.fail("begun all the same"))
    with pytest.raises(
        UserError,
        match=r"16\.\d MiB are needed and 1\.00 MiB are free on that disk\); older checkpoints",
    ):
        save(tmp_path, 20)
    assert checkpoints(tmp_path) == [kept]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize("on_host", [(), (3,), (0, 2)])
def test_bytes_that_are_staged_are_the_same(
    size: int, on_host: tuple[int, ...], monkeypatch
) -> None:
    monkeypatch.setattr(tensor_files, "_STAGE_BYTES", 64)
    given = [torch.arange(count, dtype=torch.int64).to(torch.uint8) for count in (size, 3, size, 5)]
    staged = {id(tensor) for i, tensor in enumerate(given) if i not in on_host}
    found = tensor_files._bytes_of(iter(given), is_staged=lambda tensor: id(tensor) in staged)
    assert b"".join(map(bytes, found)) == b"".join(tensor.numpy().tobytes() for tensor in given)
