"""LoRA: the adapter alone is trained and kept, belongs to its base, and merges into it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Mamba2Config,
    PreTrainedTokenizerFast,
    modeling_utils,
)

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template
from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.adapters import merged_folder, merged_model, write_merged, write_outline
from llmtrain.models.config import ModelConfig
from llmtrain.models.export import how_to_load
from llmtrain.models.generation import Sampling, TextModel
from llmtrain.models.hub_models import origin_of
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import place
from llmtrain.parallel.shards import fill
from llmtrain.record.saver import Saver, write_model
from llmtrain.record.state_tree import FlatState
from llmtrain.record.tensor_files import read_tensors
from llmtrain.training.recipe_model import build_recipe_model
from tests.launching import FINETUNE, ROOT
from tests.models.some_rows import SomeRows

WITH_EXPERTS = [
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "granitemoe",
    "deepseek_v3",
]  # whose weights are fused
IDS = torch.randint(1, 250, (4, 24), generator=torch.Generator().manual_seed(0))


def words() -> PreTrainedTokenizerFast:
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)


def chatting() -> PreTrainedTokenizerFast:
    """With the two tokens of a chat template, which the base does not know."""
    tokenizer = words()
    assert len(set_template(tokenizer, "chatml")) == 2
    return tokenizer


def load(
    accelerator,
    config: ModelConfig,
    lora: LoraConfig | None = None,
    tokenizer=None,
    ends: tuple[int, ...] = (),
) -> ModelBundle:
    tokenizer = tokenizer or words()
    rows = SomeRows(
        tokenizer, stop_token_ids=ends, new_tokens=[257, 258] if len(tokenizer) == 259 else []
    )
    return place(accelerator, load_model(config, lora, rows, 3, "no"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of small pretrained models; those named tied have one matrix for embedding and head."""
    from llmtrain.models.meta_models import configuration_of

    made: dict[str, Path] = {}

    def base(kind: str) -> Path:
        if kind not in made:
            family = kind if kind in WITH_EXPERTS else "llama"
            layers = 3 if kind == "deeper" else 2
            width = 96 if kind == "wider" else 64
            tied = str(kind == "tied").lower()
            overrides = f"num_hidden_layers={layers},hidden_size={width},tie_word_embeddings={tied}"
            torch.manual_seed(len(made))
            config = configuration_of(
                ModelConfig(from_config=family, config_overrides=overrides, max_length=64), words()
            )
            made[kind] = tmp_path_factory.mktemp(kind)
            AutoModelForCausalLM.from_config(config).save_pretrained(made[kind])
            words().save_pretrained(made[kind])
        return made[kind]

    return base


@pytest.fixture
def adapt(bases, accelerator) -> Callable[..., ModelBundle]:
    def adapt(
        kind: str = "untied", tokenizer: PreTrainedTokenizerFast | None = None, **settings
    ) -> ModelBundle:
        config = ModelConfig(str(bases(kind)), max_length=64)
        lora = LoraConfig(**{"lora_r": 4} | settings)
        return load(accelerator, config, lora, tokenizer)

    return adapt


def train_a_little(model: torch.nn.Module, ids: torch.Tensor = IDS) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(4):
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_only_the_adapter_is_trained_and_the_base_does_not_move(adapt, kind, settings):
    model = adapt(kind, **settings).model
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train_a_little(model)
    moved = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert moved == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert all("lora_" in name for name in moved)
    assert len(moved) >= 2 * 7 * 2  # two matrices at seven products of two layers


