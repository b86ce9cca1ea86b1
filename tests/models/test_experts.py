"""The balancing loss of a mixture of experts is that of the global batch, however it is split."""

from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.interfaces.objective import Objective
from llmtrain.models.experts import balancing_loss, routed_positions
from llmtrain.parallel.engine import Engine
from tests.engines import engine_of, split
from tests.families import OVERRIDES
from tests.models.small_models import gradients_of

# Families whose configuration has a weight for the balancing loss.
WITH_BALANCING_LOSS = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe"]
ROWS = 8
ROUTER_WEIGHTS = ("gate.weight", "router.weight", "router.layer.weight")

Gradients = dict[str, torch.Tensor]


@pytest.fixture
def load(load) -> Callable[..., lt.ModelBundle]:
    """Load a small model in float64, whose routers prefer some experts."""

    def load_family(family: str, overrides: str = OVERRIDES, **flags: object) -> lt.ModelBundle:
        torch.manual_seed(0)
        config = lt.ModelConfig(
            from_config=family, config_overrides=overrides, max_length=64, **flags
        )
        bundle = load(config)
        bundle.check()
        model = bundle.model.double()
        model.set_experts_implementation("eager")  # grouped products have no float64
        for name, parameter in model.named_parameters():
            if name.endswith(ROUTER_WEIGHTS):
                parameter.data.mul_(20)
        return bundle

    return load_family


def make_batch() -> Batch:
    """Return eight rows. Two of them end with padding."""
    ids = torch.randint(1, 250, (ROWS, 25), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = IGNORED
    labels[0, 15:] = IGNORED
    labels[5, 20:] = IGNORED
    return {"input_ids": ids, "labels": labels}


def gradients_in_micro_batches(engine: Engine, rows_each: int) -> Gradients:
    """Return the gradients of the mean loss of the batch, as a step computes them."""
    engine.model.zero_grad()
    batches = split(make_batch(), rows_each)
    totals = engine.count(batches)
    extra = engine.objective.prepass(engine, batches, totals)
    engine.forward_backward(batches, totals, extra)
    return gradients_of(engine.model)


def gradients_of_separate_balancing_losses(engine: Engine, rows_each: int) -> Gradients:
    """Return the gradients if each micro-batch balanced its own tokens, which would be wrong."""
    engine.model.zero_grad()
    batches = split(make_batch(), rows_each)
    totals = engine.count(batches)
    for batch in batches:
        extra = engine.objective.prepass(engine, [batch], totals)
        engine.forward_backward([batch], totals, extra)
    return gradients_of(engine.model)


def relative_difference(gradients: Gradients, expected: Gradients) -> float:
    """Return the norm of the difference over the norm, for the parameter with the largest one."""
    assert gradients.keys() == expected.keys()
    differences = [
        (gradient - expected[name]).norm() / expected[name].norm()
        for name, gradient in gradients.items()
    ]
    return float(max(differences))


@pytest.mark.parametrize("family", WITH_BALANCING_LOSS)
def test_the_loss_of_one_micro_batch_is_that_of_transformers(
    family: str, load, accelerator: Accelerator
) -> None:
    bundle = load(family)
    model = bundle.model
    objective = bundle.objective
    engine = engine_of(accelerator, model, objective)
    batch = make_batch()
    gradients = gradients_in_micro_batches(engine, rows_each=ROWS)
    totals = engine.count([batch])
    balance_loss = objective.prepass(engine, [batch], totals)["balance_loss"]

    model.zero_grad()
    is_routed = routed_positions(batch["labels"]).view(ROWS, -1)
    output = model(
        batch["input_ids"][:, :-1],
        attention_mask=is_routed.long(),
        use_cache=False,
        output_router_logits=True,
    )
    mean_nll = model(**batch) / totals.target_tokens
    (mean_nll + objective.weight * output.aux_loss).backward()
    expected = gradients_of(model)

    assert objective.weight > 0
    assert float(balance_loss) == pytest.approx(float(output.aux_loss), rel=1e-6)
    metrics = objective.metrics({}, {"balance_loss": balance_loss})
    assert metrics == {"balance_loss": float(balance_loss)}
    assert bundle.files.config.get("output_router_logits") in (None, False)
    assert relative_difference(gradients, expected) < 1e-5

    objective.weight = 0.0
    gradients_of_nll = gradients_in_micro_batches(engine, rows_each=ROWS)
    assert relative_difference(gradients_of_nll, expected) > 1e-4


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mixtral", OVERRIDES),
        ("qwen3_moe", OVERRIDES),
        # Its head is not linear.
        ("granitemoe", f"{OVERRIDES},logits_scaling=6.0"),
    ],
)
def test_micro_batches_add_up_to_the_gradients_of_the_batch(
    family: str, overrides: str, load, accelerator: Accelerator
) -> None:
    bundle = load(family, overrides)
    engine = engine_of(accelerator, bundle.model, bundle.objective)
    expected = gradients_in_micro_batches(engine, rows_each=ROWS)

    for rows_each in (4, 2, 1):
        gradients = gradients_in_micro_batches(engine, rows_each)
        difference = relative_difference(gradients, expected)
        assert difference < 1e-12
        separate = gradients_of_separate_balancing_losses(engine, rows_each)
        assert relative_difference(separate, expected) > 1e-6


@pytest.mark.parametrize(
    ("family", "flags", "weight"),
    [
        ("mixtral", {}, 0.001),
        ("mixtral", {"router_aux_loss_coef": 0.5}, 0.5),
        ("gpt_oss", {"attn_implementation": "eager"}, 0.001),
        # A class without the loss.
        ("llama4_text", {"overrides": f"{OVERRIDES},head_dim=16"}, 0),
    ],
)
def test_the_weight_is_that_of_the_configuration_or_a_flag(
    load, family: str, flags: dict[str, object], weight: float
) -> None:
    assert load(family, **flags).objective.weight == weight
    assert type(load("mixtral", router_aux_loss_coef=0.0).objective) is Objective


def test_a_weight_is_refused_for_a_model_without_experts(load) -> None:
    with pytest.raises(UserError, match="--router_aux_loss_coef"):
        load("llama", router_aux_loss_coef=0.5)


def test_autocast_does_not_round_the_factors() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 16, requires_grad=True)
    factors = 1 + 0.001 * torch.randn(16)
    is_routed = torch.ones(64, dtype=torch.bool)

    def gradient(is_autocast: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = balancing_loss([logits], is_routed, factors)
            return torch.autograd.grad(loss, logits)[0]

    torch.testing.assert_close(
        gradient(is_autocast=True), gradient(is_autocast=False), rtol=1e-4, atol=1e-9
    )


def test_the_logged_loss_is_the_nll_without_the_balancing_loss(
    load, accelerator: Accelerator
) -> None:
    bundle = load("mixtral")
    engine = engine_of(accelerator, bundle.model, bundle.objective)
    batch = make_batch()

    extra = bundle.objective.prepass(engine, [batch], engine.count([batch]))

    assert "expert_weights" in extra
    assert float(engine.loss(batch, extra).loss) == float(bundle.model(**batch))


def test_padding_and_rows_without_targets_are_not_balanced() -> None:
    targets = [[IGNORED, 5, IGNORED, 7, IGNORED], [IGNORED] * 5, [1, 2, 3, 4, 5]]
    labels = torch.tensor([[0, *targets_of_row] for targets_of_row in targets])
    is_routed = [[True, True, True, True, False], [False] * 5, [True] * 5]
    assert routed_positions(labels).view(3, 5).tolist() == is_routed
