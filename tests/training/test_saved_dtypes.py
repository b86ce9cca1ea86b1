"""A finished model has the dtype of its base or a chosen one."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmtrain.errors import UserError
from llmtrain.training.run import Run
from recipes import finetune
from tests.models.small_models import byte_tokenizer, tiny_llama

FOUR_STEPS = (
    "--max_length 32 --max_steps 4 --eval_steps 2 --global_batch_size 4 --warmup_steps 0 "
    "--eval_fraction 0.2 --report_to none"
)

MakeBase = Callable[..., Path]
Train = Callable[..., Run]


@pytest.fixture(scope="module")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> MakeBase:
    """A function that makes the folder of a small model, stored in a dtype.

    Weights in ``changes`` replace those of the model, and keep their own dtype.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_llama())
    tokenizer = byte_tokenizer()

    def make_base(dtype: str, changes: Mapping[str, torch.Tensor] | None = None) -> Path:
        folder = tmp_path_factory.mktemp(dtype)
        copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

        weights = weights_of(folder) | dict(changes or {})
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make_base


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} and {n} are {2 * n}.\n" for n in range(99)))
    return path


@pytest.fixture
def train(text: Path, tmp_path: Path) -> Train:
    """A function that fine-tunes a base for four steps, in the folder ``run``."""

    def train(base: Path, flags: str = "") -> Run:
        command = f"--model_name_or_path {base} --dataset {text} --output_dir {tmp_path}/run"
        return finetune.main(f"{command} {FOUR_STEPS} {flags}".split())

    return train


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def dtypes_of(folder: Path) -> set[torch.dtype]:
    return {weight.dtype for weight in weights_of(folder).values()}


def checkpoint_model(run: Run, step: int) -> Path:
    """Return the model folder of a checkpoint, whose weights are those that were trained."""
    return run.folder / "checkpoints" / f"step-{step:08}" / "model"


# --- the dtype of a finished model


@pytest.mark.parametrize(
    ("base_dtype", "save_dtype", "dtype"),
    [
        pytest.param("bfloat16", "auto", torch.bfloat16, id="bfloat16 base"),
        pytest.param("float16", "auto", torch.float16, id="float16 base"),
        pytest.param("bfloat16", "float32", torch.float32, id="chosen float32"),
        pytest.param("float32", "bfloat16", torch.bfloat16, id="chosen bfloat16"),
    ],
)
def test_a_finished_model_has_the_dtype_of_its_base_or_the_chosen_one(
    base_dtype: str, save_dtype: str, dtype: torch.dtype, make_base: MakeBase, train: Train
) -> None:
    run = train(make_base(base_dtype), f"--save_dtype {save_dtype}")

    folder = run.folder / "model"
    trained = weights_of(checkpoint_model(run, step=4))
    finished = weights_of(folder)
    assert trained.keys() == finished.keys()
    for name, weight in trained.items():
        assert weight.dtype == torch.float32
        assert torch.equal(finished[name], weight.to(dtype))
        assert finished[name].dtype == dtype

    assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype


def test_a_tensor_that_the_base_keeps_in_another_dtype_stays_in_it(
    make_base: MakeBase, train: Train
) -> None:
    float32_weight = "model.layers.1.input_layernorm.weight"  # stands for a routing bias
    base = make_base("bfloat16", changes={float32_weight: torch.ones(32)})

    run = train(base)

    weights = weights_of(run.folder / "model")
    in_float32 = [name for name, weight in weights.items() if weight.dtype == torch.float32]
    assert in_float32 == [float32_weight]


@pytest.mark.parametrize(
    ("save_dtype", "dtype"), [("auto", torch.float32), ("float16", torch.float16)]
)
def test_an_adapter_is_float32_unless_another_dtype_is_chosen(
    save_dtype: str, dtype: torch.dtype, make_base: MakeBase, train: Train
) -> None:
    run = train(make_base("bfloat16"), f"--lora_r 2 --save_dtype {save_dtype}")

    adapter = load_file(run.folder / "model" / "adapter_model.safetensors")
    assert {weight.dtype for weight in adapter.values()} == {dtype}


def test_the_best_weights_are_rounded(make_base: MakeBase, train: Train) -> None:
    # With this learning rate, the loss only grows.
    flags = "--load_best_model_at_end --eval_steps 1 --learning_rate 1 --lr_scheduler_type constant"

    run = train(make_base("bfloat16"), flags)

    best_step = run.patience.best_step
    assert best_step < 4
    finished = weights_of(run.folder / "model")
    for name, weight in weights_of(checkpoint_model(run, best_step)).items():
        assert torch.equal(finished[name], weight.to(torch.bfloat16)), name


# --- weights that a dtype cannot hold


def test_weights_beyond_the_chosen_dtype_are_refused_and_another_dtype_ends_the_run(
    make_base: MakeBase, train: Train, tmp_path: Path
) -> None:
    too_large = torch.full((32,), 1e5)  # above the largest number of float16
    base = make_base("float32", changes={"model.norm.weight": too_large})

    with pytest.raises(UserError, match=r"model\.norm\.weight .*--save_dtype bfloat16") as error:
        train(base, "--save_dtype float16")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "model").exists()

    run = train(base, "--save_dtype bfloat16")
    assert run.folder == tmp_path / "run"
    assert run.resume_point.step == 4
    assert dtypes_of(run.folder / "model") == {torch.bfloat16}
