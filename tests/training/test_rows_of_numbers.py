"""Rows of numbers and a plain torch module: a whole run without a tokenizer, and what it says."""

import dataclasses
import re
import threading
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
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.observe.throughput import Throughput
from llmtrain.training.context import LoopContext
from llmtrain.training.loop import make_engine, training_steps
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
    is_right = model.logits(batch["input_ids"][:, :-1]).argmax(-1) == targets
    return {"accuracy": (is_right.sum(), (targets != -100).sum())}


def table(rows: int) -> datasets.Dataset:
    """Rows that count up, from 0 again after the largest number."""
    ids = [[(start + i) % NUMBERS for i in range(6)] for start in range(rows)]
    return datasets.Dataset.from_dict({"input_ids": ids})


class StopAfter(Callback):
    """Stops a run after a step. The run without it is the same run."""

    fingerprint = None

    def __init__(self, step: int) -> None:
        self.step = step
        self.steps = 0

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.steps = info.step

    def wants_to_stop(self) -> bool:
        return self.steps + 1 == self.step


@pytest.fixture
def rows() -> lt.Tokenized:
    return lt.Tokenized.of(table(24), None, eval=table(5))


@pytest.fixture
def train(rows: lt.Tokenized, tmp_path: Path) -> Callable[..., Run]:
    def go(
        folder: str = "run", stop_after: int = 0, dry_run: bool = False, **evaluation: Any
    ) -> Run:
        settings = lt.Settings(
            data=lt.BatchConfig(global_batch_size=4),
            optim=lt.OptimConfig(max_steps=6, learning_rate=3e-2, warmup_steps=0),
            eval=lt.EvalConfig(eval_steps=3, **evaluation),
            log=lt.LogConfig(logging_steps=1),
            run=lt.RunConfig(str(tmp_path / folder), report_to=["none"], dry_run=dry_run),
        )
        return lt.fit(
            settings,
            rows,
            lambda s, rows, _: Successor(rows.vocabulary),
            callbacks=[StopAfter(stop_after)] if stop_after else [],
            metrics=[accuracy],
        )

    return go


