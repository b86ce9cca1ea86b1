"""Causal LMs of transformers: the loss is their own, packed documents do not see each other, and
transformers loads and generates from the files."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

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

import llmtrain as lt
from llmtrain.data import tokenizer as tok
from llmtrain.data.tokenizer import set_template
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED, Batch, count_targets
from llmtrain.models.attention import ATTENTION_NAME
from llmtrain.models.documents import Documents
from llmtrain.models.lora import add_lora
from llmtrain.models.probe import leaks, probe, probe_output
from llmtrain.models.weight_loading import random_weights
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.ranks import TrainingAccelerator
from llmtrain.parallel.shards import fill
from llmtrain.record.saver import write_model
from llmtrain.seeds import seed_of
from recipes import finetune, preference
from tests.engines import split
from tests.families import FAMILIES, OVERRIDES
from tests.models.small_models import byte_tokenizer, export_model
from tests.models.some_rows import SomeRows

# Classes that ignore position_ids, at least for attention. Falcon did before transformers 5.24.
LEAKING = ["gpt_oss", "bloom", "mamba"]
NOT_CAUSAL = ["bert", "electra"]

# The attention of this package has no softcap.
WITH_OWN_ATTENTION = ["gemma2"]

ROWS = 8
LENGTH = 32
FIRST_LENGTH = 12  # of the first of two documents in a packed row
VOCABULARY = 257
NEW_TOKENS = [257, 258]  # of a chat template


def packed_batch() -> Batch:
    """Return eight rows with two documents each. Most of their tokens are targets."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 250, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :3] = IGNORED
    labels[:, FIRST_LENGTH : FIRST_LENGTH + 4] = IGNORED
    positions = torch.cat([torch.arange(FIRST_LENGTH), torch.arange(LENGTH - FIRST_LENGTH)])
    return {"input_ids": ids, "labels": labels, "position_ids": positions.expand(ROWS, -1)}


@pytest.fixture
def load(load) -> Callable[..., lt.ModelBundle]:
    """Load a small model of a family, or another one, as a run does."""

    def load_family(
        family: str | None = None,
        *,
        tokenizer: PreTrainedTokenizerFast | None = None,
        packed: bool = False,
        bitwise: bool = False,
        **flags: Any,
    ) -> lt.ModelBundle:
        if family is not None and family not in LEAKING + NOT_CAUSAL:
            flags.setdefault("config_overrides", OVERRIDES)
        config = lt.ModelConfig(**{"from_config": family, "max_length": 64} | flags)
        return load(config, tokenizer=tokenizer, packed=packed, bitwise=bitwise)

    return load_family


# --- the loss


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    return model.double().eval()


def mean_loss_of_transformers(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Compute the loss from the logits of the model's own class, in float64."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    logits = model.own_class.forward(model, **inputs, use_cache=False).logits
    assert logits.dtype == torch.float64
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers_at_any_accumulation(load, family):
    model = in_float64(load(family).model)
    assert model.head_is_linear
    batch = packed_batch()
    expected = mean_loss_of_transformers(model, batch)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))

    for rows_per_micro_batch in (8, 2):
        model.zero_grad()
        mean_loss = 0.0
        for micro_batch in split(batch, rows_per_micro_batch):
            part = model(**micro_batch) / count_targets(batch["labels"])
            part.backward()
            mean_loss += part.item()

        assert mean_loss == pytest.approx(float(expected), abs=1e-12)
        parameters = model.named_parameters()
        for (name, parameter), gradient in zip(parameters, expected_gradients, strict=True):
            # The norms of transformers compute in float32 in any model.
            limit = 1e-6 * float(gradient.abs().max())
            torch.testing.assert_close(parameter.grad, gradient, atol=limit, rtol=0, msg=name)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "opt", "xglm", "biogpt"])
def test_a_token_that_the_model_also_pads_with_trains_its_embedding(load, family):
    overrides = "vocab_size=257,hidden_size=64,tie_word_embeddings=false,pad_token_id=5"
    model = load(family, config_overrides=overrides).model.eval()
    assert model.config.pad_token_id == 5

    ids = torch.arange(2, 34)[None]
    model(ids, labels=ids).backward()

    rows_of_inputs = model.get_input_embeddings().weight.grad[2:33]
    assert (rows_of_inputs.norm(dim=1) > 0).all()


