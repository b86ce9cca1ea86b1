"""Bytes by part, from the shapes of a model that has no memory."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.data import tokenizer as tok
from llmtrain.devices import bytes_per_second, get_device, known_device
from llmtrain.errors import UserError
from llmtrain.interfaces.objective import Objective
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.models.gpt import GPT
from llmtrain.models.pretrained import load_model
from llmtrain.models.trainable import make_trainable
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.placement import place
from llmtrain.parallel.sharding import Sharding
from llmtrain.training import activations
from llmtrain.training.activations import ActivationBytes, MicroBatch, count_activations
from llmtrain.training.optim import make_optimizer
from llmtrain.training.optimizer_bytes import state_bytes
from llmtrain.training.parameter_bytes import LocalParameter, Unit, bytes_per_parameter
from llmtrain.training.predicted_memory import Memory, RecipeModel
from llmtrain.training.recipe_model import build_recipe_model
from llmtrain.training.recomputation import Recomputation, least_recomputation
from llmtrain.training.settings import OptimConfig
from tests.families import OVERRIDES, rows_of

CONFIG = GPTConfig(n_layer=6, n_head=4, n_embd=64, block_size=32)


def memory(
    optim: str = "adamw",
    precision: str = "no",
    config: GPTConfig = CONFIG,
    dtype: str = "auto",
    **parallel: object,
) -> Memory:
    with torch.device("meta"):
        model = GPT(config, 1000)
    settings = SimpleNamespace(
        model=config, optim=OptimConfig(optim, dtype=dtype), parallel=ParallelConfig(**parallel)
    )
    return Memory(RecipeModel(model, settings, precision, positions=32), on_gpu=False)


def test_weights_gradients_and_states_are_what_the_shapes_say() -> None:
    numbers, tensors = 64 * 1000 + 32 * 64 + 6 * (12 * 64**2 + 13 * 64) + 2 * 64, 2 + 6 * 12 + 2
    whole = memory().bytes_of(Sharding(2, 1), 4, 1)
    assert (whole.weights, whole.gradients) == (4 * numbers, 4 * numbers)
    assert whole.optimizer == 8 * numbers + 4 * tensors
    assert memory("muon").bytes_of(Sharding(2, 1), 4, 1).optimizer == pytest.approx(
        4 * (2 * numbers - 6 * 12 * 64**2) + 4 * (tensors - 24)
    )
    # Every first dimension is even.
    assert memory().bytes_of(Sharding(1, 2), 4, 1).weights == 2 * numbers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optim", ["adamw", "adamw_torch_8bit", "muon", "adafactor"])
def test_bytes_per_parameter_are_those_of_a_step(
    optim: str, dtype: str, accelerator: Accelerator
) -> None:
    if (optim, dtype) == ("adafactor", "bfloat16"):
        pytest.skip("make_optimizer refuses it")
    settings = OptimConfig(optim, dtype=dtype)
    model = GPT(CONFIG, 1000).to(getattr(torch, dtype))
    optimizer = make_optimizer(accelerator, model, settings)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()

    states = [value for state in optimizer.state.values() for value in state.values()]
    planned = memory(optim, dtype=dtype).bytes_of(Sharding(1, 1), 4, 1)
    assert planned.weights == sum(p.nbytes for p in model.parameters())
    assert planned.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert planned.optimizer == sum(s.nbytes for s in states if isinstance(s, torch.Tensor))


def test_bytes_per_parameter_of_large_matrices() -> None:
    """A row of 256 elements has a scale for each moment: 2 x 4 / 256 bytes per element."""
    wide = GPTConfig(n_layer=1, n_head=1, n_embd=1024, block_size=32)
    for optim, dtype, expected in (
        ("adamw", "float32", (4, 4, 8, 0)),
        ("adamw", "bfloat16", (2, 2, 8, 2)),
        ("adamw_torch_8bit", "float32", (4, 4, 2 + 8 / 256, 0)),
        ("adamw_torch_8bit", "bfloat16", (2, 2, 2 + 8 / 256, 2)),
        ("muon", "bfloat16", (2, 2, 4, 2)),
    ):
        planned = memory(optim, dtype=dtype, config=wide)
        matrix = next(p for p in planned.parameters if p.name == "transformer.h.0.mlp.c_fc.weight")
        kinds = bytes_per_parameter([matrix], optim, planned.has_bf16_weights)
        assert [*kinds.values()] == pytest.approx(expected, abs=1e-5)


def test_moments_in_8_bits_are_sharded_by_rows() -> None:
    """1,000 rows of 64 elements on three processes: 334 rows with 2 x 64 codes and 2 scales."""
    embedding = state_bytes("adamw_torch_8bit", torch.Size([1000, 64]), is_bf16=False)
    assert embedding.of_rows(334) == 334 * (2 * 64 + 2 * 4) + 4
    assert state_bytes("adamw_torch_8bit", torch.Size([4096]), is_bf16=False).of_rows(4096) == (
        8 * 4096 + 4  # a vector has moments in float32
    )


def test_gradients_that_fsdp2_does_not_reduce_yet_are_float32_under_autocast() -> None:
    weights = memory(precision="bf16", dtype="bfloat16").bytes_of(Sharding(1, 2), 4, 1).weights
    in_blocks = 6 * 12 * 64**2
    autocast = memory(precision="bf16", dtype="bfloat16").bytes_of(Sharding(1, 2), 4, 2)
    assert autocast.gradients == pytest.approx(2 * weights + 2 * in_blocks, rel=0.01)
    assert memory(dtype="bfloat16").bytes_of(Sharding(1, 2), 4, 2).gradients == 2 * weights


def test_a_base_in_bfloat16_is_gathered_as_it_is_stored() -> None:
    base = LocalParameter("base", 4, 8, element_bytes=2, is_trained=False)
    matrix = LocalParameter("lora_A", 4, 1, element_bytes=4, is_trained=True)
    for is_bf16, expected in ((False, 2 * 32 + 4 * 4), (True, 2 * 32 + 2 * 4)):
        unit = Unit(frozenset(["base", "lora_A"]), is_bf16=is_bf16, stays_gathered=False)
        assert unit.gathered_bytes([base, matrix]) == expected


def test_what_does_not_divide_is_counted_for_the_process_that_holds_most() -> None:
    uneven = memory(config=GPTConfig(n_layer=1, n_head=1, n_embd=3, block_size=5))
    rows_of_three = (
        250 + 2 + 1 + 1 + 1
    )  # of 1000, 5, and three matrices of 3 by 4: the fourth part, rounded up
    vectors = 3 * 1 + 1 + 3 + 1 + 3 + 1 + 1  # to be counted beside
    held = uneven.bytes_of(Sharding(1, 4), 1, 1).weights / 4
    numbers = {parameter.name: parameter.numel(4) for parameter in uneven.parameters}
    assert numbers["transformer.wte.weight"] == 250 * 3
    assert numbers["transformer.wpe.weight"] == 2 * 3
    assert held == sum(numbers.values()) > rows_of_three + vectors


def test_gradients_grow_where_they_are_not_reduced_in_each_micro_batch() -> None:
    once, each = memory(), memory(sync_each_batch=True)
    assert (
        once.bytes_of(Sharding(1, 4), 2, 1).gradients
        == each.bytes_of(Sharding(1, 4), 2, 8).gradients
    )
    assert once.bytes_of(Sharding(1, 4), 2, 8).gradients == pytest.approx(
        4 * each.bytes_of(Sharding(1, 4), 2, 8).gradients
    )
    alone, with_buckets = (once.bytes_of(Sharding(count, 1), 2, 8) for count in (1, 2))
    assert (
        with_buckets.total == alone.total + alone.gradients
    )  # DDP's buckets, beside what grows between exchanges


def activations_of(config: GPTConfig) -> ActivationBytes:
    """Return what a GPT keeps for its backward pass."""
    recipe = memory(config=config).recipe
    return count_activations(recipe.model, recipe.objective, MicroBatch(2, 32))


def test_a_model_is_looked_at_as_if_it_had_fewer_blocks() -> None:
    deep = activations_of(CONFIG)
    assert deep.blocks == 6
    shallow = activations_of(GPTConfig(n_layer=4, n_head=4, n_embd=64, block_size=32))
    assert deep.peak.total - shallow.peak.total == pytest.approx(2 * deep.per_block)

    again = GPTConfig(n_layer=6, n_head=4, n_embd=64, block_size=32, gradient_checkpointing=True)
    input_of_block = 4 * 2 * 32 * 64
    assert activations_of(again).per_block == input_of_block


@pytest.mark.parametrize("every", range(1, 7))
def test_some_recomputed_blocks_are_composed_of_a_model_with_all_and_one_with_none(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes as a model in which these blocks are recomputed, and all blocks are counted."""
    planned = memory(config=GPTConfig(n_layer=6, n_head=4, n_embd=64, block_size=256))
    composed = planned.activations(rows=2, gathers_weights=False, every=every)

    monkeypatch.setattr(activations, "_MAX_BLOCKS", 6)
    planned.recipe.model.recompute_blocks(every)
    counted = count_activations(planned.recipe.model, Objective(), MicroBatch(2, 32))
    assert composed.highest == counted.highest
    assert composed.end_of_backward == counted.end_of_backward