@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("grown", [False, True], ids=["", "grown"])
def test_a_checkpoint_holds_the_adapter_and_gives_it_back(adapt, kind, grown, tmp_path):
    ids = torch.cat([IDS, torch.full((4, 2), 258)], dim=1) if grown else IDS
    tokenizer = chatting() if grown else words()
    bundle = adapt(kind, tokenizer)
    model, files = bundle.model, bundle.files
    train_a_little(model, ids)
    weights = files.tensors(model)
    Saver(tmp_path, files, keep=1).save(4, weights, {"optimizer": FlatState({}, {})}, {"step": 4})
    path = tmp_path / "step-00000004"
    assert (path / "model" / "adapter_model.safetensors").stat().st_size < 150_000
    assert not (path / "model" / "config.json").exists()

    bundle = adapt(kind, tokenizer)
    again, more_files = bundle.model, bundle.files
    assert not torch.equal(logits(again, ids), logits(model, ids))
    fill(more_files.tensors(again), read_tensors(path / "model"))
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize(
    "settings", [{}, {"use_dora": True}, {"lora_target_modules": ["q_proj", "lm_head"]}]
)
@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("grown", [False, True], ids=["", "grown"])
def test_adapter_and_merged_model_compute_the_trained_logits(
    adapt, kind, grown, settings, tmp_path
):
    if "lm_head" in str(settings) and (kind == "tied" or grown):
        pytest.skip("a head that is tied, or has rows of its own to train, takes no adapter")
    ids = torch.cat([IDS, torch.full((4, 2), 258)], dim=1) if grown else IDS
    bundle = adapt(kind, chatting() if grown else words(), **settings)
    model, files = bundle.model, bundle.files
    train_a_little(model, ids)
    expected = logits(model, ids)
    write_model(tmp_path / "model", files, files.export_tensors(model))
    assert torch.equal(logits(TextModel(str(tmp_path / "model")).model, ids), expected)

    write_merged(tmp_path / "model", tmp_path / "merged")
    merged, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    torch.testing.assert_close(logits(merged, ids), expected, atol=1e-5, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(files.base)
    assert (logits(base) - expected[:, :24, :257]).abs().max() > 1e-2, "training changed nothing"
    assert merged.config.tie_word_embeddings == (kind == "tied")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == (259 if grown else 257)


def test_loading_an_adapter_with_new_tokens_warns_of_nothing(adapt, tmp_path, monkeypatch):
    files = (bundle := adapt("untied", chatting())).files
    write_model(tmp_path / "model", files, files.export_tensors(bundle.model))
    warnings: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", warnings.append)
    TextModel(str(tmp_path / "model"))
    write_merged(tmp_path / "model", tmp_path / "merged")
    assert warnings == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [("{}", 5), ('{"eos_token_id": 7}', 7), ("[", 5), (None, 5)],
)
def test_an_adapter_without_a_stop_token_stops_as_its_base(adapt, tmp_path, settings, expected):
    files = (bundle := adapt("untied")).files
    folder = tmp_path / "model"
    write_model(folder, files, files.export_tensors(bundle.model))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if settings is not None:
        (folder / "generation_config.json").write_text(settings)
    model = TextModel(str(folder))
    model.model.generation_config.eos_token_id = 5
    assert model._stop_token_ids(folder) == [expected]


def test_an_adapter_names_the_modules_that_it_adapts(adapt, tmp_path):
    bundle = adapt()
    model, files = bundle.model, bundle.files
    write_model(tmp_path / "model", files, files.export_tensors(model))
    settings = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    names = {name.rpartition(".")[2] for name in settings["target_modules"]}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_transformers_alone_loads_an_adapter_whose_vocabulary_did_not_grow(adapt, tmp_path):
    bundle = adapt()
    model, files = bundle.model, bundle.files
    train_a_little(model)
    write_model(tmp_path / "model", files, files.export_tensors(model))
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits(model)
    )


@pytest.mark.parametrize("grown", [False, True], ids=["", "grown"])
def test_the_model_card_s_code_loads_the_adapter(adapt, grown, tmp_path, monkeypatch):
    ids = torch.cat([IDS, torch.full((4, 2), 258)], dim=1) if grown else IDS
    bundle = adapt("untied", chatting() if grown else words())
    model, files = bundle.model, bundle.files
    train_a_little(model, ids)
    folder = tmp_path / "model"
    write_model(folder, files, files.export_tensors(model))
    assert how_to_load(folder) == "peft: AutoPeftModelForCausalLM.from_pretrained"

    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(code, names)
    torch.testing.assert_close(logits(names["model"], ids), logits(model, ids))
    assert len(names["tokenizer"]) == (259 if grown else 257)


