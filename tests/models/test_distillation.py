"""The losses of distillation, and their gradients, are those of TRL and of torch's autograd."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.models import loss
from llmtrain.models.causal_lm import CausalLM, make_causal_lm
from llmtrain.models.distillation import DistillConfig
from llmtrain.models.distillation_objective import DistillationObjective
from llmtrain.models.probe import probe
from tests.models.small_models import gradients_of

VOCABULARY = 61
TOKENS = 10
ROWS = 3

# Models with a scale or a softcap of their logits, which are large enough to matter.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 1.5},
    "cohere": {"logit_scale": 4.0},
    "granite": {"logits_scaling": 0.2},
}


def family_model(name: str, width: int, seed: int, vocabulary: int = VOCABULARY) -> CausalLM:
    """Return a model in float64, with logits of several units."""
    config = AutoConfig.for_model(
        name,
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=width // 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        **FAMILIES[name],
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)
    trained = make_causal_lm(model, row_length=TOKENS - 1)
    probe(trained)
    return trained


def batch_of(seed: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :4] = IGNORED
    labels[2, 7:] = IGNORED
    return {"input_ids": ids, "labels": labels}


def own_logits(model: CausalLM, batch: Batch) -> Tensor:
    """Return the logits [B, T - 1, V] that the model's own class computes."""
    logits: Tensor = model.own_forward(input_ids=batch["input_ids"][:, :-1]).logits
    return logits


@pytest.fixture(autouse=True, params=["one chunk", "chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute each loss at once, and in chunks of 5 positions and tiles of 2."""
    if request.param == "chunks":
        monkeypatch.setitem(loss.CHUNK_LOGITS, "cpu", 5 * VOCABULARY)
        monkeypatch.setitem(loss.TILE_LOGITS, "cpu", 2 * VOCABULARY)


def losses_of(
    student: CausalLM,
    batch: Batch,
    config: DistillConfig,
    source: Any = "rows",
    **columns: Any,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the loss and the metrics of a batch, and the gradient of the loss."""
    objective = DistillationObjective(config, source)
    student.zero_grad()
    batch = {**batch, **student.prepare_batch(batch), **columns}
    sums = student(**batch, compute=lambda model, batch: objective.loss(model, batch, {}))
    sums.loss.backward()
    values = {"loss": sums.loss, **sums.metrics}
    return {name: float(value) for name, value in values.items()}, gradients_of(student)


def teaching(teacher: CausalLM, batch: Batch) -> Any:
    """Return what a frozen teacher passes to the objective."""
    batch = {**batch, **teacher.prepare_batch(batch)}
    with torch.no_grad():
        return teacher(**batch, compute=lambda model, batch: model.deferred_logits(**batch))


def trl_divergence(student: Tensor, teacher: Tensor, labels: Tensor, **arguments: Any) -> Tensor:
    """Return TRL's divergence, summed over the targets."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    divergence: Tensor = gkd.GKDTrainer.generalized_jsd_loss(
        student, teacher, labels=labels[:, 1:], reduction="sum", **arguments
    )
    return divergence


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("student_family", "teacher_family"),
    [("llama", "llama"), ("gemma2", "cohere"), ("granite", "gemma2"), ("cohere", "granite")],
)
def test_every_divergence_and_its_gradient_are_those_of_trl(
    student_family: str, teacher_family: str, beta: float, temperature: float
) -> None:
    student = family_model(student_family, width=8, seed=1)
    teacher = family_model(teacher_family, width=16, seed=2)
    batch = batch_of()
    config = DistillConfig(beta=beta, temperature=temperature, sft_share=0.25)

    sums, gradients = losses_of(
        student, batch, config, source="teacher", teacher=teaching(teacher, batch)
    )

    student.zero_grad()
    logits = own_logits(student, batch)
    teacher_logits = own_logits(teacher, batch).detach()
    divergence = trl_divergence(
        logits, teacher_logits, batch["labels"], beta=beta, temperature=temperature
    )
    targets = batch["labels"][:, 1:].flatten()
    nll = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    teacher_nll = F.cross_entropy(teacher_logits.flatten(0, 1), targets, reduction="sum")
    expected = 0.75 * divergence + 0.25 * nll
    expected.backward()

    assert sums == pytest.approx(
        {
            "loss": float(expected),
            "divergence": float(divergence),
            "nll": float(nll),
            "teacher_nll": float(teacher_nll),
            "weight": float((targets != IGNORED).sum()),
        },
        rel=1e-9,
    )
    torch.testing.assert_close(gradients, gradients_of(student))


def scored(teacher_logits: Tensor, batch: Batch, k: int, temperature: float = 1.0) -> Batch:
    """Return the columns of scored rows, in float64: value t belongs to label t."""
    log_p = (teacher_logits / temperature).log_softmax(-1)
    top = log_p.topk(k)
    rest = (1 - top.values.exp().sum(-1)).clamp(min=1e-300).log()
    target = log_p.gather(2, batch["labels"][:, 1:].clamp(min=0)[..., None])[..., 0]

    def unshifted(column: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(column[:, :1]), column], dim=1)

    return {
        "teacher_ids": unshifted(top.indices),
        "teacher_logps": unshifted(top.values),
        "teacher_rest": unshifted(rest),
        "teacher_logp": unshifted(target),
    }


