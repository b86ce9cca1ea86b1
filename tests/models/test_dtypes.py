"""Exports and merged models have the dtype of their base, or the chosen one, and its logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel, Qwen3Config

import llmtrain as lt
from llmtrain.cli import main
from llmtrain.models.hub_models import DTYPES
from llmtrain.record.tensor_files import read_tensors
from tests.models.small_models import byte_tokenizer, export_model, tiny_llama

IDS = torch.arange(1, 40)[None]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of one small model, stored in each dtype."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_llama())
    folders = {}
    for name, dtype in DTYPES.items():
        folder = tmp_path_factory.mktemp(name)
        model.to(dtype).save_pretrained(folder)
        model.float()
        byte_tokenizer().save_pretrained(folder)
        folders[name] = folder
    return folders


@pytest.fixture
def adapt(load) -> Callable[..., lt.ModelBundle]:
    """Load a base with a new adapter."""

    def adapt(base: Path, precision: str = "no") -> lt.ModelBundle:
        config = lt.ModelConfig(str(base), max_length=64)
        return load(config, lt.LoraConfig(lora_r=4), precision=precision)

    return adapt


def export(source: Path, target: Path, flags: str = "") -> Path:
    """Run ``llmtrain export``."""
    main(["export", str(source), "--to", str(target), *flags.split()])
    return target


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_tensors(folder))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(folder: Path, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **options)(IDS).logits.float()


def check_dtype(folder: Path, name: str, exact_logits: torch.Tensor) -> None:
    """Check the stored weights, config.json, and the logits that transformers computes."""
    dtype = DTYPES[name]
    assert {weight.dtype for weight in weights_in(folder).values()} == {dtype}
    assert json.loads((folder / "config.json").read_text())["dtype"] == name
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype
    rounding = max(1e-5, 16 * torch.finfo(dtype).eps / 2) * exact_logits.abs().max()
    assert (logits(folder, dtype=torch.float32) - exact_logits).abs().max() <= rounding


# --- exports


@pytest.mark.parametrize("name", DTYPES)
def test_a_copy_has_the_chosen_dtype(bases: dict[str, Path], name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = AutoModelForCausalLM.from_pretrained(bases["float32"])
    model.save_pretrained(source, max_shard_size="50KB")
    byte_tokenizer().save_pretrained(source)
    assert len([*source.glob("*.safetensors")]) > 1

    copy = export(source, tmp_path / "copy", f"--dtype {name}")

    check_dtype(copy, name, logits(source))
    expected = {key: weight.to(DTYPES[name]) for key, weight in weights_in(source).items()}
    torch.testing.assert_close(weights_in(copy), expected, rtol=0, atol=0)
    assert (copy / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("stored", "flags", "expected"),
    [
        ("float32", "", "float32"),
        ("bfloat16", "", "bfloat16"),
        ("float16", "", "float16"),
        ("bfloat16", "--dtype float16", "float16"),
    ],
)
def test_a_merged_model_has_the_dtype_of_its_base_or_the_chosen_one(
    bases: dict[str, Path], adapt, stored: str, flags: str, expected: str, tmp_path: Path
) -> None:
    bundle = adapt(bases[stored])
    with torch.no_grad():
        for name, parameter in bundle.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    adapter = export_model(bundle, tmp_path / "model")

    merged = export(adapter, tmp_path / "merged", f"--merge {flags}")

    exact_logits = logits(adapter, dtype=torch.float32)
    check_dtype(merged, expected, exact_logits)
    base_logits = logits(bases[stored], dtype=torch.float32)
    assert (base_logits - exact_logits).abs().max() > 1e-3, "the adapter changes nothing"


def test_a_dtype_that_cannot_be_chosen_is_refused(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = export(bases["float32"], tmp_path / "source")

    def check_refused(message: str) -> None:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            export(source, tmp_path / "copy", "--dtype float16")
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (tmp_path / "copy").exists()

    weights = weights_in(source)
    weights["model.norm.weight"][2] = 1e6
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    check_refused("model.norm.weight has values above 65504")
    change_config(source, quantization_config={"quant_method": "fp8"})
    check_refused("leave --dtype out")
    change_config(source, quantization_config=None)
    (source / "model.safetensors").unlink()
    check_refused("holds no safetensors files")


# --- quantized bases


QUANTIZED_SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def small_bfloat16(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).bfloat16()


def write_fp8_model(folder: Path) -> None:
    """Write a model whose products have weights in FP8, with a scale for each block."""
    small_bfloat16(Qwen3Config(**QUANTIZED_SIZES)).save_pretrained(folder)
    weights = weights_in(folder)
    for name in [*weights]:
        if name.endswith("_proj.weight"):
            weights[name] = weights[name].to(torch.float8_e4m3fn)
            blocks = [size // 64 for size in weights[name].shape]
            weights[f"{name}_scale_inv"] = torch.full(blocks, 0.5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    change_config(folder, quantization_config=quantization)


def write_mxfp4_model(folder: Path) -> None:
    """Write a model whose experts have weights in MXFP4: pairs of 4 bits in blocks with scales."""
    config = GptOssConfig(**QUANTIZED_SIZES, num_local_experts=4, layer_types=["full_attention"])
    small_bfloat16(config).save_pretrained(folder)
    weights = weights_in(folder)
    for name in [*weights]:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, _, rows = weights.pop(name).shape
            weights[f"{name}_blocks"] = torch.randint(256, (experts, rows, 2, 16)).to(torch.uint8)
            weights[f"{name}_scales"] = torch.full((experts, rows, 2), 120, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head", "self_attn"],
    }
    change_config(folder, quantization_config=quantization)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes with the quantized weights")
@pytest.mark.parametrize("write_base", [write_fp8_model, write_mxfp4_model])
def test_an_adapter_merged_into_a_quantized_base_is_stored_in_bfloat16(
    write_base: Callable[[Path], None], tmp_path: Path
) -> None:
    write_base(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    byte_tokenizer().save_pretrained(tmp_path / "adapter")

    merged = export(tmp_path / "adapter", tmp_path / "merged", "--merge")

    check_dtype(merged, "bfloat16", logits(tmp_path / "base"))
    config = json.loads((merged / "config.json").read_text())
    assert "quantization_config" not in config
    _, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


# --- the dtype in training


@pytest.mark.parametrize(
    ("stored", "precision", "expected"),
    [
        ("float32", "no", torch.float32),
        ("bfloat16", "no", torch.bfloat16),
        ("float16", "no", torch.float32),  # there is no loss scale
        ("float16", "fp16", torch.float16),
        ("bfloat16", "fp16", torch.bfloat16),
        ("float32", "bf16", torch.bfloat16),
    ],
)
def test_the_frozen_base_of_an_adapter_keeps_a_dtype_that_it_can_be_trained_with(
    bases: dict[str, Path], adapt, stored: str, precision: str, expected: torch.dtype
) -> None:
    parameters = [*adapt(bases[stored], precision).model.parameters()]
    assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in parameters if not p.requires_grad} == {expected}


def test_an_adapter_on_a_bfloat16_base_has_the_gradients_of_a_float32_base(
    bases: dict[str, Path], adapt, tmp_path: Path
) -> None:
    """The two bases have the same numbers, so only activations are rounded differently."""
    float32_base = export(bases["bfloat16"], tmp_path / "base", "--dtype float32")

    loss, gradients = loss_and_gradients(adapt(bases["bfloat16"]).model)
    expected_loss, expected_gradients = loss_and_gradients(adapt(float32_base).model)

    assert loss.dtype == torch.float32
    assert gradients.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=1e-3, atol=0)
    assert (gradients - expected_gradients).norm() < 0.05 * expected_gradients.norm()


def loss_and_gradients(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and all gradients in one vector."""
    loss = model(IDS, IDS)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    return loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])
