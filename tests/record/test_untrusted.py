"""Damage is noticed, wherever it falls; and nothing that is read is run."""

import contextlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.commands.eval import _answers_path
from llmtrain.data.tokenizer import as_pretrained, load_tokenizer, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.generation import TextModel
from llmtrain.models.gpt import GPT
from llmtrain.models.hub_safety import load_causal_lm, origin_of
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.record import checkpoint
from llmtrain.record.checkpoint import find_fault, newest_valid
from llmtrain.record.provenance import digest
from llmtrain.record.resume import choose_folder
from llmtrain.record.saver import Saver
from llmtrain.record.tensors import read_tensors
from tests.launching import bound
from tests.record.test_checkpoint import Files

CORRUPTIONS = int(os.environ.get("LLMTRAIN_CORRUPTIONS", "88"))


def save(folder: Path, step: int, fingerprint: str = "ours") -> Path:
    weights = {"w": torch.full((300,), float(step))}
    state = {"step": step, "fingerprint_sha256": fingerprint}
    Saver(folder, Files(), keep=3).save(
        step,
        DistributedTensors(weights),
        DistributedTensors({"w.exp_avg": weights["w"]}),
        state,
        lambda: None,
    )
    return folder / f"step-{step:08d}"


def some_file(path: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(p for p in path.rglob("*") if p.is_file()))


def flip_a_bit(path: Path, draw: random.Random) -> None:
    file = some_file(path, draw)
    raw = bytearray(file.read_bytes())
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    file.write_bytes(raw)


def truncate(path: Path, draw: random.Random) -> None:
    file = some_file(path, draw)
    os.truncate(file, draw.randrange(file.stat().st_size))


def zero_a_block(path: Path, draw: random.Random) -> None:
    file = draw.choice([path / "model/model.safetensors", path / "optimizer/state.safetensors"])
    with file.open("r+b") as stream:
        stream.seek(200)
        stream.write(bytes(512))


def grow(path: Path, draw: random.Random) -> None:
    with some_file(path, draw).open("ab") as stream:
        stream.write(b"\0")


def remove(path: Path, draw: random.Random) -> None:
    some_file(path, draw).unlink()


def swap_in_the_older_ones(path: Path, draw: random.Random) -> None:
    name = draw.choice(
        ["model/model.safetensors", "optimizer/state.safetensors", "state.json", "MANIFEST.json"]
    )
    shutil.copy(path.with_name("step-00000010") / name, path / name)


def link(path: Path, draw: random.Random) -> None:
    file = some_file(path, draw)
    elsewhere = path.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def link_the_folder(path: Path, draw: random.Random) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere, target_is_directory=True)


def rename_the_older_one(path: Path, draw: random.Random) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000010"), path)


def another_runs(path: Path, draw: random.Random) -> None:
    shutil.rmtree(path)
    save(path.parent, 20, fingerprint="theirs")


