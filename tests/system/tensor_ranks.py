"""Run by test_tensor.py on a few ranks: models of several families, whole and cut, in float64; writes how far logits
and gradients are apart. `tensor_ranks.py FILE [without_the_sum]`"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain import launch
from llmtrain.errors import UserError
from llmtrain.parallel.shards import full_tensor, local_shard
from llmtrain.parallel.tensor import parallelize

VOCABULARY = 257  # which does not divide
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
SIZES |= {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": VOCABULARY}
SIZES |= {"pad_token_id": 200, "bos_token_id": 201, "eos_token_id": 202}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama, tied": {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3": {},  # norms inside of heads
    "phi3": {},  # outputs that are joined, inputs that are cut
    "gpt_neox": {},  # fused heads, biases
    "gemma3_text": {},  # an embedding that multiplies
}
REFUSED = {"gpt2": {}, "mixtral": {}, "llama": {"num_key_value_heads": 1}}


def model_of(kind: str, changes: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(kind.partition(",")[0], **SIZES | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    for (
        parameter
    ) in model.parameters():  # biases begin as nothing, which hides one that is added twice
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim < 2 else 0.0, 0.1)
    return model


def passed(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of all parameters, whole."""
    logits = model(ids, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    return logits.detach(), {
        name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }


def compared(kind: str, changes: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    whole = model_of(kind, changes)
    cut = copy.deepcopy(whole)
    parallelize(cut, mesh)
    ids = torch.randint(0, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
    (logits, gradients), (others, other_gradients) = passed(cut, ids), passed(whole, ids)
    assert gradients.keys() == other_gradients.keys()
    apart = {name: distance(gradients[name], other) for name, other in other_gradients.items()}
    return {
        "logits": distance(logits, others),
        "gradients": max(apart.values()),
        "worst": max(apart, key=lambda name: apart[name]),
        "held": sum(local_shard(p).numel() for p in cut.parameters())
        / sum(p.numel() for p in whole.parameters()),
        "names": [name for name, _ in cut.named_parameters()]
        == [name for name, _ in whole.named_parameters()],
    }


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def refused(kind: str, changes: dict[str, Any], mesh: DeviceMesh) -> str:
    try:
        parallelize(model_of(kind, changes), mesh)
    except UserError as error:
        return str(error)
    return "nothing was said"


def main() -> None:
    file, *planted = sys.argv[1:]
    dist.init_process_group("gloo")
    if planted:  # the bug that this is there to find
        from llmtrain.parallel import tensor

        tensor.copy_to = lambda x, mesh: x
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found: dict[str, Any] = {kind: compared(kind, changes, mesh) for kind, changes in CASES.items()}
    found["refused"] = {kind: refused(kind, changes, mesh) for kind, changes in REFUSED.items()}
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
