"""Run by test_devices.py under a torch for GPUs, on a machine without one: what a GPU computes, on tensors that have a
device and a shape and no values. Two devices in one operation raise, and so does reading a value. A fault can be named.

Left out is what wants a real device: autocast, backward passes, pinned memory, kernels, NCCL.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmtrain.interfaces.batches import LocalBatch
from llmtrain.models import attention_gpu
from llmtrain.models.attention import ATTENTION_NAME, register
from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.models.config import GPTConfig
from llmtrain.models.documents import Documents
from llmtrain.models.gpt import GPT
from llmtrain.models.loss import linear_nll, target_positions_of
from llmtrain.observe import replicas
from llmtrain.parallel import shards
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.ranks import Ranks
from llmtrain.training import run_state
from llmtrain.training.muon import Muon

CUDA = torch.device("cuda")
ACCELERATOR: Any = SimpleNamespace(
    device=CUDA,
    num_processes=1,
    is_fsdp2=False,
    state=None,
    reduce=lambda tensor, reduction: tensor.clone(),
    gather=lambda tensor: tensor,
    unwrap_model=lambda model, **_: model,
)


def gpt() -> GPT:
    with CUDA:
        return GPT(GPTConfig(2, 2, 16, 8), vocab_size=50)


def local_batch() -> LocalBatch:
    """A batch as the loader makes it, on the host."""
    ids = torch.zeros(4, 9, dtype=torch.int64)
    positions = (torch.arange(9) % 5).expand(4, -1)
    return LocalBatch(
        columns={"input_ids": ids, "labels": ids, "position_ids": positions},
        micro_batch=2,
        rows=torch.zeros(4),
        targets=torch.zeros(4),
        token_fingerprint=0,
        label_fingerprint=0,
    )


def made_on_the_host() -> LocalBatch:
    made = local_batch()
    positions, labels = (
        [batch["position_ids"] for batch in made.batches],
        [batch["labels"] for batch in made.batches],
    )
    found = zip(positions, labels, strict=True)
    prepared = [
        {
            "documents": Documents.of(p[:, :-1], True),
            "target_positions": target_positions_of(own, True),
        }
        for p, own in found
    ]
    return replace(made, prepared=tuple(prepared))


def forward_of_gpt(sent: LocalBatch) -> None:
    batch = sent.batches[0]
    keys = torch.zeros(2, dtype=torch.int64, device=CUDA)
    nll = gpt()(batch["input_ids"], batch["labels"], dropout_keys=keys)
    assert nll.device.type == "cuda"


def forward_of_llama(sent: LocalBatch) -> None:
    """Packed rows, through the kernel for sequences of many lengths."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16
    )
    with CUDA:
        llama = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = make_causal_lm(llama, row_length=8)
    register()
    model.config._attn_implementation, model.head_is_linear = ATTENTION_NAME, True
    newest = mock.patch("torch.cuda.get_device_capability", return_value=(9, 0))
    right = mock.patch.object(
        attention_gpu, "_varlen_is_correct", return_value=True
    )  # no values, nothing to compare
    with newest, right, mock.patch.object(attention_gpu, "attend_with_flex", None):
        assert model(**sent.batches[0]).device.type == "cuda"


def losses(sent: LocalBatch) -> None:
    with CUDA:
        weight, hidden = torch.zeros(50, 16), torch.zeros(2, 8, 16)
    batch = sent.batches[0]
    for positions in (None, batch["target_positions"]):
        assert (
            linear_nll(
                hidden, weight, batch["labels"][:, 1:], target_positions=positions
            ).device.type
            == "cuda"
        )


def counts(sent: LocalBatch) -> None:
    totals = ReplicatedEngine(Ranks(ACCELERATOR), gpt()).count(sent.batches)
    assert {totals.target_tokens.device.type, totals.denominator.device.type} == {"cuda"}


def optimizers(sent: LocalBatch) -> None:
    model = gpt()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    Muon([p for p in model.parameters() if p.ndim == 2], 0.1, 0.1).step()


def restores(sent: LocalBatch) -> None:
    """Weights that come as a stream, on the host, into those of a device."""
    model = gpt()
    shards.fill(
        dict(model.named_parameters()),
        ((name, torch.zeros(p.shape)) for name, p in model.named_parameters()),
    )


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made in 64 bits."""

    bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = [
            one.numel() * one.element_size() for one in _tensors(made) if one.dtype == torch.int64
        ]
        self.bytes = max([self.bytes, *sizes])
        return made


def _tensors(made: object) -> list[torch.Tensor]:
    return [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]


def fingerprints(sent: LocalBatch) -> None:
    replicas.weight_checksums(gpt())
    with CUDA:
        large = nn.Linear(1 << 14, 1 << 12, bias=False)
    with Largest() as largest:
        replicas.weight_checksums(large)
    assert largest.bytes <= 2 * large.weight.numel(), (
        f"{largest.bytes} bytes for {large.weight.numel()} numbers"
    )


def finite(sent: LocalBatch) -> None:
    seen: list[torch.Tensor] = []
    sharded = {"is_fsdp2": True, "reduce": lambda bad, reduction: seen.append(bad)}
    accelerator = SimpleNamespace(**{**vars(ACCELERATOR), **sharded})
    try:
        run_state.check_finite(gpt(), Ranks(accelerator))
    except AttributeError:  # a list of values, which there are none of
        assert seen[0].device.type == "cuda"


def all_at_once(values: torch.Tensor) -> torch.Tensor:
    bits = values.contiguous().view(torch.int32).flatten().to(torch.int64)
    return (bits * (2 * torch.arange(bits.numel(), device=bits.device) + 1)).sum()


def on_the_host(model: nn.Module, ranks: Any) -> None:
    torch.stack([torch.zeros(()), *(p.sum() for p in model.parameters())])


FAULTS: dict[str, Any] = {
    "3": mock.patch.object(run_state, "check_finite", on_the_host),
    "7": mock.patch.object(replicas, "checksum", all_at_once),
}
PATHS: list[Callable[[LocalBatch], None]] = [
    *(
        forward_of_gpt,
        forward_of_llama,
        losses,
        counts,
        optimizers,
        restores,
        fingerprints,
        finite,
    )
]


def stack_on_one_device(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """As a GPU has it; fake tensors let scalars of a CPU pass."""
    assert len({tensor.device for tensor in tensors}) == 1, (
        "Expected all tensors to be on the same device"
    )
    return honest_stack(tensors, dim)


honest_stack = torch.stack


def main() -> None:
    assert not torch.cuda.is_available()
    sent = made_on_the_host()
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch("torch.stack", stack_on_one_device):
        sent = sent.to(CUDA)
        for path in PATHS:
            path(sent)
            print(path.__name__)


if __name__ == "__main__":
    with FAULTS[sys.argv[1]] if len(sys.argv) > 1 else mock.patch.dict({}):
        main()