def test_the_finished_model_of_experts_adds_no_balancing_loss(load):
    files = load("mixtral", config_overrides=f"{OVERRIDES},output_router_logits=true").files
    assert files.config["output_router_logits"] is False


def test_a_head_that_scales_its_logits_is_noticed(load):
    model = load("cohere", config_overrides=f"{OVERRIDES},logit_scale=0.3").model
    batch = packed_batch()
    assert not model.head_is_linear

    expected = float(mean_loss_of_transformers(in_float64(model), batch))
    loss = model(**batch) / count_targets(batch["labels"])
    assert float(loss) == pytest.approx(expected, abs=1e-12)

    model.head_is_linear = True
    wrong_loss = model(**batch) / count_targets(batch["labels"])
    assert float(wrong_loss) != pytest.approx(expected, abs=1e-5)


def test_a_softcap_by_another_name_that_changes_only_large_logits_is_noticed(load):
    sizes = "num_hidden_layers=3,hidden_size=64,lru_width=64,logits_soft_cap=1000.0"
    assert not load("recurrent_gemma", config_overrides=sizes).model.head_is_linear


def test_a_scale_before_the_head_is_noticed(load):
    """The head of MiniCPM3 gets the hidden states, divided by a number of its configuration."""
    bundle = load("minicpm3", config_overrides="dim_model_base=16")
    assert not bundle.model.head_is_linear
    ids = torch.arange(1, 21).view(2, 10)
    logits = bundle.model.own_forward(input_ids=ids, use_cache=False).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
    )
    assert float(bundle.model(ids, labels=ids)) == pytest.approx(float(expected), rel=1e-5)


def test_a_small_addition_after_the_head_is_noticed(load, monkeypatch):
    """It would vanish beside the large numbers that show a cap."""
    model = load("llama").model
    forward = model.own_class.forward
    ids = torch.arange(1, 11)[None]
    largest = float(forward(model, input_ids=ids, use_cache=False).logits.abs().max())

    def forward_with_addition(self, *inputs: Any, **arguments: Any) -> Any:
        outputs = forward(self, *inputs, **arguments)
        outputs.logits = outputs.logits + 0.05 * largest
        return outputs

    monkeypatch.setattr(model.own_class, "forward", forward_with_addition)
    probe(model)
    assert not model.head_is_linear


# --- packed documents


def second_document_logits(
    model: torch.nn.Module, first_document: torch.Tensor, restart_positions: bool = True
) -> torch.Tensor:
    """Return the logits of the second document of packed rows, after a given first one."""
    batch = packed_batch()
    ids = batch["input_ids"].clone()
    ids[:, :FIRST_LENGTH] = first_document
    positions = batch["position_ids"]
    if not restart_positions:
        positions = torch.arange(LENGTH).expand(ROWS, -1)
    with torch.no_grad():
        return probe_output(model, ids, positions)[:, FIRST_LENGTH:]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_is_computed_as_if_it_were_alone(load, family):
    model = load(family, packed=True).model.eval()
    uses_own_attention = model.config._attn_implementation != ATTENTION_NAME
    assert uses_own_attention == (family in WITH_OWN_ATTENTION)
    generator = torch.Generator().manual_seed(2)
    document, other_document = torch.randint(1, 250, (2, ROWS, FIRST_LENGTH), generator=generator)

    logits = second_document_logits(model, document)
    assert torch.equal(logits, second_document_logits(model, other_document))

    # Without restarts the two documents are one. If nothing changed, the test would see nothing.
    joined = second_document_logits(model, document, restart_positions=False)
    other_joined = second_document_logits(model, other_document, restart_positions=False)
    assert (joined - other_joined).abs().max() > 1e-4
    with torch.no_grad():
        ids = packed_batch()["input_ids"][:, FIRST_LENGTH:]
        expected = model.own_class.forward(model, input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_flash_attention_gets_all_documents_end_to_end_in_a_single_row(load, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = []

    def flash_attention(module, query, key, value, mask, *, scaling, cu_seq_lens_q, **options):
        """Compute each document alone, between the borders in ``cu_seq_lens_q``.

        Transformers finds the documents only if it gets all four arguments about them.
        """
        calls.append((len(query), mask, options["max_length_q"]))
        assert torch.equal(options["cu_seq_lens_k"], cu_seq_lens_q)
        assert options["max_length_k"] == options["max_length_q"]
        borders = cu_seq_lens_q.tolist()
        outputs = []
        for start, end in itertools.pairwise(borders):
            output = F.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, start:end],
                value[:, :, start:end],
                is_causal=True,
                scale=scaling,
                enable_gqa=True,
            )
            outputs.append(output)
        return torch.cat(outputs, dim=2).transpose(1, 2), None

    bundle = load("llama", packed=True)
    model = bundle.model.double().eval()
    columns = packed_batch()
    with torch.no_grad():
        expected = float(model(**columns))
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash_attention)
        monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
        nll = float(model(**columns))
        nll_of_prepared_batch = float(model(**columns, **bundle.prepare_batch(columns)))

    assert nll == pytest.approx(expected, rel=1e-12)
    assert nll_of_prepared_batch == pytest.approx(expected, rel=1e-12)
    # A single row, without a mask. A document is at most as long as a row.
    assert set(calls) == {(1, None, LENGTH - 1)}


