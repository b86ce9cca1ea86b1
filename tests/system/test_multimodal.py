"""Whole runs that train multimodal checkpoints on text: on one process, and on two.

The finished model has the weights that text does not reach, as they were in the base.
"""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from llmtrain.record.tensor_files import read_tensors
from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    PYTHON,
    accelerate,
    long_form,
    make_look_killed,
    series,
    torchrun,
    write_chats,
)
from tests.multimodal import PROCESSOR_FILES, write_checkpoint

FSDP2 = accelerate("fsdp2")
FLAGS = (
    "--max_steps 2 --logging_steps 1 --global_batch_size 4 --max_length 64 --learning_rate 1e-2 "
    "--report_to none"
)


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny checkpoint of the class in ``request.param``."""
    return write_checkpoint(request.param, tmp_path / "base")


@pytest.fixture
def train(base: Path, tmp_path: Path) -> Callable[..., Path]:
    """Train the base, and return the run folder."""
    chats = write_chats(tmp_path / "chats.jsonl")

    def train(name: str, flags: str = "", launcher: list[str] = PYTHON) -> Path:
        folder = tmp_path / name
        flags = (
            f"--model_name_or_path {base} --dataset {chats} {FLAGS} {flags} --output_dir {folder}"
        )
        run_forked([*launcher, FINETUNE, *shlex.split(flags)]).assert_ok()
        return folder

    return train


def export(flags: str) -> None:
    run_forked([*PYTHON, "llmtrain/__main__.py", "export", *shlex.split(flags)]).assert_ok()


def is_of_images(name: str) -> bool:
    return "vision" in name or "visual" in name


def is_outside_text(name: str) -> bool:
    """Return whether text does not reach a tensor. The class ignores those of ``mtp``."""
    return is_of_images(name) or "projector" in name or name.startswith("mtp")


def check_finished_model(folder: Path, base: Path) -> None:
    """Check that a model has all tensors of its base, and that only text changed some.

    The names in an exported checkpoint are those of the class, not those of published files.
    """
    base_model = transformers.AutoModelForImageTextToText.from_pretrained(base)
    model, loading_info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder / "model", output_loading_info=True
    )
    assert type(model) is type(base_model)
    weights = model.state_dict()
    changed = {
        name for name, old in base_model.state_dict().items() if not torch.equal(old, weights[name])
    }
    assert changed
    assert not any(is_outside_text(name) for name in changed)

    finished = dict(read_tensors(folder / "model"))
    for name, old in read_tensors(base):
        assert not is_outside_text(name) or torch.equal(old, finished[name])
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    for name in PROCESSOR_FILES:
        assert (folder / "model" / name).read_text() == (base / name).read_text()


@pytest.mark.parametrize("base", ["Gemma3"], indirect=True)
def test_a_multimodal_model_is_trained_on_text_by_two_processes(
    train: Callable[..., Path], base: Path
) -> None:
    check_finished_model(train("run", launcher=torchrun(2)), base)


@long_form
@pytest.mark.parametrize("base", ["Gemma4", "Qwen3_5Moe", "Mistral3"], indirect=True)
def test_a_class_makes_the_same_run_with_ddp_and_fsdp2_and_resumes_on_one_process(
    train: Callable[..., Path], base: Path, tmp_path: Path
) -> None:
    ddp = train("ddp", launcher=torchrun(2))
    fsdp = train("fsdp", "--save_steps 1", launcher=FSDP2)
    check_finished_model(ddp, base)
    check_finished_model(fsdp, base)
    assert series(fsdp, "train/loss") == pytest.approx(series(ddp, "train/loss"), rel=1e-4)

    # A checkpoint has only the weights that are trained. Its export has those of the base, too.
    checkpoint = fsdp / "checkpoints/step-00000001/model"
    assert not any(is_of_images(name) for name, _ in read_tensors(checkpoint))
    exported = tmp_path / "exported"
    export(f"{checkpoint} --to {exported}/model")
    check_finished_model(exported, base)

    expected = dict(read_tensors(fsdp / "model"))
    make_look_killed(fsdp, step=1)
    train("fsdp", "--save_steps 1")
    check_finished_model(fsdp, base)
    for name, tensor in read_tensors(fsdp / "model"):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-3)


@long_form
@pytest.mark.parametrize("base", ["Llama4", "Qwen3VL"], indirect=True)
def test_an_adapter_is_in_the_text_tower_and_can_be_merged(
    train: Callable[..., Path], base: Path, tmp_path: Path
) -> None:
    adapter = train("adapter", "--lora_r 2", launcher=torchrun(2))
    assert not any(is_of_images(name) for name, _ in read_tensors(adapter / "model"))

    merged = tmp_path / "merged"
    export(f"{adapter} --merge --to {merged}/model")
    check_finished_model(merged, base)