def test_as_few_blocks_are_recomputed_as_memory_makes_necessary() -> None:
    planned = memory()
    one_process = Sharding(1, 1)
    totals = [planned.bytes_of(one_process, 8, 4, every).total for every in range(7)]

    def least(device_bytes: float) -> Recomputation:
        return least_recomputation(
            planned, one_process, rows=8, accumulation=4, device_bytes=device_bytes
        )

    assert totals[0] > totals[6] > totals[3] > totals[2] > totals[1]
    assert [least(totals[every]).every for every in (0, 6, 3, 2, 1)] == [0, 6, 3, 2, 1]
    assert least(totals[3] - 1).every == 2
    assert least(1e6).every == 1
    assert least(totals[2]).reason.startswith("3 of 6 blocks: the run needs ")


def test_counting_leaves_a_model_as_it_is_and_copies_no_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = GPT(CONFIG, 1000)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    copies = []
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda self, memo: copies.append(self))

    count_activations(model, Objective(), MicroBatch(2, 32, recomputes=True))

    assert copies == []
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert len(model.transformer.h) == 6
    assert model.base_model.recompute_every == 0


@pytest.mark.parametrize("tied", [True, False])
def test_activations_are_those_that_a_model_keeps(tied: bool) -> None:
    """Three linear layers keep the input of each, and what belongs to the logits."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.head = nn.Linear(16, 50, bias=False)
            if tied:
                self.head.weight = self.embedding.weight

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.embedding(input_ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x).sum()

    with torch.device("meta"):
        model = make_trainable(Tiny())
    found = count_activations(model, Objective(), MicroBatch(2, 7))
    assert found.per_block == 4 * 2 * 8 * 16  # float32, rows of 8 tokens
    assert found.before_blocks == 4 * 2 * 8 * 16
    gradient = 4 * 50 * 16  # of the embedding, as it comes: those that have come count apart
    # Tied weights have a gradient of both ends, and their sum.
    at_end = 3 * gradient if tied else gradient + found.before_blocks
    assert found.end_of_backward == pytest.approx(at_end, abs=8)


def test_activations_of_experts_are_counted_without_values(accelerator: Accelerator) -> None:
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 32)
    config = ModelConfig(from_config="mixtral", config_overrides=OVERRIDES, max_length=32)
    bundle = load_model(config, None, rows_of(tokenizer), 3, "no")
    found = count_activations(bundle.model, bundle.objective, MicroBatch(2, 32))
    model = place(accelerator, bundle).model.train()
    known = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved.setdefault(storage.data_ptr(), 0 if storage.data_ptr() in known else storage.nbytes())
        return tensor

    ids = torch.randint(1, 250, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.base_model(input_ids=ids, use_cache=False)
    assert found.before_blocks + found.blocks * found.per_block == pytest.approx(
        sum(saved.values()), rel=0.05
    )
    out.last_hidden_state.sum().backward()


def test_micro_batches_that_fit_divide_the_rows_of_a_process() -> None:
    found = memory()
    sizes = {
        rows: found.bytes_of(Sharding(2, 1), rows, 24 // rows).total
        for rows in (1, 2, 3, 4, 6, 8, 12, 24)
    }
    assert found.fitting(Sharding(2, 1), 24, sizes[6] + 1) == [1, 2, 3, 4, 6]
    assert found.fitting(Sharding(2, 1), 24, sizes[1] - 1) == []
    assert found.fitting(Sharding(2, 1), 24, 1e12) == [*sizes]


def test_rates_and_devices_are_read_or_refused_in_one_line() -> None:
    assert bytes_per_second("400Gbit") == bytes_per_second("50 GB/s") == 50e9
    assert (
        bytes_per_second("100Mbit/s")
        == bytes_per_second("100mbps".replace("mbps", "Mbit"))
        == 12.5e6
    )
    for text in ("fast", "400", "0Gbit", "-1Gbit"):
        with pytest.raises(UserError, match="400Gbit"):
            bytes_per_second(text)
    with pytest.raises(UserError, match="did you mean h100-80gb"):
        get_device("h100-80g")


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA L40", "l40-48gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla T4", "t4-16gb"),
        # Their names contain those of other devices.
        ("NVIDIA T400 4GB", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla V100-PCIE-16GB", None),
        ("a new one", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(title: str, name: str | None) -> None:
    assert known_device(title) == name


def recipe(folder: Path, model: str) -> str:
    lines = [
        "import torch, datasets",
        "import llmtrain as lt",
        "def main(argv=None):",
        "    settings = lt.parse(lt.Settings(data=lt.BatchConfig()), argv)",
        "    table = datasets.Dataset.from_dict({'input_ids': [list(range(9))] * 64})",
        f"    return lt.fit(settings, lt.Tokenized.of(table, None), lambda *_: {model})",
    ]
    path = folder / "own.py"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_model_of_ones_own_is_planned_without_its_weights(tmp_path: Path) -> None:
    described = build_recipe_model(recipe(tmp_path, "torch.nn.Linear(2**20, 2**20)"), [], "no")
    assert (described.positions, described.class_name, described.flops_per_token) == (
        8,
        "Linear",
        0,
    )
    assert Memory(described, on_gpu=False).parameters[0].numel() == 2**40


def test_a_model_that_needs_values_is_refused_in_one_line(tmp_path: Path) -> None:
    path = recipe(tmp_path, "torch.nn.Linear(int(torch.ones(1).item()), 2)")
    with pytest.raises(UserError, match="the recipe builds its model from values of weights"):
        build_recipe_model(path, [], "no")