def test_a_run_without_a_tokenizer_has_no_bits_per_byte(
    train: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train()
    history = run.history()
    assert history["eval/accuracy"].dropna().tolist()[-1] > 0.1
    assert "eval/perplexity" in history
    assert "eval/bits_per_byte" not in history

    evaluations = [line for line in capsys.readouterr().out.splitlines() if "  eval: " in line]
    assert len(evaluations) == 3
    for line in evaluations:
        assert re.fullmatch(r"step +\d+  eval: loss \S+  perplexity \S+  accuracy \S+", line)


def test_the_end_of_the_run_and_the_card_say_how_to_load_a_plain_module(
    train: Callable[..., Run],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = train()
    capsys.readouterr()
    run.show()
    shown = capsys.readouterr()
    folder = run.folder / "model"
    line = f'safetensors.torch: load_model(Successor(...), "{folder}/model.safetensors")'
    assert shown.out.splitlines()[-1] == f"model     {folder}  ({line})"
    assert not shown.err

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


def test_a_stopped_run_resumes(train: Callable[..., Run]) -> None:
    whole = train("whole")
    stopped = train(stop_after=2)
    assert not stopped.is_finished
    resumed = train()
    assert (resumed.resume_point.step, resumed.folder) == (2, stopped.folder)
    assert resumed.is_finished
    for name, weight in whole.bundle.model.state_dict().items():
        assert torch.equal(weight, resumed.bundle.model.state_dict()[name])


def test_a_caller_may_make_the_steps_one_by_one_and_end_early(
    rows: lt.Tokenized, tmp_path: Path
) -> None:
    settings = lt.Settings(
        data=lt.BatchConfig(global_batch_size=4),
        optim=lt.OptimConfig(max_steps=6, warmup_steps=0),
        run=lt.RunConfig(str(tmp_path / "run"), report_to=["none"]),
    )
    accelerator = lt.start(settings)
    bundle = lt.place(accelerator, lambda s, rows, _: Successor(rows.vocabulary), settings, rows)
    optimizer = lt.make_optimizer(accelerator, bundle.model, settings.optim)
    with lt.open_run(accelerator, settings, rows, bundle, optimizer) as run:
        model, optimizer, batches, _ = accelerator.prepare(
            bundle.model, optimizer, *lt.loaders(run)
        )
        engine = make_engine(run, model)
        context = LoopContext(
            run=run,
            engine=engine,
            optimizer=optimizer,
            batches=batches,
            eval_batches=None,
            throughput=Throughput(accelerator, engine.unwrapped),
        )
        steps = training_steps(context)
        made = []
        for _ in range(3):
            next(steps)
            made.append(run.step)
        steps.close()
        assert made == [0, 1, 2]  # before the first step, and after each
    assert run.step == 2
    assert not run.is_finished
    assert not (run.folder / "model").exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_report_and_diff_read_such_runs(
    train: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(train(name).folder) for name in ("one", "two")]
    command(["report", *folders, "--output", str(tmp_path / "page.html")])
    assert "eval/accuracy" not in capsys.readouterr().err
    assert "one" in (tmp_path / "page.html").read_text()
    with pytest.raises(SystemExit) as ended:
        command(["diff", *folders])
    assert ended.value.code == 0


RECIPE = """
import datasets
import torch
import llmtrain as lt

class Successor(torch.nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, 8)
        self.head = torch.nn.Linear(8, vocabulary)

    def forward(self, input_ids, labels):
        return lt.summed_nll(self.head(self.embedding(input_ids[:, :-1])), labels[:, 1:])

def build(settings, rows, precision):
    return Successor(rows.vocabulary)

def main(argv=None):
    settings = lt.parse(lt.Settings(data=lt.BatchConfig(global_batch_size=4)), argv)
    rows = lt.Tokenized.of(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3, 4]]}), None)
    return lt.fit(settings, rows, build)
"""


def test_plan_reads_such_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "numbers.py").write_text(RECIPE)
    command(["plan", str(tmp_path / "numbers.py"), "--device", "h100-80gb"])
    out = capsys.readouterr().out
    assert "Successor: 85 parameters" in out
    assert "4 rows of 3 tokens" in out


def test_a_dry_run_shows_numbers(
    train: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(dry_run=True)
    assert "===== row 0 of 24\n0 " in capsys.readouterr().out
    assert repr(run) == f"Run('{run.folder}', dry run)"


def test_samples_need_a_tokenizer(train: Callable[..., Run]) -> None:
    with pytest.raises(UserError, match="--sample_prompts needs a tokenizer"):
        train(sample_prompts=["1"])


def test_text_commands_name_the_module_that_they_cannot_load(
    train: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train().folder
    with pytest.raises(SystemExit):
        command(["generate", str(folder)])
    assert "holds the weights of Successor, a torch module" in capsys.readouterr().err


def test_a_module_may_have_its_own_objective_and_no_files(
    train: Callable[..., Run], rows: lt.Tokenized, accelerator: Any
) -> None:
    settings = lt.Settings(data=lt.BatchConfig(global_batch_size=4))
    objective = lt.Objective()

    def build(settings: Any, rows: lt.Tokenized, precision: str) -> lt.ModelBundle:
        return lt.ModelBundle(Successor(rows.vocabulary), objective=objective)

    bundle = lt.place(accelerator, build, settings, rows)
    assert bundle.objective is objective
    assert bundle.files.config == {"torch_module": "Successor"}


def test_a_vocabulary_is_the_largest_number_plus_1(rows: lt.Tokenized) -> None:
    assert rows.vocabulary == NUMBERS
    with_labels = table(2).add_column("labels", [[-100] * 5 + [40]] * 2)
    assert lt.Tokenized.of(table(2), None, eval=with_labels).vocabulary == 41
    assert dataclasses.asdict(rows.metadata)["tokenizer"] == "none"