def leave_the_folder(path: Path, draw: random.Random) -> None:
    """A manifest that names a file elsewhere, with its true hash."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    hashes = manifest["files"]
    name = draw.choice(sorted(hashes))
    outside = path.parent / "outside"
    (path / name).rename(outside)
    hashes[draw.choice(["../outside", str(outside)])] = hashes.pop(name)
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    flip_a_bit,
    truncate,
    zero_a_block,
    grow,
    remove,
    swap_in_the_older_ones,
    link,
    link_the_folder,
    rename_the_older_one,
    another_runs,
    leave_the_folder,
]


def test_every_corruption_is_detected_and_the_run_falls_back_or_stops(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    draw, fell_back, stopped = random.Random(CORRUPTIONS), 0, 0
    cannot_go_on = (
        r"no checkpoint in .* is intact|has format version"  # a flip in the version's digit
    )
    for i in range(CORRUPTIONS):
        folder = tmp_path / str(i)
        older, newer = save(folder, 10), save(folder, 20)
        damage = DAMAGES[i % len(DAMAGES)]
        damage(newer, draw)
        if i % 4 == 3:
            flip_a_bit(older, draw)
            with pytest.raises(UserError, match=cannot_go_on):
                newest_valid(folder, True, "ours")
            stopped += 1
            continue
        try:
            taken = newest_valid(folder, True, "ours")
        except UserError as error:
            if "MANIFEST.json has format version" not in str(error):
                raise
            stopped += 1
            continue
        assert taken == older, damage.__name__
        assert float(load_file(older / "model/model.safetensors")["w"][0]) == 10
        fell_back += 1
        shutil.rmtree(folder)
    kinds = f"{len(DAMAGES)} kinds; {fell_back} fell back, {stopped} stopped with a line"
    score(f"corruption: unnoticed: {bound(0, fell_back + stopped)} of {kinds}")


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.mark,))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    words = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 8)
    model = GPT(GPTConfig(1, 1, 8, 8), len(words))

    folder = tmp_path / "model"
    checkpoint.write_model(
        folder, ModelFiles(model.hf_config(0), words), DistributedTensors(model.state_dict())
    )
    return folder


def test_no_payload_in_a_file_that_is_read_is_run(
    model_folder: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    mark, planted = tmp_path / "executed", 0
    run = tmp_path / "run"
    save(run / "checkpoints", 10, digest({}))
    (run / "run.json").write_text(json.dumps({"run_id": "x", "fingerprint_sha256": digest({})}))
    (run / "status.json").write_text('{"state": "running"}')
    malice = pickle.dumps(Payload(mark))
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"

    def read_everything() -> None:
        for reader in (
            lambda: choose_folder(str(run), "auto", {}).__enter__(),
            lambda: find_fault(run / "checkpoints/step-00000010"),
            lambda: dict(read_tensors(run / "checkpoints/step-00000010/model")),
            lambda: dict(read_tensors(run / "checkpoints/step-00000010/optimizer")),
            lambda: checkpoint.read_state(run / "checkpoints/step-00000010"),
            lambda: TextModel(str(model_folder)),
            lambda: load_causal_lm(str(model_folder)),
            lambda: load_tokenizer(str(model_folder)),
        ):
            with contextlib.suppress(Exception):  # how it refuses is other tests' matter
                reader()
        for aside in (run / "checkpoints").glob("damaged-*"):
            aside.rename(run / "checkpoints/step-00000010")

    for file in [
        path for folder in (run, model_folder) for path in folder.rglob("*") if path.is_file()
    ]:
        kept = file.read_bytes()
        file.write_bytes(malice)
        read_everything()
        file.write_bytes(kept)
        planted += 1
    for name in (
        "pytorch_model.bin",
        "optimizer.bin",
        "random_states_0.pkl",
        "training_args.bin",
        "scheduler.pt",
    ):
        for folder in (model_folder, run / "checkpoints/step-00000010"):
            (folder / name).write_bytes(malice)
            read_everything()
            (folder / name).unlink()
            planted += 1
    (model_folder / "evil.py").write_text(code)
    config = json.loads((model_folder / "config.json").read_text())
    config |= {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "model_type": "evil",
    }
    (model_folder / "config.json").write_text(json.dumps(config))
    read_everything()
    assert not mark.exists()
    score(f"payloads: executed: {bound(0, planted + 1)} that were planted")

    pickle.loads(malice)  # it is one
    assert mark.exists()


def test_a_model_on_the_hub_is_known_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter of a hub model, and the answers of an interrupted eval, belong to one commit."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "models--org--model" / "refs").mkdir(parents=True)
    arguments = SimpleNamespace(tasks=["t"], include_path=None)
    accelerator = SimpleNamespace(num_processes=1, mixed_precision="no")
    paths = set()
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / "models--org--model" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (tmp_path / "models--org--model" / "refs" / "main").write_text(commit)
        assert origin_of("org/model") == {"name": "org/model", "commit": commit}
        paths.add(_answers_path("org/model", arguments, {}, accelerator))  # type: ignore[arg-type]
    assert len(paths) == 2
    with pytest.raises(UserError, match="org/absent is no folder, and the hub did not provide it"):
        _answers_path("org/absent", arguments, {}, accelerator)  # type: ignore[arg-type]


def test_a_folder_with_pickles_alone_is_refused_by_name(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    torch.save({}, model_folder / "pytorch_model.bin")
    for load in (TextModel, load_causal_lm):
        with pytest.raises(
            UserError, match=r"as a pickle \(pytorch_model\.bin\), which can run code"
        ):
            load(str(model_folder))
