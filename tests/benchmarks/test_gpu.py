"""The benchmark of a GPU, rehearsed on the CPU: each of its verdicts is wrong if its fault is planted."""

import json
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu import passes, same_weights
from benchmarks.gpu.__main__ import sections
from benchmarks.gpu.call import TINY, Call
from benchmarks.gpu.journal import Journal
from tests.launching import PYTHON, run

# `make rehearse` sets it. Runs that are compared by their weights need two dozen processes.
rehearsal = pytest.mark.skipif(
    not os.environ.get("LLMTRAIN_REHEARSE"), reason="make rehearse runs it"
)

VERDICTS_OF_PASSES = {
    "fused AdamW takes found_inf",
    "Muon's update in torch.float32, by float64",
    "attention over plain rows in torch.float32, forward and backward, by float64",
    "blocks over packed rows in torch.float32, forward and backward, by float64",
    "the loss of V 512 in torch.float32, forward and backward, by float64",
    "the loss of V 501 in torch.float32, forward and backward, by float64",
    "a GPT on packed rows in torch.float32, forward and backward, by float64 on the CPU",
}


@pytest.fixture
def call(tmp_path: Path) -> Call:
    journal = Journal(tmp_path / "out", seconds=200)
    return Call(sizes=TINY, device=torch.device("cpu"), journal=journal, folder=tmp_path)


def verdicts(call: Call) -> dict[str, str]:
    """Return the verdicts of a call by name."""
    entries = [entry for entry in call.journal.entries if "verdict" in entry]
    return {str(entry["name"]): str(entry["verdict"]) for entry in entries}


def wrong_verdicts(call: Call) -> list[str]:
    """Return the names of the verdicts that are wrong."""
    return [name for name, verdict in verdicts(call).items() if verdict == "WRONG"]


def test_without_faults_all_passes_are_right(call: Call) -> None:
    passes.judge(call)

    assert verdicts(call) == dict.fromkeys(VERDICTS_OF_PASSES, "right")


def gradient_with_wrong_sign(correct: Any) -> Any:
    # The same value, whose derivative is -1.
    return lambda hidden, *others: correct(2 * hidden.detach() - hidden, *others)