def test_scored_rows_with_all_tokens_give_the_loss_of_the_live_teacher() -> None:
    student = family_model("gemma2", width=8, seed=1)
    teacher = family_model("cohere", width=16, seed=2)
    batch = batch_of()
    config = DistillConfig(temperature=2.0, sft_share=0.5)

    live, live_gradients = losses_of(
        student, batch, config, source="teacher", teacher=teaching(teacher, batch)
    )
    columns = scored(own_logits(teacher, batch).detach(), batch, VOCABULARY, temperature=2.0)
    offline, gradients = losses_of(student, batch, config, **columns)

    assert offline["loss"] == pytest.approx(live["loss"], rel=1e-6)
    assert offline["divergence"] == pytest.approx(live["divergence"], rel=1e-6)
    torch.testing.assert_close(gradients, live_gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("k", [1, 8, 32])
def test_fewer_tokens_give_the_divergence_of_k_plus_one_outcomes(k: int) -> None:
    student = family_model("llama", width=8, seed=1)
    teacher = family_model("llama", width=16, seed=2)
    batch = batch_of()
    teacher_logits = own_logits(teacher, batch).detach()
    columns = scored(teacher_logits, batch, k)

    sums, gradients = losses_of(student, batch, DistillConfig(), **columns)

    student.zero_grad()
    q = own_logits(student, batch).softmax(-1)
    ids = columns["teacher_ids"][:, 1:]
    p = teacher_logits.softmax(-1)
    outcomes_q = torch.cat([q.gather(2, ids), 1 - q.gather(2, ids).sum(-1, keepdim=True)], dim=2)
    outcomes_p = torch.cat([p.gather(2, ids), 1 - p.gather(2, ids).sum(-1, keepdim=True)], dim=2)
    is_target = batch["labels"][:, 1:] != IGNORED
    expected = F.kl_div(outcomes_q.log(), outcomes_p, reduction="none").sum(-1)[is_target].sum()
    expected.backward()
    full = F.kl_div(q.log(), p, reduction="none").sum(-1)[is_target].sum()

    assert sums["loss"] == pytest.approx(float(expected), rel=1e-9)
    assert sums["loss"] < float(full)
    torch.testing.assert_close(gradients, gradients_of(student))


def test_the_policy_gradient_is_that_of_the_reverse_kl_on_average() -> None:
    """All tokens are tried at one position, each with its probability as its weight."""
    student = family_model("llama", width=8, seed=1)
    teacher = family_model("llama", width=16, seed=2)
    prompt = torch.tensor([[3, 17, 29]])
    full_batch = {"input_ids": F.pad(prompt, (0, 1)), "labels": None}
    log_q = own_logits(student, full_batch)[:, -1].log_softmax(-1)
    log_p = own_logits(teacher, full_batch)[:, -1].log_softmax(-1).detach()

    ids = torch.cat([prompt.expand(VOCABULARY, -1), torch.arange(VOCABULARY)[:, None]], dim=1)
    labels = ids.clone()
    labels[:, :3] = IGNORED

    def at_last(values: Tensor) -> Tensor:
        return F.pad(values.detach().view(-1, 1), (3, 0))

    sums, gradients = losses_of(
        student,
        {"input_ids": ids, "labels": labels, "loss_weight": at_last(log_q.exp()).float()},
        DistillConfig(),
        source="samples",
        student_logp=at_last(log_q),
        teacher_logp=at_last(log_p),
    )

    student.zero_grad()
    log_q = own_logits(student, full_batch)[:, -1].log_softmax(-1)
    reverse_kl = F.kl_div(log_p, log_q, reduction="sum", log_target=True)
    reverse_kl.backward()
    assert sums["loss"] == pytest.approx(float(reverse_kl), rel=1e-5)  # weights are float32
    assert sums["kl_to_sampler"] == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(gradients, gradients_of(student), rtol=1e-4, atol=1e-6)


def test_later_steps_of_a_round_weigh_tokens_by_their_importance() -> None:
    student = family_model("llama", width=8, seed=1)
    batch = batch_of()
    shape = batch["labels"].shape
    generator = torch.Generator().manual_seed(3)
    sampler = -torch.rand(shape, generator=generator, dtype=torch.float64)
    teacher = -torch.rand(shape, generator=generator, dtype=torch.float64)

    sums, gradients = losses_of(
        student,
        batch,
        DistillConfig(),
        source="samples",
        student_logp=sampler,
        teacher_logp=teacher,
    )

    student.zero_grad()
    targets = batch["labels"][:, 1:]
    is_target = targets != IGNORED
    logps = own_logits(student, batch).log_softmax(-1)
    logp = logps.gather(2, targets.clamp(min=0)[..., None])[..., 0][is_target]
    sampler = sampler[:, 1:][is_target]
    advantage = teacher[:, 1:][is_target] - sampler
    expected = -(torch.exp(logp - sampler) * advantage).sum()
    expected.backward()
    assert sums["loss"] == pytest.approx(float(expected), rel=1e-9)
    assert sums["kl_to_sampler"] == pytest.approx(float((sampler - logp).sum()), rel=1e-9)
    torch.testing.assert_close(gradients, gradients_of(student))


def test_rows_of_padding_in_a_larger_vocabulary_do_not_count() -> None:
    student = family_model("llama", width=8, seed=1, vocabulary=VOCABULARY + 3)
    teacher = family_model("llama", width=16, seed=2)
    batch = batch_of()

    sums, _ = losses_of(
        student, batch, DistillConfig(), source="teacher", teacher=teaching(teacher, batch)
    )

    logits = own_logits(student, batch)[..., :VOCABULARY]
    teacher_logits = own_logits(teacher, batch)
    expected = trl_divergence(logits, teacher_logits, batch["labels"], beta=0)
    assert sums["loss"] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_masked_logits_leave_loss_and_gradient_finite(beta: float) -> None:
    student = family_model("llama", width=8, seed=1)
    batch = batch_of()
    logits = torch.randn(ROWS * (TOKENS - 1), VOCABULARY, dtype=torch.float64)
    logits[:, 2:5] = -math.inf

    batch = {**batch, **student.prepare_batch(batch)}
    positions = batch["target_positions"]
    keep: Callable[[Tensor], Tensor] = copy.copy
    sums, gradients = losses_of(
        student,
        batch,
        DistillConfig(beta=beta),
        source="teacher",
        teacher=(logits[positions], keep),
    )

    assert math.isfinite(sums["loss"])
    assert all(gradient.isfinite().all() for gradient in gradients.values())
