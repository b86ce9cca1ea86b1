"""Damage to a checkpoint is always noticed, and no file that is read can run code."""

import contextlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    modeling_utils,
)
from transformers.integrations import hub_kernels

from llmtrain.data.config import DataConfig
from llmtrain.data.tokenizer import (
    as_pretrained,
    load_tokenizer,
    stop_token_ids_of,
    train_tokenizer,
)
from llmtrain.errors import UserError
from llmtrain.files import digest
from llmtrain.model_folders import tokenizer_of
from llmtrain.models.adapters import adapted_model, merged_model
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.generation import TextModel
from llmtrain.models.gpt import GPT
from llmtrain.models.hub_models import load_pretrained
from llmtrain.models.pretrained import load_model
from llmtrain.record.checkpoint import find_fault, newest_valid, read_state
from llmtrain.record.resume import choose_folder
from llmtrain.record.saver import write_model
from llmtrain.record.tensor_files import read_tensors
from llmtrain.training.rows import tokenize
from tests.failing_calls import logging_calls, needs_failing_calls
from tests.forked import run_forked
from tests.launching import PYTHON, bound, read_json
from tests.models.small_models import tiny_llama
from tests.models.some_rows import SomeRows
from tests.record.checkpoint_files import save_checkpoint

CORRUPTIONS = int(os.environ.get("LLMTRAIN_CORRUPTIONS", "88"))


# Damaged checkpoints. Each function damages one, next to which there is that of step 10.


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip_a_bit(checkpoint: Path, draw: random.Random) -> None:
    file = draw.choice(files_in(checkpoint))
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def truncate(checkpoint: Path, draw: random.Random) -> None:
    file = draw.choice(files_in(checkpoint))
    os.truncate(file, draw.randrange(file.stat().st_size))


def zero_a_block(checkpoint: Path, draw: random.Random) -> None:
    name = draw.choice(["model/model.safetensors", "optimizer/state.safetensors"])
    with (checkpoint / name).open("r+b") as file:
        file.seek(200)
        file.write(bytes(512))


def append_a_byte(checkpoint: Path, draw: random.Random) -> None:
    with draw.choice(files_in(checkpoint)).open("ab") as file:
        file.write(b"\0")


def delete_a_file(checkpoint: Path, draw: random.Random) -> None:
    draw.choice(files_in(checkpoint)).unlink()


def take_a_file_of_the_older_one(checkpoint: Path, draw: random.Random) -> None:
    tensor_files = ["model/model.safetensors", "optimizer/state.safetensors"]
    name = draw.choice([*tensor_files, "state.json", "MANIFEST.json"])
    shutil.copy(checkpoint.with_name("step-00000010") / name, checkpoint / name)


def link_a_file(checkpoint: Path, draw: random.Random) -> None:
    file = draw.choice(files_in(checkpoint))
    target = checkpoint.with_name("elsewhere")
    file.rename(target)
    file.symlink_to(target)


def link_the_folder(checkpoint: Path, draw: random.Random) -> None:
    target = checkpoint.with_name("elsewhere")
    checkpoint.rename(target)
    checkpoint.symlink_to(target, target_is_directory=True)


def copy_the_older_one(checkpoint: Path, draw: random.Random) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("step-00000010"), checkpoint)


def take_the_checkpoint_of_another_run(checkpoint: Path, draw: random.Random) -> None:
    shutil.rmtree(checkpoint)
    save_checkpoint(checkpoint.parent, 20, fingerprint="of another run")


def move_a_file_out_of_the_folder(checkpoint: Path, draw: random.Random) -> None:
    """The manifest names the file in its new place, with its true hash."""
    manifest = read_json(checkpoint / "MANIFEST.json")
    hashes = manifest["files"]
    name = draw.choice(sorted(hashes))
    outside = checkpoint.with_name("outside")
    (checkpoint / name).rename(outside)
    new_name = draw.choice(["../outside", str(outside)])
    hashes[new_name] = hashes.pop(name)
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    flip_a_bit,
    truncate,
    zero_a_block,
    append_a_byte,
    delete_a_file,
    take_a_file_of_the_older_one,
    link_a_file,
    link_the_folder,
    copy_the_older_one,
    take_the_checkpoint_of_another_run,
    move_a_file_out_of_the_folder,
]


