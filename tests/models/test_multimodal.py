"""Text training of multimodal checkpoints: the text tower is trained, and everything else is frozen or left out."""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models import pretrained
from llmtrain.models.base_tensors import BASE_FILE
from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.models.config import ModelConfig
from llmtrain.models.export import how_to_load
from llmtrain.models.generation import TextModel
from llmtrain.models.hub_models import origin_of
from llmtrain.models.lora import add_lora
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.pretrained import load_model
from llmtrain.models.probe import check_gradients
from llmtrain.parallel.placement import place
from llmtrain.record.saver import write_model
from llmtrain.record.tensor_files import read_headers, read_tensors
from tests.models.some_rows import SomeRows
from tests.multimodal import CLASSES, IGNORED, PROCESSOR_FILES, write_checkpoint

# Everything outside the text tower of the tiny Gemma 3.
STORED_OUTSIDE = ("vision_tower.", "multi_modal_projector.")
OUTSIDE = ["model.vision_tower", "model.multi_modal_projector"]


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("Gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture
def load(accelerator: Any) -> Callable[..., ModelBundle]:
    def load(folder: Path, lora: LoraConfig | None = None, **settings: Any) -> ModelBundle:
        config = ModelConfig(str(folder), max_length=32, **settings)
        rows = SomeRows(AutoTokenizer.from_pretrained(folder))
        return place(accelerator, load_model(config, lora, rows, 3, "no"))

    return load


def trained_names(bundle: ModelBundle) -> set[str]:
    return {name for name, weight in bundle.model.named_parameters() if weight.requires_grad}


def test_what_text_does_not_reach_is_removed_and_named_in_one_line_and_in_the_fingerprint(
    load: Callable[..., ModelBundle], gemma3: Path, capsys: pytest.CaptureFixture
) -> None:
    bundle = load(gemma3)
    model: Any = bundle.model
    assert trained_names(bundle) == {name for name, _ in model.named_parameters()}
    assert (model.model.vision_tower, model.model.multi_modal_projector) == (None, None)

    stored = read_headers(gemma3)
    size = sum(header.shape.numel() for header in stored if header.name.startswith(STORED_OUTSIDE))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("text only")]
    assert lines == [
        f"text only {size:,} parameters are not loaded, as no text meets them: "
        "model.vision_tower, model.multi_modal_projector"
    ]
    assert bundle.start is not None
    assert bundle.start["outside_text"] == OUTSIDE


def test_the_finished_model_has_the_tensors_of_the_base_and_a_checkpoint_names_it(
    load: Callable[..., ModelBundle], gemma3: Path, tmp_path: Path
) -> None:
    bundle = load(gemma3)
    files: Any = bundle.files
    assert not any(name.startswith(STORED_OUTSIDE) for name in files.tensors(bundle.model))
    files.write(tmp_path / "checkpoint", 1)
    base = json.loads((tmp_path / "checkpoint" / BASE_FILE).read_text())
    assert base == {"name": str(gemma3), "origin": origin_of(str(gemma3))}
    assert not (tmp_path / "checkpoint" / "processor_config.json").exists()

    finished = files.finished("auto")
    tensors = finished.export_tensors(bundle.model)
    stored = dict(read_tensors(gemma3))
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], stored[name]) for name in stored)
    finished.write(tmp_path / "finished", 1)
    assert not (tmp_path / "finished" / BASE_FILE).exists()
    for name in PROCESSOR_FILES:
        assert (tmp_path / "finished" / name).read_text() == (gemma3 / name).read_text()

    # Shards are converted one tensor at a time.
    convert = finished.tensor_converter(bundle.model)
    one_at_a_time: dict[str, torch.Tensor] = {}
    for name, tensor in finished.tensors(bundle.model).items():
        one_at_a_time |= convert(name, tensor)
    assert one_at_a_time.keys() == tensors.keys()


def test_another_dtype_is_that_of_all_tensors_and_of_every_part_of_the_configuration(
    load: Callable[..., ModelBundle], gemma3: Path
) -> None:
    bundle = load(gemma3)
    files: Any = bundle.files
    finished = files.finished("bfloat16")
    stored = dict(read_tensors(gemma3))
    for name, tensor in finished.export_tensors(bundle.model).items():
        assert torch.equal(tensor, stored[name].bfloat16())
        assert tensor.dtype == torch.bfloat16
    for part in (finished.config, finished.config["text_config"], finished.config["vision_config"]):
        assert part["dtype"] == "bfloat16"
    assert files.config["text_config"]["dtype"] == "float32"


