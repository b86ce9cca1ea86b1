"""LoRA: only the adapter is trained and saved; it belongs to its base, and merges into it."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import llmtrain as lt
from llmtrain.data.tokenizer import set_template
from llmtrain.errors import UserError
from llmtrain.model_folders import folder_beside
from llmtrain.models import lora_config
from llmtrain.models.adapters import merged_model, write_merged
from llmtrain.models.export import how_to_load
from llmtrain.models.generation import TextModel
from llmtrain.parallel.shards import fill
from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState
from llmtrain.record.tensor_files import read_tensors
from llmtrain.training.recipe_model import build_recipe_model
from tests.launching import FINETUNE, ROOT
from tests.models.small_models import byte_tokenizer, export_model, gradients_of

# Each keeps the weights of its experts in one parameter of three dimensions.
FUSED_EXPERTS = ["mixtral", "gpt_oss", "llama4_text", "deepseek_v3"]
SEVEN_PRODUCTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# The base knows 257 tokens, and a chat template adds two.
VOCABULARY = 257
NEW_TOKENS = [257, 258]
IDS = torch.randint(1, 250, (4, 24), generator=torch.Generator().manual_seed(0))
IDS_WITH_NEW_TOKEN = torch.cat([IDS, torch.full((4, 2), NEW_TOKENS[-1])], dim=1)

BASES = {
    "untied": {"tie_word_embeddings": "false"},
    "tied": {"tie_word_embeddings": "true"},
    "another": {"tie_word_embeddings": "false"},
    "deeper": {"tie_word_embeddings": "false", "num_hidden_layers": 3},
    "wider": {"tie_word_embeddings": "false", "hidden_size": 96},
    **{family: {"tie_word_embeddings": "false"} for family in FUSED_EXPERTS},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a small pretrained model, by its name in BASES."""
    folders: dict[str, Path] = {}

    def base(name: str) -> Path:
        if name in folders:
            return folders[name]

        folder = folders[name] = tmp_path_factory.mktemp(name)
        sizes = {"num_hidden_layers": 2, "hidden_size": 64} | BASES[name]
        config = lt.ModelConfig(
            from_config=name if name in FUSED_EXPERTS else "llama",
            config_overrides=",".join(f"{key}={value}" for key, value in sizes.items()),
            max_length=64,
        )
        torch.manual_seed(len(folders))
        model = AutoModelForCausalLM.from_config(config.configuration(byte_tokenizer()))
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        return folder

    return base


@pytest.fixture
def adapt(bases, load) -> Callable[..., lt.ModelBundle]:
    """Add a new adapter to a base, with flags of LoRA."""

    def adapt(
        base: str = "untied", tokenizer: PreTrainedTokenizerFast | None = None, **flags
    ) -> lt.ModelBundle:
        tokenizer = tokenizer or byte_tokenizer()
        return load(
            lt.ModelConfig(str(bases(base)), max_length=64),
            lt.LoraConfig(**{"lora_r": 4} | flags),
            tokenizer=tokenizer,
            new_tokens=range(VOCABULARY, len(tokenizer)),
        )

    return adapt


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose chat template has two tokens that the base does not know."""
    tokenizer = byte_tokenizer()
    assert set_template(tokenizer, "chatml") == NEW_TOKENS
    return tokenizer


def ids_for(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    return IDS_WITH_NEW_TOKEN if len(tokenizer) > VOCABULARY else IDS


with_and_without_new_tokens = pytest.mark.parametrize(
    "make_tokenizer",
    [
        pytest.param(byte_tokenizer, id="tokens of the base"),
        pytest.param(chat_tokenizer, id="two new tokens"),
    ],
)


def train_a_little(model: torch.nn.Module, ids: torch.Tensor = IDS) -> None:
    optimizer = torch.optim.AdamW(trained_parameters(model).values(), lr=1e-2)
    for _ in range(4):
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    parameters = model.named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def changed_by_training(model: torch.nn.Module, ids: torch.Tensor = IDS) -> set[str]:
    """Train a model, and return the names of the parameters that have changed."""
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train_a_little(model, ids)
    return {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }


def logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- trained parameters


def test_no_two_adapted_layers_begin_with_the_same_numbers(adapt):
    """peft draws A of a layer uniformly, within a bound that depends on the layer's width."""
    beginnings = []
    for name, parameter in adapt(lora_target_modules=["all-linear"]).model.named_parameters():
        if "lora_A" in name:
            numbers = parameter.detach().flatten()[:16]
            beginnings.append(tuple((numbers / numbers.norm()).tolist()))

    assert len(beginnings) == 14, "two layers with seven linear modules each"
    assert len({*beginnings}) == 14


