"""Objectives and metrics can call the same methods on every model, which counts its operations."""

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.models.hub_models import without_weights
from llmtrain.models.trainable import make_trainable
from tests.engines import engine_of
from tests.launching import ROOT
from tests.models.small_models import small_model

VOCABULARY = 30
TOKENS = 9


class Recurrent(nn.Module):
    """A model of the user, which computes the loss of rows that are not packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            return lt.summed_nll(self(input_ids[:, :-1]), labels[:, 1:])
        assert input_ids.shape[1] < TOKENS, "the last token of a row is only a target"
        logits: Tensor = self.head(self.hidden(self.embedding(input_ids))[0])
        return logits


class LossOnly(Recurrent):
    """A model of the user that returns no logits."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids, labels)


def build(name: str) -> Any:
    torch.manual_seed(2)
    if name == "recurrent":
        return make_trainable(Recurrent())
    return small_model(name, vocabulary=VOCABULARY, tokens=TOKENS, width=16)


def batch_of(model: Any, packed: bool) -> Batch:
    ids = torch.randint(VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        batch["position_ids"] = torch.cat([torch.arange(4), torch.arange(5)]).expand_as(ids)
        batch["documents"] = model.prepare_batch(batch)["documents"]
    # Numbers of an objective's reference, which no model takes.
    return {**batch, "reference": torch.zeros(3, 2)}


def expected_logits(model: Any, batch: Batch) -> Tensor:
    """Compute the logits of each document in a row of its own."""
    documents = [slice(0, TOKENS - 1)]
    if "position_ids" in batch:
        documents = [slice(0, 4), slice(4, TOKENS - 1)]
    outputs = [model(batch["input_ids"][:, document]) for document in documents]
    return torch.cat([getattr(output, "logits", output) for output in outputs], dim=1)


MODELS = ["gpt2", "lfm2", "llama"]


@pytest.mark.parametrize(
    ("name", "packed"), [*itertools.product(MODELS, [False, True]), ("recurrent", False)]
)
def test_the_methods_of_every_model_agree_with_its_logits(name: str, packed: bool) -> None:
    model = build(name)
    batch = batch_of(model, packed)
    logits = expected_logits(model, batch)
    targets = batch["labels"][:, 1:].flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")

    torch.testing.assert_close(model.logits(**batch), logits)
    torch.testing.assert_close(model.nll(**batch), losses.sum())
    torch.testing.assert_close(model.nll(**batch, per_target=True), losses)
    target_positions = torch.tensor([5, 0, -1])  # -1 is padding
    chosen_losses = model.nll(**batch, per_target=True, target_positions=target_positions)
    expected_losses = torch.stack([losses[5], losses[0], torch.zeros(())])
    torch.testing.assert_close(chosen_losses, expected_losses)

    positions = torch.tensor([7, 0, 12])
    at_positions = model.logits_at(positions, **batch)
    torch.testing.assert_close(at_positions, logits.flatten(0, 1)[positions])

    if packed:
        outputs = model(batch["input_ids"], position_ids=batch["position_ids"])
        torch.testing.assert_close(getattr(outputs, "logits", outputs)[:, :-1], logits)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_head_makes_logits_of_the_hidden_states_of_one_call_of_the_base(
    name: str, packed: bool
) -> None:
    model = build(name)
    batch = batch_of(model, packed)
    weight = model.get_output_embeddings().weight if name == "llama" else model.head
    calls: list[nn.Module] = []
    with model.base_model.register_forward_hook(lambda module, *_: calls.append(module)):
        hidden = model.hidden(**batch)
    assert calls == [model.base_model]
    torch.testing.assert_close(F.linear(hidden, weight), expected_logits(model, batch))


# --- models of the user


def test_methods_and_modules_of_the_user_stay_what_they_are() -> None:
    class Own(Recurrent):
        def logits_at(self, positions: Tensor, **batch: Any) -> str:
            return "mine"

    model: Any = make_trainable(Own())
    assert isinstance(model.hidden, nn.GRU)
    assert model.logits_at(torch.tensor([0]), **batch_of(model, packed=False)) == "mine"


def test_a_model_that_uses_the_name_nll_for_something_else_is_refused() -> None:
    model = Recurrent()
    model.nll = nn.NLLLoss()
    with pytest.raises(UserError, match=r"Recurrent\.nll is another thing .*; rename it\."):
        make_trainable(model)


def test_a_layer_may_be_called_logits() -> None:
    model = Recurrent()
    model.logits = nn.Linear(2, 2)
    trained: Any = make_trainable(model)
    assert isinstance(trained.logits, nn.Linear)
    batch = batch_of(trained, packed=False)
    labels = batch["input_ids"]
    nll = trained.nll(batch["input_ids"], labels, per_target=True)
    torch.testing.assert_close(nll.sum(), trained(batch["input_ids"], labels))


def test_a_model_that_only_returns_a_loss_has_no_logits() -> None:
    model: Any = make_trainable(LossOnly())
    batch = batch_of(model, packed=False)
    with pytest.raises(UserError, match="LossOnly only returns a loss"):
        model.logits_at(torch.tensor([0]), **batch)


def test_inputs_of_every_token_lose_their_last_position_for_logits() -> None:
    class WithOffsets(Recurrent):
        def forward(
            self, input_ids: Tensor, labels: Tensor | None = None, offsets: Tensor | None = None
        ) -> Tensor:
            assert offsets is not None
            assert labels is not None or offsets.shape == input_ids.shape
            return super().forward(input_ids)

    model: Any = make_trainable(WithOffsets())
    batch = batch_of(model, packed=False)
    offsets = torch.zeros_like(batch["input_ids"])
    assert model.logits(**batch, offsets=offsets).shape == (3, TOKENS - 1, VOCABULARY)


def test_a_forward_of_the_user_gets_the_columns_that_it_takes() -> None:
    received: list[set[str]] = []

    class TakesTeacher(Recurrent):
        def forward(
            self, input_ids: Tensor, labels: Tensor | None = None, teacher: Tensor | None = None
        ) -> Tensor:
            received.append(set() if teacher is None else {"teacher"})
            return super().forward(input_ids)

    class TakesAnyColumn(Recurrent):
        def forward(
            self, input_ids: Tensor, labels: Tensor | None = None, **columns: Tensor
        ) -> Tensor:
            received.append({*columns})
            return super().forward(input_ids)

    for model_class in (Recurrent, TakesTeacher, TakesAnyColumn):
        model: Any = make_trainable(model_class())
        batch = batch_of(model, packed=False)
        column = torch.ones(batch["labels"].shape)
        del batch["labels"]  # the columns are those of any pass
        model.logits(**batch, teacher=column, loss_weight=column)
    assert received == [{"teacher"}, {"teacher", "loss_weight"}]


def test_the_model_of_the_guide_has_hidden_states_for_its_objective(
    accelerator: Accelerator,
) -> None:
    page = (ROOT / "docs" / "guides" / "own-model.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    variables: dict[str, Any] = {"lt": lt, "nn": nn}
    exec(code, variables)

    custom_model = variables["Recurrent"](VOCABULARY)
    batch = batch_of(custom_model, packed=False)
    for own_model in (custom_model, build("gpt2")):
        engine = engine_of(accelerator, own_model, variables["SmallStates"](weight=0.5))
        model: Any = engine.unwrapped
        is_target = batch["labels"][:, 1:] != IGNORED
        penalty = 0.5 * model.hidden(**batch)[is_target].square().mean(-1).sum()
        torch.testing.assert_close(engine.loss(batch).loss, model.nll(**batch) + penalty)


# --- the operations of a step are counted as torch counts them

LENGTH = 64
SIZES = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
TWO_OF_FOUR = ["conv", "full_attention", "conv", "full_attention"]
# Gemma 4 can also embed the tokens for each layer.
WITHOUT_PER_LAYER = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}


def eager_model(family: str, **values: Any) -> Any:
    """Return a model with random weights and eager attention, whose products torch counts."""
    config = AutoConfig.for_model(family, **SIZES | values)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def flops_by_torch(model: Any) -> int:
    """Count the operations of matrix products in a forward and a backward pass over one row."""
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    # Torch counts the backward pass of a convolution as if each channel met all others.
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if "conv" not in str(operation))


