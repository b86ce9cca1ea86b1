"""The memory of a run is predicted from the shapes of its model, which holds no weights."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.data.shards import Column
from llmtrain.devices import known_device
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import LossSums, Objective
from llmtrain.lab.plan.hardware import PlanRequest, hardware_of
from llmtrain.lab.plan.layouts import fitting_sizes
from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.models.distillation import DistillConfig
from llmtrain.models.distillation_objective import DistillationObjective
from llmtrain.models.gpt import GPT
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.ranks import Sharding
from llmtrain.training import activations
from llmtrain.training.activations import ActivationBytes, MicroBatch, count_activations
from llmtrain.training.optim import make_optimizer
from llmtrain.training.predicted_memory import Bytes, LocalParameter, Memory, UnitBytes
from llmtrain.training.recipe_model import RecipeModel, build_recipe_model
from llmtrain.training.settings import OptimConfig
from tests.engines import ScaledRows
from tests.families import OVERRIDES, rows_of
from tests.models.small_models import byte_tokenizer

CONFIG = GPTConfig(n_layer=6, n_head=4, n_embd=64, block_size=32)
VOCABULARY = 1000
POSITIONS = 32
ONE_PROCESS = Sharding(replicas=1, shards=1)


def memory(
    optim: str = "adamw",
    precision: str = "no",
    config: GPTConfig = CONFIG,
    dtype: str = "auto",
    columns: Mapping[str, Column] = MappingProxyType({}),
    **parallel: object,
) -> Memory:
    with torch.device("meta"):
        model = GPT(config, VOCABULARY)
    settings = SimpleNamespace(
        model=config, optim=OptimConfig(optim, dtype=dtype), parallel=ParallelConfig(**parallel)
    )
    rows = SimpleNamespace(positions=POSITIONS, train=SimpleNamespace(columns=columns))
    return Memory.of(RecipeModel(model, settings, precision, rows), on_gpu=False)


# --- weights, gradients and the states of optimizers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optim", ["adamw", "adamw_torch_8bit", "muon"])
def test_the_predicted_bytes_are_those_of_a_step(
    optim: str, dtype: str, accelerator: Accelerator
) -> None:
    model = GPT(CONFIG, VOCABULARY).to(getattr(torch, dtype))
    optimizer = make_optimizer(accelerator, model, OptimConfig(optim, dtype=dtype))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    state_tensors = []
    for state in optimizer.state.values():
        state_tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    predicted = memory(optim, dtype=dtype).bytes_of(ONE_PROCESS, rows=4, accumulation=1)
    assert predicted.weights == sum(p.nbytes for p in model.parameters())
    assert predicted.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert predicted.optimizer == sum(tensor.nbytes for tensor in state_tensors)


def test_moments_in_8_bits_are_sharded_by_rows() -> None:
    """On three processes, 1,000 rows of 64 numbers are at most 334 rows with codes and scales."""
    predicted = memory("adamw_torch_8bit")
    predicted.recipe = predicted.recipe._replace(model=nn.Linear(64, 1000))
    weight, bias = predicted.parameters

    count_of_steps = 4
    assert weight.state_bytes(shards=3) == 334 * (2 * 64 + 2 * 4) + count_of_steps
    assert bias.state_bytes(shards=3) == 2 * 4 * 334 + count_of_steps, "it stays in float32"


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_gradients_that_fsdp2_has_not_reduced_yet_are_float32(precision: str) -> None:
    two_shards = Sharding(replicas=1, shards=2)
    predicted = memory(precision=precision, dtype="bfloat16")

    needed = predicted.bytes_of(two_shards, rows=4, accumulation=2)

    assert needed.gradients == 2 * 2 * needed.weights, "all shards, of four bytes instead of two"


@pytest.mark.parametrize(("is_bf16", "bytes_of_lora"), [(False, 4), (True, 2)])
def test_a_base_in_bfloat16_is_gathered_as_it_is_stored(is_bf16: bool, bytes_of_lora: int) -> None:
    base = LocalParameter("base", rows=4, row_numel=8, element_bytes=2, is_trained=False)
    matrix = LocalParameter("lora_A", rows=4, row_numel=1, element_bytes=4, is_trained=True)
    unit = UnitBytes([base, matrix], is_bf16=is_bf16, stays_gathered=False)

    assert unit.weights == 2 * 4 * 8 + bytes_of_lora * 4


def test_rows_that_do_not_divide_are_counted_for_the_process_with_the_most() -> None:
    config = GPTConfig(n_layer=1, n_head=1, n_embd=3, block_size=5)
    predicted = memory(config=config)

    numbers = {parameter.name: parameter.numel(4) for parameter in predicted.parameters}
    assert numbers["transformer.wte.weight"] == math.ceil(1000 / 4) * 3
    assert numbers["transformer.wpe.weight"] == math.ceil(5 / 4) * 3
    four_shards = Sharding(replicas=1, shards=4)
    weights = predicted.bytes_of(four_shards, rows=1, accumulation=1).weights
    assert weights == 4 * sum(numbers.values())
    assert weights > 4 * sum(p.numel() for p in GPT(config, VOCABULARY).parameters()) / 4


def test_gradients_are_sharded_only_if_they_are_reduced_in_each_micro_batch() -> None:
    four_shards = Sharding(replicas=1, shards=4)

    def gradients(predicted: Memory, accumulation: int) -> float:
        return predicted.bytes_of(four_shards, rows=2, accumulation=accumulation).gradients

    sharded = gradients(memory(sync_each_batch=True), accumulation=8)
    assert gradients(memory(), accumulation=1) == sharded
    assert gradients(memory(), accumulation=8) == pytest.approx(4 * sharded)


def test_ddp_has_buckets_besides_the_gradients_that_it_accumulates() -> None:
    one_process = memory().bytes_of(ONE_PROCESS, rows=2, accumulation=8)
    two_replicas = Sharding(replicas=2, shards=1)
    two_processes = memory().bytes_of(two_replicas, rows=2, accumulation=8)
    without_accumulation = memory().bytes_of(two_replicas, rows=2, accumulation=1)

    assert two_processes.total == one_process.total + one_process.gradients
    assert without_accumulation.total == one_process.total, "gradients stay in the buckets"


# --- activations


def activations_of(config: GPTConfig) -> ActivationBytes:
    """Count the bytes that a GPT keeps for its backward pass."""
    recipe = memory(config=config).recipe
    return count_activations(recipe.model, recipe.objective, MicroBatch(2, POSITIONS))


def test_a_block_that_is_recomputed_keeps_only_its_input() -> None:
    config = GPTConfig(n_layer=6, n_head=4, n_embd=64, block_size=32, gradient_checkpointing=True)

    assert activations_of(config).per_block == 4 * 2 * POSITIONS * 64


def test_the_two_gradients_of_a_tied_weight_are_added_up_in_place() -> None:
    recipe = memory(config=GPTConfig(n_layer=1, n_head=1, n_embd=64, block_size=2)).recipe

    counted = count_activations(recipe.model, recipe.objective, MicroBatch(1, 2))

    two_gradients = 2 * 4 * VOCABULARY * 64
    assert counted.end_of_backward == pytest.approx(two_gradients, rel=0.1)


def test_a_model_that_recomputes_its_blocks_is_counted_by_the_first_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = GPTConfig(n_layer=6, n_head=4, n_embd=64, block_size=256)
    predicted = memory(config=config)
    by_four_blocks = predicted.activations(rows=2, gathers_weights=False, recomputes=True)

    monkeypatch.setattr(activations, "_MAX_BLOCKS", 6)
    predicted.recipe.model.recompute_blocks(True)
    counted = count_activations(predicted.recipe.model, Objective(), MicroBatch(2, POSITIONS))

    assert by_four_blocks.highest == counted.highest
    assert by_four_blocks.end_of_backward == counted.end_of_backward


def test_counting_leaves_a_model_unchanged_and_copies_no_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = GPT(CONFIG, VOCABULARY)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    copied = []
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda self, memo: copied.append(self))

    count_activations(model, Objective(), MicroBatch(2, POSITIONS, recomputes=True))

    assert copied == []
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
    assert len(model.transformer.h) == 6
    assert not model.base_model.recomputes


def test_the_activations_of_experts_are_those_that_autograd_saves(
    accelerator: Accelerator,
) -> None:
    config = ModelConfig(from_config="mixtral", config_overrides=OVERRIDES, max_length=32)
    bundle = load_model(config, lora=None, rows=rows_of(byte_tokenizer(32)), seed=3, precision="no")
    counted = count_activations(bundle.model, bundle.objective, MicroBatch(2, POSITIONS))

    model = move_to_devices(accelerator.ranks, bundle).model.train()
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved_bytes: dict[int, int] = {}  # of each storage, by its address

    def note_saved(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(1, 250, (2, POSITIONS), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor):
        output = model.base_model(input_ids=ids, use_cache=False)

    counted_bytes = counted.before_blocks + counted.blocks * counted.per_block
    assert counted_bytes == pytest.approx(sum(saved_bytes.values()), rel=0.05)
    assert output.last_hidden_state.requires_grad, "autograd would free what it has saved"


def test_micro_batches_that_fit_divide_the_rows_of_a_process() -> None:
    predicted = memory()
    sharding = Sharding(replicas=2, shards=1)
    divisors_of_24 = [1, 2, 3, 4, 6, 8, 12, 24]
    totals = {}
    for rows in divisors_of_24:
        totals[rows] = predicted.bytes_of(sharding, rows=rows, accumulation=24 // rows).total

    assert fitting_sizes(predicted, sharding, 24, totals[6] + 1) == [1, 2, 3, 4, 6]
    assert fitting_sizes(predicted, sharding, 24, totals[1] - 1) == []
    assert fitting_sizes(predicted, sharding, 24, 1e12) == divisors_of_24


# --- frozen models


def distilled(source: str = "teacher", width: int = 64, depth: int = 2) -> Memory:
    """Return the memory of a small Llama that learns from one with these sizes."""
    sizes = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "intermediate_size": 96}
    student = LlamaConfig(**sizes, hidden_size=32, num_hidden_layers=2)
    teacher = LlamaConfig(**sizes, hidden_size=width, num_hidden_layers=depth)
    with torch.device("meta"):
        models = [make_causal_lm(LlamaForCausalLM(c), POSITIONS) for c in (student, teacher)]
    predicted = memory()
    predicted.recipe = predicted.recipe._replace(
        model=models[0],
        frozen={"teacher": models[1].requires_grad_(False)},
        objective=DistillationObjective(DistillConfig(), source),
    )
    return predicted


@pytest.mark.parametrize("source", ["teacher", "samples"])
def test_a_teacher_needs_its_weights_and_live_the_hidden_states_of_the_targets(source: str) -> None:
    small = distilled(source)
    deep = distilled(source, depth=6)
    wide = distilled(source, width=128)

    def bytes_of(predicted: Memory) -> Bytes:
        return predicted.bytes_of(ONE_PROCESS, rows=2, accumulation=1)

    def weights(predicted: Memory) -> int:
        return sum(p.nbytes for p in predicted.recipe.frozen["teacher"].parameters())

    assert bytes_of(deep).frozen == weights(deep)
    assert bytes_of(deep).total - bytes_of(small).total == weights(deep) - weights(small)
    hidden_states = 4 * 2 * POSITIONS * (128 - 64) if source == "teacher" else 0
    added = bytes_of(wide).total - bytes_of(small).total
    assert added == weights(wide) - weights(small) + hidden_states


def test_a_sharded_teacher_keeps_its_head_and_its_last_norm_gathered() -> None:
    predicted = distilled()
    teacher = predicted.recipe.frozen["teacher"]

    needed = predicted.bytes_of(Sharding(replicas=1, shards=3), rows=2, accumulation=1)

    shards = [math.ceil(len(p) / 3) * p[0].nbytes for p in teacher.parameters()]
    gathered = teacher.lm_head.weight.nbytes + teacher.model.norm.weight.nbytes
    assert needed.frozen == sum(shards) + gathered


# --- devices


@pytest.mark.parametrize(
    ("option", "problem"),
    [({"link": "fast"}, "--link fast is no size"), ({"device": "h1000"}, "use one of h100-pcie")],
)
def test_a_bandwidth_or_a_device_that_is_not_known_is_refused(
    option: dict[str, str], problem: str
) -> None:
    request = PlanRequest("gpt.py", [], processes=9, **({"device": "h100-80gb"} | option))
    with pytest.raises(UserError, match=problem):
        hardware_of(request)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        # Their names contain those of other devices.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_device_is_known_by_its_complete_name(title: str, name: str | None) -> None:
    assert known_device(title) == name


# --- models of the user


def test_a_loss_that_needs_its_prepass_is_not_known() -> None:
    predicted = memory()
    predicted.recipe = predicted.recipe._replace(objective=ScaledRows())

    with pytest.raises(UserError, match=r"loss of ScaledRows reads 'factor'.* makes no prepass"):
        predicted.bytes_of(ONE_PROCESS, rows=2, accumulation=1)


class ReadsColumns(Objective):
    """The nll, weighted with scores of k tokens."""

    def loss(self, model: GPT, batch: Batch, extra: Batch) -> LossSums:
        scores = batch["scores"].gather(2, batch["choices"]).sum(2)
        nll = model.nll(**batch, per_target=True)
        return LossSums((scores[:, 1:].flatten() * nll).sum())


def test_a_loss_that_reads_columns_of_the_rows_is_counted() -> None:
    shape = [POSITIONS + 1, 64]
    columns = {"scores": Column("float16", shape), "choices": Column("uint16", shape)}
    recipe = memory(columns=columns).recipe._replace(objective=ReadsColumns())
    counted = Memory.of(recipe, on_gpu=False).activations(rows=2, gathers_weights=False)
    nll = memory().activations(rows=2, gathers_weights=False)
    assert counted.peak.total >= nll.peak.total


RECIPE = """
import datasets
import torch

import llmtrain as lt


def main(argv=None):
    settings = lt.parse(lt.Settings(data=lt.BatchConfig()), argv)
    table = datasets.Dataset.from_dict({"input_ids": [list(range(9))] * 64})
    rows = lt.Tokenized.of(table, None)
    return lt.fit(settings, rows, lambda *_: torch.nn.Linear(int(torch.ones(1).item()), 2))
"""


def test_a_model_that_is_built_from_values_of_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(RECIPE)

    with pytest.raises(UserError, match="the recipe builds its model from values of weights"):
        build_recipe_model(str(path), [], "no")
