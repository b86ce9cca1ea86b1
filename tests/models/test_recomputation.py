"""Blocks that compute their activations again give the same bits, whichever blocks they are."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import llmtrain as lt
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.gpt_family import build_gpt
from llmtrain.models.meta_models import configuration_of
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import place
from llmtrain.training import compiling
from tests.engines import engine_of, split
from tests.launching import long_form
from tests.models.some_rows import SomeRows

SIZES = "num_hidden_layers=3,hidden_size=64"
MODELS = {
    "gpt": lambda load: load.gpt("gpt2"),
    "lfm2": lambda load: load.gpt("lfm2"),
    "llama": lambda load: load.hub("llama"),
    "llama with dropout": lambda load: load.hub("llama", "attention_dropout=0.1"),
    "gpt2 with dropout": lambda load: load.hub("gpt2"),  # 0.1 is its default
    "short convolutions": lambda load: load.hub("lfm2"),
    "experts": lambda load: load.hub("mixtral", "router_aux_loss_coef=0.5"),
    "experts with dropout": lambda load: load.hub("mixtral", "attention_dropout=0.1"),
    "LoRA with dropout": lambda load: load.adapter("llama", lora_dropout=0.2),
    "LoRA of experts": lambda load: load.adapter("mixtral"),
}


class Load:
    """Makes small models of three blocks."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.accelerator = accelerator
        self.folder = folder
        self.words: PreTrainedTokenizerFast = as_pretrained(
            train_tokenizer("byte", [], lambda: iter(())), 64
        )

    def gpt(self, architecture: str) -> ModelBundle:
        config = lt.GPTConfig(
            n_layer=3, n_head=2, n_embd=32, block_size=24, dropout=0.2, architecture=architecture
        )
        return ModelBundle(build_gpt(config, len(self.words)))

    def hub(self, family: str, overrides: str = "") -> ModelBundle:
        return self._load(self._config(family, overrides))

    def adapter(self, family: str, **settings: float) -> ModelBundle:
        base = self.folder / family
        if not base.exists():
            config = configuration_of(self._config(family), self.words)
            AutoModelForCausalLM.from_config(config).save_pretrained(base)
            self.words.save_pretrained(base)
        return self._load(
            lt.ModelConfig(str(base), max_length=64), lt.LoraConfig(lora_r=4, **settings)
        )

    def _config(self, family: str, overrides: str = "") -> lt.ModelConfig:
        return lt.ModelConfig(
            from_config=family,
            config_overrides=",".join(filter(None, [SIZES, overrides])),
            max_length=64,
        )

    def _load(self, config: lt.ModelConfig, lora: lt.LoraConfig | None = None) -> ModelBundle:
        torch.manual_seed(0)
        bundle = load_model(config, lora, SomeRows(self.words), 0, "no")
        return place(self.accelerator, bundle)


@pytest.fixture
def load(accelerator: Accelerator, tmp_path: Path) -> Load:
    return Load(accelerator, tmp_path)


def batch() -> Batch:
    ids = torch.randint(1, 250, (8, 25), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels, "dropout_keys": torch.arange(8) * 2**40}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return function(*args, **(kwargs or {}))


def gradients(accelerator: Accelerator, bundle: ModelBundle) -> tuple[dict[str, Tensor], int]:
    """Return the gradients of a step with two micro-batches, and its number of products."""
    engine = engine_of(accelerator, bundle.model, bundle.objective)
    engine.model.train()
    engine.model.zero_grad()
    torch.manual_seed(5)
    micro_batches = split(batch(), 4)
    totals = engine.count(micro_batches)
    with Products() as products:
        extra = engine.objective.prepass(engine, micro_batches, totals)
        engine.forward_backward(micro_batches, totals, extra)
    computed = {
        name: parameter.grad.clone()
        for name, parameter in bundle.model.named_parameters()
        if parameter.grad is not None
    }
    return computed, products.count


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_blocks_give_the_same_gradients(
    name: str, load: Load, accelerator: Accelerator
) -> None:
    bundle = MODELS[name](load)
    expected, fewest_products = gradients(accelerator, bundle)

    counts = []
    for every in (1, 2, 3):
        bundle.model.recompute_blocks(every)
        computed, products = gradients(accelerator, bundle)
        counts.append(products)
        assert computed.keys() == expected.keys()
        for parameter, gradient in computed.items():
            assert torch.equal(gradient, expected[parameter]), (every, parameter)
    assert counts[0] > counts[1] > counts[2] > fewest_products  # 3, 2 and 1 blocks

    bundle.model.recompute_blocks(0)
    assert gradients(accelerator, bundle)[1] == fewest_products


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


compiled = [
    ("gpt", "aot_eager"),
    pytest.param("lfm2", "aot_eager", marks=long_form),
    pytest.param("llama", "aot_eager", marks=long_form),
    pytest.param("gpt2 with dropout", "aot_eager", marks=long_form),
]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "backend"), compiled)
def test_compiled_blocks_that_are_recomputed_give_the_same_gradients(
    name: str, backend: str, load: Load, accelerator: Accelerator
) -> None:
    results = []
    for every in (0, 2):
        bundle = MODELS[name](load)
        bundle.model.recompute_blocks(every)
        compiling._compile(bundle.model, backend)
        results.append(gradients(accelerator, bundle)[0])
    kept, recomputed = results
    for parameter, gradient in recomputed.items():
        assert torch.equal(gradient, kept[parameter]), parameter


def test_the_flag_of_a_config_recomputes_every_block(load: Load) -> None:
    gpt = build_gpt(lt.GPTConfig(gradient_checkpointing=True), 50)
    assert gpt.base_model.recompute_every == 1
    config = load._config("llama")
    config.gradient_checkpointing = True
    layers = load._load(config).model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True] * 3


def test_a_class_that_cannot_recompute_is_one_line(load: Load) -> None:
    config = lt.ModelConfig(from_config="ctrl", config_overrides="n_layer=2", max_length=64)
    config.gradient_checkpointing = True
    with pytest.raises(
        UserError, match=r"^CTRLLMHeadModel cannot compute activations again; leave"
    ):
        load_model(config, None, SomeRows(load.words), 0, "no")
