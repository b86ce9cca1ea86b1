"""Training multimodal checkpoints on text: only the text tower is trained.

Other towers are not loaded, and the finished model gets them from its base.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
)

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.models.export import write_copy
from llmtrain.models.hub_models import origin_of
from llmtrain.models.lora import add_lora
from llmtrain.models.text_tower import BASE_FILE
from llmtrain.record.saver import write_model
from llmtrain.record.tensor_files import read_headers, read_tensors
from tests.multimodal import CLASSES, IGNORED, PROCESSOR_FILES, write_checkpoint

# Everything outside the text tower of the tiny Gemma 3, by its names in files and in the model.
STORED_OUTSIDE = ("vision_tower.", "multi_modal_projector.")
OUTSIDE = ["model.vision_tower", "model.multi_modal_projector"]
VOCABULARY = 300
WIDTH = 32
MAX_LENGTH = 32


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("Gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def gemma3_tensors(gemma3: Path) -> dict[str, Tensor]:
    return dict(read_tensors(gemma3))


@pytest.fixture
def load(load) -> Callable[..., lt.ModelBundle]:
    """Load the checkpoint of a folder, as a run does."""

    def load_folder(
        folder: Path | None, lora: lt.LoraConfig | None = None, **flags: Any
    ) -> lt.ModelBundle:
        config = lt.ModelConfig(folder and str(folder), max_length=MAX_LENGTH, **flags)
        tokenizer = AutoTokenizer.from_pretrained(folder or flags["from_config"])
        return load(config, lora, tokenizer=tokenizer)

    return load_folder


def trained_names(bundle: lt.ModelBundle) -> set[str]:
    return {name for name, weight in bundle.model.named_parameters() if weight.requires_grad}


def finished_tensors(bundle: lt.ModelBundle) -> dict[str, Tensor]:
    """Return the tensors of the finished model, by the names of published checkpoints."""
    return bundle.files.finished("auto").export_tensors(bundle.model)


def replace_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# --- the text tower


def test_towers_that_text_does_not_reach_are_not_loaded(load, gemma3: Path, capsys) -> None:
    bundle = load(gemma3)

    assert bundle.model.model.vision_tower is None
    assert bundle.model.model.multi_modal_projector is None
    assert trained_names(bundle) == {name for name, _ in bundle.model.named_parameters()}
    assert bundle.start["outside_text"] == OUTSIDE

    sizes = [
        header.numel()
        for name, header in read_headers(gemma3).items()
        if name.startswith(STORED_OUTSIDE)
    ]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "text only" in line)
    assert f"{sum(sizes):,} parameters" in line
    assert line.endswith(", ".join(OUTSIDE))


def test_parts_of_the_text_tower_can_be_frozen(load, gemma3: Path) -> None:
    names = trained_names(load(gemma3, freeze="vision|layers"))

    assert names
    assert not any("layers" in name for name in names)


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"]], ids=" ".join)
def test_an_adapter_is_in_the_text_tower_only(load, gemma3: Path, targets: list[str]) -> None:
    names = trained_names(load(gemma3, lt.LoraConfig(lora_r=2, lora_target_modules=targets)))

    assert names
    assert all(name.startswith("model.language_model.") for name in names)


# --- the finished model


def test_the_finished_model_has_all_tensors_and_the_processor_of_its_base(
    load, gemma3: Path, gemma3_tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    bundle = load(gemma3)
    torch.testing.assert_close(finished_tensors(bundle), gemma3_tensors, rtol=0, atol=0)

    files = bundle.files.finished("auto")
    convert = files.tensor_converter(bundle.model)  # one at a time, as shards are
    converted: dict[str, Tensor] = {}
    for name, tensor in files.tensors(bundle.model).items():
        converted |= convert(name, tensor)
    assert converted.keys() == gemma3_tensors.keys()

    files.write(tmp_path, parameters=1)
    assert not (tmp_path / BASE_FILE).exists()
    for name in PROCESSOR_FILES:
        assert (tmp_path / name).read_text() == (gemma3 / name).read_text()


def test_another_dtype_is_that_of_all_tensors_and_parts_of_the_configuration(
    load, gemma3: Path, gemma3_tensors: dict[str, Tensor]
) -> None:
    bundle = load(gemma3)
    files = bundle.files.finished("bfloat16")

    expected = {name: tensor.bfloat16() for name, tensor in gemma3_tensors.items()}
    torch.testing.assert_close(files.export_tensors(bundle.model), expected, rtol=0, atol=0)
    assert files.config["dtype"] == "bfloat16"
    assert files.config["text_config"]["dtype"] == "bfloat16"
    assert files.config["vision_config"]["dtype"] == "bfloat16"
    assert bundle.files.config["text_config"]["dtype"] == "float32"


def test_tensors_that_the_class_ignores_are_in_the_finished_model(
    load, tmp_path: Path, capsys
) -> None:
    folder = write_checkpoint("Qwen3_5", tmp_path)

    tensors = finished_tensors(load(folder))

    assert torch.equal(tensors[IGNORED], dict(read_tensors(folder))[IGNORED])
    assert f"untrained {IGNORED} (1 tensor in all): " in capsys.readouterr().out


def test_a_separately_stored_head_is_not_tied_unless_the_configuration_says_so(
    load, tmp_path: Path
) -> None:
    folder = write_checkpoint("Mistral3", tmp_path)
    head = torch.randn(VOCABULARY, WIDTH)
    tensors = dict(read_tensors(folder)) | {"language_model.lm_head.weight": head}
    replace_weights(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))

    bundle = load(folder)

    assert torch.equal(bundle.model.lm_head.weight, head)
    assert bundle.files.config["tie_word_embeddings"] is False
    assert len(finished_tensors(bundle)) == len(tensors)


@pytest.mark.parametrize("name", ["Qwen3VL", "Qwen3_5", "Mistral3"])
def test_a_head_may_be_copied_unless_it_is_tied(name: str) -> None:
    with pytest.raises(UserError, match="the embedding and the head of this model share"):
        add_lora_with_head(name, is_tied=True)

    adapted = add_lora_with_head(name, is_tied=False)
    names = [name for name, _ in adapted.named_parameters()]
    assert any("lm_head.modules_to_save" in name for name in names)


def add_lora_with_head(name: str, is_tied: bool) -> Any:
    """Add an adapter that trains the head in full; the full configuration says if it is tied."""
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    with torch.device("meta"):
        model = model_class(config_class(**CLASSES[name], tie_word_embeddings=is_tied))
    lora = lt.LoraConfig(lora_r=2, lora_target_modules=["q_proj"], lora_modules_to_save=["lm_head"])
    return add_lora(model, lora, seed=0, new_tokens=[])


# --- checkpoints, and bases with missing files


def test_a_checkpoint_names_its_base_and_a_run_from_it_gets_the_towers(
    load, gemma3: Path, gemma3_tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    bundle = load(gemma3)
    tensors = bundle.files.tensors(bundle.model)
    assert not any(name.startswith(STORED_OUTSIDE) for name in tensors)
    write_model(tmp_path / "checkpoint", bundle.files, tensors)
    base = json.loads((tmp_path / "checkpoint" / BASE_FILE).read_text())
    names = sorted(name for name in gemma3_tensors if name.startswith(STORED_OUTSIDE))
    assert base == {"base": str(gemma3), "origin": origin_of(str(gemma3)), "names": names}
    assert not (tmp_path / "checkpoint" / "processor_config.json").exists()

    restarted = load(tmp_path / "checkpoint")
    assert finished_tensors(restarted).keys() == gemma3_tensors.keys()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_copy_of_a_checkpoint_is_complete(
    load, gemma3: Path, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    bundle = load(gemma3)
    write_model(tmp_path / "checkpoint", bundle.files, bundle.files.tensors(bundle.model))

    (tmp_path / "copy").mkdir()
    write_copy(
        tmp_path / "checkpoint", tmp_path / "copy", dtype and str(dtype).removeprefix("torch.")
    )

    model, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "copy", output_loading_info=True
    )
    assert not info["missing_keys"] | info["unexpected_keys"]
    expected = AutoModelForImageTextToText.from_pretrained(gemma3).to(dtype).state_dict()
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)
    assert not (tmp_path / "copy" / BASE_FILE).exists()
    assert all((tmp_path / "copy" / name).exists() for name in PROCESSOR_FILES)


def test_a_checkpoint_whose_base_has_changed_is_refused(load, tmp_path: Path) -> None:
    base = write_checkpoint("Gemma3", tmp_path / "base")
    bundle = load(base)
    write_model(tmp_path / "checkpoint", bundle.files, bundle.files.tensors(bundle.model))

    replace_weights(base, {name: tensor + 1 for name, tensor in read_tensors(base)})

    with pytest.raises(UserError, match="base has other weights now"):
        load(tmp_path / "checkpoint")


def test_a_base_that_is_removed_during_a_run_is_noticed_at_its_end(load, tmp_path: Path) -> None:
    bundle = load(write_checkpoint("Gemma3", tmp_path / "base"))

    (tmp_path / "base" / "model.safetensors").unlink()

    with pytest.raises(UserError, match="base has other weights now"):
        finished_tensors(bundle)


# --- the model card of an adapter


def test_the_code_in_the_card_of_an_adapter_loads_the_full_class(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load(write_checkpoint("Qwen3_5", tmp_path / "base"), lt.LoraConfig(lora_r=2))
    folder = tmp_path / "adapter"
    write_model(folder, bundle.files, bundle.files.tensors(bundle.model))
    card = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    variables: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(code, variables)

    model = variables["model"]
    assert type(model.base_model.model).__name__ == "Qwen3_5ForConditionalGeneration"
    parameters = dict(model.named_parameters())
    for name, tensor in read_tensors(folder):
        assert torch.equal(parameters[name.replace(".weight", ".default.weight")], tensor)
    assert "revision=settings.revision" in code