def test_attention_that_finds_documents_only_in_a_single_row_leaks(load, monkeypatch):
    """The flash attention of transformers takes each of several rows for one document."""
    model = load("llama").model
    own_forward = type(model.base_model).forward

    def forward(self, input_ids, documents=None, **options):
        if len(input_ids) > 1:
            documents = Documents()
        return own_forward(self, input_ids=input_ids, documents=documents, **options)

    monkeypatch.setattr(type(model.base_model), "forward", forward)
    assert leaks(model)


LLAMA4_SIZES = (
    "num_hidden_layers=2,hidden_size=64,intermediate_size_mlp=64,intermediate_size=64,"
    "num_attention_heads=4,num_key_value_heads=2,head_dim=16,num_local_experts=2,vocab_size=257"
)


@pytest.mark.parametrize("span", [24, 60])
@pytest.mark.parametrize(
    ("family", "sizes", "span_name"),
    [
        pytest.param("mistral", OVERRIDES, "sliding_window", id="sliding window"),
        pytest.param("llama4_text", LLAMA4_SIZES, "attention_chunk_size", id="chunks"),
    ],
)
def test_a_leak_beyond_a_sliding_window_or_a_chunk_is_found(
    load, monkeypatch, family, sizes, span_name, span
):
    """The class is changed to restart positions only within the first span of a row."""
    model = load(family, config_overrides=f"{sizes},{span_name}={span}").model
    assert not leaks(model)
    own_forward = type(model.base_model).forward

    def forward(self, input_ids, position_ids=None, **options):
        if position_ids is not None:
            row_positions = torch.arange(input_ids.shape[1])
            position_ids = torch.where(row_positions < span, position_ids, row_positions)
        return own_forward(self, input_ids=input_ids, position_ids=position_ids, **options)

    monkeypatch.setattr(type(model.base_model), "forward", forward)
    assert leaks(model)


