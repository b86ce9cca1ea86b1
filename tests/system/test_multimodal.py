"""Multimodal checkpoints trained on text as whole runs: on one process, and on two with DDP and FSDP2.

What text does not reach is in the result, as it was in the base.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from llmtrain.record.tensor_files import read_tensors
from tests.forked import run_forked
from tests.launching import (
    BIN,
    FINETUNE,
    PREFERENCE,
    PYTHON,
    accelerate,
    long_form,
    read_json,
    run,
    series,
    torchrun,
    write_chats,
    write_pairs,
)
from tests.multimodal import CLASSES, PROCESSOR_FILES, write_checkpoint

FSDP2 = accelerate("fsdp2", "--mixed_precision", "no")
SETTINGS = ["--max_steps", "2", "--logging_steps", "1", "--global_batch_size", "4"]
SETTINGS += ["--max_length", "64", "--learning_rate", "1e-2", "--report_to", "none"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_chats(folder / "chats.jsonl")
    write_pairs(folder / "pairs.jsonl")
    return folder


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(request.param, tmp_path / "base")


@pytest.fixture
def train(base: Path, data: Path, tmp_path: Path) -> Callable[..., Path]:
    """Train the base, and return the run folder."""

    def train(name: str, *flags: str, launcher: list[str] = PYTHON, recipe: str = FINETUNE) -> Path:
        folder = tmp_path / name
        records = data / ("pairs.jsonl" if recipe == PREFERENCE else "chats.jsonl")
        command = [*launcher, recipe, "--model_name_or_path", str(base), "--dataset", str(records)]
        run_forked([*command, *SETTINGS, *flags, "--output_dir", str(folder)]).assert_ok()
        return folder

    return train


def interrupt_after_the_first_step(folder: Path) -> None:
    """Leave a run folder as a run that was killed in its second step leaves it."""
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints/step-00000002")
    status = read_json(folder / "status.json")
    (folder / "status.json").write_text(json.dumps({**status, "state": "running", "step": 1}))


def check_result(folder: Path, base: Path) -> None:
    """Check that a finished model has every tensor, and what text does not reach to the bit."""
    stored = dict(read_tensors(base))
    finished = dict(read_tensors(folder / "model"))
    assert finished.keys() == stored.keys()
    changed = {name for name in stored if not torch.equal(stored[name], finished[name])}
    assert changed
    assert not any("vision" in name or "visual" in name for name in changed)
    assert not any("projector" in name or name.startswith("mtp") for name in changed)

    own = transformers.AutoModelForImageTextToText.from_pretrained(base)
    again, info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder / "model", output_loading_info=True
    )
    assert type(again) is type(own)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name in PROCESSOR_FILES:
        assert (folder / "model" / name).read_text() == (base / name).read_text()


@pytest.mark.parametrize("base", ["Gemma3"], indirect=True)
def test_a_multimodal_model_is_trained_on_text_by_two_processes(
    train: Callable[..., Path], base: Path
) -> None:
    check_result(train("run", launcher=torchrun(2)), base)


def export(*arguments: str) -> None:
    run_forked([*PYTHON, "llmtrain/__main__.py", "export", *arguments]).assert_ok()


@long_form
@pytest.mark.parametrize("base", CLASSES, indirect=True)
def test_every_multimodal_class_is_the_same_run_on_any_layout(
    train: Callable[..., Path], base: Path, tmp_path: Path
) -> None:
    ddp = train("ddp", launcher=torchrun(2))
    fsdp = train("fsdp", "--save_steps", "1", launcher=FSDP2)
    for folder in (ddp, fsdp):
        check_result(folder, base)
    assert series(fsdp, "train/loss") == pytest.approx(series(ddp, "train/loss"), rel=1e-4)

    # A checkpoint holds only what is trained, and refers to the base.
    checkpoint = fsdp / "checkpoints/step-00000001/model"
    held = {name for name, _ in read_tensors(checkpoint)}
    assert not any("vision" in name or "visual" in name for name in held)
    exported = tmp_path / "exported/model"
    export(str(checkpoint), "--to", str(exported))
    check_result(exported.parent, base)

    # A run that was interrupted goes on, here on one process.
    finished = dict(read_tensors(fsdp / "model"))
    interrupt_after_the_first_step(fsdp)
    train("fsdp", "--save_steps", "1")
    check_result(fsdp, base)
    for name, tensor in read_tensors(fsdp / "model"):
        torch.testing.assert_close(tensor, finished[name], rtol=1e-2, atol=1e-3)


@long_form
@pytest.mark.parametrize("base", CLASSES, indirect=True)
def test_every_multimodal_class_takes_an_adapter_and_preferences(
    train: Callable[..., Path], base: Path, tmp_path: Path
) -> None:
    adapter = train("adapter", "--lora_r", "2", launcher=torchrun(2))
    names = {name for name, _ in read_tensors(adapter / "model")}
    assert not any("vision" in name or "visual" in name for name in names)
    merged = tmp_path / "merged/model"
    export(str(adapter), "--merge", "--check", "--to", str(merged))
    check_result(merged.parent, base)

    check_result(train("preferred", recipe=PREFERENCE), base)


@long_form
@pytest.mark.parametrize("base", ["Qwen3_5"], indirect=True)
def test_a_run_that_starts_from_a_checkpoint_has_all_of_the_base_and_writes_text(
    train: Callable[..., Path], base: Path
) -> None:
    first = train("first", "--save_steps", "1")
    checkpoint = str(first / "checkpoints/step-00000001")
    second = train("second", "--model_name_or_path", checkpoint)
    check_result(second, base)
    flags = ["--prompt", "a", "--max_new_tokens", "2"]
    run([f"{BIN}/llmtrain", "generate", str(second), *flags]).assert_ok()