def test_a_base_that_has_changed_is_one_line_at_the_end(
    load: Callable[..., ModelBundle], tmp_path: Path
) -> None:
    bundle = load(write_checkpoint("Gemma3", tmp_path / "base"))
    files: Any = bundle.files
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"base has changed since the run began.*put its files back"
    ):
        files.finished("auto").export_tensors(bundle.model)


def test_tensors_that_the_class_ignores_are_in_the_result_and_a_line_says_so(
    load: Callable[..., ModelBundle], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_checkpoint("Qwen3_5", tmp_path)
    bundle = load(folder)
    files: Any = bundle.files
    finished = files.finished("auto").export_tensors(bundle.model)
    assert torch.equal(finished[IGNORED], dict(read_tensors(folder))[IGNORED])
    assert (
        capsys.readouterr().out.count(
            "untrained mtp: Qwen3_5ForConditionalGeneration does not have these 2,048 parameters; the "
            "finished model has them as they were, so they no longer match its other weights"
        )
        == 1
    )


def test_a_head_that_is_stored_apart_is_not_tied_if_the_configuration_does_not_say_so(
    load: Callable[..., ModelBundle], tmp_path: Path
) -> None:
    folder = write_checkpoint("Mistral3", tmp_path)
    head = torch.randn(300, 32)
    save_file(
        dict(read_tensors(folder)) | {"language_model.lm_head.weight": head},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    bundle = load(folder)
    model: Any = bundle.model
    files: Any = bundle.files
    assert torch.equal(model.lm_head.weight, head)
    assert files.config["tie_word_embeddings"] is False
    assert len(files.finished("auto").export_tensors(model)) == len(dict(read_tensors(folder)))


def test_a_base_without_its_towers_is_one_line(
    load: Callable[..., ModelBundle], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_checkpoint("Gemma3", tmp_path)
    text = {
        name: tensor for name, tensor in read_tensors(folder) if not name.startswith(STORED_OUTSIDE)
    }
    save_file(text, folder / "model.safetensors", {"format": "pt"})
    load(folder)
    assert (
        f"left out  model.vision_tower and model.multi_modal_projector: {folder} does not hold "
        "them, nor will the result\n"
    ) in capsys.readouterr().out


def test_a_checkpoint_gets_the_tensors_and_the_processor_of_its_base(
    load: Callable[..., ModelBundle],
    gemma3: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    bundle = load(gemma3)
    write_model(tmp_path / "checkpoint", bundle.files, bundle.files.tensors(bundle.model))
    again = load(tmp_path / "checkpoint")
    assert "processor" not in capsys.readouterr().err
    finished: Any = again.files
    assert (
        finished.finished("auto").export_tensors(again.model).keys()
        == dict(read_tensors(gemma3)).keys()
    )


def test_a_checkpoint_whose_base_has_changed_is_one_line(
    load: Callable[..., ModelBundle], tmp_path: Path
) -> None:
    base = write_checkpoint("Gemma3", tmp_path / "base")
    bundle = load(base)
    write_model(tmp_path / "checkpoint", bundle.files, bundle.files.tensors(bundle.model))
    changed = {name: tensor + 1 for name, tensor in read_tensors(base)}
    save_file(changed, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"base, and that has other weights now; put those back"):
        load(tmp_path / "checkpoint")


def test_random_towers_are_in_the_result_and_do_not_depend_on_when_they_are_made(
    load: Callable[..., ModelBundle], accelerator: Any, gemma3: Path
) -> None:
    rows = SomeRows(AutoTokenizer.from_pretrained(gemma3))
    config = ModelConfig(from_config=str(gemma3), max_length=32)
    bundle = place(accelerator, load_model(config, None, rows, 3, "no"))
    files: Any = bundle.files
    first = files.finished("auto").export_tensors(bundle.model)
    again = files.finished("auto").export_tensors(bundle.model)
    assert first.keys() == dict(read_tensors(gemma3)).keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(first[name].isfinite().all() for name in first)


@pytest.mark.parametrize("lora", [None, LoraConfig(lora_r=2)])
def test_a_base_without_a_processor_is_one_line(
    load: Callable[..., ModelBundle],
    lora: LoraConfig | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    folder = write_checkpoint("Gemma3", tmp_path)
    load(folder, lora)
    assert capsys.readouterr().err.count("has no processor either") == 0
    for name in PROCESSOR_FILES:
        (folder / name).unlink()
    load(folder, lora)
    assert capsys.readouterr().err.count("has no processor either") == (lora is None)


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"]])
def test_an_adapter_is_in_the_text_tower_only(
    load: Callable[..., ModelBundle], gemma3: Path, targets: list[str]
) -> None:
    bundle = load(gemma3, LoraConfig(lora_r=2, lora_target_modules=targets))
    assert trained_names(bundle)
    assert all(name.startswith("model.language_model.") for name in trained_names(bundle))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", ["Qwen3VL", "Qwen3_5", "Mistral3"])
def test_a_head_that_is_tied_by_the_full_configuration_is_not_parted_from_its_embedding(
    name: str, is_tied: bool
) -> None:
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    with torch.device("meta"):
        model = model_class(config_class(**CLASSES[name], tie_word_embeddings=is_tied))
    lora = LoraConfig(lora_r=2, lora_target_modules=["q_proj"], lora_modules_to_save=["lm_head"])
    refusal = pytest.raises(UserError, match="the embedding and the head of this model share")
    with refusal if is_tied else contextlib.nullcontext():
        add_lora(model, lora, "base", seed=0, new_tokens=[])


def test_the_card_of_an_adapter_has_code_that_loads_the_full_class(
    load: Callable[..., ModelBundle], tmp_path: Path
) -> None:
    bundle = load(write_checkpoint("Qwen3_5", tmp_path / "base"), LoraConfig(lora_r=2))
    write_model(tmp_path / "adapter", bundle.files, bundle.files.tensors(bundle.model))
    code = (tmp_path / "adapter/README.md").read_text().split("```")[1].removeprefix("python\n")
    names: dict[str, Any] = {}
    exec(code.replace('"."', repr(str(tmp_path / "adapter"))), names)
    assert type(names["model"].base_model.model).__name__ == "Qwen3_5ForConditionalGeneration"
    loaded = dict(names["model"].named_parameters())
    for name, tensor in read_tensors(tmp_path / "adapter"):
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], tensor)
    assert how_to_load(tmp_path / "adapter").startswith(
        "peft: PeftModel.from_pretrained(AutoModelForImageTextToText"
    )
    of_hub = replace(bundle.files, origin={"name": "org/base", "commit": "a" * 40})
    assert ".from_pretrained(name, revision=settings.revision)" in of_hub.loading_code()


@pytest.mark.parametrize("lora", [None, LoraConfig(lora_r=2)])
def test_a_tower_that_is_not_frozen_is_named_by_the_gradients(
    load: Callable[..., ModelBundle],
    gemma3: Path,
    lora: LoraConfig | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pretrained, "outside_text_tower", lambda _: {})
    projector = " and model.multi_modal_projector"  # all-linear takes no other kind of weight
    remedy = r"--freeze '^(model\.vision_tower|model\.multi_modal_projector)(\.|$)'"
    if lora:
        projector = ""
        remedy = "--lora_target_modules"
    message = re.escape(f"no gradient to model.vision_tower{projector}, whose ")
    with pytest.raises(UserError, match=f"{message}.*{re.escape(remedy)}"):
        load(gemma3, lora)


def test_freezing_more_leaves_something_to_train(
    load: Callable[..., ModelBundle], gemma3: Path
) -> None:
    everything_else = load(gemma3, freeze="vision|layers")
    assert not any("layers" in name for name in trained_names(everything_else))
    with pytest.raises(UserError, match="matches every parameter"):
        load(gemma3, freeze="language_model|lm_head")


def test_the_flops_are_those_of_the_text_tower(
    load: Callable[..., ModelBundle], gemma3: Path
) -> None:
    model: Any = load(gemma3).model
    weights = sum(
        weight.numel() for weight in model.parameters()
    )  # the head is tied to the embedding
    attention = 12 * 2 * 32 * 32  # layers, width, row
    assert model.flops_per_token() == 6 * weights + attention


def test_the_context_is_that_of_the_text_tower(gemma3: Path) -> None:
    assert TextModel(str(gemma3)).context == 128


def test_an_expert_that_no_token_reached_needs_no_gradient(accelerator: Any) -> None:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
    )
    model: Any = make_causal_lm(AutoModelForCausalLM.from_config(config), row_length=8)
    for layer in model.model.layers:
        layer.mlp = Experts(layer.mlp)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.experts\.1"):
        check_gradients(model)
    config.num_experts = 2
    check_gradients(model)
    assert all(weight.grad is None for weight in model.parameters())


class Experts(torch.nn.Module):
    """Two experts, of which all tokens go to the first."""

    def __init__(self, expert: torch.nn.Module) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([expert, torch.nn.Linear(32, 32)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts[0](hidden)


def test_the_trial_leaves_random_numbers_gradients_and_the_mode_as_they_were() -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    own: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    model: Any = make_causal_lm(own, row_length=8)  # it has dropout
    state = torch.random.get_rng_state()
    model.eval()
    check_gradients(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    assert all(weight.grad is None for weight in model.parameters())