def newest_of_ours(folder: Path) -> Path | None:
    return newest_valid(folder, set_aside=True, fingerprint="ours")


def test_every_damage_is_noticed_and_the_run_falls_back_or_stops(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    """In every fourth case the older checkpoint is damaged, too, so that the run stops."""
    draw = random.Random(CORRUPTIONS)
    fell_back = 0
    stopped = 0
    # A flipped bit may change the digit of the format version.
    other_version = "has format version"
    for case in range(CORRUPTIONS):
        folder = tmp_path / str(case)
        older = save_checkpoint(folder, 10, fingerprint="ours")
        newer = save_checkpoint(folder, 20, fingerprint="ours")
        damage = DAMAGES[case % len(DAMAGES)]
        damage(newer, draw)

        if case % 4 == 3:
            flip_a_bit(older, draw)
            no_intact_one = "no checkpoint in .* is intact"
            with pytest.raises(UserError, match=f"{no_intact_one}|{other_version}"):
                newest_of_ours(folder)
            stopped += 1
            continue

        try:
            resumed = newest_of_ours(folder)
        except UserError as error:
            if f"MANIFEST.json {other_version}" not in str(error):
                raise
            stopped += 1
        else:
            assert resumed == older, damage.__name__
            weights = load_file(older / "model/model.safetensors")
            assert weights["w"].unique().tolist() == [10]
            fell_back += 1
            shutil.rmtree(folder)

    assert fell_back > CORRUPTIONS / 2
    cases = f"{len(DAMAGES)} kinds; {fell_back} fell back, {stopped} stopped with a line"
    score(f"corruption: unnoticed: {bound(0, fell_back + stopped)} of {cases}")


# --- files that would run code


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.mark,))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 8)
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8)
    model = GPT(config, len(tokenizer))

    folder = tmp_path / "model"
    write_model(folder, ModelFiles(model.hf_config(0), tokenizer), model.state_dict())
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """An unfinished run with one checkpoint."""
    folder = tmp_path / "run"
    fingerprint = digest({})
    save_checkpoint(folder / "checkpoints", 10, fingerprint=fingerprint)
    record = {"run_id": "x", "fingerprint_sha256": fingerprint}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "status.json").write_text('{"state": "running"}')
    return folder


def resume(run_folder: Path) -> None:
    with choose_folder(str(run_folder), "auto", {}):
        pass


def read_everything(run_folder: Path, model_folder: Path) -> None:
    """Call everything that reads a run or a model. Errors do not matter."""
    checkpoint = run_folder / "checkpoints/step-00000010"
    readers = [
        lambda: resume(run_folder),
        lambda: find_fault(checkpoint),
        lambda: [*read_tensors(checkpoint / "model")],
        lambda: [*read_tensors(checkpoint / "optimizer")],
        lambda: read_state(checkpoint),
        lambda: TextModel(str(model_folder)),
        lambda: load_pretrained(str(model_folder)),
        lambda: load_tokenizer(str(model_folder)),
        lambda: tokenize(DataConfig(dataset=[str(model_folder)], tokenizer="byte"), 8),
    ]
    for reader in readers:
        with contextlib.suppress(Exception):
            reader()

    for damaged in checkpoint.parent.glob("damaged-*"):
        damaged.rename(checkpoint)


