"""Blocks that recompute their activations give the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.models.lfm2 import build_gpt
from llmtrain.training import compiling
from tests.engines import engine_of, split
from tests.models.small_models import byte_tokenizer, gradients_of
from tests.models.some_rows import SomeRows

BLOCKS = 3
SIZES = f"num_hidden_layers={BLOCKS},hidden_size=64"
ROWS = 8


DROPOUT = "attention_dropout=0.1"

# Models of three blocks: a family, with overrides or flags of an adapter.
HUB_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", SIZES, {}),
    "gpt2 with dropout": ("gpt2", SIZES, {}),  # 0.1 is its default
    "short convolutions": ("lfm2", SIZES, {}),
    "experts with dropout": ("mixtral", f"{SIZES},{DROPOUT}", {}),
    "LoRA with dropout": ("llama", SIZES, {"lora_r": 4, "lora_dropout": 0.2}),
}
OWN_MODELS = ("gpt2", "lfm2")


@pytest.fixture
def build(load, tmp_path: Path) -> Callable[..., lt.ModelBundle]:
    """Build a model of three blocks, by its name."""

    def build(name: str, **flags: Any) -> lt.ModelBundle:
        torch.manual_seed(0)
        if name in OWN_MODELS:
            config = lt.GPTConfig(
                n_layer=BLOCKS, n_head=2, n_embd=32, block_size=24, dropout=0.2, architecture=name
            )
            return lt.ModelBundle(build_gpt(config, len(byte_tokenizer())))

        family, overrides, lora = HUB_MODELS[name]
        hub_config = lt.ModelConfig(
            from_config=family, config_overrides=overrides, max_length=64, **flags
        )
        if not lora:
            return load(hub_config)
        config = hub_config.configuration(byte_tokenizer())
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return load(lt.ModelConfig(str(tmp_path), max_length=64), lt.LoraConfig(**lora))

    return build


def make_batch() -> Batch:
    ids = torch.randint(1, 250, (ROWS, 25), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = IGNORED
    return {"input_ids": ids, "labels": labels, "dropout_keys": torch.arange(ROWS) * 2**40}


class ProductCounter(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


class StepOutcome(NamedTuple):
    """The gradients of a step, and its number of matrix products."""

    gradients: dict[str, Tensor]
    products: int


def take_step(accelerator: Accelerator, bundle: lt.ModelBundle) -> StepOutcome:
    """Compute the gradients of a step with two micro-batches."""
    engine = engine_of(accelerator, bundle.model, bundle.objective)
    engine.model.train()
    engine.model.zero_grad()
    torch.manual_seed(5)
    micro_batches = split(make_batch(), ROWS // 2)
    totals = engine.count(micro_batches)
    with ProductCounter() as products:
        extra = engine.objective.prepass(engine, micro_batches, totals)
        engine.forward_backward(micro_batches, totals, extra)

    return StepOutcome(gradients_of(bundle.model), products.count)


@pytest.mark.parametrize("name", [*OWN_MODELS, *HUB_MODELS])
def test_recomputed_blocks_give_the_same_gradients_for_more_products(
    name: str, build, accelerator: Accelerator
) -> None:
    bundle = build(name)
    expected = take_step(accelerator, bundle)

    bundle.model.recompute_blocks(True)
    outcome = take_step(accelerator, bundle)
    torch.testing.assert_close(outcome.gradients, expected.gradients, rtol=0, atol=0)
    assert outcome.products > expected.products

    bundle.model.recompute_blocks(False)
    assert take_step(accelerator, bundle).products == expected.products


def test_compiled_blocks_give_the_same_gradients_if_they_are_recomputed(
    build, accelerator: Accelerator
) -> None:
    torch._dynamo.reset()
    gradients = {}
    for recomputes in (False, True):
        bundle = build("gpt2")
        bundle.model.recompute_blocks(recomputes)
        compiling._compile(bundle.model, "aot_eager")
        gradients[recomputes] = take_step(accelerator, bundle).gradients
    torch.testing.assert_close(gradients[True], gradients[False], rtol=0, atol=0)


def test_the_flag_recomputes_every_block(build) -> None:
    gpt = build_gpt(lt.GPTConfig(gradient_checkpointing=True), 50)
    assert gpt.base_model.recomputes
    layers = build("llama", gradient_checkpointing=True).model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True] * BLOCKS


def test_a_class_that_cannot_recompute_is_refused() -> None:
    config = lt.ModelConfig(
        from_config="ctrl",
        config_overrides="n_layer=2",
        max_length=64,
        gradient_checkpointing=True,
    )
    with pytest.raises(UserError, match="CTRLLMHeadModel cannot recompute activations"):
        lt.load_model(config, None, SomeRows(byte_tokenizer()), 0, "no")
