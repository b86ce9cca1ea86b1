"""Exports and merged models have the dtype of their base or the chosen one, and compute the same."""

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from llmtrain.cli import main
from llmtrain.data import tokenizer as tok
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.config import ModelConfig
from llmtrain.models.dtypes import DTYPES, stored_dtypes, with_dtype
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import place
from llmtrain.record.saver import write_model
from tests.models.small_models import tiny_llama
from tests.models.some_rows import SomeRows

IDS = torch.arange(1, 40)[None]
WORDS = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of one small model, stored in each dtype."""
    torch.manual_seed(0)
    config = tiny_llama()
    model = AutoModelForCausalLM.from_config(config)
    folders = {}
    for name, dtype in DTYPES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        model.to(dtype).save_pretrained(folders[name])
        model.float()
        WORDS.save_pretrained(folders[name])
    return folders


@pytest.fixture
def adapt(accelerator: Accelerator) -> Callable[..., ModelBundle]:
    """Load a base with an adapter."""

    def adapt(base: Path, precision: str = "no") -> ModelBundle:
        config = ModelConfig(str(base), max_length=64)
        bundle = load_model(config, LoraConfig(lora_r=4), SomeRows(WORDS), 3, precision)
        return place(accelerator, bundle)

    return adapt


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def logits(folder: Path, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **options)(IDS).logits.float()


def assert_has_dtype(folder: Path, name: str, exact: torch.Tensor) -> None:
    """Check the bytes of a model folder, its config.json, and its logits by stock transformers."""
    dtype = DTYPES[name]
    assert {weight.dtype for weight in weights_of(folder).values()} == {dtype}
    assert json.loads((folder / "config.json").read_text())["dtype"] == name
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype
    bound = max(1e-5, 16 * torch.finfo(dtype).eps / 2) * exact.abs().max()
    assert (logits(folder, dtype=torch.float32) - exact).abs().max() <= bound


@pytest.mark.parametrize("name", DTYPES)
def test_a_copy_has_the_chosen_dtype(bases: dict[str, Path], name: str, tmp_path: Path) -> None:
    source = bases["float32"]
    main(["export", str(source), "--dtype", name, "--check", "--to", str(tmp_path / "copy")])
    assert_has_dtype(tmp_path / "copy", name, logits(source))
    for key, weight in weights_of(source).items():
        assert torch.equal(weights_of(tmp_path / "copy")[key], weight.to(DTYPES[name]))
    assert (tmp_path / "copy" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("stored", "chosen"),
    [("float32", None), ("bfloat16", None), ("float16", None), ("bfloat16", "float16")],
)
def test_a_merged_model_has_the_dtype_of_its_base_or_the_chosen_one(
    bases: dict[str, Path],
    adapt: Callable[..., ModelBundle],
    stored: str,
    chosen: str | None,
    tmp_path: Path,
) -> None:
    bundle = adapt(bases[stored])
    with torch.no_grad():
        for name, parameter in bundle.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    adapter = tmp_path / "model"
    write_model(adapter, bundle.files, bundle.files.export_tensors(bundle.model))

    flags = ["--dtype", chosen] if chosen else []
    main(["export", str(adapter), "--merge", "--check", "--to", str(tmp_path / "merged"), *flags])
    exact = logits(adapter, dtype=torch.float32)
    assert_has_dtype(tmp_path / "merged", chosen or stored, exact)
    assert (logits(bases[stored], dtype=torch.float32) - exact).abs().max() > 1e-3


def quantized(kind: str, folder: Path) -> Path:
    """Write a small model whose weights are stored quantized."""
    sizes = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    torch.manual_seed(0)
    if kind == "fp8":
        config: PreTrainedConfig = Qwen3Config(**sizes)
        settings: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    else:
        config = GptOssConfig(**sizes, num_local_experts=4, layer_types=["full_attention"])
        settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "self_attn"]}
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)

    weights = weights_of(folder)
    for name in [*weights]:
        if kind == "fp8" and name.endswith("_proj.weight"):
            weights[name] = weights[name].to(torch.float8_e4m3fn)
            blocks = [size // 64 for size in weights[name].shape]
            weights[f"{name}_scale_inv"] = torch.full(blocks, 0.5)
        if kind == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, _, rows = weights.pop(name).shape
            weights[f"{name}_blocks"] = torch.randint(256, (experts, rows, 2, 16)).to(torch.uint8)
            weights[f"{name}_scales"] = torch.full((experts, rows, 2), 120, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "quantization_config": settings}))
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes with the quantized weights")
@pytest.mark.parametrize(("kind", "has_gpu"), [("fp8", False), ("fp8", True), ("mxfp4", False)])
def test_an_adapter_merged_into_a_quantized_base_is_stored_in_bfloat16(
    kind: str, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(quantized(kind, tmp_path / "base"))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    WORDS.save_pretrained(tmp_path / "adapter")

    with monkeypatch.context() as patch:
        if has_gpu:  # there, transformers does not choose to dequantize
            patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        main(["export", str(tmp_path / "adapter"), "--merge", "--to", str(tmp_path / "merged")])
    assert_has_dtype(tmp_path / "merged", "bfloat16", logits(tmp_path / "base"))
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


@pytest.mark.parametrize(
    ("stored", "precision", "expected"),
    [
        ("float32", "no", torch.float32),
        ("bfloat16", "no", torch.bfloat16),
        ("float16", "no", torch.float32),  # without a loss scale
        ("float16", "fp16", torch.float16),
        ("bfloat16", "fp16", torch.bfloat16),
        ("float32", "bf16", torch.bfloat16),
    ],
)
def test_the_base_of_an_adapter_keeps_its_dtype(
    bases: dict[str, Path],
    adapt: Callable[..., ModelBundle],
    stored: str,
    precision: str,
    expected: torch.dtype,
) -> None:
    model = adapt(bases[stored], precision).model
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert (trained, frozen) == ({torch.float32}, {expected})


def test_an_adapter_beside_a_bfloat16_base_learns_what_it_learns_in_float32(
    bases: dict[str, Path], adapt: Callable[..., ModelBundle], tmp_path: Path
) -> None:
    """The loss is float32, and so are the gradients, within the rounding of bfloat16."""
    wide = tmp_path / "wide"  # the same numbers, stored in float32
    main(["export", str(bases["bfloat16"]), "--dtype", "float32", "--to", str(wide)])

    losses, gradients = {}, {}
    for name, base in (("bfloat16", bases["bfloat16"]), ("float32", wide)):
        model = adapt(base).model
        losses[name] = model(IDS, IDS)
        losses[name].backward()
        gradients[name] = [p.grad for p in model.parameters() if p.grad is not None]

    assert losses["bfloat16"].dtype == torch.float32
    assert {gradient.dtype for gradient in gradients["bfloat16"]} == {torch.float32}
    torch.testing.assert_close(losses["bfloat16"], losses["float32"], rtol=1e-3, atol=0)
    narrow = torch.cat([gradient.flatten() for gradient in gradients["bfloat16"]])
    exact = torch.cat([gradient.flatten() for gradient in gradients["float32"]])
    assert (narrow - exact).norm() < 0.05 * exact.norm()


def test_the_parts_of_a_configuration_name_the_dtype_too() -> None:
    config = {
        "dtype": "float32",
        "text_config": {"dtype": "float32", "layers": 2},
        "vision_config": {"torch_dtype": "float32"},
        "vocabulary": {"dtype": 17},  # a token
    }
    assert with_dtype(config, torch.bfloat16) == {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "layers": 2},
        "vision_config": {"torch_dtype": "bfloat16"},
        "vocabulary": {"dtype": 17},
    }


def test_quantized_weights_count_as_bfloat16(tmp_path: Path) -> None:
    weights = {
        "w": torch.ones(64, 64).to(torch.float8_e4m3fn),
        "w_scale": torch.ones(1),
        "norm": torch.ones(64, dtype=torch.float16),
    }
    save_file(weights, tmp_path / "model.safetensors")
    assert stored_dtypes(tmp_path).main == torch.bfloat16
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert stored_dtypes(tmp_path).main == torch.bfloat16
    assert stored_dtypes(tmp_path).by_name == {}


def planted(folder: Path, source: Path, kind: str) -> Path:
    """Copy a model folder, with something that no dtype can be chosen for."""
    main(["export", str(source), "--to", str(folder)])
    weights = weights_of(folder)
    if kind == "too large":
        weights["model.norm.weight"][2] = 1e6
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if kind == "quantized":
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (folder / "config.json").write_text(json.dumps(config))
    if kind == "pickled":
        (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("too large", "model.norm.weight has values above 65504, the largest of float16"),
        ("quantized", "are quantized; leave --dtype out"),
        ("pickled", "holds no safetensors files to cast"),
    ],
)
def test_a_dtype_that_cannot_be_chosen_is_one_line(
    bases: dict[str, Path],
    kind: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    source = planted(tmp_path / "source", bases["float32"], kind)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["export", str(source), "--dtype", "float16", "--to", str(tmp_path / "to")])
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "to").exists()
