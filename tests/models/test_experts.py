"""The balancing loss of a mixture of experts is that of the global batch, however it is split."""

from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig
from llmtrain.models.experts import balancing, counted_positions
from llmtrain.models.loss import IGNORED
from llmtrain.models.pretrained import load_model
from llmtrain.models.summed import SummedLoss
from llmtrain.parallel.fsdp import place
from llmtrain.training.step import Accumulation, count_tokens, survey
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
def load(words: PreTrainedTokenizerFast, accelerator: Accelerator) -> Callable[..., SummedLoss]:
    """A small model in float64, whose routers prefer some experts."""

    def load(family: str, more: str = "", **settings: object) -> SummedLoss:
        torch.manual_seed(0)
        config = ModelConfig(
            from_config=family, config_overrides=OVERRIDES + more, block_size=64, **settings
        )
        built = place(accelerator, load_model(config, None, SomeRows(words, False), 3, "no"))
        built.check()
        model = built.model.double()
        model.set_experts_implementation("eager")  # grouped products have no float64
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight", "router.layer.weight")):
                parameter.data.mul_(20)
        return model

    return load


def rows() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 250, (8, 25), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = IGNORED
    labels[0, 15:] = labels[5, 20:] = IGNORED  # padding
    return {"input_ids": ids, "labels": labels}


def gradients(
    model: SummedLoss, accelerator: Accelerator, micro_batch: int, whole: bool = True
) -> Gradients:
    """Of the mean loss of a batch in micro-batches; ``whole`` counts over all of them, as it should be."""
    batch = rows()
    model.zero_grad()
    parts = [
        {name: one[i : i + micro_batch] for name, one in batch.items()}
        for i in range(0, 8, micro_batch)
    ]
    tokens, _ = count_tokens(accelerator, parts, False)
    groups = [parts] if whole else [[part] for part in parts]
    loads = [survey(accelerator, model, group, tokens)[0] for group in groups]
    loaded = [one | load for group, load in zip(groups, loads, strict=True) for one in group]
    Accumulation(accelerator, model)(loaded, tokens)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(some: Gradients, others: Gradients) -> float:
    assert some.keys() == others.keys()
    return max(
        float((one - others[name]).norm() / others[name].norm()) for name, one in some.items()
    )


@pytest.mark.parametrize("family", WITH_LOSS)
def test_on_one_micro_batch_it_is_transformers_own(
    family: str, load: Callable, accelerator: Accelerator
) -> None:
    model, batch = load(family), rows()
    ours = gradients(model, accelerator, 8)
    _, balance = survey(accelerator, model, [batch], torch.tensor(176))
    model.zero_grad()
    tokens = (batch["labels"][:, 1:] != IGNORED).sum()
    counted = counted_positions(batch["labels"][:, 1:]).view(8, -1).long()
    out = model(
        batch["input_ids"][:, :-1],
        attention_mask=counted,
        use_cache=False,
        output_router_logits=True,
    )
    assert balance is not None
    assert float(balance) == pytest.approx(float(out.aux_loss), rel=1e-6)
    assert model.balance > 0
    (model(**batch) / tokens + model.balance * out.aux_loss).backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert apart(ours, theirs) < 1e-5
    model.balance = 0.0
    assert apart(gradients(model, accelerator, 8), theirs) > 1e-4, "it makes a difference"


def test_a_head_that_does_more_than_multiply_has_it_too(
    load: Callable, accelerator: Accelerator
) -> None:
    model = load("granitemoe", ",logits_scaling=6.0")
    assert not model.head_is_linear
    whole = gradients(model, accelerator, 8)
    assert apart(gradients(model, accelerator, 2), whole) < 1e-12
    model.balance = 0.0
    assert apart(gradients(model, accelerator, 8), whole) > 1e-4


def test_its_weight_may_be_another_and_classes_that_have_none_get_none(load: Callable) -> None:
    assert load("mixtral").balance == 0.001
    assert load("mixtral", router_aux_loss_coef=0.5).balance == 0.5
    assert load("mixtral", router_aux_loss_coef=0.0).balance == 0
    assert load("gpt_oss", attn_implementation="eager").balance == 0.001
    assert load("llama4_text", ",head_dim=16").balance == 0
    with pytest.raises(UserError, match="is for a mixture of experts, which this model is not"):
        load("llama", router_aux_loss_coef=0.5)


def test_autocast_rounds_no_load() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 16, requires_grad=True)
    load, counted = 1 + 0.001 * torch.randn(16), torch.ones(64, dtype=torch.bool)

    def gradient(enabled: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            (found,) = torch.autograd.grad(balancing([logits], counted, load), logits)
        return found

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(
    family: str, load: Callable, accelerator: Accelerator, score: Callable[[str], None]
) -> None:
    model = load(family)
    whole = gradients(model, accelerator, 8)
    for micro_batch in (4, 2, 1):
        found = apart(gradients(model, accelerator, micro_batch), whole)
        score(
            f"balancing loss: {family}: {8 // micro_batch} micro-batches of {micro_batch} rows differ by {found:.1e}"
        )
        assert found < 1e-12
        assert apart(gradients(model, accelerator, micro_batch, whole=False), whole) > 1e-6, (
            "else nothing is shown"
        )


def test_the_loss_that_is_told_is_the_nll_alone(load: Callable, accelerator: Accelerator) -> None:
    model, batch = load("mixtral"), rows()
    load, _ = survey(accelerator, model, [batch], torch.tensor(176))
    assert load.keys() == {"load"}
    assert float(model(**batch, **load)) == float(model(**batch))


def test_padding_and_rows_without_targets_do_not_count() -> None:
    targets = torch.tensor([[IGNORED, 5, IGNORED, 7, IGNORED], [IGNORED] * 5, [1, 2, 3, 4, 5]])
    expected = [[True, True, True, True, False], [False] * 5, [True] * 5]
    assert counted_positions(targets).view(3, 5).tolist() == expected


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