def test_no_code_in_a_file_of_a_run_or_a_model_is_run(
    run_folder: Path, model_folder: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    mark = tmp_path / "executed"
    payload = pickle.dumps(Payload(mark))
    payloads = 0

    # Pickles instead of each file.
    for file in files_in(run_folder) + files_in(model_folder):
        content = file.read_bytes()
        file.write_bytes(payload)
        read_everything(run_folder, model_folder)
        file.write_bytes(content)
        payloads += 1

    # Pickles under names that other programs use.
    names = [
        "pytorch_model.bin",
        "optimizer.bin",
        "random_states_0.pkl",
        "training_args.bin",
        "scheduler.pt",
    ]
    for folder in (model_folder, run_folder / "checkpoints/step-00000010"):
        for name in names:
            (folder / name).write_bytes(payload)
            read_everything(run_folder, model_folder)
            (folder / name).unlink()
            payloads += 1

    # A module that the config of a model asks for.
    (model_folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    config = read_json(model_folder / "config.json")
    config["model_type"] = "evil"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (model_folder / "config.json").write_text(json.dumps(config))
    read_everything(run_folder, model_folder)
    payloads += 1

    # A module that the settings of a tokenizer ask for, and one with the name of a data set.
    settings = read_json(model_folder / "tokenizer_config.json")
    settings["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    (model_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(model_folder / "evil.py", model_folder / "model.py")
    read_everything(run_folder, model_folder)
    payloads += 1

    assert not mark.exists()
    score(f"payloads: executed: {bound(0, payloads)} that were planted")

    pickle.loads(payload)
    assert mark.exists(), "the payload does nothing"


@pytest.mark.parametrize("load", [TextModel, load_pretrained])
def test_a_model_stored_as_a_pickle_is_refused_with_the_name_of_the_file(
    load: Callable[[str], Any], model_folder: Path
) -> None:
    (model_folder / "model.safetensors").unlink()
    torch.save({}, model_folder / "pytorch_model.bin")

    message = r"as a pickle \(pytorch_model\.bin\), which can run code"
    with pytest.raises(UserError, match=message):
        load(str(model_folder))

    # transformers reads this file with a Qwen2.5-Omni, whatever the weights are stored in.
    (model_folder / "pytorch_model.bin").rename(model_folder / "spk_dict.pt")
    with pytest.raises(UserError, match=r"as a pickle \(spk_dict\.pt\)"):
        load(str(model_folder))


@pytest.fixture
def pickled_adapter(model_folder: Path, tmp_path: Path) -> Path:
    """An adapter whose weights are a pickle. Its safetensors file has a name that nothing loads."""
    peft = pytest.importorskip("peft", reason="needs peft, which comes with the extra lora")
    folder = tmp_path / "adapter"
    base_model = AutoModelForCausalLM.from_pretrained(model_folder)
    settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(base_model, settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)

    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").rename(folder / "other.safetensors")
    return folder


def use_safetensors(adapter: Path) -> None:
    """Give the safetensors file of an adapter its usual name."""
    (adapter / "other.safetensors").rename(adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(TextModel, id="text"),
        pytest.param(load_pretrained, id="model"),
        pytest.param(lambda name: adapted_model(Path(name), 1), id="adapter"),
        pytest.param(lambda name: merged_model(Path(name)), id="merged"),
    ],
)
def test_an_adapter_stored_as_a_pickle_is_refused_whatever_is_next_to_it(
    load: Callable[[str], Any], pickled_adapter: Path
) -> None:
    with pytest.raises(UserError, match=r"as a pickle \(adapter_model\.bin\)"):
        load(str(pickled_adapter))

    use_safetensors(pickled_adapter)
    assert load(str(pickled_adapter))


@contextlib.contextmanager
def on_hub(folder: Path) -> Iterator[Path]:
    """Put a copy of a folder into the cache of the hub, as someone/something, and return it."""
    commit = "0" * 40
    repository = Path(HF_HUB_CACHE, "models--someone--something")
    snapshot = repository / "snapshots" / commit
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    try:
        yield snapshot
    finally:
        shutil.rmtree(repository)


def test_an_adapter_on_the_hub_stored_as_a_pickle_is_refused(pickled_adapter: Path) -> None:
    with on_hub(pickled_adapter) as snapshot:
        with pytest.raises(UserError, match=r"as a pickle \(adapter_model\.bin\)"):
            load_pretrained("someone/something")

        use_safetensors(snapshot)
        assert load_pretrained("someone/something")


# --- names of files in a model folder


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(read_json(path) | entries))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of honest models, and copies that name other files.

    These files are in the folder ``outside``, or are pickles in the folder of the model.
    """
    peft = pytest.importorskip("peft", reason="needs peft, which comes with the extra lora")
    parent = tmp_path_factory.mktemp("folders")
    honest = parent / "honest"
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama())
    model.save_pretrained(honest, max_shard_size="60KB")
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 8)
    tokenizer.save_pretrained(honest)

    outside = parent / "outside"
    model.save_pretrained(outside)
    torch.save(model.state_dict(), outside / "weights.bin")
    shutil.copy(honest / "tokenizer.json", outside / "tokenizer.1.0.json")

    weight_map = read_json(honest / "model.safetensors.index.json")["weight_map"]
    for name, file in {
        "index-parent": "../outside/model.safetensors",
        "index-absolute": str(outside / "model.safetensors"),
        "index-pickle": "weights.bin",
    }.items():
        folder = shutil.copytree(honest, parent / name)
        shutil.copy(outside / "weights.bin", folder)
        index = folder / "model.safetensors.index.json"
        change(index, weight_map=dict.fromkeys(weight_map, file))

    folder = shutil.copytree(honest, parent / "config-pickle")
    shutil.copy(outside / "weights.bin", folder / "adapter_model.bin")
    change(folder / "config.json", transformers_weights="adapter_model.bin")
    folder = shutil.copytree(honest, parent / "tokenizer-version")
    names = ["../outside/tokenizer.1.0.json"]
    change(folder / "tokenizer_config.json", fast_tokenizer_files=names)
    folder = shutil.copytree(honest, parent / "tokenizer-vocabulary")
    (folder / "tokenizer.json").unlink()
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="BertTokenizer",
        vocab=str(outside / "tokenizer.1.0.json"),
    )

    settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    honest_adapter = parent / "honest-adapter"
    peft.get_peft_model(model, settings).save_pretrained(honest_adapter)
    tokenizer.save_pretrained(honest_adapter)
    change(honest_adapter / "adapter_config.json", base_model_name_or_path=str(honest))
    # A base that is an adapter itself, of a base that leaves its folder.
    base = shutil.copytree(honest_adapter, parent / "adapter-base")
    change(base / "adapter_config.json", base_model_name_or_path=str(parent / "index-parent"))
    prompt: dict[str, Any] = {"num_virtual_tokens": 2, "token_dim": 32, "num_layers": 2}
    for name, entries in {
        "adapter-of-adapter": {"base_model_name_or_path": str(base)},
        "adapter-mixture": {"peft_type": "XLORA", "adapters": {"a": str(outside)}},
        "adapter-shadow": {"peft_type": "SHADOW", "shadow_model": str(outside)},
        "adapter-prompt": {
            "peft_type": "MULTITASK_PROMPT_TUNING",
            "prompt_tuning_init": "ONLY_SOURCE_SHARED",
            "prompt_tuning_init_state_dict_path": str(outside / "weights.bin"),
            **prompt,
        },
    }.items():
        folder = shutil.copytree(honest_adapter, parent / name)
        change(folder / "adapter_config.json", **entries)
    return parent


@needs_failing_calls
def test_no_file_outside_a_model_folder_and_no_pickle_is_opened(
    folders: Path, tmp_path: Path
) -> None:
    """Each way to load each folder ends in one line, unless the folder is honest."""
    names = sorted(folder.name for folder in folders.iterdir() if folder.name != "outside")
    log = tmp_path / "calls"
    result = run_forked(
        [*PYTHON, "tests/record/untrusted_loads.py", *(str(folders / name) for name in names)],
        env=logging_calls(str(folders), log),
    ).assert_ok()

    opened = log.read_text().splitlines()
    assert any("honest/model-00001" in call for call in opened)
    assert [call for call in opened if "/outside/" in call or call.endswith(".bin")] == []

    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("[")]
    assert {name for name, _, _ in lines} == {*names}
    for name, load, outcome in lines:
        only_reads_tokenizer = load in ("tokenizer", "rows") and name.startswith("index")
        is_harmless = name.startswith("honest") or only_reads_tokenizer
        # `load_pretrained` also raises the errors of transformers.
        pattern = "loaded" if is_harmless else f"(UserError|ValueError): .*{folders}"
        assert re.match(pattern, outcome), (name, load, outcome)


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (TextModel, "index-absolute", "is no safetensors file of its folder"),
        (load_pretrained, "index-pickle", "is no safetensors file of its folder"),
        (tokenizer_of, "tokenizer-vocabulary", "the entry vocab names other files"),
        (load_tokenizer, "tokenizer-version", "the entry fast_tokenizer_files names other files"),
    ],
)
def test_a_model_on_the_hub_that_names_other_files_is_refused(
    load: Callable[[str], Any], name: str, message: str, folders: Path
) -> None:
    with on_hub(folders / name), pytest.raises(UserError, match=message):
        load("someone/something")


# --- kernels on the hub


def model_to_train(name: str, **settings: Any) -> dict[str, Any]:
    """Load a model for training, and return what a fingerprint says of its initial weights."""
    config = ModelConfig(name, max_length=8, **settings)
    rows = SomeRows(AutoTokenizer.from_pretrained(name))
    bundle = load_model(config, lora=None, rows=rows, seed=3, precision="no")
    return bundle.start or {}


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param("someone/kernel", id="name"),
        pytest.param("someone/kernel@v1:forward", id="name, version and function"),
        pytest.param({"": "someone/kernel"}, id="dictionary"),
    ],
)
def test_a_model_whose_config_asks_for_a_kernel_on_the_hub_is_refused(
    attention: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hub_kernels, "get_kernel", lambda *_, **__: pytest.fail("the kernel is loaded")
    )
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    config = model_folder / "config.json"
    config.write_text(json.dumps(read_json(config) | {"attn_implementation": attention}))

    for load in (TextModel, load_pretrained, model_to_train):
        with pytest.raises(UserError, match=r"someone/kernel.*, a program on the hub"):
            load(str(model_folder))

    model_to_train(str(model_folder), attn_implementation="sdpa")


@pytest.mark.parametrize(
    ("kernel", "trust_remote_code", "message"),
    [
        ("someone/kernel", False, r"someone/kernel is a program .* --trust_remote_code"),
        ("someone/kernel", True, "name its commit.* ORG/NAME@COMMIT"),
        ("someone/kernel@main", True, "name its commit.* ORG/NAME@COMMIT"),
    ],
)
def test_a_kernel_on_the_hub_is_refused_without_trust_or_a_commit(
    kernel: str, trust_remote_code: bool, message: str, model_folder: Path
) -> None:
    with pytest.raises(UserError, match=message):
        model_to_train(
            str(model_folder), attn_implementation=kernel, trust_remote_code=trust_remote_code
        )


def test_the_commit_of_a_trusted_kernel_is_in_the_fingerprint(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda *_, **__: None)
    kernel = f"someone/kernel@{'5c' * 20}"

    start = model_to_train(str(model_folder), attn_implementation=kernel, trust_remote_code=True)

    assert start["attention"] == kernel


# --- generation_config.json


@pytest.mark.parametrize(
    "content",
    [
        pytest.param('{"eos_token_id": "x"}', id="text"),
        pytest.param('{"eos_token_id": {"a": 1}}', id="object"),
        pytest.param('{"eos_token_id": [1, [2]]}', id="list in a list"),
        pytest.param('{"eos_token_id": 1.5}', id="fraction"),
        pytest.param('{"eos_token_id": true}', id="boolean"),
        pytest.param("[3]", id="no object"),
        pytest.param("{", id="no JSON"),
        pytest.param('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}", id="deep"),
    ],
)
@pytest.mark.parametrize(
    "load",
    [TextModel, load_pretrained, model_to_train, stop_token_ids_of],
    ids=lambda f: f.__name__,
)
def test_a_wrong_generation_config_is_refused_by_name(
    load: Callable[[str], Any], content: str, model_folder: Path
) -> None:
    (model_folder / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"^\S*/generation_config.json(: eos_token_id)? is "):
        load(str(model_folder))


@pytest.mark.parametrize("value", [None, 5, [5], [3, 5]])
def test_the_tokens_at_which_a_model_stops_are_those_of_transformers(
    value: object, model_folder: Path
) -> None:
    path = model_folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": value, "temperature": 0.5}))

    of_transformers = GenerationConfig.from_pretrained(model_folder).eos_token_id
    expected = of_transformers if isinstance(of_transformers, list) else [of_transformers]
    assert stop_token_ids_of(str(model_folder)) == [token for token in expected if token]
    assert TextModel(str(model_folder)).stop_token_ids == {*expected, 0} - {None}