def gradient_of_nan(correct: Any) -> Any:
    def faulty(attend: Any, qkv: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
        output, gradient = correct(attend, qkv, upstream)
        if qkv.dtype == torch.float32:  # not in the exact results, which are in float64
            gradient = torch.full_like(gradient, float("nan"))
        return [output, gradient]

    return faulty


def attention_without_documents(correct: Any) -> Any:
    return lambda q, k, v, *_: correct(q, k, v)


def attention_to_later_positions(correct: Any) -> Any:
    return passes.F.scaled_dot_product_attention


def model_without_documents(correct: Any) -> Any:
    def faulty(
        model: Any, columns: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        if dtype != torch.float64:
            columns = {name: columns[name] for name in ("input_ids", "labels")}
        return correct(model, columns, device=device, dtype=dtype)

    return faulty


def update_that_is_not_orthogonal(correct: Any) -> Any:
    return lambda matrices: matrices / matrices.norm(dim=(-2, -1), keepdim=True)


def optimizer_without_found_inf(correct: Any) -> Any:
    class Faulty(correct):
        def step(self, *arguments: Any) -> None:
            self.found_inf = torch.zeros(())
            super().step(*arguments)

    return Faulty


@pytest.mark.parametrize(
    ("fault", "replaces", "judge", "count"),
    [
        (gradient_with_wrong_sign, "linear_nll", passes.judge_loss, 2),
        (gradient_of_nan, "_output_and_gradient", passes.judge_packed_attention, 1),
        (attention_without_documents, "causal_attention", passes.judge_packed_attention, 1),
        (attention_to_later_positions, "causal_attention", passes.judge_plain_attention, 1),
        (model_without_documents, "_model_pass", passes.judge_packed_model, 1),
        (update_that_is_not_orthogonal, "orthogonal", passes.judge_muon, 1),
        (optimizer_without_found_inf, "torch.optim.AdamW", passes.judge_found_inf, 1),
    ],
)
def test_a_planted_fault_is_wrong(
    fault: Callable[[Any], Any],
    replaces: str,
    judge: Callable[[Call], None],
    count: int,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    correct = operator.attrgetter(replaces)(passes)
    monkeypatch.setattr(f"benchmarks.gpu.passes.{replaces}", fault(correct))
    judge(call)

    assert len(wrong_verdicts(call)) == count


def test_two_checkpoints_with_nan_are_not_equal(tmp_path: Path) -> None:
    for name in ("first", "second"):
        folder = tmp_path / name / "checkpoints" / "step-00000001" / "model"
        folder.mkdir(parents=True)
        save_file({"weight": torch.tensor([1.0, float("nan")])}, folder / "model.safetensors")

    difference = same_weights.compare(tmp_path / "first", tmp_path / "second")
    assert not difference.is_none


def test_a_precision_that_changes_the_losses_is_wrong(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = [3.0, 2.0]
    wrong = [3.0, 2.1]
    # In float32, in float32 with other first weights, and in the precision to judge: AdamW, Muon.
    losses = iter([exact, exact, wrong, exact, exact, exact])
    monkeypatch.setattr(passes, "losses_of_run", lambda *_, **__: next(losses))
    passes.judge_curves(call)

    assert wrong_verdicts(call) == ["adamw in no, 6 steps, by float32"]


RESUMED = {
    "plain run, killed and resumed: as close as the same command twice",
    "bitwise run, killed and resumed: the same bits",
}
LAYOUT = "two processes on one card, with a skipped step"
LAYOUTS = {f"{LAYOUT}: the weights of one process", f"{LAYOUT}, bitwise: the bits of one process"}

OTHER_MOMENTS = """
from llmtrain.training.optimizer_state import OptimizerState
correct = OptimizerState.restore
def faulty(state, structure, tensors):
    correct(state, structure, ((n, t * 1.01 if "exp_avg" in n else t) for n, t in tensors))
OptimizerState.restore = faulty
"""
SEED_OF_RANK = """
import llmtrain.data.order as order
correct = order.key_of
def faulty(seed, number):
    return correct(seed + int(os.environ.get("RANK", "0")), number)
order.key_of = faulty
"""
PROGRAM = """
import json, os, sys
from pathlib import Path
from benchmarks.gpu.short_run import ShortRun, train
{fault}
train(Path(sys.argv[1]), ShortRun(**json.loads(sys.argv[2])))
sys.stdout.flush()
os._exit(0)
"""


def program_with_fault(fault: str, folder: Path) -> list[str]:
    """Return the command of a short run in whose process the lines ``fault`` are run first."""
    file = folder / "short_run.py"
    file.write_text(PROGRAM.format(fault=fault))
    return [sys.executable, str(file)]


@rehearsal
def test_a_resume_with_other_moments_is_wrong(call: Call, tmp_path: Path) -> None:
    same_weights.judge_resume(call, program=program_with_fault(OTHER_MOMENTS, tmp_path))

    assert set(wrong_verdicts(call)) == verdicts(call).keys() == RESUMED


@rehearsal
def test_a_seed_with_the_rank_in_it_is_wrong(call: Call, tmp_path: Path) -> None:
    same_weights.judge_layouts(call, program=program_with_fault(SEED_OF_RANK, tmp_path))

    assert set(wrong_verdicts(call)) == verdicts(call).keys() == LAYOUTS


@rehearsal
def test_a_rehearsal_has_all_sections_and_no_wrong_verdict(tmp_path: Path) -> None:
    command = f"-m benchmarks.gpu --rehearse --out {tmp_path} --sections {' '.join(sections())}"
    # TRL warns of its own settings.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    run([*PYTHON, *command.split()], environment, timeout=1500).assert_ok()

    entries = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    right = {entry["name"] for entry in entries if entry.get("verdict") == "right"}
    assert right >= VERDICTS_OF_PASSES | RESUMED | LAYOUTS
