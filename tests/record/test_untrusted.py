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
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_utils
from transformers.integrations import hub_kernels

from llmtrain.commands.eval import _answers_path
from llmtrain.data.tokenizer import as_pretrained, load_tokenizer, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.files import digest
from llmtrain.models.adapters import adapted_model, merged_model
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.generation import TextModel
from llmtrain.models.gpt import GPT
from llmtrain.models.hub_models import load_causal_lm, origin_of
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.ranks import Ranks
from llmtrain.record import checkpoint
from llmtrain.record.checkpoint import find_fault, newest_valid
from llmtrain.record.resume import choose_folder
from llmtrain.record.saver import Saver, write_model
from llmtrain.record.state_tree import FlatState
from llmtrain.record.tensor_files import read_tensors
from tests.launching import bound, read_json
from tests.models.some_rows import SomeRows
from tests.record.test_checkpoint import Files

CORRUPTIONS = int(os.environ.get("LLMTRAIN_CORRUPTIONS", "88"))


def save(folder: Path, step: int, fingerprint: str = "ours") -> Path:
    weights = {"w": torch.full((300,), float(step))}
    state = {"step": step, "fingerprint_sha256": fingerprint}
    Saver(folder, Files(), keep=3).save(
        step,
        weights,
        {"optimizer": FlatState({}, {"w.exp_avg": weights["w"]})},
        state,
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
    write_model(folder, ModelFiles(model.hf_config(0), words), model.state_dict())
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
    ranks = Ranks(Accelerator(cpu=True))
    paths = set()
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / "models--org--model" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (tmp_path / "models--org--model" / "refs" / "main").write_text(commit)
        assert origin_of("org/model") == {"name": "org/model", "commit": commit}
        paths.add(_answers_path("org/model", arguments, {}, ranks))  # type: ignore[arg-type]
    assert len(paths) == 2
    with pytest.raises(UserError, match="org/absent is no folder, and the hub did not provide it"):
        _answers_path("org/absent", arguments, {}, ranks)  # type: ignore[arg-type]


def test_a_folder_with_pickles_alone_is_refused_by_name(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    torch.save({}, model_folder / "pytorch_model.bin")
    for load in (TextModel, load_causal_lm):
        with pytest.raises(
            UserError, match=r"as a pickle \(pytorch_model\.bin\), which can run code"
        ):
            load(str(model_folder))


@pytest.fixture
def pickled_adapter(model_folder: Path, tmp_path: Path) -> Path:
    """An adapter whose weights are a pickle, next to a safetensors file that nobody loads."""
    peft = pytest.importorskip("peft", reason="needs peft, which comes with the extra lora")
    folder = tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(base, settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").rename(folder / "other.safetensors")
    return folder


def merged(name: str) -> str:
    return merged_model(Path(name))


@pytest.mark.parametrize(
    "load",
    [TextModel, load_causal_lm, lambda name: adapted_model(name, 1), merged],
    ids=["text", "model", "adapter", "merged"],
)
def test_an_adapter_stored_as_a_pickle_is_refused_whatever_is_next_to_it(
    load: Callable[[str], Any], pickled_adapter: Path
) -> None:
    with pytest.raises(UserError, match=r"as a pickle \(adapter_model\.bin\)"):
        load(str(pickled_adapter))
    (pickled_adapter / "other.safetensors").rename(pickled_adapter / "adapter_model.safetensors")
    assert load(str(pickled_adapter))


def test_an_adapter_of_the_hub_stored_as_a_pickle_is_refused(pickled_adapter: Path) -> None:
    commit = "0" * 40
    repository = Path(HF_HUB_CACHE, "models--someone--adapter")
    snapshot = repository / "snapshots" / commit
    shutil.copytree(pickled_adapter, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    try:
        with pytest.raises(UserError, match=r"as a pickle \(adapter_model\.bin\)"):
            load_causal_lm("someone/adapter")
        (snapshot / "other.safetensors").rename(snapshot / "adapter_model.safetensors")
        assert load_causal_lm("someone/adapter")
    finally:
        shutil.rmtree(repository)


@pytest.mark.parametrize(
    "attention", ["someone/kernel", "someone/kernel@v1:forward", {"": "someone/kernel"}]
)
def test_a_model_cannot_ask_for_an_attention_that_is_a_program_on_the_hub(
    attention: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: pytest.fail("it was loaded"))
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    path = model_folder / "config.json"
    path.write_text(json.dumps(read_json(path) | {"attn_implementation": attention}))
    for load in (TextModel, load_causal_lm, train):
        with pytest.raises(UserError, match=r"someone/kernel.*, a program on the hub"):
            load(str(model_folder))
    train(str(model_folder), attn_implementation="sdpa")


def train(name: str, **settings: Any) -> dict[str, Any]:
    config = ModelConfig(name, max_length=8, **settings)
    rows = SomeRows(AutoTokenizer.from_pretrained(name))
    return load_model(config, None, rows, 3, "no").start or {}


def test_an_attention_of_the_hub_needs_trust_and_a_commit_which_is_in_the_fingerprint(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = f"someone/kernel@{'5c' * 20}"
    with pytest.raises(UserError, match=r"someone/kernel is a program .* --trust_remote_code"):
        train(str(model_folder), attn_implementation="someone/kernel")
    for name in ("someone/kernel", "someone/kernel@main", "someone/kernel:forward"):
        with pytest.raises(UserError, match=r"name its commit.* ORG/NAME@COMMIT"):
            train(str(model_folder), attn_implementation=name, trust_remote_code=True)

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda *_, **__: None)
    start = train(str(model_folder), attn_implementation=commit, trust_remote_code=True)
    assert start["attention"] == commit
