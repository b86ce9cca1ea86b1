"""Any causal LM of Hugging Face's: the loss is its own, packed documents do not see each other, and what is saved is
what transformers, on its own, loads."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED, count_targets
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.attention import ATTENTION_NAME
from llmtrain.models.config import ModelConfig
from llmtrain.models.documents import Documents
from llmtrain.models.export import ModelFiles
from llmtrain.models.lora import add_lora
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.meta_models import configuration_of
from llmtrain.models.pretrained import load_model
from llmtrain.models.probe import leaks, probe_output
from llmtrain.models.weight_loading import random_weights
from llmtrain.parallel.placement import place
from llmtrain.parallel.shards import fill
from llmtrain.record.saver import write_model
from recipes import finetune, preference
from tests.families import FAMILIES, OVERRIDES
from tests.models.some_rows import SomeRows

# Whatever their position_ids. Falcon belongs here only before transformers 5.24.
LEAKING = ["gpt_oss", "opt", "bloom", "mamba"]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)


@dataclass
class Batch:
    """Eight rows of two packed documents, of which most is trained."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor

    @classmethod
    def make(cls, length: int = 32, first: int = 12) -> "Batch":
        ids = torch.randint(1, 250, (8, length), generator=torch.Generator().manual_seed(1))
        labels = ids.clone()
        labels[:, :3] = labels[:, first : first + 4] = IGNORED
        positions = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(8, -1)
        return cls(ids, labels, positions)

    def part(self, rows: slice) -> dict[str, torch.Tensor]:
        return {name: tensor[rows] for name, tensor in vars(self).items()}


@pytest.fixture
def load(words: PreTrainedTokenizerFast, accelerator) -> Callable[..., ModelBundle]:
    def load(
        family: str | None = None, tokenizer=None, packed: bool = False, **settings
    ) -> ModelBundle:
        overrides = {"config_overrides": OVERRIDES} if family else {}
        if "config_overrides" not in settings and family in (*LEAKING, "bert", "electra"):
            overrides = {}
        config = ModelConfig(**{"from_config": family, "max_length": 64} | overrides | settings)
        return place(
            accelerator, load_model(config, None, SomeRows(tokenizer or words, packed), 3, "no")
        )

    return load


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    return model.double().eval()


def mean_loss_of_transformers(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model's own class computes, but in float64 instead of float32."""
    output = model.own_class.forward(
        model, input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    )
    logits = output.logits
    assert logits.dtype == torch.float64
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers_at_any_accumulation(load, family, score):
    model, batch = in_float64(load(family).model), Batch.make()
    expected = mean_loss_of_transformers(model, batch)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    tokens = (batch.labels[:, 1:] != IGNORED).sum()
    apart = 0.0
    for rows in (8, 2):
        model.zero_grad()
        total = 0.0
        for start in range(0, 8, rows):
            part = model(**batch.part(slice(start, start + rows))) / tokens
            part.backward()
            total += part.item()
        assert total == pytest.approx(float(expected), abs=1e-12)
        apart = max(apart, abs(total - float(expected)))
        for (name, parameter), gradient in zip(
            model.named_parameters(), expected_gradients, strict=True
        ):
            limit = 1e-6 * float(
                gradient.abs().max()
            )  # their norms compute in float32, whatever the model is in
            torch.testing.assert_close(parameter.grad, gradient, atol=limit, rtol=0, msg=name)
    score(
        f"families: {family}: loss beside transformers' own in float64, at accumulation 1 and 4: {apart:.1e}"
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "mixtral"])
def test_the_reported_loss_of_the_class_itself_is_the_same_in_float32(load, family):
    model, batch = load(family).model.eval(), Batch.make()
    expected = model.own_class.forward(model, **vars(batch), use_cache=False).loss
    loss = model(**vars(batch)) / count_targets(batch.labels)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_a_head_that_does_more_than_multiply_is_noticed_and_its_logits_taken_whole(load):
    assert load("llama").model.head_is_linear
    assert load("gemma2").model.head_is_linear  # softcapped, which the loss knows
    model = load("cohere", config_overrides=f"{OVERRIDES},logit_scale=0.3").model
    assert not model.head_is_linear
    expected = mean_loss_of_transformers(in_float64(model), batch := Batch.make())
    tokens = (batch.labels[:, 1:] != IGNORED).sum()
    assert float(model(**vars(batch)) / tokens) == pytest.approx(float(expected), abs=1e-12)
    model.head_is_linear = True
    assert float(model(**vars(batch)) / tokens) != pytest.approx(float(expected), abs=1e-5), (
        "it would have been wrong"
    )


