"""The balancing loss of a mixture of experts is that of the global batch, however it is split."""

from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.interfaces.objective import Objective
from llmtrain.models.balancing_loss import balancing_loss, routed_positions
from llmtrain.models.config import ModelConfig
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.placement import place
from tests.engines import engine_of, split
from tests.families import OVERRIDES
from tests.forked import run_forked
from tests.launching import FINETUNE, PYTHON, TINY, read_json, series, write_chats
from tests.models.some_rows import SomeRows

WITH_LOSS = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe"]
Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)


@pytest.fixture
def load(words: PreTrainedTokenizerFast, accelerator: Accelerator) -> Callable[..., ModelBundle]:
    """A small model in float64, whose routers prefer some experts."""

    def load(family: str, more: str = "", **settings: object) -> ModelBundle:
        torch.manual_seed(0)
        config = ModelConfig(
            from_config=family, config_overrides=OVERRIDES + more, max_length=64, **settings
        )
        bundle = place(accelerator, load_model(config, None, SomeRows(words, False), 3, "no"))
        bundle.check()
        model = bundle.model.double()
        model.set_experts_implementation("eager")  # grouped products have no float64
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight", "router.layer.weight")):
                parameter.data.mul_(20)
        return bundle

    return load


def rows() -> Batch:
    ids = torch.randint(1, 250, (8, 25), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = IGNORED
    labels[0, 15:] = labels[5, 20:] = IGNORED  # padding
    return {"input_ids": ids, "labels": labels}


def gradients(engine: Engine, micro_batch: int, counts_globally: bool = True) -> Gradients:
    """Return the gradients of the mean loss of a batch in micro-batches.

    Args:
        engine: the engine of the model.
        micro_batch: rows of a micro-batch.
        counts_globally: count the choices over all micro-batches, as it should be, and not over
            each by itself.
    """
    engine.model.zero_grad()
    batches = split(rows(), micro_batch)
    totals = engine.count(batches)
    if counts_globally:
        extra = engine.objective.prepass(engine, batches, totals)
        engine.forward_backward(batches, totals, extra)
    else:
        for batch in batches:
            extra = engine.objective.prepass(engine, [batch], totals)
            engine.forward_backward([batch], totals, extra)
    parameters = engine.model.named_parameters()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def largest_difference(some: Gradients, others: Gradients) -> float:
    """Return the norm of the difference over the norm, of the parameter where it is largest."""
    assert some.keys() == others.keys()
    differences = [
        (gradient - others[name]).norm() / others[name].norm() for name, gradient in some.items()
    ]
    return float(max(differences))


@pytest.mark.parametrize("family", WITH_LOSS)
def test_on_one_micro_batch_it_is_transformers_own(
    family: str, load: Callable, accelerator: Accelerator
) -> None:
    bundle = load(family)
    model = bundle.model
    objective = bundle.objective
    engine = engine_of(accelerator, model, objective)
    batch = rows()
    ours = gradients(engine, micro_batch=8)
    totals = engine.count([batch])
    extra = objective.prepass(engine, [batch], totals)

    model.zero_grad()
    is_routed = routed_positions(batch["labels"][:, 1:]).view(8, -1).long()
    output = model(
        batch["input_ids"][:, :-1],
        attention_mask=is_routed,
        use_cache=False,
        output_router_logits=True,
    )
    assert float(extra["balance_loss"]) == pytest.approx(float(output.aux_loss), rel=1e-6)
    assert objective.weight > 0
    (model(**batch) / totals.target_tokens + objective.weight * output.aux_loss).backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert largest_difference(ours, theirs) < 1e-5

    objective.weight = 0.0
    without = gradients(engine, micro_batch=8)
    assert largest_difference(without, theirs) > 1e-4, "it makes a difference"


def test_a_head_that_does_more_than_multiply_has_it_too(
    load: Callable, accelerator: Accelerator
) -> None:
    bundle = load("granitemoe", ",logits_scaling=6.0")
    assert not bundle.model.head_is_linear
    engine = engine_of(accelerator, bundle.model, bundle.objective)
    expected = gradients(engine, micro_batch=8)
    assert largest_difference(gradients(engine, micro_batch=2), expected) < 1e-12
    bundle.objective.weight = 0.0
    assert largest_difference(gradients(engine, micro_batch=8), expected) > 1e-4


def test_its_weight_may_be_another_and_classes_that_have_none_get_none(load: Callable) -> None:
    assert load("mixtral").objective.weight == 0.001
    assert load("mixtral", router_aux_loss_coef=0.5).objective.weight == 0.5
    assert type(load("mixtral", router_aux_loss_coef=0.0).objective) is Objective
    assert load("gpt_oss", attn_implementation="eager").objective.weight == 0.001
    assert load("llama4_text", ",head_dim=16").objective.weight == 0
    with pytest.raises(UserError, match="is for a mixture of experts, which this model is not"):
        load("llama", router_aux_loss_coef=0.5)


def test_autocast_rounds_no_factor() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 16, requires_grad=True)
    factors = 1 + 0.001 * torch.randn(16)
    is_routed = torch.ones(64, dtype=torch.bool)

    def gradient(enabled: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = balancing_loss([logits], is_routed, factors)
            return torch.autograd.grad(loss, logits)[0]

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(
    family: str, load: Callable, accelerator: Accelerator, score: Callable[[str], None]
) -> None:
    bundle = load(family)
    engine = engine_of(accelerator, bundle.model, bundle.objective)
    expected = gradients(engine, micro_batch=8)
    for micro_batch in (4, 2, 1):
        difference = largest_difference(gradients(engine, micro_batch), expected)
        score(
            f"balancing loss: {family}: {8 // micro_batch} micro-batches of {micro_batch} rows "
            f"differ by {difference:.1e}"
        )
        assert difference < 1e-12
        counted_apart = gradients(engine, micro_batch, counts_globally=False)
        assert largest_difference(counted_apart, expected) > 1e-6, "else nothing is shown"


def test_the_loss_that_is_logged_is_the_nll_alone(load: Callable, accelerator: Accelerator) -> None:
    bundle = load("mixtral")
    engine = engine_of(accelerator, bundle.model, bundle.objective)
    batch = rows()
    extra = bundle.objective.prepass(engine, [batch], engine.count([batch]))
    assert "expert_weights" in extra
    assert float(engine.loss(batch, extra).loss) == float(bundle.model(**batch))


def test_padding_and_rows_without_targets_do_not_count() -> None:
    targets = torch.tensor([[IGNORED, 5, IGNORED, 7, IGNORED], [IGNORED] * 5, [1, 2, 3, 4, 5]])
    expected = [[True, True, True, True, False], [False] * 5, [True] * 5]
    assert routed_positions(targets).view(3, 5).tolist() == expected


def test_a_run_tells_of_it(tmp_path) -> None:
    flags = ["--from_config", "qwen3_moe", "--config_overrides", OVERRIDES, "--dataset"]
    flags += [
        str(write_chats(tmp_path / "chats.jsonl")),
        "--block_size",
        "64",
        "--tokenizer",
        "byte",
        *TINY[10:],
    ]
    ended = run_forked(
        [*PYTHON, FINETUNE, *flags, "--output_dir", str(tmp_path / "run")]
    ).assert_ok()
    assert (
        "the routers' balancing loss, times 0.001, is computed over the global batch" in ended.out
    )
    losses = series(tmp_path / "run", "train/balance_loss")
    assert len(losses) == 6
    assert all(1.9 < loss < 4 for loss in losses.values()), (
        "2 where each of 4 experts is chosen as often"
    )
    assert read_json(tmp_path / "run" / "model" / "config.json")["output_router_logits"] is False
