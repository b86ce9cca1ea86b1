"""A document of an isolated row has the loss and the gradients that it has in a row of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor

import llmtrain as lt
from llmtrain.data.loader import train_loader
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.parallel.placement import move_to_devices
from llmtrain.training.start import place as place_recipe
from tests.data.preparation import TEXTS, tokenize_texts
from tests.models.small_models import perturbed, small_model

BLOCK_SIZE = 24
END_OF_TEXT = 0  # of the tokenizer ``byte``
OWN_MODELS = ["gpt2", "lfm2"]
MODELS = [*OWN_MODELS, "llama"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> lt.Tokenized:
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
        return tokenize_texts(folder, TEXTS, BLOCK_SIZE, isolate_documents=True)


def build(name: str, rows: lt.Tokenized) -> Any:
    """Build a model in float64, with weights far from their initial values."""
    model = small_model(name, vocabulary=rows.vocabulary, tokens=BLOCK_SIZE + 1, width=16)
    return perturbed(model).double()


def batch_of_all_rows(rows: lt.Tokenized, model: Any) -> Batch:
    count = len(rows.train)
    loader = train_loader(rows.train, count, count, range(1), None, prepare=model.prepare_batch)
    (local_batch,) = loader
    (batch,) = local_batch.batches
    return batch


def documents_in(rows: lt.Tokenized) -> list[Tensor]:
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


@pytest.mark.parametrize("name", MODELS)
def test_isolated_documents_have_the_loss_and_gradients_of_separate_rows(
    rows: lt.Tokenized, name: str
) -> None:
    model = build(name, rows)
    batch = batch_of_all_rows(rows, model)
    loss = model(**batch)
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()

    documents = documents_in(rows)
    assert len(documents) > len(TEXTS), "the end of a row cuts some"
    assert sum(len(document) - 1 for document in documents) == rows.metadata.train_tokens
    losses = [model(document[None], document[None]) for document in documents]
    expected = torch.stack(losses).sum()
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    joint_loss = model(batch["input_ids"], batch["labels"])
    assert abs(joint_loss / loss - 1) > 1e-5, "documents that see each other have another loss"
    for key, parameter in model.named_parameters():
        tolerance = 1e-5 * float(gradients[key].abs().max())
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("name", OWN_MODELS)
def test_the_logits_of_an_isolated_document_are_those_of_a_separate_row(
    rows: lt.Tokenized, name: str
) -> None:
    """Without labels, the last position is computed, too."""
    model = build(name, rows)
    batch = batch_of_all_rows(rows, model)
    ids = batch["input_ids"][:1, :-1]
    positions = batch["position_ids"][:1, :-1]
    last_start = int((positions[0] == 0).nonzero()[-1])

    logits = model(ids, position_ids=positions)[:, last_start:]

    expected = model(ids[:, last_start:])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OWN_MODELS)
def test_isolated_rows_need_no_prepared_documents_and_a_compiler_gets_one_graph(
    rows: lt.Tokenized, name: str
) -> None:
    model = build(name, rows)
    batch = batch_of_all_rows(rows, model)
    documents = batch.pop("documents")
    expected = model(**batch)  # they are found in the position ids
    batch["documents"] = documents
    assert torch.equal(model(**batch), expected)

    (blocks,) = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for block in blocks:
        block.compile(fullgraph=True, backend="eager")

    torch.testing.assert_close(model(**batch), expected)


def test_a_class_that_leaks_is_refused_for_isolated_text(
    accelerator: Any, rows: lt.Tokenized
) -> None:
    config = lt.ModelConfig(from_config="opt", max_length=BLOCK_SIZE)
    with pytest.raises(UserError, match="or for text leave --isolate_documents out"):
        move_to_devices(accelerator.ranks, lt.load_model(config, None, rows, 0, "no"))


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


def test_a_custom_model_for_isolated_rows_must_take_position_ids(
    accelerator: Any, rows: lt.Tokenized
) -> None:
    class WithPositions(_Bigrams):
        def forward(
            self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None
        ) -> Tensor:
            return super().forward(input_ids, labels)

    settings = lt.Settings(data=lt.DataConfig(), optim=lt.OptimConfig())
    with pytest.raises(UserError, match=r"_Bigrams\.forward takes no position_ids"):
        place_recipe(accelerator, lambda *_: _Bigrams(), settings, rows)
    assert place_recipe(accelerator, lambda *_: WithPositions(), settings, rows)
