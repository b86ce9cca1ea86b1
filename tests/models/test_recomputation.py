"""Blocks that compute their activations again give the same bits, whichever blocks do."""

from collections.abc import Callable, Iterator
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
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.gpt_family import build_gpt
from llmtrain.models.meta_models import configuration_of
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import place
from llmtrain.training import compiling
from tests.engines import engine_of, split
from tests.launching import long_form
from tests.models.small_models import byte_tokenizer
from tests.models.some_rows import SomeRows

BLOCKS = 3
SIZES = f"num_hidden_layers={BLOCKS},hidden_size=64"
ROWS = 8


class SmallModels:
    """Builds models of three blocks."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.accelerator = accelerator
        self.folder = folder

    def gpt(self, architecture: str) -> ModelBundle:
        config = lt.GPTConfig(
            n_layer=BLOCKS,
            n_head=2,
            n_embd=32,
            block_size=24,
            dropout=0.2,
            architecture=architecture,
        )
        return ModelBundle(build_gpt(config, len(byte_tokenizer())))

    def hub(self, family: str, overrides: str = "", **flags: Any) -> ModelBundle:
        return self._load(self._config(family, overrides, **flags))

    def adapter(self, family: str, **flags: Any) -> ModelBundle:
        base = self.folder / family
        if not base.exists():
            config = configuration_of(self._config(family), byte_tokenizer())
            AutoModelForCausalLM.from_config(config).save_pretrained(base)
        lora = lt.LoraConfig(lora_r=4, **flags)
        return self._load(lt.ModelConfig(str(base), max_length=64), lora)

    def _config(self, family: str, overrides: str = "", **flags: Any) -> lt.ModelConfig:
        overrides = f"{SIZES},{overrides}" if overrides else SIZES
        return lt.ModelConfig(
            from_config=family, config_overrides=overrides, max_length=64, **flags
        )

    def _load(self, config: lt.ModelConfig, lora: lt.LoraConfig | None = None) -> ModelBundle:
        torch.manual_seed(0)
        bundle = load_model(config, lora, SomeRows(byte_tokenizer()), 0, "no")
        return place(self.accelerator, bundle)


MODELS: dict[str, Callable[[SmallModels], ModelBundle]] = {
    "gpt": lambda models: models.gpt("gpt2"),
    "lfm2": lambda models: models.gpt("lfm2"),
    "llama": lambda models: models.hub("llama"),
    "llama with dropout": lambda models: models.hub("llama", "attention_dropout=0.1"),
    "gpt2 with dropout": lambda models: models.hub("gpt2"),  # 0.1 is its default
    "short convolutions": lambda models: models.hub("lfm2"),
    "experts": lambda models: models.hub("mixtral", "router_aux_loss_coef=0.5"),
    "experts with dropout": lambda models: models.hub("mixtral", "attention_dropout=0.1"),
    "LoRA with dropout": lambda models: models.adapter("llama", lora_dropout=0.2),
    "LoRA of experts": lambda models: models.adapter("mixtral"),
}


@pytest.fixture
def models(accelerator: Accelerator, tmp_path: Path) -> SmallModels:
    return SmallModels(accelerator, tmp_path)


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


def take_step(accelerator: Accelerator, bundle: ModelBundle) -> StepOutcome:
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

    parameters = bundle.model.named_parameters()
    gradients = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
    return StepOutcome(gradients, products.count)


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_blocks_give_the_same_gradients_for_more_products(
    name: str, models: SmallModels, accelerator: Accelerator
) -> None:
    bundle = MODELS[name](models)
    expected = take_step(accelerator, bundle)

    products = []
    for every in (1, 2, 3):  # recompute 3, 2 and 1 of the blocks
        bundle.model.recompute_blocks(every)
        outcome = take_step(accelerator, bundle)
        torch.testing.assert_close(outcome.gradients, expected.gradients, rtol=0, atol=0)
        products.append(outcome.products)
    assert products[0] > products[1] > products[2] > expected.products

    bundle.model.recompute_blocks(0)
    assert take_step(accelerator, bundle).products == expected.products


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        pytest.param("lfm2", marks=long_form),
        pytest.param("llama", marks=long_form),
        pytest.param("gpt2 with dropout", marks=long_form),
    ],
)
def test_compiled_blocks_give_the_same_gradients_if_they_are_recomputed(
    name: str, models: SmallModels, accelerator: Accelerator
) -> None:
    gradients = {}
    for every in (0, 2):
        bundle = MODELS[name](models)
        bundle.model.recompute_blocks(every)
        compiling._compile(bundle.model, "aot_eager")
        gradients[every] = take_step(accelerator, bundle).gradients
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=0)


def test_the_flag_recomputes_every_block_of_the_models_of_this_package() -> None:
    gpt = build_gpt(lt.GPTConfig(gradient_checkpointing=True), 50)
    assert gpt.base_model.recompute_every == 1


def test_the_flag_recomputes_every_block_of_a_hub_model(models: SmallModels) -> None:
    layers = models.hub("llama", gradient_checkpointing=True).model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True] * BLOCKS


def test_a_class_that_cannot_recompute_is_refused() -> None:
    config = lt.ModelConfig(
        from_config="ctrl",
        config_overrides="n_layer=2",
        max_length=64,
        gradient_checkpointing=True,
    )
    message = r"^CTRLLMHeadModel cannot compute activations again; leave"
    with pytest.raises(UserError, match=message):
        load_model(config, None, SomeRows(byte_tokenizer()), 0, "no")