@pytest.mark.parametrize(("kind", "matrices"), [("tied", 1), ("untied", 2)])
def test_rows_of_added_tokens_are_trained_and_no_others(adapt, kind, matrices):
    model = adapt(kind, chatting()).model
    rows = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    assert [len(part) for part in rows] == [2] * matrices
    before = [part.clone() for part in rows]
    train_a_little(model, torch.full((4, 24), 258))
    assert not any(torch.equal(part, then) for part, then in zip(rows, before, strict=True))
    assert logits(model).shape[-1] == 259


def test_an_adapter_of_other_weights_is_refused(adapt, bases, tmp_path):
    bundle = adapt()
    model, files = bundle.model, bundle.files
    write_model(tmp_path / "model", files, files.export_tensors(model))
    path = tmp_path / "model" / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "base_model_name_or_path": str(bases("another"))}))
    with pytest.raises(
        UserError, match=r"is an adapter of other weights than .*another\w* holds now"
    ):
        TextModel(str(tmp_path / "model"))


def test_a_run_with_an_adapter_stands_for_its_merged_model(adapt, tmp_path, capsys):
    bundle = adapt()
    model, files = bundle.model, bundle.files
    train_a_little(model, IDS)
    run = tmp_path / "run"
    write_model(run / "model", files, files.export_tensors(model))

    for _ in range(2):
        config = ModelConfig(str(run), max_length=64)
        config.fit_max_length()
        assert config.model_name_or_path == str(run / "merged")
        assert f"merged    {run}/model is an adapter" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=1e-5)
    assert len(AutoTokenizer.from_pretrained(run / "merged")) == 257

    before = (run / "merged" / "model.safetensors").stat().st_mtime_ns
    merged_model(run / "model")
    assert (run / "merged" / "model.safetensors").stat().st_mtime_ns == before
    train_a_little(model, IDS)
    write_model(run / "model", files, files.export_tensors(model))
    with pytest.raises(UserError, match=r"merged exists and was not merged from .*model; delete"):
        merged_model(run / "model")


@pytest.mark.parametrize("kind", ["untied", "deepseek_v3"])
@pytest.mark.parametrize("tokenizer", [words, chatting])
def test_a_plan_of_an_adapter_writes_nothing_next_to_it(adapt, tmp_path, kind, tokenizer):
    bundle = adapt(kind, tokenizer())
    run = tmp_path / "run"
    tensors = bundle.files.export_tensors(bundle.model)
    write_model(run / "model", bundle.files, tensors)
    (tmp_path / "text.txt").write_text("some words of text " * 200)
    before = sorted(tmp_path.rglob("*"))

    flags = ["--model_name_or_path", str(run), "--dataset", str(tmp_path / "text.txt")]
    subject = build_recipe_model(str(ROOT / FINETUNE), [*flags, "--max_length", "64"], "no")
    assert sorted(tmp_path.rglob("*")) == before

    rows = SomeRows(tokenizer(), stop_token_ids=(), new_tokens=[])
    merged = load_model(
        ModelConfig(merged_model(run / "model"), max_length=64), None, rows, 3, "no"
    )
    shapes = {name: weight.shape for name, weight in merged.model.named_parameters()}
    assert {name: weight.shape for name, weight in subject.model.named_parameters()} == shapes


