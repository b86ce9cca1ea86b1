"""A document of an isolated row has the loss and the gradients that it has in a row of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import llmtrain as lt
from llmtrain.data.loader import train_loader
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.gpt_family import build_gpt
from llmtrain.models.pretrained import load_model
from llmtrain.models.trainable import make_trainable
from llmtrain.parallel.placement import place
from llmtrain.training.start import place as place_recipe
from tests.data.preparation import TEXTS, tokenize_texts
from tests.models.small_models import perturbed

BLOCK_SIZE = 24
END_OF_TEXT = 0  # of the tokenizer ``byte``
OWN_MODELS = ["our gpt2", "our lfm2"]
STOCK_MODELS = ["llama", "gpt2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def rows(folder: Path) -> Tokenized:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
        return tokenize_texts(folder, TEXTS, BLOCK_SIZE, isolate_documents=True)


@pytest.fixture
def build(accelerator: Any, rows: Tokenized) -> Callable[[str], ModelBundle]:
    """Build a model in float64, with weights far from their initial values."""

    def build(name: str) -> ModelBundle:
        if name in OWN_MODELS:
            config = lt.GPTConfig(
                n_layer=3,
                n_head=2,
                n_embd=16,
                block_size=BLOCK_SIZE,
                architecture=name.removeprefix("our "),
            )
            gpt = build_gpt(config, rows.vocabulary)
            bundle = gpt.bundle(rows.tokenizer, "some text", seed=0)
        else:
            model_config = lt.ModelConfig(from_config=name, max_length=BLOCK_SIZE)
            bundle = place(accelerator, load_model(model_config, None, rows, 0, "no"))
        perturbed(bundle.model).double()
        return bundle

    return build


def batch_of_all_rows(rows: Tokenized, bundle: ModelBundle) -> Batch:
    count = len(rows.train)
    loader = train_loader(rows.train, count, count, range(1), None, prepare=bundle.prepare_batch)
    (local_batch,) = loader
    (batch,) = local_batch.batches
    return batch


def documents_in(rows: Tokenized) -> list[Tensor]:
    """Return the tokens of each document, or of its part in a row: int64 [n + 1].

    The documents are found by their end-of-text tokens, not by the position ids.
    """
    documents = []
    for row in rows.train:
        tokens = [token for token in row["input_ids"] if token >= 0]
        last = len(tokens) - 1
        start = 0
        for i in range(1, len(tokens)):
            if tokens[i] == END_OF_TEXT or i == last:
                documents.append(torch.tensor(tokens[start : i + 1]))
                start = i
    return documents


@pytest.mark.parametrize("name", [*OWN_MODELS, *STOCK_MODELS])
def test_isolated_documents_have_the_loss_and_gradients_of_separate_rows(
    rows: Tokenized, build: Callable[[str], ModelBundle], name: str
) -> None:
    bundle = build(name)
    batch = batch_of_all_rows(rows, bundle)
    loss = bundle.model(**batch)
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in bundle.model.named_parameters()}
    bundle.model.zero_grad()

    documents = documents_in(rows)
    assert len(documents) > len(TEXTS), "the end of a row cuts some"
    assert sum(len(document) - 1 for document in documents) == rows.metadata.train_tokens
    losses = [bundle.model(document[None], document[None]) for document in documents]
    expected = torch.stack(losses).sum()
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for key, parameter in bundle.model.named_parameters():
        tolerance = 1e-5 * float(gradients[key].abs().max())
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("name", [*OWN_MODELS, *STOCK_MODELS])
def test_documents_that_see_each_other_have_another_loss(
    rows: Tokenized, build: Callable[[str], ModelBundle], name: str
) -> None:
    bundle = build(name)
    batch = batch_of_all_rows(rows, bundle)
    isolated_loss = bundle.model(**batch)
    joint_loss = bundle.model(batch["input_ids"], batch["labels"])
    assert abs(joint_loss / isolated_loss - 1) > 1e-5


@pytest.mark.parametrize("name", OWN_MODELS)
def test_the_models_of_this_package_find_documents_in_position_ids(
    rows: Tokenized, build: Callable[[str], ModelBundle], name: str
) -> None:
    bundle = build(name)
    batch = batch_of_all_rows(rows, bundle)
    documents = batch.pop("documents")
    assert torch.equal(bundle.model(**batch), bundle.model(**batch, documents=documents))


@pytest.mark.parametrize("name", OWN_MODELS)
def test_the_logits_of_an_isolated_document_are_those_of_a_separate_row(
    rows: Tokenized, build: Callable[[str], ModelBundle], name: str
) -> None:
    """Without labels, the last position is computed, too."""
    bundle = build(name)
    batch = batch_of_all_rows(rows, bundle)
    ids = batch["input_ids"][:1, :-1]
    positions = batch["position_ids"][:1, :-1]
    last_start = int((positions[0] == 0).nonzero()[-1])

    logits = bundle.model(ids, position_ids=positions)[:, last_start:]

    expected = bundle.model(ids[:, last_start:])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OWN_MODELS)
def test_a_compiler_gets_blocks_of_isolated_rows_as_one_graph(
    rows: Tokenized, build: Callable[[str], ModelBundle], name: str
) -> None:
    bundle = build(name)
    batch = batch_of_all_rows(rows, bundle)
    expected = bundle.model(**batch)

    (blocks,) = (m for m in bundle.model.modules() if isinstance(m, torch.nn.ModuleList))
    for block in blocks:
        block.compile(fullgraph=True, backend="eager")

    torch.testing.assert_close(bundle.model(**batch), expected)


def test_a_class_that_leaks_is_refused_for_isolated_text(accelerator: Any, rows: Tokenized) -> None:
    config = lt.ModelConfig(from_config="opt", max_length=BLOCK_SIZE)
    with pytest.raises(UserError, match="or for text leave --isolate_documents out"):
        place(accelerator, load_model(config, None, rows, 0, "no"))


# --- custom models


class _Bigrams(torch.nn.Module):
    """A custom model whose ``forward`` takes no position ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(300, 300)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.table(input_ids[:, :-1])
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )


class _BigramsWithPositions(_Bigrams):
    """A custom model whose ``forward`` takes position ids."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        return super().forward(input_ids, labels)


def test_a_custom_model_for_isolated_rows_must_take_position_ids(
    accelerator: Any, rows: Tokenized
) -> None:
    settings = lt.Settings(data=lt.DataConfig(), optim=lt.OptimConfig())
    with pytest.raises(UserError, match=r"_Bigrams\.forward takes no position_ids"):
        place_recipe(accelerator, lambda *_: _Bigrams(), settings, rows)
    assert place_recipe(accelerator, lambda *_: _BigramsWithPositions(), settings, rows)


def test_a_module_of_torch_takes_no_position_ids() -> None:
    assert make_trainable(torch.nn.Linear(1, 1)).takes_position_ids is False


def test_rows_that_are_not_isolated_take_any_model(
    accelerator: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    text = folder / "text.txt"
    text.write_text("some words " * 20)
    data = lt.DataConfig(dataset=[str(text)], tokenizer="byte", eval_fraction=0)
    settings = lt.Settings(data=data, optim=lt.OptimConfig())
    rows = tokenize(data, BLOCK_SIZE)
    assert place_recipe(accelerator, lambda *_: _Bigrams(), settings, rows)