@pytest.mark.parametrize(("base", "use_dora"), [("untied", False), ("tied", True)])
def test_the_adapter_of_each_product_is_trained_and_nothing_else(adapt, base, use_dora):
    model = adapt(base, use_dora=use_dora).model

    changed = changed_by_training(model)

    assert changed == trained_parameters(model).keys()
    adapted = {name.partition(".lora_")[0] for name in changed}
    assert len(adapted) == 7 * 2, "seven products in each of two layers"
    parts_of_adapter = 3 if use_dora else 2
    assert len(changed) == len(adapted) * parts_of_adapter
    assert all(".lora_" in name for name in changed)


@pytest.mark.parametrize(
    ("base", "layer"),
    [("untied", "embed_tokens"), ("tied", "embed_tokens"), ("tied", "lm_head")],
)
def test_new_dora_of_an_embedding_or_a_head_begins_as_its_base_with_the_norms_of_peft(
    layer, base, adapt, bases
):
    model = adapt(base, use_dora=True, lora_target_modules=[layer, "q_proj"]).model

    plain = AutoModelForCausalLM.from_pretrained(bases(base))
    torch.testing.assert_close(logits(model), logits(plain))
    settings = peft.LoraConfig(use_dora=True, target_modules=[layer, "q_proj"])
    expected = trained_parameters(peft.get_peft_model(plain, settings).get_base_model())
    for name, parameter in trained_parameters(model).items():
        if "magnitude" in name:
            torch.testing.assert_close(parameter, expected[name], msg=name)


@pytest.mark.parametrize(
    ("base", "embedding_matrices"),
    [pytest.param("tied", 1, id="tied"), pytest.param("untied", 2, id="untied")],
)
def test_only_the_embedding_rows_of_new_tokens_are_trained(adapt, base, embedding_matrices):
    model = adapt(base, chat_tokenizer()).model
    rows = [value for name, value in trained_parameters(model).items() if "lora_" not in name]
    assert [len(part) for part in rows] == [len(NEW_TOKENS)] * embedding_matrices
    before = [part.clone() for part in rows]

    train_a_little(model, ids=torch.full((4, 24), NEW_TOKENS[-1]))

    for part, initial in zip(rows, before, strict=True):
        assert not torch.equal(part, initial)
    assert logits(model).shape[-1] == VOCABULARY + len(NEW_TOKENS)


