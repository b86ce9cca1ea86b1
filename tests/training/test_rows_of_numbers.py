"""A plain torch module is trained on rows of numbers, without a tokenizer."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn

import llmtrain as lt
from llmtrain.cli import main as command
from llmtrain.errors import UserError
from llmtrain.training.run import Run

NUMBERS = 12


class Successor(nn.Module):
    """Predicts each number from the one before it. The matrices are tied."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids))
        return logits

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return lt.summed_nll(self.logits(input_ids[:, :-1]), labels[:, 1:])


def accuracy(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    targets = batch["labels"][:, 1:]
    predictions = model.logits(batch["input_ids"][:, :-1]).argmax(-1)
    return {"accuracy": ((predictions == targets).sum(), (targets != -100).sum())}


def table(rows: int) -> datasets.Dataset:
    """Make rows that count up, from 0 again after the largest number."""
    ids = []
    for first in range(rows):
        ids.append([(first + offset) % NUMBERS for offset in range(6)])
    return datasets.Dataset.from_dict({"input_ids": ids})


@pytest.fixture
def rows() -> lt.Tokenized:
    return lt.Tokenized.of(table(24), None, eval=table(5))


@pytest.fixture
def train(rows: lt.Tokenized, tmp_path: Path) -> Callable[..., Run]:
    """A function that trains the model on the rows for six steps."""

    def train(**eval_flags: Any) -> Run:
        settings = lt.Settings(
            data=lt.BatchConfig(global_batch_size=4),
            optim=lt.OptimConfig(max_steps=6, learning_rate=3e-2, warmup_steps=0),
            eval=lt.EvalConfig(eval_steps=3, **eval_flags),
            run=lt.RunConfig(str(tmp_path / "run"), report_to=["none"]),
        )
        return lt.fit(
            settings,
            rows,
            lambda *_: Successor(rows.vocabulary),
            metrics=[accuracy],
        )

    return train


# A run


def test_a_run_without_a_tokenizer_has_its_metrics_but_no_bits_per_byte(
    train: Callable[..., Run],
) -> None:
    run = train()
    history = run.history()

    ids = torch.tensor(table(5)["input_ids"])
    predictions = run.bundle.model.logits(ids[:, :-1]).argmax(-1)
    expected = (predictions == ids[:, 1:]).double().mean().item()
    assert history["eval/accuracy"].dropna().tolist()[-1] == pytest.approx(expected)
    assert history["eval/perplexity"].dropna().size == 3
    assert "eval/bits_per_byte" not in history


def test_the_code_in_the_model_card_loads_a_plain_module(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train()
    folder = run.folder / "model"

    card = (folder / "README.md").read_text()
    assert f"# Successor, a torch module of {8 * NUMBERS} parameters" in card
    assert "AutoModel" not in card
    assert "transformers" not in card

    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {"Successor": Successor}
    monkeypatch.chdir(folder)
    exec(code.replace("...", str(NUMBERS)), names)
    ids = torch.arange(NUMBERS)
    assert torch.equal(names["model"].logits(ids), run.bundle.model.logits(ids))


def test_the_vocabulary_is_the_largest_number_plus_1(rows: lt.Tokenized) -> None:
    assert rows.vocabulary == NUMBERS
    assert dataclasses.asdict(rows.metadata)["tokenizer"] == "none"

    with_labels = table(2).add_column("labels", [[-100] * 5 + [40]] * 2)
    assert lt.Tokenized.of(with_labels, None).vocabulary == 41


# --- commands


def test_text_needs_a_tokenizer(
    train: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train().folder

    with pytest.raises(SystemExit):
        command(["generate", str(folder)])
    assert (
        "cannot write text (safetensors.torch: load_model(Successor(...),"
        in capsys.readouterr().err
    )
    with pytest.raises(UserError, match="--sample_prompts needs a tokenizer"):
        train(sample_prompts=["1"])