def second_document(
    model: torch.nn.Module, first: torch.Tensor, restart: bool = True
) -> torch.Tensor:
    """Logits of a packed row's second document, after another first one."""
    batch = Batch.make()
    ids = batch.input_ids.clone()
    ids[:, :12] = first
    positions = batch.position_ids if restart else torch.arange(32).expand(8, -1)
    with torch.no_grad():
        return probe_output(model, ids, positions)[:, 12:]


# of softcapped attention
WITH_THEIRS = {"gemma2"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_in_a_packed_row_does_not_move_a_bit_when_its_neighbour_changes(
    load, family, score
):
    model = load(family, packed=True).model.eval()
    first, other = torch.randint(1, 250, (2, 8, 12), generator=torch.Generator().manual_seed(2))
    assert torch.equal(second_document(model, first), second_document(model, other))
    assert (model.config._attn_implementation == ATTENTION_NAME) == (family not in WITH_THEIRS)
    score(
        f"families: {family}: logits of a document that move with its neighbour: 0 bits; without restarts they do"
    )
    moved = second_document(model, first, restart=False) - second_document(
        model, other, restart=False
    )
    assert moved.abs().max() > 1e-4, "without restarts it must leak, or nothing was tested"


def test_flash_attention_gets_rows_laid_end_to_end(load, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def flash(module, q, k, v, mask, cu_seq_lens_q, scaling, max_length_q, **_):
        """As it is called: one row of many documents; each is computed alone."""
        seen.append((len(q), mask, max_length_q))
        spans = zip(cu_seq_lens_q[:-1].tolist(), cu_seq_lens_q[1:].tolist(), strict=True)
        parts = [[one[:, :, first:end] for one in (q, k, v)] for first, end in spans]
        attend = torch.nn.functional.scaled_dot_product_attention
        outs = [attend(*part, is_causal=True, scale=scaling, enable_gqa=True) for part in parts]
        return torch.cat(outs, 2).transpose(1, 2), None

    bundle = load("llama", packed=True)
    model = bundle.model.double().eval()
    batch = Batch.make()
    columns = {
        "input_ids": batch.input_ids,
        "labels": batch.labels,
        "position_ids": batch.position_ids,
    }
    with torch.no_grad():
        expected = model(**columns)
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash)
        monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
        for prepared in ({}, bundle.prepare_batch(columns)):
            nll = model(**columns, **prepared)
            assert float(nll) == pytest.approx(float(expected), rel=1e-12)
    assert set(seen) == {(1, None, batch.input_ids.shape[1] - 1)}


def test_attention_that_finds_borders_in_a_single_row_only_is_refused(load, monkeypatch):
    """As transformers' flash attention does: of several rows it takes each for one document."""
    model = load("llama").model
    own_forward = model.own_class.forward

    def forward(self, input_ids, documents=None, **others):
        return own_forward(
            self,
            input_ids=input_ids,
            documents=Documents() if len(input_ids) > 1 else documents,
            **others,
        )

    monkeypatch.setattr(model.own_class, "forward", forward)
    assert leaks(model)


LLAMA4 = (
    "num_hidden_layers=2,hidden_size=64,intermediate_size_mlp=64,intermediate_size=64,"
    "num_attention_heads=4,num_key_value_heads=2,head_dim=16,num_local_experts=2,vocab_size=257"
)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mistral", f"{OVERRIDES},sliding_window={{span}}"),
        ("llama4_text", f"{LLAMA4},attention_chunk_size={{span}}"),
    ],
    ids=["sliding window", "chunks"],
)
@pytest.mark.parametrize("span", [24, 60])
def test_a_leak_past_a_sliding_window_or_a_chunk_is_found(
    load, monkeypatch, family, overrides, span
):
    """The planted class restarts positions only inside the first window of a row."""
    model = load(family, config_overrides=overrides.format(span=span)).model
    assert not leaks(model)
    own_forward = model.own_class.forward

    def forward(self, input_ids, position_ids=None, **others):
        if position_ids is not None:
            row_positions = torch.arange(input_ids.shape[1])
            position_ids = torch.where(row_positions < span, position_ids, row_positions)
        return own_forward(self, input_ids=input_ids, position_ids=position_ids, **others)

    monkeypatch.setattr(model.own_class, "forward", forward)
    assert leaks(model)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("family", ["llama", "bloom", "gpt2", "mixtral"])
