"""A document of an isolated row has the loss and the gradient that it has alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmtrain.data.config import DataConfig
from llmtrain.data.loader import train_loader
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.models.gpt_family import build_gpt
from llmtrain.models.pretrained import load_model
from llmtrain.models.trainable import make_trainable
from llmtrain.parallel.placement import place
from llmtrain.training.start import place as place_recipe
from tests.data.test_prepare import TEXTS, tokenize_texts
from tests.models.small_models import perturbed

BLOCK = 24
E = 0  # end-of-text of the tokenizer ``byte``
OURS = ["our gpt2", "our lfm2"]
STOCK = ["llama", "gpt2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def rows(folder: Path) -> Tokenized:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
        return tokenize_texts(folder, TEXTS, BLOCK, isolate_documents=True)


@pytest.fixture
def bundle(accelerator: Any, rows: Tokenized) -> Callable[[str], ModelBundle]:
    """Build a model in float64, with weights far from their initial values."""

    def build(name: str) -> ModelBundle:
        if name in OURS:
            config = GPTConfig(
                n_layer=3,
                n_head=2,
                n_embd=16,
                block_size=BLOCK,
                architecture=name.removeprefix("our "),
            )
            made = build_gpt(config, rows.vocabulary).bundle(rows.tokenizer, "some text", seed=0)
        else:
            model_config = ModelConfig(from_config=name, max_length=BLOCK)
            made = place(accelerator, load_model(model_config, None, rows, 0, "no"))
        perturbed(made.model).double()
        return made

    return build


def batch_of(rows: Tokenized, made: ModelBundle) -> Batch:
    count = len(rows.train)
    loader = train_loader(rows.train, count, count, range(1), None, prepare=made.prepare_batch)
    (local_batch,) = loader
    (batch,) = local_batch.batches
    return batch


def documents_alone(rows: Tokenized) -> list[Tensor]:
    """The inputs of each document with their targets, cut at the borders of rows: int64 [n + 1].

    They are found by the end-of-text tokens, not by the position ids.
    """
    documents = []
    for row in rows.train:
        tokens = [token for token in row["input_ids"] if token >= 0]
        start = 0
        for i in range(1, len(tokens)):
            if tokens[i] == E or i == len(tokens) - 1:
                documents.append(torch.tensor(tokens[start : i + 1]))
                start = i
    return documents


@pytest.mark.parametrize("name", [*OURS, *STOCK])
def test_isolated_documents_have_the_loss_and_gradient_that_they_have_alone(
    rows: Tokenized, bundle: Callable[[str], ModelBundle], name: str
) -> None:
    made = bundle(name)
    batch = batch_of(rows, made)
    loss = made.model(**batch)
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in made.model.named_parameters()}
    made.model.zero_grad()

    documents = documents_alone(rows)
    assert len(documents) > len(TEXTS), "some are cut"
    assert sum(len(document) - 1 for document in documents) == rows.metadata.train_tokens
    alone = torch.zeros((), dtype=torch.float64)
    for document in documents:
        alone = alone + made.model(document[None], document[None])
    alone.backward()

    assert loss.item() == pytest.approx(alone.item(), rel=1e-6)
    for key, parameter in made.model.named_parameters():
        size = float(gradients[key].abs().max())
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-5, atol=1e-5 * size)

    together = {name: batch[name] for name in ("input_ids", "labels")}
    difference = abs(made.model(**together) / loss - 1)
    assert difference > 1e-3, "documents that see each other have another loss"


@pytest.mark.parametrize("name", OURS)
def test_our_models_find_the_documents_in_the_position_ids(
    rows: Tokenized, bundle: Callable[[str], ModelBundle], name: str
) -> None:
    model = bundle(name).model
    batch = batch_of(rows, bundle(name))
    documents = batch.pop("documents")
    assert torch.equal(model(**batch), model(**batch, documents=documents))

    # A call without labels computes the last position, too.
    ids, positions = batch["input_ids"][:1, :-1], batch["position_ids"][:1, :-1]
    logits = model(ids, position_ids=positions)
    start = int((positions[0] == 0).nonzero()[-1])
    torch.testing.assert_close(logits[:, start:], model(ids[:, start:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_blocks_of_isolated_rows_are_one_graph(
    rows: Tokenized, bundle: Callable[[str], ModelBundle], name: str
) -> None:
    made = bundle(name)
    batch = batch_of(rows, made)
    expected = made.model(**batch)
    (blocks,) = (m for m in made.model.modules() if isinstance(m, torch.nn.ModuleList))
    for block in blocks:
        block.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(made.model(**batch), expected)


def test_a_class_that_leaks_is_refused_for_isolated_text(accelerator: Any, rows: Tokenized) -> None:
    config = ModelConfig(from_config="opt", max_length=BLOCK)
    with pytest.raises(UserError, match="or for text leave --isolate_documents out"):
        place(accelerator, load_model(config, None, rows, 0, "no"))


class _Bigrams(torch.nn.Module):
    """A custom model, whose forward knows no documents."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(300, 300)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.table(input_ids[:, :-1])
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )


class _BigramsOfDocuments(_Bigrams):
    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        return super().forward(input_ids, labels)


def test_a_custom_model_without_position_ids_is_refused_before_it_trains(
    accelerator: Any, rows: Tokenized
) -> None:
    import llmtrain as lt

    settings = lt.Settings(data=DataConfig(), optim=lt.OptimConfig())
    with pytest.raises(UserError, match=r"_Bigrams\.forward takes no position_ids"):
        place_recipe(accelerator, lambda *_: _Bigrams(), settings, rows)
    place_recipe(accelerator, lambda *_: _BigramsOfDocuments(), settings, rows)
    assert make_trainable(torch.nn.Linear(1, 1)).takes_position_ids is False


def test_rows_that_are_not_isolated_take_any_model(
    accelerator: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llmtrain as lt

    monkeypatch.setenv("LLMTRAIN_CACHE", str(folder / "cache"))
    (folder / "text.txt").write_text("some words " * 20)
    data = DataConfig(dataset=[str(folder / "text.txt")], tokenizer="byte", eval_fraction=0)
    settings = lt.Settings(data=data, optim=lt.OptimConfig())
    place_recipe(accelerator, lambda *_: _Bigrams(), settings, tokenize(data, BLOCK))
