"""A user's own loss, optimizer, average and metric keep the promises of the package's own parts.

tests/system/own_everything.py is the recipe that has them, without the objective with a teacher.
"""

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import llmtrain as lt
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.record.tensor_files import read_tensors
from tests.engines import engine_of, split
from tests.forked import run_forked
from tests.launching import PYTHON, accelerate, long_form, run, series

RECIPE = "tests/system/own_everything.py"
VERIFY_RESUME = [*PYTHON, "-m", "llmtrain", "verify", "resume"]


@pytest.fixture(scope="module")
def flags(text_file: Path) -> list[str]:
    return shlex.split(f"--report_to none --per_device_train_batch_size 2 --dataset {text_file}")


@pytest.fixture(scope="module")
def finished(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on one process."""
    folder = tmp_path_factory.mktemp("own") / "run"
    run_forked([*PYTHON, RECIPE, *flags, "--output_dir", str(folder)]).assert_ok()
    return folder


@long_form
def test_a_run_has_the_same_bits_after_three_kills_on_changing_layouts(flags: list[str]) -> None:
    verify_flags = shlex.split("--steps 24 --layouts 1,4,2,1")
    command = [*VERIFY_RESUME, *verify_flags, RECIPE, *flags, "--bitwise"]

    ended = run(command, timeout=600).assert_ok()

    assert ended.out.count("killed after step") == 3
    assert ended.out.splitlines()[-1] == "passed: the same run"


def test_another_coefficient_of_the_loss_makes_another_run(
    flags: list[str], finished: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "run"
    shutil.copytree(finished, killed)
    (killed / "status.json").unlink()  # as if it had been killed before it wrote its end

    command = [*PYTHON, RECIPE, *flags, "--output_dir", str(killed), "--z_loss", "0.1"]
    ended = run_forked(command).assert_ok()

    reason = "is taken by a run that differs in objective: weight 0.001 there, 0.1 here"
    assert f"run       {killed}-2 (new; {killed} {reason})\n" in ended.out


@long_form
def test_fsdp2_makes_the_average_and_the_eval_metrics_of_one_process(
    flags: list[str], finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sharded"
    launcher = accelerate("fsdp2")
    run_forked([*launcher, RECIPE, *flags, "--output_dir", str(folder)]).assert_ok()

    expected = dict(read_tensors(finished / "model-average"))
    averages = dict(read_tensors(folder / "model-average"))
    # The weights are 100 times as large as the tolerance.
    torch.testing.assert_close(averages, expected, rtol=1e-4, atol=1e-4)

    for name in ("train/loss", "train/grad_norm", "eval/accuracy", "eval/average/loss"):
        assert series(folder, name) == pytest.approx(series(finished, name), rel=1e-4)


# --- an objective with a teacher


class Distillation(lt.Objective):
    """The mean KL divergence from a teacher's distribution, per target token."""

    def __init__(self, teacher: LlamaForCausalLM) -> None:
        self.teacher = teacher.requires_grad_(False).eval()

    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        targets = batch["labels"][:, 1:].flatten()
        positions = (targets != IGNORED).nonzero().flatten()
        student = model.logits_at(positions, **batch).log_softmax(-1)
        logits = self.teacher(batch["input_ids"][:, :-1]).logits
        teacher = logits.flatten(0, 1)[positions].log_softmax(-1)
        agrees = student.argmax(-1) == teacher.argmax(-1)
        return lt.LossSums(
            loss=F.kl_div(student, teacher, reduction="sum", log_target=True),
            metrics={"agrees": agrees.sum().float(), "targets": agrees.new_ones(()) * len(agrees)},
        )

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        return {"agreement": sums["agrees"] / sums["targets"]}


def llama(seed: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).float()


def test_the_gradient_of_a_distillation_objective_is_that_of_plain_autograd(
    accelerator: Accelerator,
) -> None:
    """The rows have different numbers of target tokens."""
    token_ids = torch.randint(60, (8, 17), generator=torch.Generator().manual_seed(3))
    labels = token_ids.clone()
    for row in range(8):
        labels[row, : 2 * row] = IGNORED

    student = llama(seed=1, layers=2)
    teacher = llama(seed=2, layers=3)
    is_target = labels[:, 1:] != IGNORED
    log_p = student(token_ids[:, :-1]).logits.log_softmax(-1)[is_target]
    log_q = teacher(token_ids[:, :-1]).logits.log_softmax(-1)[is_target].detach()
    expected_loss = F.kl_div(log_p, log_q, reduction="sum", log_target=True) / is_target.sum()
    expected_loss.backward()
    expected = {name: parameter.grad for name, parameter in student.named_parameters()}

    model = make_causal_lm(llama(seed=1, layers=2), row_length=16)
    engine = engine_of(accelerator, model, Distillation(teacher))
    batches = split({"input_ids": token_ids, "labels": labels}, 2)
    totals = engine.count(batches)
    sums = engine.forward_backward(batches, totals)

    loss = float(sums.loss) / int(totals.denominator)
    assert loss == pytest.approx(float(expected_loss.detach()), rel=1e-5)
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert max(float(value.abs().max()) for value in gradient.values()) > 1e-3
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)
    counts = {name: float(value) for name, value in sums.metrics.items()}
    assert 0 <= engine.objective.metrics(counts, {})["agreement"] < 1
