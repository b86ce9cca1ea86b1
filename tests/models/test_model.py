"""Objectives and metrics can call the same methods on every model."""

import inspect
import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.lfm2 import LFM2
from llmtrain.models.trainable import make_trainable
from tests.engines import engine_of
from tests.launching import ROOT
from tests.models.small_models import small_model

VOCABULARY = 30
TOKENS = 9
METHODS = ("nll", "hidden", "logits", "logits_at", "run_layers")


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
    assert model.run_layers(**batch) is None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_head_makes_logits_of_the_hidden_states(name: str, packed: bool) -> None:
    model = build(name)
    batch = batch_of(model, packed)
    weight = model.get_output_embeddings().weight if name == "llama" else model.head
    logits = F.linear(model.hidden(**batch), weight)
    torch.testing.assert_close(logits, expected_logits(model, batch))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_run_layers_runs_the_base_model_once(name: str, packed: bool) -> None:
    model = build(name)
    batch = batch_of(model, packed=packed)
    calls: list[nn.Module] = []
    with model.base_model.register_forward_hook(lambda module, *_: calls.append(module)):
        model.run_layers(**batch)
    assert calls == [model.base_model]


@pytest.mark.parametrize("own_class", [lt.GPT, LFM2, CausalLM])
@pytest.mark.parametrize("name", METHODS)
def test_every_class_has_the_signatures_of_the_protocol(own_class: type, name: str) -> None:
    parameters = inspect.signature(getattr(own_class, name)).parameters
    assert any(p.kind is p.VAR_KEYWORD for p in parameters.values()), "columns of a batch"
    for expected in inspect.signature(getattr(lt.Model, name)).parameters.values():
        if expected.kind is not expected.VAR_KEYWORD:
            assert parameters[expected.name].kind is expected.kind
            assert parameters[expected.name].default == expected.default


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


# --- names that a model lacks


class UsesHidden(lt.Objective):
    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        return lt.LossSums(loss=model.base_model(**batch).sum())


class UsesLogits(lt.Objective):
    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        return lt.LossSums(loss=model.logits_at(torch.tensor([0]), **batch).sum())


class Typo(lt.Objective):
    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        return lt.LossSums(loss=model.logit_at(torch.tensor([0]), **batch).sum())


class Unknown(lt.Objective):
    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        return lt.LossSums(loss=model.xyz)


@pytest.mark.parametrize(
    ("objective", "own_class", "message"),
    [
        (
            UsesHidden,
            Recurrent,
            r"UsesHidden\.loss \(test_model\.py, line \d+\) uses base_model of the model, which "
            r"Recurrent does not have; add it to the class, as docs/guides/own-model\.md",
        ),
        (Typo, Recurrent, r"Typo\.loss .* uses logit_at .*; did you mean logits_at\?$"),
        (Unknown, Recurrent, r"uses xyz .*own-model\.md lists what every model has"),
        (UsesLogits, LossOnly, r"LossOnly only returns a loss.* `labels` .* default None"),
    ],
)
def test_the_error_names_the_objective_and_the_missing_attribute(
    accelerator: Accelerator, objective: type[lt.Objective], own_class: type, message: str
) -> None:
    engine = engine_of(accelerator, own_class(), objective())
    batch = batch_of(engine.unwrapped, packed=False)
    with pytest.raises(UserError, match=message):
        engine.loss(batch)


def test_an_attribute_error_within_the_model_or_of_another_object_is_raised_as_it_is(
    accelerator: Accelerator,
) -> None:
    class Wrong(Recurrent):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
            output: Tensor = self.embeding(input_ids)
            return output

    class AboutTheBatch(lt.Objective):
        def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
            return lt.LossSums(loss=batch["labels"].logits)

    batch = batch_of(None, packed=False)
    with pytest.raises(AttributeError, match="embeding"):
        engine_of(accelerator, Wrong()).loss(batch)
    with pytest.raises(AttributeError, match="logits"):
        engine_of(accelerator, Recurrent(), AboutTheBatch()).loss(batch)