def test_mixed_precision_does_not_blind_the_probes(words, precision, family):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    config = ModelConfig(from_config=family, max_length=64)
    leaking = family == "bloom"
    try:
        with (
            pytest.raises(UserError, match="see each other")
            if leaking
            else contextlib.nullcontext()
        ):
            place(
                accelerator, load_model(config, None, SomeRows(words, is_packed=True), 0, precision)
            )
        for dtype in (torch.float32, torch.bfloat16):  # as a frozen base may be
            model = place(
                accelerator, load_model(config, None, SomeRows(words), 0, precision)
            ).model.to(dtype)
            assert leaks(model) == leaking
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_softcap_by_another_name_is_noticed(load):
    model = load(
        "recurrent_gemma", config_overrides="num_hidden_layers=3,hidden_size=64,lru_width=64"
    ).model
    assert not model.head_is_linear


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_a_class_that_sees_what_follows_is_no_causal_model(load, family):
    with pytest.raises(UserError, match="it is no causal language model"):
        load(family)


@pytest.mark.parametrize("positions", [4, 2])
def test_a_model_with_few_positions_is_tried_within_them(load, positions):
    assert load("gpt2", max_length=positions, packed=True).model.head_is_linear


@pytest.mark.parametrize("family", LEAKING)
def test_a_class_that_leaks_is_refused(load, family):
    with pytest.raises(UserError, match=r"see each other; use --no_packing"):
        load(family, packed=True)
    assert leaks(load(family).model)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_what_transformers_loads_and_generates_from(
    load, family, words, tmp_path
):
    bundle = load(family)
    model, files = bundle.model, bundle.files
    model.eval()
    for name, tensors in (
        ("checkpoint", files.tensors(model)),
        ("model", files.export_tensors(model)),
    ):
        write_model(tmp_path / name, files, tensors)
        loaded, found = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True
        )
        assert not found["missing_keys"]
        assert not found["mismatched_keys"]
        assert type(loaded).__name__ == model.own_class.__name__
        ids = Batch.make().input_ids[:2]
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids, use_cache=False).logits)
    text = AutoTokenizer.from_pretrained(tmp_path / "model")(
        "a", return_tensors="pt", return_token_type_ids=False
    )
    assert loaded.generate(**text, max_new_tokens=3, do_sample=False).shape[1] > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_gives_a_model_its_weights_back(load, family):
    bundle = load(family)
    model, files = bundle.model, bundle.files
    kept = {name: tensor.clone() for name, tensor in files.tensors(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fill(files.tensors(model), kept.items())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in files.tensors(model).items())
    assert any(
        parameter.abs().sum() > 0 for parameter in model.get_output_embeddings().parameters()
    )


def test_an_infinite_number_is_in_the_written_configuration(load, tmp_path):
    sizes = "hidden_size=32,num_heads=8,head_dim=8,n_groups=1,num_hidden_layers=1"
    load("mamba2", config_overrides=sizes).files.write_config(tmp_path)
    assert [*AutoConfig.from_pretrained(tmp_path).time_step_limit] == [0.0, float("inf")]


def saved(
    load: Callable[..., ModelBundle], folder: Path, family: str = "llama", **settings
) -> Path:
    bundle = load(family, **settings)
    model, files = bundle.model, bundle.files
    write_model(folder, files, files.export_tensors(model))
    return folder


def reference(
    base: str, lora: LoraConfig | None, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    """The model as transformers and peft build it at once, with the weights of a folder, or of seed 3."""
    if Path(base).exists():
        model = AutoModelForCausalLM.from_pretrained(base)
    else:
        config = configuration_of(
            ModelConfig(from_config=base, config_overrides=OVERRIDES, max_length=64), tokenizer
        )
        model = AutoModelForCausalLM.from_config(config)
        fill(dict(model.named_parameters()), random_weights(model, 3))
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        torch.manual_seed(3)
        model.resize_token_embeddings(len(tokenizer))
    if lora is not None:
        add_lora(model, lora, base, 3, [257, 258] if len(tokenizer) == 259 else [])
    return model


@pytest.mark.parametrize("grown", [False, True], ids=["", "grown"])
@pytest.mark.parametrize("lora", [None, LoraConfig(lora_r=4), LoraConfig(lora_r=4, use_dora=True)])
@pytest.mark.parametrize("start", ["folder", "seed"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2's head is tied
def test_a_model_that_was_placed_is_the_one_that_is_built_at_once(
    accelerator, load, words, family, start, lora, grown, tmp_path
):
    if lora is not None and start == "seed":
        pytest.skip("random weights get no adapter")
    tokenizer = copy.deepcopy(words)
    base = str(saved(load, tmp_path / "base", family)) if start == "folder" else family
    if grown:
        set_template(tokenizer, "chatml")
    named = (
        {"model_name_or_path": base}
        if start == "folder"
        else {"from_config": base, "config_overrides": OVERRIDES}
    )
    rows = SomeRows(tokenizer, new_tokens=[257, 258] if grown else [])
    bundle = load_model(ModelConfig(**named, max_length=64), lora, rows, 3, "no")
    assert all(p.is_meta or lora or grown for p in bundle.model.parameters())
    model, expected = place(accelerator, bundle).model, reference(base, lora, tokenizer)
    for kind in ("parameters", "buffers"):  # a parameter that is tied is named once
        ours, theirs = (getattr(each, f"named_{kind}")() for each in (model, expected))
        for (name, one), (other_name, other) in zip(ours, theirs, strict=True):
            assert (name, one.dtype, one.requires_grad) == (
                other_name,
                other.dtype,
                other.requires_grad,
            )
            assert torch.equal(one, other), name
    assert [*model.state_dict()] == [*expected.state_dict()]
    assert model.training == expected.training
    assert type(model).__name__ == type(expected).__name__
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_a_folder_without_a_weight_is_refused_by_its_name(load, tmp_path):
    bundle = load("llama")
    model, files = bundle.model, bundle.files
    tensors = files.export_tensors(model)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_model(tmp_path / "base", files, tensors)
    with pytest.raises(
        UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing \(1 in all\)"
    ):
        load(model_name_or_path=str(tmp_path / "base"))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(load, tmp_path):
    base = saved(load, tmp_path / "base")
    words = tok.as_pretrained(
        tok.train_tokenizer("bpe:300", ["some words to merge, " * 50], lambda: iter(())), 64
    )
    words.add_tokens([f"<{i}>" for i in range(40)])
    with pytest.raises(
        UserError, match=r"tokens and .* a vocabulary of 257; use the model's own tokenizer"
    ):
        load(model_name_or_path=str(base), tokenizer=words)


def test_a_max_length_that_nobody_has_set_is_no_longer_than_the_model_to_load(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:

    def rows_of_length(data: Any, max_length: int, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(metadata=SimpleNamespace(block_size=max_length))

    GPT2Config(n_positions=32).save_pretrained(tmp_path)
    for size, asked, expected in ((64, False, 32), (16, False, 16), (64, True, 64)):
        config = ModelConfig(model_name_or_path=str(tmp_path), max_length=size)
        config.origins = {"max_length": "the command line"} if asked else {}
        config.fit_max_length()
        assert config.max_length == expected
    assert "--max_length 32" in capsys.readouterr().out
    nowhere = ModelConfig(model_name_or_path=str(tmp_path / "nowhere"), max_length=64)
    nowhere.fit_max_length()  # is refused when it is loaded
    assert nowhere.max_length == 64
    for key in ("n_positions", "max_position_embeddings"):
        overridden = ModelConfig(from_config="gpt2", config_overrides=f"n_embd=32,{key}=48")
        overridden.fit_max_length()
        assert overridden.max_length == 48
    with pytest.raises(UserError, match="write key=value"):
        ModelConfig(from_config="gpt2", config_overrides="n_positions").fit_max_length()
    monkeypatch.setattr("llmtrain.training.model_rows.tokenize", rows_of_length)
    for recipe in (finetune, preference):
        settings = copy.deepcopy(recipe.DEFAULTS)
        settings.model.model_name_or_path = str(tmp_path)
        recipe.tokenized(settings)
        assert settings.model.max_length == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"from_config": "lama"}, r"--from_config lama: "),
        (
            {"from_config": "llama", "config_overrides": "hidden_sizes=3"},
            r"no 'hidden_sizes' - did you mean hidden_size",
        ),
        ({"from_config": "llama", "config_overrides": "hidden_size"}, r"write key=value"),
        ({"from_config": "llama", "config_overrides": "hidden_size=33"}, r"--from_config llama"),
        (
            {"from_config": "gpt2", "config_overrides": "n_positions=32"},
            r"--max_length 64 is more than .* 32 positions",
        ),
        (
            {"from_config": "llama", "freeze": "nothing"},
            r"matches no parameter; their names are like model\.",
        ),
        ({"from_config": "llama", "freeze": "."}, r"matches every parameter"),
        (
            {"from_config": "llama", "load_in_4bit": True},
            r"--load_in_4bit needs --model_name_or_path",
        ),
        ({"model_name_or_path": "nowhere/at-all"}, r"--model_name_or_path nowhere/at-all: "),
    ],
)
def test_what_cannot_be_a_model_is_one_line(load, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        load(**settings)
    assert "\n" not in str(caught.value)


def test_frozen_parameters_are_not_trained_and_the_rest_is(load):
    model = load("llama", freeze=r"embed_tokens|layers\.0\.").model
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert "model.embed_tokens.weight" in frozen
    assert all("layers.0." in name for name in frozen - {"model.embed_tokens.weight"})
    assert len(frozen) == 10


def test_the_experts_balancing_loss_is_ours_and_said_so(load, capsys):
    model = load("mixtral", config_overrides=f"{OVERRIDES},output_router_logits=true").model
    assert not model.config.output_router_logits
    assert (
        "balancing loss, times 0.001, is computed over the global batch" in capsys.readouterr().out
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bits_that_would_depend_on_the_layout_are_refused(words, family):
    config = ModelConfig(from_config=family, max_length=64)
    if family == "llama":
        assert load_model(config, None, SomeRows(words), 0, "no", bitwise=True)
        config.config_overrides = "attention_dropout=0.1"
    with pytest.raises(
        UserError, match=r"--bitwise needs a model without dropout, and \w+ is 0\.1"
    ):
        load_model(config, None, SomeRows(words), 0, "no", bitwise=True)


def test_files_of_this_package_and_of_transformers_are_written_by_one_writer(load):
    assert type(load("llama").files) is ModelFiles


@pytest.mark.parametrize("family", LEAKING)
def test_a_class_that_leaks_trains_with_a_document_a_row(load, family):
    model, batch = load(family).model, Batch.make()
    first = model(batch.input_ids, batch.labels)
    first.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad)
    assert model(batch.input_ids, batch.labels) < first
