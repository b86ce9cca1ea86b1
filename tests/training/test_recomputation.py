"""`--gradient_checkpointing auto` recomputes blocks if it must, and a run keeps its choice."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import llmtrain as lt
from llmtrain.devices import RESERVED_MEMORY
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model import ModelBundle
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.ranks import ranks_of
from llmtrain.training import recomputation
from llmtrain.training.layout import Layout
from llmtrain.training.recomputation import (
    choose_recomputation,
    usable_bytes,
)
from llmtrain.training.run import Run
from recipes import finetune, gpt
from tests.launching import TINY, read_json
from tests.models.small_models import byte_tokenizer
from tests.models.some_rows import SomeRows
from tests.training.small_runs import StopAfter

# Bytes of a GPU's memory.
AMPLE = 1e12
SCARCE = 1.0

LAYOUT = Layout(processes=1, accumulation=1, micro_batch=4)


# --- the choice


class Chooser:
    """Makes the choice for a small Llama of three blocks, and keeps the last settings."""

    def __init__(self, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks = ranks_of(accelerator)
        self.monkeypatch = monkeypatch

    def choose(
        self,
        memory: float | None,
        *,
        gradient_checkpointing: bool | None = None,
        bitwise: bool = False,
        objective: lt.Objective | None = None,
    ) -> ModelBundle:
        """Return a new model with the choice.

        Args:
            memory: the bytes of the GPU; ``None`` for a CPU.
            gradient_checkpointing: the flag; ``None`` is ``auto``.
            bitwise: the flag.
            objective: replaces the objective of the model.
        """
        self.monkeypatch.setattr(recomputation, "usable_bytes", lambda _: memory)
        torch.manual_seed(0)
        self.settings = finetune.Settings(
            model=lt.ModelConfig(
                from_config="llama",
                config_overrides="num_hidden_layers=3,hidden_size=64",
                max_length=64,
                gradient_checkpointing=gradient_checkpointing,
            ),
            lora=lt.LoraConfig(),
            data=lt.DataConfig(),
            chat=lt.ChatConfig(),
            parallel=lt.ParallelConfig(bitwise=bitwise),
        )
        bundle = load_model(
            self.settings.model, lora=None, rows=SomeRows(byte_tokenizer()), seed=0, precision="no"
        )
        if objective is not None:
            bundle.objective = objective

        rows: Any = SimpleNamespace(positions=64, train=SimpleNamespace(columns={}))
        choose_recomputation(self.ranks, bundle, self.settings, layout=LAYOUT, rows=rows)
        return bundle


@pytest.fixture
def chooser(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> Chooser:
    return Chooser(accelerator, monkeypatch)


def recomputed(bundle: ModelBundle) -> list[bool]:
    """Return for each block whether it recomputes."""
    return [block.gradient_checkpointing for block in bundle.model.model.layers]


def test_blocks_are_recomputed_if_the_run_does_not_fit_otherwise(chooser: Chooser) -> None:
    on_a_cpu = chooser.choose(None)
    assert on_a_cpu.recomputation is None
    assert recomputed(on_a_cpu) == [False, False, False]

    with_ample_memory = chooser.choose(AMPLE)
    assert recomputed(with_ample_memory) == [False, False, False]
    assert with_ample_memory.recomputation.reason.startswith("no block: the run needs ")

    with_scarce_memory = chooser.choose(SCARCE)
    assert recomputed(with_scarce_memory) == [True, True, True]
    assert all(p.is_meta for p in with_scarce_memory.model.parameters())


def test_counting_the_memory_draws_no_random_numbers(chooser: Chooser) -> None:
    chooser.choose(None)  # on a CPU, nothing is counted
    expected = torch.rand(3)

    chooser.choose(SCARCE)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("memory", "flags", "expected"),
    [
        (SCARCE, {"gradient_checkpointing": False}, False),
        (AMPLE, {"gradient_checkpointing": True}, True),
        (SCARCE, {"bitwise": True}, False),
        (AMPLE, {"bitwise": True, "gradient_checkpointing": True}, True),
    ],
)
def test_the_memory_does_not_matter_if_a_flag_decides(
    memory: float, flags: dict[str, bool], expected: bool, chooser: Chooser
) -> None:
    bundle = chooser.choose(memory, **flags)

    assert bundle.recomputation.enabled == expected
    assert recomputed(bundle) == [expected] * 3


class AbsoluteLoss(lt.Objective):
    """An objective that reads the value of a tensor, so its memory cannot be counted."""

    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        nll = model.nll(**batch)
        if nll.item() > 0:
            return lt.LossSums(nll)
        return lt.LossSums(-nll)


def test_a_run_whose_memory_is_unknown_starts_and_says_so(chooser: Chooser) -> None:
    bundle = chooser.choose(SCARCE, objective=AbsoluteLoss())

    assert recomputed(bundle) == [False, False, False]
    assert "--gradient_checkpointing" in bundle.recomputation.reason


def test_the_smallest_gpu_of_all_ranks_counts_and_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    ranks: Any = SimpleNamespace(
        device=torch.device("cuda"),
        gather_numbers=lambda numbers: {"memory": [numbers["memory"], 40e9]},
    )
    assert usable_bytes(ranks) == 40e9 * (1 - RESERVED_MEMORY)

    ranks.device = torch.device("cpu")
    assert usable_bytes(ranks) is None


# --- a run that is resumed


@pytest.fixture
def train(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A function that trains a GPT with dropout, on a GPU with some memory."""

    def train(
        name: str, memory: float, flags: str = "", callbacks: Sequence[lt.Callback] = ()
    ) -> Run:
        monkeypatch.setattr(recomputation, "usable_bytes", lambda _: memory)
        files = f"--dataset {text_file} --output_dir {tmp_path}/{name}"
        more = f"--dropout 0.1 --gradient_checkpointing auto {files} {flags}"
        settings = lt.parse(gpt.DEFAULTS, [*TINY, *shlex.split(more)])
        return lt.fit(settings, gpt.tokenized(settings), gpt.build, callbacks=callbacks)

    return train


def test_a_resumed_run_decides_anew_which_changes_no_weights(
    train: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("run", SCARCE, callbacks=[StopAfter(2)])
    assert "recompute all blocks: the run needs " in capsys.readouterr().out
    resumed = train("run", AMPLE)
    assert "recompute no block: the run needs " in capsys.readouterr().out
    without = train("without", AMPLE, "--gradient_checkpointing false")

    starts = read_json(tmp_path / "run/run.json")["starts"]
    assert [start["recomputes"] for start in starts] == [True, False]
    assert not without.bundle.model.base_model.recomputes
    assert resumed.fingerprint == without.fingerprint
    weights = resumed.bundle.model.state_dict()
    expected_weights = without.bundle.model.state_dict()
    assert weights.keys() == expected_weights.keys()
    for name, expected in expected_weights.items():
        assert torch.equal(weights[name], expected), name