def test_new_tokens_are_trained_if_the_base_has_spare_rows_for_them(bases, load, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(bases("untied"))
    base.resize_token_embeddings(320)
    base.save_pretrained(tmp_path / "padded")

    bundle = load(
        lt.ModelConfig(str(tmp_path / "padded"), max_length=64),
        lt.LoraConfig(lora_r=4),
        tokenizer=chat_tokenizer(),
        new_tokens=NEW_TOKENS,
    )

    parameters = trained_parameters(bundle.model).items()
    rows = [len(value) for name, value in parameters if "lora_" not in name]
    assert rows == [len(NEW_TOKENS)] * 2
    # Otherwise the loss would keep the logits of all tokens in memory.
    assert bundle.model.head_is_linear

    train_a_little(bundle.model, ids=torch.full((4, 24), NEW_TOKENS[-1]))
    folder = export_model(bundle, tmp_path / "model")
    assert torch.equal(logits(TextModel(str(folder)).model), logits(bundle.model))
    continued = load(continuing(folder), tokenizer=chat_tokenizer())
    assert torch.equal(logits(continued.model), logits(bundle.model))


@pytest.mark.parametrize("family", FUSED_EXPERTS)
def test_all_linear_trains_exports_and_merges_every_expert(adapt, family, tmp_path, recwarn):
    bundle = adapt(family)

    changed = check_export_and_merge(bundle, IDS, tmp_path)

    assert changed == trained_parameters(bundle.model).keys()
    layers_with_experts = 1 if family == "deepseek_v3" else 2
    matrices_of_experts = [name for name in changed if ".experts." in name]
    assert len(matrices_of_experts) == 2 * 2 * layers_with_experts, "A and B of two products"

    base = AutoModelForCausalLM.from_pretrained(bundle.files.base)
    linear_layers = {
        name for name, module in base.named_modules() if type(module) is torch.nn.Linear
    }
    adapted = {name.partition(".lora_")[0].replace(".base_layer", "") for name in changed}
    assert linear_layers - {"lm_head"} <= adapted

    merged_weights = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    base_weights = base.state_dict()
    names = [
        name for name in merged_weights if ".experts." in name and base_weights[name].ndim == 3
    ]
    assert names
    for name in names:
        for after, before in zip(merged_weights[name], base_weights[name], strict=True):
            assert not torch.equal(after, before), name
    assert not [warning for warning in recwarn if "pattern" in str(warning.message)]


def test_a_reward_model_with_experts_trains_its_head_in_full(bases, load):
    model = load(
        lt.ModelConfig(str(bases("mixtral")), max_length=64),
        lt.LoraConfig(lora_r=2),
        preference=lt.PreferenceConfig(loss_type=["reward"]),
        metadata=SimpleNamespace(dataset="pairs", pairs=1, shared=False),
    ).model
    names = trained_parameters(model).keys()
    assert [name for name in names if "score" in name] == ["score.modules_to_save.default.weight"]
    assert any(".experts." in name for name in names)


def test_a_parameter_of_experts_can_be_a_target(adapt):
    model = adapt("mixtral", lora_target_modules=["q_proj", "experts.down_proj"]).model

    names = trained_parameters(model).keys()
    modules = {re.search(r"\.layers\.\d\.(.*?)\.lora_", name)[1] for name in names}
    assert modules == {"self_attn.q_proj", "mlp.experts"}
    assert len(names) == 2 * 2 * 2, "A and B of two products in each of two layers"


@pytest.mark.parametrize(
    ("family", "targets", "products"),
    [
        ("mixtral", SEVEN_PRODUCTS, 2 * (4 + 2)),
        # A dense layer, and a layer with shared experts and two fused products.
        ("deepseek_v3", SEVEN_PRODUCTS[-3:], 3 + 3 + 2),
    ],
)
def test_usual_target_names_reach_the_fused_products_of_experts(adapt, family, targets, products):
    model = adapt(family, lora_target_modules=targets).model
    assert len(trained_parameters(model)) == 2 * products, "A and B of each product"


def test_modules_to_save_are_float32_beside_a_bfloat16_base(bases, load, tmp_path):
    bundle = load(
        lt.ModelConfig(str(bases("untied")), max_length=64),
        lt.LoraConfig(lora_r=4, lora_modules_to_save=["embed_tokens", "lm_head", "model.norm"]),
        precision="bf16",
    )
    check_saved_modules(bundle.model)
    norm = bundle.model.get_parameter("model.layers.0.input_layernorm.weight")
    assert norm.dtype == torch.bfloat16

    folder = export_model(bundle, tmp_path / "model")
    check_saved_modules(load(continuing(folder), precision="bf16").model)


def check_saved_modules(model: torch.nn.Module) -> None:
    """Check that three modules are trained in full, from the frozen weights of the base."""
    parameters = trained_parameters(model).items()
    copies = {name: value for name, value in parameters if ".modules_to_save." in name}
    assert len(copies) == 3
    for name, copy in copies.items():
        original = model.get_parameter(name.replace("modules_to_save.default", "original_module"))
        assert copy.dtype == torch.float32
        assert torch.equal(copy.to(original.dtype), original)
        assert not original.requires_grad
    assert model.head_is_linear


@with_and_without_new_tokens
def test_modules_to_save_are_trained_exported_continued_and_merged(
    adapt, load, make_tokenizer, tmp_path
):
    tokenizer = make_tokenizer()
    ids = ids_for(tokenizer)
    modules = ["embed_tokens", "lm_head", "model.norm"]
    bundle = adapt("untied", tokenizer, use_rslora=True, lora_modules_to_save=modules)
    check_saved_modules(bundle.model)

    before = {name: value.clone() for name, value in trained_parameters(bundle.model).items()}
    train_a_little(bundle.model, ids)
    for name, value in trained_parameters(bundle.model).items():
        assert not torch.equal(value, before[name]), name

    expected = logits(bundle.model, ids)
    folder = export_model(bundle, tmp_path / "model")
    keys = load_file(folder / "adapter_model.safetensors").keys()
    assert {"base_model.model.lm_head.weight", "base_model.model.model.norm.weight"} < keys
    assert torch.equal(logits(TextModel(str(folder)).model, ids), expected)

    continued = load(continuing(folder), tokenizer=AutoTokenizer.from_pretrained(folder))
    assert torch.equal(logits(continued.model, ids), expected)

    merged = AutoModelForCausalLM.from_pretrained(merged_model(folder))
    torch.testing.assert_close(logits(merged, ids), expected, atol=2e-5, rtol=0)


# --- checkpoints and exported adapters


@pytest.mark.parametrize(
    ("base", "make_tokenizer"), [("untied", byte_tokenizer), ("tied", chat_tokenizer)]
)
def test_a_checkpoint_holds_only_the_adapter_and_restores_it(adapt, base, make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    ids = ids_for(tokenizer)
    bundle = adapt(base, tokenizer)
    train_a_little(bundle.model, ids)

    saver = Saver(tmp_path, bundle.files, keep=1)
    state = {"optimizer": FlatState({}, {})}
    saver.save(4, bundle.files.tensors(bundle.model), state, {"step": 4})

    folder = tmp_path / "step-00000004" / "model"
    assert (folder / "adapter_model.safetensors").stat().st_size < 150_000
    assert not (folder / "config.json").exists()

    restored = adapt(base, tokenizer)
    assert not torch.equal(logits(restored.model, ids), logits(bundle.model, ids))
    fill(restored.files.tensors(restored.model), read_tensors(folder))
    assert torch.equal(logits(restored.model, ids), logits(bundle.model, ids))


HEAD = {"lora_target_modules": ["q_proj", "lm_head"]}


@pytest.mark.parametrize(
    ("base", "flags", "make_tokenizer"),
    [
        pytest.param("untied", {}, byte_tokenizer, id="untied"),
        pytest.param("tied", {}, chat_tokenizer, id="tied, new tokens"),
        pytest.param("untied", {"use_dora": True}, chat_tokenizer, id="untied, dora, new tokens"),
        pytest.param("tied", {"use_dora": True}, byte_tokenizer, id="tied, dora"),
        pytest.param("untied", HEAD, byte_tokenizer, id="head"),
    ],
)
def test_exported_and_merged_models_compute_the_trained_logits(
    adapt, base, flags, make_tokenizer, tmp_path
):
    tokenizer = make_tokenizer()
    check_export_and_merge(adapt(base, tokenizer, **flags), ids_for(tokenizer), tmp_path)


def check_export_and_merge(bundle: lt.ModelBundle, ids: torch.Tensor, folder: Path) -> set[str]:
    """Train an adapter, and check its files. Return the names of the changed parameters."""
    changed = changed_by_training(bundle.model, ids)
    expected = logits(bundle.model, ids)
    base = AutoModelForCausalLM.from_pretrained(bundle.files.base)
    change = logits(base) - expected[:, : IDS.shape[1], :VOCABULARY]
    assert change.abs().max() > 1e-2, "training changed nothing"

    exported = export_model(bundle, folder / "model")
    assert torch.equal(logits(TextModel(str(exported)).model, ids), expected)

    write_merged(exported, folder / "merged")
    merged, info = AutoModelForCausalLM.from_pretrained(folder / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(merged, ids), expected, atol=1e-5, rtol=0)
    assert merged.config.tie_word_embeddings == base.config.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    assert len(tokenizer) == len(bundle.files.tokenizer)
    return changed


def test_transformers_loads_an_adapter_whose_settings_name_its_modules(adapt, tmp_path):
    bundle = adapt()
    train_a_little(bundle.model)
    folder = export_model(bundle, tmp_path / "model")

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(loaded), logits(bundle.model))
    settings = json.loads((folder / "adapter_config.json").read_text())
    names = {name.rpartition(".")[2] for name in settings["target_modules"]}
    assert names == set(SEVEN_PRODUCTS)


@with_and_without_new_tokens
def test_the_code_in_the_model_card_loads_the_adapter(adapt, make_tokenizer, tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    ids = ids_for(tokenizer)
    bundle = adapt("untied", tokenizer)
    train_a_little(bundle.model, ids)
    folder = export_model(bundle, tmp_path / "model")
    assert how_to_load(folder) == "peft: AutoPeftModelForCausalLM.from_pretrained"

    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n")
    assert f"Fine-tuned from {Path(bundle.files.base).name} with llmtrain" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    variables: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(code, variables)

    torch.testing.assert_close(logits(variables["model"], ids), logits(bundle.model, ids))
    assert len(variables["tokenizer"]) == len(tokenizer)


def test_a_relative_base_is_found_from_another_working_directory(
    bases, load, tmp_path, monkeypatch
):
    base = bases("untied")
    monkeypatch.chdir(base.parent)
    bundle = load(lt.ModelConfig(base.name, max_length=64), lt.LoraConfig(lora_r=4))
    export_model(bundle, tmp_path / "model")

    monkeypatch.chdir(tmp_path)

    assert torch.equal(logits(TextModel("model").model), logits(bundle.model))


def test_the_fingerprint_of_a_run_has_every_setting_of_its_adapter(adapt):
    start = adapt().start
    assert start.keys() == {"weights", "lora", "freeze"}
    assert start["lora"] == dataclasses.asdict(lt.LoraConfig(lora_r=4))


# --- the end of an answer


def test_answers_end_at_the_stop_tokens_of_the_base_and_of_the_template(bases, load, tmp_path):
    base = shutil.copytree(bases("untied"), tmp_path / "base")
    settings = {"eos_token_id": [0, 71], "temperature": 0.6, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(settings))
    config = lt.ModelConfig(str(base), max_length=64)

    generation = load(config, stop_token_ids=(0, 258)).files.generation
    assert generation["eos_token_id"] == [0, 71, 258]
    assert generation["temperature"] == 0.6

    lora = lt.LoraConfig(lora_r=4)
    adapter = export_model(load(config, lora, stop_token_ids=(258,)), tmp_path / "chat")
    assert 258 in TextModel(str(adapter)).stop_token_ids
    adapter = export_model(load(config, lora), tmp_path / "model")
    assert TextModel(str(adapter)).stop_token_ids == {0, 71}
    (adapter / "generation_config.json").write_text('{"eos_token_id": 80}')
    assert TextModel(str(adapter)).stop_token_ids == {0, 80}
    (adapter / "generation_config.json").unlink()
    assert TextModel(str(adapter)).stop_token_ids == {0, 71}


# --- merging


def test_a_run_from_an_adapter_starts_from_its_model_which_is_merged_once(adapt, tmp_path):
    bundle = adapt()
    train_a_little(bundle.model)
    run = tmp_path / "run"
    export_model(bundle, run / "model")

    times_of_merge = set()
    for _ in range(2):
        config = lt.ModelConfig(str(run), max_length=64)
        config.fit_max_length()
        assert config.model_name_or_path == str(run / "merged")
        times_of_merge.add((run / "merged" / "model.safetensors").stat().st_mtime_ns)

    assert len(times_of_merge) == 1
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    torch.testing.assert_close(logits(merged), logits(bundle.model), atol=1e-5, rtol=1e-5)
    assert len(AutoTokenizer.from_pretrained(run / "merged")) == VOCABULARY


def test_a_merge_of_an_earlier_adapter_or_into_another_dtype_is_refused(adapt, tmp_path):
    bundle = adapt()
    folder = export_model(bundle, tmp_path / "run" / "model")
    merged_model(folder)

    train_a_little(bundle.model)
    export_model(bundle, folder)

    with refused("merged exists and was not merged from .*/model in the dtypes of its base"):
        merged_model(folder)

    merged = tmp_path / "run" / "merged"
    shutil.rmtree(merged)
    write_merged(folder, merged, "float16")
    with refused("in the dtypes of its base"):
        merged_model(folder)


@pytest.mark.parametrize(
    ("base", "make_tokenizer"), [("untied", chat_tokenizer), ("deepseek_v3", byte_tokenizer)]
)
def test_planning_from_an_adapter_writes_nothing(adapt, base, make_tokenizer, tmp_path):
    run = tmp_path / "run"
    export_model(adapt(base, make_tokenizer()), run / "model")
    text = tmp_path / "text.txt"
    text.write_text("some words of text " * 200)
    files_before = sorted(tmp_path.rglob("*"))

    flags = f"--model_name_or_path {run} --dataset {text} --max_length 64"
    build_recipe_model(str(ROOT / FINETUNE), flags.split(), "no")

    assert sorted(tmp_path.rglob("*")) == files_before


def test_a_merged_model_is_never_written_into_a_checkpoint(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000010"
    assert (
        folder_beside(checkpoint / "model", "merged") == tmp_path / "run" / "merged-step-00000010"
    )
    assert folder_beside(tmp_path / "own", "merged") == tmp_path / "own-merged"


def test_a_merge_into_quantized_weights_is_refused(peft_adapter, bases, tmp_path):
    folder = peft_adapter()
    base = shutil.copytree(bases("untied"), tmp_path / "quantized")
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    change_json(base / "config.json", quantization_config=quantization)
    change_json(folder / "adapter_config.json", base_model_name_or_path=str(base))

    with refused("--continue_adapter, .* export .* --merge"):
        lt.ModelConfig(str(folder), max_length=64).fit_max_length()


def test_biases_of_an_adapter_are_not_merged_into_a_base_without_biases(peft_adapter, tmp_path):
    folder = peft_adapter(lora_bias=True)
    with refused("cannot be merged .* no bias"):
        write_merged(folder, tmp_path / "merged")


# --- adapters that peft wrote


@pytest.fixture
def peft_adapter(bases, tmp_path) -> Callable[..., Path]:
    """Write an adapter with peft alone, with matrices that are not zero, and a tokenizer."""

    def write(base: str = "untied", dtype: torch.dtype = torch.float32, **options) -> Path:
        defaults = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        settings = peft.LoraConfig(**defaults | options)
        model = AutoModelForCausalLM.from_pretrained(bases(base))
        adapted = peft.get_peft_model(model, settings)
        torch.manual_seed(1)
        for parameter in trained_parameters(adapted).values():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        adapted.to(dtype).save_pretrained(tmp_path / "peft")
        byte_tokenizer().save_pretrained(tmp_path / "peft")
        return tmp_path / "peft"

    return write


def continuing(folder: Path, **flags: Any) -> lt.ModelConfig:
    return lt.ModelConfig(str(folder), max_length=64, continue_adapter=True, **flags)


@pytest.mark.parametrize(
    ("base", "options"),
    [
        pytest.param("untied", {"use_rslora": True, "bias": "lora_only"}, id="biases"),
        pytest.param(
            "untied",
            {"dtype": torch.bfloat16, "rank_pattern": {"1.self_attn.q_proj": 5}},
            id="bfloat16, two ranks",
        ),
        pytest.param(
            "untied", {"modules_to_save": ["lm_head", "embed_tokens"]}, id="modules in full"
        ),
        pytest.param("tied", {"target_modules": ["q_proj", "lm_head"]}, id="tied head"),
        pytest.param("tied", {"modules_to_save": ["embed_tokens"]}, id="tied embedding in full"),
    ],
)
def test_an_adapter_of_peft_is_trained_further_and_merged(
    peft_adapter, load, base, options, tmp_path
):
    original = peft_adapter(base, **options)

    bundle = load(continuing(original))
    expected = logits(AutoPeftModelForCausalLM.from_pretrained(original))
    torch.testing.assert_close(logits(bundle.model), expected, rtol=0, atol=1e-6)
    dtypes = {parameter.dtype for parameter in trained_parameters(bundle.model).values()}
    assert dtypes == {torch.float32}

    train_a_little(bundle.model)
    trained = export_model(bundle, tmp_path / "trained")
    for folder in (original, trained):
        expected = logits(AutoPeftModelForCausalLM.from_pretrained(folder))
        merged = merged_model(folder)
        loaded = AutoModelForCausalLM.from_pretrained(merged)
        torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=2e-5)

    restarted = load(lt.ModelConfig(merged, max_length=64))
    torch.testing.assert_close(logits(restarted.model), expected, rtol=0, atol=2e-5)


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(peft_adapter):
    folder = peft_adapter()
    for file in folder.glob("token*"):
        file.unlink()

    vocabulary = byte_tokenizer().get_vocab()
    assert TextModel(str(folder)).tokenizer.get_vocab() == vocabulary
    merged = merged_model(folder)
    assert AutoTokenizer.from_pretrained(merged).get_vocab() == vocabulary


# --- an adapter that is trained further


def gradients(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.train()(ids, ids).backward()
    return gradients_of(model)


@pytest.mark.parametrize(
    ("base", "flags", "make_tokenizer"),
    [
        pytest.param("untied", {}, chat_tokenizer, id="untied, new tokens"),
        pytest.param("tied", {"use_dora": True, "lora_alpha": 5}, chat_tokenizer, id="tied, dora"),
        pytest.param("gpt_oss", {}, byte_tokenizer, id="gpt_oss"),
        pytest.param("deepseek_v3", {}, chat_tokenizer, id="deepseek_v3, new tokens"),
        pytest.param("untied", HEAD, byte_tokenizer, id="head"),
    ],
)
def test_a_continued_adapter_trains_as_its_run_would(
    adapt, load, base, flags, make_tokenizer, tmp_path
):
    tokenizer = make_tokenizer()
    ids = ids_for(tokenizer)
    bundle = adapt(base, tokenizer, **flags)
    train_a_little(bundle.model, ids)
    exported = export_model(bundle, tmp_path / "model")

    continued = load(continuing(exported), lt.LoraConfig(), tokenizer=tokenizer)

    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing was merged"
    tensors = continued.files.tensors(continued.model)
    expected_tensors = bundle.files.tensors(bundle.model)
    torch.testing.assert_close(tensors, expected_tensors, rtol=0, atol=0)
    assert torch.equal(logits(continued.model, ids), logits(bundle.model, ids))
    torch.testing.assert_close(
        gradients(continued.model, ids), gradients(bundle.model, ids), rtol=1e-6, atol=1e-9
    )

    train_a_little(continued.model, ids)
    train_a_little(bundle.model, ids)
    exported = export_model(continued, tmp_path / "continued")
    torch.testing.assert_close(
        logits(TextModel(str(exported)).model, ids), logits(bundle.model, ids), rtol=0, atol=1e-6
    )


# --- refusals, in one line that names the flag or the folder


@contextmanager
def refused(message: str) -> Iterator[None]:
    with pytest.raises(UserError, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "flags", "message"),
    [
        (
            "untied",
            {"lora_target_modules": ["q_proj", "v_porj"]},
            "--lora_target_modules: .*v_porj",
        ),
        # It is only the end of a name.
        ("untied", {"lora_target_modules": ["q_proj", "proj"]}, "--lora_target_modules: .* proj"),
        ("untied", {"lora_target_modules": ["all-linear", "q_proj"]}, "--lora_target_modules"),
        ("untied", {"lora_r": 0, "use_dora": True}, "--use_dora needs --lora_r"),
        ("untied", {"lora_r": 0, "lora_alpha": 64}, "--lora_alpha and .* need --lora_r"),
        (
            "untied",
            {"lora_r": 0, "lora_target_modules": ["q_proj"]},
            "--lora_target_modules need --lora_r",
        ),
        ("untied", {"lora_modules_to_save": ["lm_hed"]}, "--lora_modules_to_save: .*lm_hed"),
        ("tied", {"lora_modules_to_save": ["embed_tokens"]}, "embedding and the head .* share"),
        ("mixtral", {"lora_dropout": 0.1}, "the fused weights of this model's experts"),
        ("mixtral", {"use_dora": True}, "the fused weights of this model's experts"),
        ("untied", {"lora_r": -1}, "--lora_r -1"),
        ("untied", {"lora_dropout": 1.0}, r"--lora_dropout 1\.0"),
    ],
)
def test_bad_settings_are_refused(adapt, base, flags, message):
    with refused(message):
        adapt(base, **flags)


def test_peft_is_missing_before_the_data_are_read(monkeypatch):
    monkeypatch.setattr(lora_config, "find_spec", lambda name: None)
    with refused("--lora_r needs peft: pip install"):
        lt.LoraConfig(lora_r=4)
    lt.LoraConfig()


def test_bitwise_runs_refuse_the_dropout_of_an_adapter(bases, load, peft_adapter):
    dropout = lt.LoraConfig(lora_r=4, lora_dropout=0.1)
    with refused("--bitwise needs a model without dropout"):
        load(lt.ModelConfig(str(bases("untied")), max_length=64), dropout, bitwise=True)
    with refused("--bitwise needs a model without dropout"):
        load(continuing(peft_adapter(lora_dropout=0.1)), bitwise=True)


def test_dropout_is_accepted_if_no_expert_is_adapted(adapt):
    model = adapt("mixtral", lora_target_modules=["q_proj"], lora_dropout=0.1).model
    assert trained_parameters(model)
    assert all("q_proj" in name for name in trained_parameters(model))


@pytest.mark.parametrize(
    ("flags", "lora", "message"),
    [
        ({"from_config": "llama"}, lt.LoraConfig(lora_r=4), "--lora_r needs --model_name_or_path"),
        ({"freeze": "embed"}, lt.LoraConfig(lora_r=4), "--freeze cannot be combined with --lora_r"),
        ({"load_in_4bit": True}, None, "--load_in_4bit needs --lora_r"),
    ],
)
def test_flags_that_exclude_or_need_an_adapter_are_refused(bases, load, flags, lora, message):
    source = {} if "from_config" in flags else {"model_name_or_path": str(bases("untied"))}
    with refused(message):
        load(lt.ModelConfig(max_length=64, **source, **flags), lora)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can train with 4 bits")
def test_four_bits_without_a_gpu_are_refused(bases, load):
    config = lt.ModelConfig(str(bases("untied")), max_length=64, load_in_4bit=True)
    with refused("--load_in_4bit needs a CUDA GPU"):
        load(config, lt.LoraConfig(lora_r=4))


def test_an_adapter_is_not_a_base(adapt, load, tmp_path):
    folder = export_model(adapt(), tmp_path / "model")
    with refused("llmtrain export .* --merge"):
        load(lt.ModelConfig(str(folder), max_length=64), lt.LoraConfig(lora_r=4))


def test_a_base_with_other_weights_or_another_configuration_is_another_base(bases, load, tmp_path):
    base = shutil.copytree(bases("untied"), tmp_path / "base")
    bundle = load(lt.ModelConfig(str(base), max_length=64), lt.LoraConfig(lora_r=4))
    folder = export_model(bundle, tmp_path / "model")
    assert TextModel(str(folder))

    change_json(base / "config.json", rms_norm_eps=1e-3)
    with refused("was trained on different weights"):
        TextModel(str(folder))

    change_json(folder / "adapter_config.json", base_model_name_or_path=str(bases("another")))
    with refused(r"was trained on different weights than .*another"):
        TextModel(str(folder))
    with refused(r"was trained on different weights than .*another"):
        load(continuing(folder))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", "{"),
        ("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": null}'),
        ("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "/no/base"}'),
        ("adapter_model.safetensors", None),
    ],
)
def test_a_broken_adapter_is_refused(adapt, tmp_path, file, content):
    folder = export_model(adapt(), tmp_path / "model")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)

    with refused(str(folder)):
        write_merged(folder, tmp_path / "merged")
    with refused(str(folder)):
        TextModel(str(folder))
    assert not (tmp_path / "merged").exists()


def test_an_adapter_whose_base_has_moved_says_what_to_set(adapt, tmp_path):
    folder = export_model(adapt(), tmp_path / "model")
    change_json(folder / "adapter_config.json", base_model_name_or_path="/no/base")
    with refused("/no/base has moved; set base_model_name_or_path"):
        TextModel(str(folder))


@pytest.mark.parametrize(
    ("flags", "lora", "message"),
    [
        ({}, {"lora_r": 4}, "cannot be combined with --lora_r"),
        ({"freeze": "norm"}, {}, "--freeze cannot be combined with --continue_adapter"),
    ],
)
def test_flags_that_contradict_continue_adapter_are_refused(
    peft_adapter, load, flags, lora, message
):
    with refused(message):
        load(continuing(peft_adapter(), **flags), lt.LoraConfig(**lora))


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        pytest.param("deeper", {}, "does not fit", id="a deeper base"),
        pytest.param("wider", {}, "could not be loaded: .*size mismatch", id="a wider base"),
        pytest.param("untied", {"init_lora_weights": "pissa"}, "pissa", id="a changed base"),
        pytest.param("untied", {"peft_type": "IA3"}, "peft_type IA3", id="no LoRA"),
    ],
)
def test_an_adapter_that_cannot_be_continued_is_refused(
    peft_adapter, bases, load, base, settings, message
):
    folder = peft_adapter()
    settings = {"base_model_name_or_path": str(bases(base)), **settings}
    change_json(folder / "adapter_config.json", **settings)

    with refused(message):
        load(continuing(folder))


def test_an_adapter_of_another_architecture_is_not_used(peft_adapter, bases):
    folder = peft_adapter()
    change_json(folder / "adapter_config.json", base_model_name_or_path=str(bases("deeper")))
    with refused("does not fit"):
        TextModel(str(folder))


def test_only_the_folder_of_an_adapter_can_be_continued(bases):
    with refused("--continue_adapter needs --model_name_or_path"):
        lt.ModelConfig(from_config="llama", continue_adapter=True)
    with refused("is not the folder of an adapter"):
        continuing(bases("untied")).fit_max_length()
    with refused("hf download some/adapter --local-dir "):
        lt.ModelConfig("some/adapter", continue_adapter=True).fit_max_length()


def test_a_chat_template_adds_no_tokens_to_a_continued_adapter(peft_adapter, load):
    with refused("leave --chat_template out"):
        load(continuing(peft_adapter()), tokenizer=chat_tokenizer(), new_tokens=NEW_TOKENS)
