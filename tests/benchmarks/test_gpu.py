"""The benchmark of a GPU, rehearsed on the CPU: each of its verdicts is wrong if its fault is planted."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu import curves, passes, same_weights
from benchmarks.gpu.call import Call
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.sizes import TINY
from benchmarks.runs import environment
from tests.launching import ROOT, long_form

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
    """The verdicts of a call by name."""
    entries = [entry for entry in call.journal.entries if "verdict" in entry]
    return {str(entry["name"]): str(entry["verdict"]) for entry in entries}


def wrong(call: Call) -> list[str]:
    return [name for name, verdict in verdicts(call).items() if verdict == "WRONG"]


def test_without_faults_all_passes_are_right(call: Call) -> None:
    passes.judge(call)
    assert verdicts(call) == dict.fromkeys(VERDICTS_OF_PASSES, "right")


class WrongSign(torch.autograd.Function):
    """The identity, with a gradient of the wrong sign."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def test_a_gradient_with_a_wrong_sign_is_wrong(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    correct: Callable[..., torch.Tensor] = passes.linear_nll

    def faulty(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return correct(WrongSign.apply(hidden), *others)

    monkeypatch.setattr(passes, "linear_nll", faulty)
    passes.judge_loss(call)
    assert len(wrong(call)) == len(TINY.vocabularies)


def test_a_gradient_of_nan_is_wrong(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = passes._output_and_gradient

    def faulty(attend: Any, qkv: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
        output, gradient = correct(attend, qkv, upstream)
        return [output, gradient * float("nan") if qkv.dtype == torch.float32 else gradient]

    monkeypatch.setattr(passes, "_output_and_gradient", faulty)
    passes.judge_plain_attention(call)
    passes.judge_packed_attention(call)
    assert len(wrong(call)) == 2


def test_checkpoints_of_nan_have_not_the_same_bits(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name / "checkpoints" / "step-00000001" / "model"
        folder.mkdir(parents=True)
        save_file({"weight": torch.tensor([1.0, float("nan")])}, folder / "model.safetensors")
    assert not same_weights.compare(tmp_path / "one", tmp_path / "two").is_none


def test_attention_that_leaks_is_wrong(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = passes.causal_attention

    def faulty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
        return correct(q, k, v)

    monkeypatch.setattr(passes, "causal_attention", faulty)
    passes.judge_packed_attention(call)
    assert len(wrong(call)) == 1


def test_attention_that_sees_what_follows_is_wrong(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "causal_attention", passes.F.scaled_dot_product_attention)
    passes.judge_plain_attention(call)
    assert len(wrong(call)) == 1


def test_documents_that_leak_in_a_model_are_wrong(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = passes._model_pass

    def faulty(
        model: Any, columns: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        if dtype != torch.float64:
            columns = {name: columns[name] for name in ("input_ids", "labels")}
        return correct(model, columns, device, dtype)

    monkeypatch.setattr(passes, "_model_pass", faulty)
    passes.judge_packed_model(call)
    assert len(wrong(call)) == 1


def test_an_update_that_is_not_orthogonal_is_wrong(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(matrices: torch.Tensor) -> torch.Tensor:
        return matrices / matrices.norm(dim=(-2, -1), keepdim=True)

    monkeypatch.setattr(passes, "orthogonal", faulty)
    passes.judge_muon(call)
    assert len(wrong(call)) == 1


def test_an_optimizer_that_ignores_found_inf_is_wrong(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty(torch.optim.AdamW):
        def step(self, *arguments: Any) -> None:
            self.found_inf = torch.zeros(())
            super().step(*arguments)

    monkeypatch.setattr(torch.optim, "AdamW", Faulty)
    passes.judge_found_inf(call)
    assert wrong(call) == ["fused AdamW takes found_inf"]


def test_a_precision_that_changes_the_losses_is_wrong(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([[3.0, 2.0], [3.0, 2.0], [3.0, 2.1], [3.0, 2.0], [3.0, 2.0], [3.0, 2.0]])
    monkeypatch.setattr(curves, "_losses", lambda *_, **__: next(losses))
    curves.judge(call)
    assert wrong(call) == ["adamw in no, 6 steps, by float32"]


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
import llmtrain.data.samplers as samplers
correct = samplers.key_of
def faulty(seed, number):
    return correct(seed + int(os.environ.get("RANK", "0")), number)
samplers.key_of = faulty
"""
PROGRAM = """
import json, os, sys
from pathlib import Path
from benchmarks.gpu.short_run import ShortRun, train
{plant}
train(Path(sys.argv[1]), ShortRun(**json.loads(sys.argv[2])))
sys.stdout.flush()
os._exit(0)
"""


def planted(plant: str, folder: Path) -> list[str]:
    """A program that makes a short run with a fault."""
    file = folder / "planted.py"
    file.write_text(PROGRAM.format(plant=plant))
    return [sys.executable, str(file)]


@long_form
def test_a_resume_with_other_moments_is_wrong(call: Call, tmp_path: Path) -> None:
    same_weights.judge_resume(call, program=planted(OTHER_MOMENTS, tmp_path))
    assert set(wrong(call)) == verdicts(call).keys() == RESUMED


@long_form
def test_a_seed_with_the_rank_in_it_is_wrong(call: Call, tmp_path: Path) -> None:
    same_weights.judge_layouts(call, program=planted(SEED_OF_RANK, tmp_path))
    assert set(wrong(call)) == verdicts(call).keys() == LAYOUTS


@long_form
def test_a_rehearsal_has_all_sections_and_no_wrong_verdict(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(tmp_path)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(threads=1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]

    entries = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    right = {entry["name"] for entry in entries if entry.get("verdict") == "right"}
    assert right >= VERDICTS_OF_PASSES | RESUMED | LAYOUTS
    timed = {entry["name"] for entry in entries if "ms" in entry}
    for optim in ("adamw", "muon"):
        for vocabulary in TINY.vocabularies:
            assert f"{optim}, V {vocabulary}: recipe" in timed
            assert f"{optim}, V {vocabulary}: bare, norm read" in timed
    assert {"8B LoRA, recomputed", "Llama 1.4B in full, compiled", "Muon, 8 matrices"} <= timed
    left_out = {entry["section"] for entry in entries if "left_out" in entry}
    assert left_out <= {"gpt2", "trl"}  # they need nanoGPT and TRL
    table = ended.stdout.splitlines()
    assert "card: cpu" in table


def test_a_guard_leaves_out_what_does_not_fit(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import __main__ as main

    on_gpu = dataclasses.replace(call, device=torch.device("cuda"))
    monkeypatch.setattr(main, "sections", dict)
    on_gpu.journal.seconds = 5
    main.run_sections(on_gpu, ["gpt2"])
    [entry] = on_gpu.journal.entries
    assert entry["name"] == "gpt2"
    assert "left_out" in entry
    assert not on_gpu.journal.has_failed


def test_packages_that_the_caller_named_reach_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/newer/wheels")
    paths = environment()["PYTHONPATH"].split(":")
    assert paths == [str(ROOT), "/newer/wheels"]