@pytest.mark.parametrize(
    ("family", "values"),
    [
        pytest.param("llama", {}, id="heads that divide the hidden size"),
        pytest.param("qwen3", {"head_dim": 64}, id="large heads"),
        pytest.param("llama", {"tie_word_embeddings": True}, id="the embedding is the head"),
        pytest.param("lfm2", {"layer_types": TWO_OF_FOUR}, id="two layers without attention"),
        pytest.param(
            "gemma4_text",
            {"head_dim": 24, "global_head_dim": 48, "sliding_window": LENGTH, **WITHOUT_PER_LAYER},
            id="heads of two sizes",
        ),
        pytest.param("gemma3_text", {"head_dim": 48, "sliding_window": LENGTH}, id="windows"),
    ],
)
def test_flops_are_those_that_torch_counts(family: str, values: dict[str, Any]) -> None:
    model = eager_model(family, **values)
    expected = flops_by_torch(model)

    flops = make_causal_lm(model, row_length=LENGTH).flops_per_token() * LENGTH

    assert flops == pytest.approx(expected, rel=0.01)


# Classes without some of these sizes, or with layers of other kinds.
@pytest.mark.parametrize("family", ["gpt2", "mamba", "nemotron_h", "zamba2", "gemma3"])
def test_the_attention_of_any_configuration_is_counted(family: str) -> None:
    config = AutoConfig.for_model(family).get_text_config()
    model = without_weights(lambda: AutoModelForCausalLM.from_config(config))
    assert make_causal_lm(model, row_length=LENGTH).flops_per_token() >= 0
