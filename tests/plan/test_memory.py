"""Bytes by part, from the shapes of a model that has no memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llmtrain import GPT, GPTConfig, UserError
from llmtrain.devices import DEVICES, bytes_per_second, check_room, device_called, peak_of
from llmtrain.parallel.fsdp import Sharding
from llmtrain.plan.activations import kept
from llmtrain.plan.memory import Memory
from llmtrain.plan.subject import Subject

CONFIG = GPTConfig(n_layer=6, n_head=4, n_embd=64, block_size=32)


def memory(optim: str = "adamw", precision: str = "no", config: GPTConfig = CONFIG, **settings: object) -> Memory:
    with torch.device("meta"):
        model = GPT(config, 1000)
    return Memory(Subject(model, SimpleNamespace(optim=optim, block_size=32, **settings), precision), on_gpu=False)


def test_weights_gradients_and_states_are_what_the_shapes_say() -> None:
    numbers, tensors = 64 * 1000 + 32 * 64 + 6 * (12 * 64**2 + 13 * 64) + 2 * 64, 2 + 6 * 12 + 2
    whole = memory().of(Sharding(2, 1), 4, 1)
    assert (whole.weights, whole.gradients) == (4 * numbers, 4 * numbers)
    assert whole.optimizer == 8 * numbers + 4 * tensors
    assert memory("muon").of(Sharding(2, 1), 4, 1).optimizer == pytest.approx(
        4 * (2 * numbers - 6 * 12 * 64**2) + 4 * (tensors - 24)
    )
    assert memory().of(Sharding(1, 2), 4, 1).weights == 2 * numbers  # every first dimension is even


def test_what_does_not_divide_is_counted_for_the_process_that_holds_most() -> None:
    uneven = memory(config=GPTConfig(n_layer=1, n_head=1, n_embd=3, block_size=5))
    rows_of_three = 250 + 2 + 1 + 1 + 1  # of 1000, 5, and three matrices of 3 by 4: the fourth part, rounded up
    vectors = 3 * 1 + 1 + 3 + 1 + 3 + 1 + 1  # to be counted beside
    held = uneven.of(Sharding(1, 4), 1, 1).weights / 4
    parts = {part.name: part.numbers(4) for part in uneven.parts(1)}
    assert parts["transformer.wte.weight"] == 250 * 3
    assert parts["transformer.wpe.weight"] == 2 * 3
    assert held == sum(parts.values()) > rows_of_three + vectors


def test_gradients_grow_where_they_are_not_reduced_in_each_micro_batch() -> None:
    once, each = memory(), memory(sync_each_batch=True)
    assert once.of(Sharding(1, 4), 2, 1).gradients == each.of(Sharding(1, 4), 2, 8).gradients
    assert once.of(Sharding(1, 4), 2, 8).gradients == pytest.approx(4 * each.of(Sharding(1, 4), 2, 8).gradients)
    alone, with_buckets = (once.of(Sharding(count, 1), 2, 8) for count in (1, 2))
    assert with_buckets.total == alone.total + alone.gradients  # DDP's buckets, beside what grows between exchanges


def test_a_model_is_looked_at_as_if_it_had_fewer_blocks() -> None:
    found = kept(memory().subject.model, 2, 32, bf16=False)
    assert found.blocks == 6
    shallow = kept(memory(config=GPTConfig(n_layer=4, n_head=4, n_embd=64, block_size=32)).subject.model, 2, 32, False)
    assert sum(found.peak()) - sum(shallow.peak()) == pytest.approx(2 * found.block)
    again = GPTConfig(n_layer=6, n_head=4, n_embd=64, block_size=32, gradient_checkpointing=True)
    assert kept(memory(config=again).subject.model, 2, 32, False).block == 4 * 2 * 32 * 64  # what goes into a block


@pytest.mark.parametrize("tied", [True, False])
def test_activations_are_those_that_a_model_keeps(tied: bool) -> None:
    """Of three linear layers: what goes into each; and the logits' own."""

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
        model = Tiny()
    found = kept(model, 2, 7, bf16=False)
    assert found.block == 4 * 2 * 8 * 16  # float32, rows of 8 tokens
    assert found.before == 4 * 2 * 8 * 16
    gradient = 4 * 50 * 16  # of the embedding, as it comes: those that have come count apart
    at_end = 3 * gradient if tied else gradient + found.before  # tied: of both ends, and their sum
    assert found.most_after == pytest.approx(at_end, abs=8)


def test_the_largest_micro_batch_divides_and_fits() -> None:
    found = memory()
    sizes = {rows: found.of(Sharding(2, 1), rows, 24 // rows).total for rows in (1, 2, 3, 4, 6, 8, 12, 24)}
    assert found.largest(Sharding(2, 1), 24, sizes[6] + 1) == 6
    assert found.largest(Sharding(2, 1), 24, sizes[1] - 1) == 0
    assert found.largest(Sharding(2, 1), 24, 1e12) == 24


def test_a_stage_holds_its_layers_and_waits_with_what_it_has_begun() -> None:
    found = memory()
    half = Sharding(1, 1, stages=2)
    one, two, three = (found._of_stage(half, 0, 1, count) for count in (1, 2, 3))
    assert one.activations < two.activations == three.activations  # no more are under way than there are stages
    assert two.weights < found.of(Sharding(2, 1), 1, 2).weights
    assert three.total > two.total  # with three, there are gradients when it is fullest


def test_rates_and_devices_are_read_or_refused_in_one_line() -> None:
    assert bytes_per_second("400Gbit") == bytes_per_second("50 GB/s") == 50e9
    assert bytes_per_second("100Mbit/s") == bytes_per_second("100mbps".replace("mbps", "Mbit")) == 12.5e6
    for text in ("fast", "400", "0Gbit", "-1Gbit"):
        with pytest.raises(UserError, match="400Gbit"):
            bytes_per_second(text)
    with pytest.raises(UserError, match="did you mean h100-80gb"):
        device_called("h100-80g")
    assert peak_of("NVIDIA H100 PCIe") == DEVICES["h100-pcie"].peak
    assert peak_of("NVIDIA H100 80GB HBM3") == DEVICES["h100-80gb"].peak
    assert peak_of("NVIDIA L40S") == DEVICES["l40s-48gb"].peak
    assert peak_of("NVIDIA A100-SXM4-80GB") == DEVICES["a100-80gb"].peak
    assert peak_of("a new one") is None


def test_a_gpu_that_is_too_small_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Linear(2**14, 2**14, bias=False)  # a GiB
    gpu: object = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr("llmtrain.devices._memory_of", lambda _: 2.9 * 2**30)
    with pytest.raises(UserError, match=r"3\.0 GiB a process and more: 1\.0 for weights, 1\.0 for .* has 2\.9"):
        check_room(gpu, model)
    check_room(gpu, model, trained=False)  # LoRA's base, before it is frozen
    model.requires_grad_(False)
    check_room(gpu, model)
    model.requires_grad_(True)
    check_room(SimpleNamespace(device=torch.device("cpu")), model)
    plugin = SimpleNamespace(sharding=Sharding(1, 2))
    check_room(SimpleNamespace(device=torch.device("cuda"), state=SimpleNamespace(fsdp_plugin=plugin)), model)