@pytest.fixture(params=["no", "bf16"])
def mixed_precision(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield TrainingAccelerator(cpu=True, mixed_precision=request.param)
    AcceleratorState._reset_state(reset_partial_state=True)


def load_in(accelerator: Accelerator, family: str, packed: bool) -> lt.ModelBundle:
    rows = SomeRows(byte_tokenizer(), is_packed=packed)
    config = lt.ModelConfig(from_config=family, max_length=64)
    precision = accelerator.mixed_precision
    return move_to_devices(accelerator.ranks, lt.load_model(config, None, rows, 0, precision))


# A frozen base may be bfloat16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "lfm2"])
def test_no_leak_is_reported_in_low_precision(mixed_precision, family, dtype):
    bundle = load_in(mixed_precision, family, packed=True)
    assert not leaks(bundle.model.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_leak_is_found_in_low_precision(mixed_precision, dtype):
    with pytest.raises(UserError, match="see each other"):
        load_in(mixed_precision, "bloom", packed=True)
    assert leaks(load_in(mixed_precision, "bloom", packed=False).model.to(dtype))


@pytest.mark.parametrize("family", LEAKING)
def test_a_class_that_leaks_trains_with_one_document_per_row_only(load, family):
    with pytest.raises(UserError, match=r"see each other; use --no_packing"):
        load(family, packed=True)

    model = load(family).model
    assert leaks(model)
    batch = packed_batch()
    loss = model(batch["input_ids"], batch["labels"])
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad)

    assert model(batch["input_ids"], batch["labels"]) < loss


@pytest.mark.parametrize("family", NOT_CAUSAL)
def test_a_class_whose_tokens_see_later_ones_is_refused(load, family):
    with pytest.raises(UserError, match="so it is not a causal LM"):
        load(family)


@pytest.mark.parametrize("positions", [4, 2])
def test_a_model_with_few_positions_is_tried_within_them(load, positions):
    assert load("gpt2", max_length=positions, packed=True).model.head_is_linear


# --- files


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_checkpoints_and_models_and_generates(load, family, tmp_path):
    bundle = load(family)
    model = bundle.model.eval()
    write_model(tmp_path / "checkpoint", bundle.files, bundle.files.tensors(model))
    export_model(bundle, tmp_path / "model")

    ids = packed_batch()["input_ids"][:2]
    for name in ("checkpoint", "model"):
        loaded, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
        assert type(loaded).__name__ == model.own_class.__name__
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids, use_cache=False).logits)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer("a", return_tensors="pt", return_token_type_ids=False)
    assert loaded.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > 1

    stored = {name: tensor.clone() for name, tensor in bundle.files.tensors(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fill(bundle.files.tensors(model), stored.items())
    torch.testing.assert_close(bundle.files.tensors(model), stored, rtol=0, atol=0)
    assert any(parameter.any() for parameter in model.get_output_embeddings().parameters())


def test_an_infinite_number_survives_in_the_written_configuration(load, tmp_path):
    sizes = "hidden_size=32,num_heads=8,head_dim=8,n_groups=1,num_hidden_layers=1"
    load("mamba2", config_overrides=sizes).files.write_config(tmp_path)
    limits = AutoConfig.from_pretrained(tmp_path).time_step_limit
    assert [*limits] == [0.0, float("inf")]


# --- initial weights


def built_at_once(
    base: str, lora: lt.LoraConfig | None, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    """Build a model as transformers and peft do, with the weights of a folder or of seed 3."""
    if Path(base).exists():
        model = AutoModelForCausalLM.from_pretrained(base)
    else:
        config = lt.ModelConfig(from_config=base, config_overrides=OVERRIDES, max_length=64)
        model = AutoModelForCausalLM.from_config(config.configuration(tokenizer))
        fill(dict(model.named_parameters()), random_weights(model, 3))

    new_tokens = [*range(VOCABULARY, len(tokenizer))]
    if new_tokens:
        torch.manual_seed(seed_of(3, "rows of new tokens"))
        model.resize_token_embeddings(len(tokenizer))
    if lora is not None:
        add_lora(model, lora, 3, new_tokens)
    return model


def description(tensors: Iterator[tuple[str, torch.Tensor]]) -> list[tuple[str, Any, bool]]:
    return [(name, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]


LORA = lt.LoraConfig(lora_r=4)
DORA = lt.LoraConfig(lora_r=4, use_dora=True)


@pytest.mark.parametrize(
    ("family", "start", "lora", "has_new_tokens"),
    [
        pytest.param("llama", "folder", None, False, id="untied head, folder"),
        pytest.param("gpt2", "folder", LORA, True, id="tied head, folder, LoRA, new tokens"),
        pytest.param("llama", "folder", DORA, True, id="untied head, folder, DoRA, new tokens"),
        pytest.param("gpt2", "seed", None, False, id="tied head, seed"),
        pytest.param("llama", "seed", None, True, id="untied head, seed, new tokens"),
    ],
)
def test_a_placed_model_is_the_one_that_transformers_builds_at_once(
    accelerator, load, family, start, lora, has_new_tokens, tmp_path
):
    tokenizer = byte_tokenizer()
    base = family
    config = lt.ModelConfig(from_config=family, config_overrides=OVERRIDES, max_length=64)
    if start == "folder":
        base = str(export_model(load(family), tmp_path / "base"))
        config = lt.ModelConfig(base, max_length=64)
    if has_new_tokens:
        set_template(tokenizer, "chatml")

    rows = SomeRows(tokenizer, new_tokens=NEW_TOKENS if has_new_tokens else [])
    bundle = lt.load_model(config, lora, rows, 3, "no")
    if lora is None and not has_new_tokens:
        assert all(parameter.is_meta for parameter in bundle.model.parameters())
    model = move_to_devices(accelerator.ranks, bundle).model

    expected = built_at_once(base, lora, tokenizer)
    assert description(model.named_parameters()) == description(expected.named_parameters())
    assert description(model.named_buffers()) == description(expected.named_buffers())
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    buffers = dict(model.named_buffers())  # some are in no state_dict
    torch.testing.assert_close(buffers, dict(expected.named_buffers()), rtol=0, atol=0)
    assert [*model.state_dict()] == [*expected.state_dict()]
    assert model.training == expected.training
    assert type(model).__name__ == type(expected).__name__
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_frozen_parameters_are_those_whose_names_match(load):
    model = load("llama", freeze=r"embed_tokens|layers\.0\.").model

    parameters = model.named_parameters()
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}

    assert "model.embed_tokens.weight" in frozen
    assert all("layers.0." in name for name in frozen - {"model.embed_tokens.weight"})
    assert len(frozen) == 10, "nine in a layer, and the embedding"


# --- the length of rows


@pytest.fixture
def model_of_32_positions(tmp_path: Path) -> str:
    GPT2Config(n_positions=32).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("max_length", "origins", "expected"),
    [
        pytest.param(64, {}, 32, id="a longer default"),
        pytest.param(16, {}, 16, id="a shorter default"),
        pytest.param(64, {"max_length": "the command line"}, 64, id="set by the user"),
    ],
)
def test_only_a_default_max_length_is_lowered_to_the_positions_of_the_model(
    model_of_32_positions, max_length, origins, expected
):
    stored = lt.ModelConfig(model_name_or_path=model_of_32_positions, max_length=max_length)
    overridden = lt.ModelConfig(
        from_config="gpt2", config_overrides="n_positions=32", max_length=max_length
    )
    for config in (stored, overridden):
        config.origins = origins
        config.fit_max_length()
        assert config.max_length == expected


@pytest.mark.parametrize("recipe", [finetune, preference])
def test_recipes_fit_max_length_to_the_model(recipe, model_of_32_positions, monkeypatch):
    make_request = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr("llmtrain.training.rows.DataRequest", make_request)
    settings = copy.deepcopy(recipe.DEFAULTS)
    settings.model.model_name_or_path = model_of_32_positions

    with pytest.raises(InterruptedError):
        recipe.tokenized(settings)

    assert make_request.call_args.args[1] == 32


# --- refusals


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"from_config": "lama"}, "--from_config lama: "),
        ({"from_config": "llama", "config_overrides": "hidden_sizes=3"}, "'hidden_sizes'"),
        ({"from_config": "llama", "config_overrides": "hidden_size=33"}, "--from_config llama"),
        ({"from_config": "gpt2", "config_overrides": "n_positions=32"}, "--max_length 64 "),
        ({"from_config": "llama", "freeze": "nothing"}, "matches no parameter"),
        ({"from_config": "llama", "freeze": "."}, "matches every parameter"),
        ({"from_config": "llama", "load_in_4bit": True}, "--load_in_4bit needs "),
        ({"model_name_or_path": "nowhere/at-all"}, "nowhere/at-all is no folder"),
    ],
)
def test_settings_that_make_no_model_are_one_line(load, flags, message):
    with pytest.raises(UserError, match=message) as caught:
        load(**flags)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(load, tmp_path):
    base = export_model(load("llama"), tmp_path / "base")
    text = ["some words to merge, " * 50]
    tokenizer = tok.as_pretrained(tok.train_tokenizer("bpe:300", text, lambda: iter(())), 64)
    tokenizer.add_tokens([f"<{i}>" for i in range(40)])

    message = r"tokens and .* a vocabulary of 257; use the model's own tokenizer"
    with pytest.raises(UserError, match=message):
        load(model_name_or_path=str(base), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("family", "overrides"), [("gpt2", None), ("llama", "attention_dropout=0.1")]
)
def test_bitwise_runs_refuse_dropout(load, family, overrides):
    with pytest.raises(UserError, match="--bitwise needs a model without dropout"):
        load(family, config_overrides=overrides, bitwise=True)


def test_bitwise_runs_accept_a_model_without_dropout(load):
    assert load("llama", bitwise=True)