def test_a_merged_model_is_never_written_into_a_checkpoint(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000010"
    assert merged_folder(checkpoint / "model") == tmp_path / "run" / "merged-step-00000010"
    assert merged_folder(tmp_path / "own") == tmp_path / "own-merged"


def test_a_base_with_another_configuration_is_another_base(accelerator, bases, tmp_path):
    base = shutil.copytree(bases("untied"), tmp_path / "base")
    loaded = load(accelerator, ModelConfig(str(base), max_length=64), LoraConfig(lora_r=4))
    write_model(
        tmp_path / "model",
        loaded.files,
        loaded.files.export_tensors(loaded.model),
    )
    assert TextModel(str(tmp_path / "model"))
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    with pytest.raises(UserError, match="is an adapter of other weights"):
        TextModel(str(tmp_path / "model"))


def test_an_adapter_whose_base_is_gone_is_one_line(adapt, tmp_path):
    bundle = adapt()
    model, files = bundle.model, bundle.files
    write_model(tmp_path / "model", files, files.export_tensors(model))
    path = tmp_path / "model" / "adapter_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "/no/such/base"})
    )
    with pytest.raises(UserError, match="its adapter could not be loaded") as caught:
        TextModel(str(tmp_path / "model"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_every_expert_has_matrices_of_its_own(adapt, family, tmp_path, recwarn):
    bundle = adapt(family)
    model, files = bundle.model, bundle.files
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train_a_little(model)
    moved = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert moved == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    mine = [name for name in moved if ".experts." in name]
    assert len(mine) == 2 * 2 * (1 if family == "deepseek_v3" else 2), (
        "two matrices at two products of each layer"
    )
    plain = AutoModelForCausalLM.from_pretrained(files.base)
    linear = {name for name, module in plain.named_modules() if type(module) is torch.nn.Linear} - {
        "lm_head"
    }
    assert linear <= {name.partition(".lora_")[0].replace(".base_layer", "") for name in moved}, (
        "all-linear"
    )
    expected = logits(model)
    write_model(tmp_path / "model", files, files.export_tensors(model))
    assert torch.equal(logits(TextModel(str(tmp_path / "model")).model), expected)
    write_merged(tmp_path / "model", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
    before = plain.state_dict()
    for name, whole in merged.state_dict().items():
        if ".experts." in name and whole.ndim == 3:
            assert not any(
                torch.equal(one, was) for one, was in zip(whole, before[name], strict=True)
            ), name
    assert not [str(one.message) for one in recwarn if "pattern" in str(one.message)]


def test_the_weights_of_experts_can_be_named(adapt):
    model = adapt("mixtral", lora_target_modules=["q_proj", "experts.down_proj"]).model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kinds = {name.partition(".layers.")[2][2:].partition(".lora_")[0] for name in trained}
    assert kinds == {"self_attn.q_proj", "mlp.experts"}
    assert len(trained) == 2 * 2 * 2
    alone = adapt("mixtral", lora_target_modules=["experts.down_proj"]).model
    trained = [name for name, parameter in alone.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2
    assert all(".experts.lora_" in name for name in trained)
    usual = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for family in ("qwen3_moe", "mixtral"):
        whole = adapt(family, lora_target_modules=usual).model
        trained = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
        assert len(trained) == 2 * 2 * (4 + 2), "two products of experts"
    dense = adapt("deepseek_v3", lora_target_modules=usual[-3:]).model
    trained = [name for name, parameter in dense.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * (3 + 3 + 2), "a dense layer, shared experts, and the others"
    adapt("mixtral", lora_target_modules=["q_proj"], lora_dropout=0.1)
    for settings in ({"lora_dropout": 0.1}, {"use_dora": True}):
        with pytest.raises(
            UserError, match="the fused weights of this model's experts take neither"
        ):
            adapt("mixtral", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_target_modules": ["no_such_proj"]}, r"--lora_target_modules no_such_proj: "),
        ({"lora_target_modules": ["q_proj", "v_porj"]}, r"no module is called v_porj"),
        (
            {"lora_target_modules": ["all-linear", "q_proj"]},
            r"all-linear already means every module",
        ),
        ({"lora_r": 0, "use_dora": True}, r"--use_dora needs --lora_r"),
        ({"lora_r": 0, "lora_modules_to_save": ["lm_head"]}, r"to_save needs --lora_r"),
        ({"lora_modules_to_save": ["lm_hed"]}, r"to_save: no module is called lm_hed"),
        (
            {"kind": "tied", "lora_modules_to_save": ["embed_tokens"]},
            r"embedding and the head of this model share",
        ),
        ({"lora_r": -1}, r"--lora_r -1"),
        ({"lora_dropout": 1.0}, r"--lora_dropout 1\.0"),
        ({"lora_alpha": 0}, r"--lora_alpha 0"),
    ],
)
def test_bad_settings_are_one_line(adapt, settings, message):
    with pytest.raises(UserError, match=message):
        adapt(**settings)


def test_rows_of_added_tokens_are_trained_where_the_base_had_spare_ones(
    bases, accelerator, tmp_path
):
    base = AutoModelForCausalLM.from_pretrained(bases("untied"))
    base.resize_token_embeddings(320)
    base.save_pretrained(tmp_path / "padded")
    config = ModelConfig(str(tmp_path / "padded"), max_length=64)
    loaded = load(accelerator, config, LoraConfig(lora_r=4), chatting())
    rows = [
        p for name, p in loaded.model.named_parameters() if p.requires_grad and "lora_" not in name
    ]
    assert [len(part) for part in rows] == [2, 2]
    assert loaded.model.head_is_linear, (
        "the loss must not hold the logits of a long vocabulary for it"
    )
    train_a_little(loaded.model, torch.full((4, 24), 258))
    expected = logits(loaded.model)
    write_model(
        tmp_path / "model",
        loaded.files,
        loaded.files.export_tensors(loaded.model),
    )
    assert torch.equal(logits(TextModel(str(tmp_path / "model")).model), expected)


def test_an_adapter_is_no_base(adapt, accelerator, tmp_path):
    loaded = adapt()
    write_model(
        tmp_path / "model",
        loaded.files,
        loaded.files.export_tensors(loaded.model),
    )
    for rank in (0, 4):
        config = ModelConfig(str(tmp_path / "model"), max_length=64)
        with pytest.raises(
            UserError,
            match=r"is an adapter; merge it into its model first: llmtrain export .* --merge",
        ):
            load(accelerator, config, LoraConfig(lora_r=rank))


def test_freezing_and_adapting_are_one_or_the_other(bases, accelerator):
    config = ModelConfig(str(bases("untied")), max_length=64, freeze="embed")
    with pytest.raises(UserError, match="--freeze cannot be combined with --lora_r"):
        load(accelerator, config, LoraConfig(lora_r=4))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", "{"),
        ("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": null}'),
        ("adapter_model.safetensors", None),
    ],
)
def test_a_broken_adapter_is_one_line(adapt, tmp_path, name, content):
    bundle = adapt()
    model, files = bundle.model, bundle.files
    write_model(tmp_path / "model", files, files.export_tensors(model))
    (tmp_path / "model" / name).unlink()
    if content is not None:
        (tmp_path / "model" / name).write_text(content)
    with pytest.raises(UserError) as caught:
        write_merged(tmp_path / "model", tmp_path / "merged")
    assert "\n" not in str(caught.value)


def test_an_adapter_names_its_base_so_that_it_is_found_from_anywhere(
    bases, accelerator, tmp_path, monkeypatch
):
    monkeypatch.chdir(bases("untied").parent)
    config = ModelConfig(bases("untied").name, max_length=64)
    bundle = load(accelerator, config, LoraConfig(lora_r=4))
    model, files = bundle.model, bundle.files
    write_model(tmp_path / "model", files, files.export_tensors(model))
    monkeypatch.chdir(tmp_path)
    assert torch.equal(logits(TextModel("model").model), logits(model))


def test_what_a_base_said_of_generating_is_kept(bases, accelerator, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(bases("untied"), folder)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [0, 7], "temperature": 0.6, "do_sample": true}'
    )
    for ends, expected in (((), [0, 7]), ((0, 258), [0, 7, 258])):
        config = ModelConfig(str(folder), max_length=64)
        files = load(accelerator, config, ends=ends).files
        assert files.generation["eos_token_id"] == expected
        assert files.generation["temperature"] == 0.6


def test_random_weights_get_no_adapter(accelerator):
    with pytest.raises(UserError, match="--lora_r needs --model_name_or_path"):
        load(accelerator, ModelConfig(from_config="llama", max_length=64), LoraConfig(lora_r=4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, 4 bits are held")
def test_four_bits_without_a_gpu_are_one_line(bases, accelerator):
    config = ModelConfig(str(bases("untied")), max_length=64, load_in_4bit=True)
    with pytest.raises(UserError, match="--load_in_4bit needs a CUDA GPU"):
        load(accelerator, config, LoraConfig(lora_r=4))
    with pytest.raises(UserError, match="--load_in_4bit needs --lora_r"):
        load(accelerator, config)


def test_the_identity_of_a_run_holds_every_setting_of_its_adapter(bases):
    bundle = load_model(
        ModelConfig(str(bases("untied")), max_length=64),
        LoraConfig(lora_r=4),
        SomeRows(words()),
        3,
        "no",
    )
    assert bundle.start["lora"] == {
        "lora_r": 4,
        "lora_alpha": 32,
        "lora_target_modules": ["all-linear"],
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
        "lora_modules_to_save": [],
    }
    assert bundle.start.keys() == {"weights", "lora", "freeze"}


def test_an_answer_of_an_adapter_ends_where_its_turns_end(adapt, tmp_path):
    tokenizer = chatting()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    bundle = adapt("untied", tokenizer)
    model, files = bundle.model, bundle.files
    ending = type(files)(**{**vars(files), "generation": {"eos_token_id": [end]}})
    write_model(tmp_path / "model", ending, files.export_tensors(model))
    loaded = TextModel(str(tmp_path / "model"))
    said = torch.full((1, 2, 259), -100.0)
    said[..., end] = 100.0
    loaded.model = Saying(said)
    assert list(loaded.stream([1, 2], Sampling(max_new_tokens=5))) == []


class Saying:
    """A model that always says the same."""

    device = "cpu"

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.past_key_values = self.cache = None

    def __call__(self, *_, **__) -> "Saying":
        return self


# --- an adapter that is trained further


def stored(bundle: ModelBundle, folder: Path) -> Path:
    write_model(folder, bundle.files, bundle.files.export_tensors(bundle.model))
    return folder


def gradients(model: torch.nn.Module, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.train()(ids, ids).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("untied", {}),
        ("tied", {"use_dora": True, "lora_alpha": 5}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("untied", {"lora_target_modules": ["q_proj", "lm_head"]}),
    ],
)
@pytest.mark.parametrize("grown", [False, True], ids=["", "grown"])
def test_an_adapter_goes_on_as_its_run_would(adapt, accelerator, kind, settings, grown, tmp_path):
    if grown and "lm_head" in str(settings):
        pytest.skip("a head that has rows of its own to train takes no adapter")
    tokenizer = chatting() if grown else words()
    ids = torch.cat([IDS, torch.full((4, 2), 258)], dim=1) if grown else IDS
    bundle = adapt(kind, tokenizer, **settings)
    train_a_little(bundle.model, ids)
    folder = stored(bundle, tmp_path / "model")

    config = ModelConfig(str(folder), max_length=64, continue_adapter=True)
    rows = SomeRows(tokenizer, stop_token_ids=(), new_tokens=[])
    again = place(accelerator, load_model(config, LoraConfig(), rows, 3, "no"))
    expected = bundle.files.tensors(bundle.model)
    tensors = again.files.tensors(again.model)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert torch.equal(logits(again.model, ids), logits(bundle.model, ids))
    expected_gradients = gradients(bundle.model, ids)
    assert gradients(again.model, ids).keys() == expected_gradients.keys()
    for name, gradient in gradients(again.model, ids).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-6, atol=1e-9)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing was merged"

    train_a_little(again.model, ids)
    train_a_little(bundle.model, ids)
    further = stored(again, tmp_path / "further")
    torch.testing.assert_close(
        logits(TextModel(str(further)).model, ids), logits(bundle.model, ids), rtol=0, atol=1e-6
    )


@pytest.fixture
def own_peft(bases, tmp_path) -> Callable[..., Path]:
    """An adapter that stock peft has made and saved alone, with values that are not zero."""

    def save(kind: str = "untied", dtype: torch.dtype = torch.float32, **settings) -> Path:
        chosen = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        if settings.get("task_type") == "SEQ_CLS":
            base = AutoModelForSequenceClassification.from_pretrained(bases(kind), num_labels=1)
        else:
            base = AutoModelForCausalLM.from_pretrained(bases(kind))
        adapted = peft.get_peft_model(base, peft.LoraConfig(**chosen | settings))
        torch.manual_seed(1)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        adapted.to(dtype).save_pretrained(tmp_path / "peft")
        return tmp_path / "peft"

    return save


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("untied", {"use_rslora": True, "bias": "lora_only"}),
        ("untied", {"dtype": torch.bfloat16, "rank_pattern": {"1.self_attn.q_proj": 5}}),
        ("untied", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("tied", {"target_modules": ["q_proj", "lm_head"]}),
        ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    ],
)
def test_an_adapter_of_stock_peft_goes_on_and_merges(
    own_peft, accelerator, kind, settings, tmp_path
):
    folder = own_peft(kind, **settings)
    expected = logits(AutoPeftModelForCausalLM.from_pretrained(folder))
    config = ModelConfig(str(folder), max_length=64, continue_adapter=True)
    bundle = load(accelerator, config)
    torch.testing.assert_close(logits(bundle.model), expected, rtol=0, atol=1e-6)
    assert not any(p.requires_grad and p.dtype != torch.float32 for p in bundle.model.parameters())

    train_a_little(bundle.model)
    saved = stored(bundle, tmp_path / "saved")
    words().save_pretrained(folder)
    for adapter in (folder, saved):
        expected = logits(AutoPeftModelForCausalLM.from_pretrained(adapter))
        merged = AutoModelForCausalLM.from_pretrained(merged_model(adapter))
        torch.testing.assert_close(logits(merged), expected, rtol=0, atol=2e-5)
    again = load(accelerator, ModelConfig(str(tmp_path / "saved-merged"), max_length=64))
    torch.testing.assert_close(logits(again.model), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "flags", "lora", "message"),
    [
        ({}, {}, {"lora_r": 4}, "cannot be combined with --lora_r: the adapter has its own"),
        ({}, {}, {"lora_alpha": 4}, "cannot be combined with --lora_alpha"),
        ({}, {"freeze": "norm"}, {}, "cannot be combined with --freeze"),
        ({"base": "another"}, {}, {}, "is an adapter of other weights than"),
        ({"base": "deeper"}, {}, {}, "does not fit .*: only one of them has base_model"),
        ({"base": "wider"}, {}, {}, "could not be loaded: .*: size mismatch for"),
        ({"init_lora_weights": "pissa"}, {}, {}, "initialised with pissa, which changed"),
        ({"peft_type": "IA3"}, {}, {}, "is a IA3 adapter, and only LoRA"),
    ],
)
def test_an_adapter_that_cannot_go_on_is_one_line(
    own_peft, bases, accelerator, change, flags, lora, message
):
    folder = own_peft()
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    if "base" in change:
        if change["base"] == "another":
            (folder / "base.json").write_text(json.dumps(origin_of(str(bases("untied")))))
        change = {"base_model_name_or_path": str(bases(change["base"]))}
    path.write_text(json.dumps({**settings, **change}))
    config = ModelConfig(str(folder), max_length=64, continue_adapter=True, **flags)
    with pytest.raises(UserError, match=message) as caught:
        load(accelerator, config, LoraConfig(**lora))
    assert "\n" not in str(caught.value)


def test_an_adapter_goes_on_only_if_it_is_one(bases, own_peft, accelerator):
    with pytest.raises(UserError, match="--continue_adapter needs --model_name_or_path"):
        ModelConfig(from_config="llama", continue_adapter=True)
    with pytest.raises(UserError, match=r"is not the folder of an adapter; leave the flag out"):
        ModelConfig(str(bases("untied")), continue_adapter=True).fit_max_length()
    with pytest.raises(UserError, match="name its folder: hf download some/adapter --local-dir "):
        ModelConfig("some/adapter", continue_adapter=True).fit_max_length()
    config = ModelConfig(str(own_peft()), max_length=64, continue_adapter=True)
    with pytest.raises(UserError, match="the chat template has tokens that the adapter has no"):
        load(accelerator, config, tokenizer=chatting())


def test_a_merged_reward_model_says_that_it_is_one_and_scores_a_batch(own_peft, tmp_path):
    folder = own_peft(task_type="SEQ_CLS")
    words().save_pretrained(folder)
    write_merged(folder, tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["pad_token_id"] is not None
    scores = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")(IDS).logits
    assert scores.shape == (len(IDS), 1)


def test_infinite_numbers_of_a_configuration_survive_a_merge(tmp_path):
    """As the limit of a state space model's time steps."""
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    base = AutoModelForCausalLM.from_config(
        Mamba2Config(**sizes, vocab_size=257, num_hidden_layers=1)
    )
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["in_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    words().save_pretrained(tmp_path / "adapter")
    write_merged(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.time_step_limit == base.config.time_step_limit


def test_a_run_does_not_start_from_an_export_in_another_dtype(own_peft):
    folder = own_peft()
    words().save_pretrained(folder)
    write_merged(folder, merged_folder(folder), "float16")
    with pytest.raises(UserError, match=r"exported with --dtype float16, .*; delete it, or name"):
        merged_model(folder)


def test_the_revision_that_peft_recorded_is_that_of_the_base(
    own_peft, bases, tmp_path, monkeypatch
):
    """Its main branch is another model, whose weights are quantized and not even there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--org--model"
    for branch, commit in {"main": "a" * 40, "v2": "b" * 40}.items():
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    shutil.copytree(bases("untied"), repository / "snapshots" / ("b" * 40), dirs_exist_ok=True)
    main_config = {"model_type": "gemma3", "quantization_config": {"quant_method": "fp8"}}
    (repository / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps(main_config))

    folder = own_peft()
    words().save_pretrained(folder)
    expected = logits(AutoPeftModelForCausalLM.from_pretrained(folder))
    path = folder / "adapter_config.json"
    names = {"base_model_name_or_path": "org/model", "revision": "v2"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **names}))
    merged = AutoModelForCausalLM.from_pretrained(merged_model(folder))
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=2e-5)
    (tmp_path / "outline").mkdir()
    outline = AutoConfig.from_pretrained(write_outline(folder, tmp_path / "outline"))
    assert outline.model_type == "llama"
    assert how_to_load(folder) == "peft: AutoPeftModelForCausalLM.from_pretrained"


def test_a_merge_that_would_round_is_refused(own_peft, bases, tmp_path):
    folder = own_peft()
    base = shutil.copytree(bases("untied"), tmp_path / "quantized")
    settings = json.loads((base / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(settings))
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(base)})
    )
    with pytest.raises(UserError, match=r"round them .*--continue_adapter, .* export .* --merge"):
        ModelConfig(str(folder), max_length=64).fit_max_length()


# --- modules that are trained in full beside the matrices


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("grown", [False, True], ids=["", "grown"])
def test_modules_beside_an_adapter_are_trained_from_the_weights_of_its_base(
    bases, accelerator, precision, grown, tmp_path
):
    tokenizer = chatting() if grown else words()
    ids = torch.cat([IDS, torch.full((4, 2), 258)], dim=1) if grown else IDS
    names = ["embed_tokens", "lm_head", "model.norm"]
    lora = LoraConfig(lora_r=4, use_rslora=True, lora_modules_to_save=names)
    rows = SomeRows(tokenizer, stop_token_ids=(), new_tokens=[257, 258] if grown else [])
    config = ModelConfig(str(bases("untied")), max_length=64)
    bundle = place(accelerator, load_model(config, lora, rows, 3, precision))
    model = bundle.model
    copies = {name: p for name, p in model.named_parameters() if ".modules_to_save." in name}
    assert len(copies) == 3
    for name, parameter in copies.items():
        original = model.get_parameter(name.replace("modules_to_save.default", "original_module"))
        assert (parameter.dtype, parameter.requires_grad) == (torch.float32, True)
        assert torch.equal(parameter.to(original.dtype), original)
        assert not original.requires_grad
    assert model.head_is_linear
    if precision == "bf16":
        return

    before = {name: parameter.clone() for name, parameter in copies.items()}
    train_a_little(model, ids)
    assert not any(torch.equal(parameter, before[name]) for name, parameter in copies.items())
    expected = logits(model, ids)
    folder = stored(bundle, tmp_path / "model")
    keys = load_file(folder / "adapter_model.safetensors").keys()
    assert {"base_model.model.lm_head.weight", "base_model.model.model.norm.weight"} < keys
    assert torch.equal(logits(TextModel(str(folder)).model, ids), expected)
    config = ModelConfig(str(folder), max_length=64, continue_adapter=True)
    rows = SomeRows(AutoTokenizer.from_pretrained(folder))
    again = place(accelerator, load_model(config, None, rows, 3, "no"))
    assert torch.equal(logits(again.model, ids), expected)
    merged = AutoModelForCausalLM.from_pretrained(merged_model(folder))
    torch.testing.assert_close(logits(merged, ids), expected, atol=2e-5, rtol=0)
