"""What an accelerate config may ask of sharding. What sharding computes is in tests/system/test_sharding.py."""

import pytest
import torch
from torch import nn

from llmtrain import GPT, GPTConfig, UserError
from llmtrain.parallel.fsdp import Sharding, block_classes

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    def ask(processes: int, **environment: str) -> Sharding | None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return Sharding.asked(processes)

    return ask


def sizes(replicas: int, shards: int) -> dict[str, str]:
    names = {"DP_REPLICATE": replicas, "DP_SHARD": shards}
    return {f"PARALLELISM_CONFIG_{name}_SIZE": str(value) for name, value in names.items()}


def test_what_a_config_asks_for(asked) -> None:
    assert asked(4) is None
    assert asked(1, **FSDP2) is None  # nobody to share with
    assert asked(4) == Sharding(1, 4)
    assert asked(4, FSDP_OFFLOAD_PARAMS="true") == Sharding(1, 4, cpu_offload=True)
    assert asked(4, ACCELERATE_USE_PARALLELISM_CONFIG="true", **sizes(2, 2)).replicas == 2


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (
            {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
            "without FSDP; see .*hsdp.yaml",
        ),
        ({"FSDP_VERSION": "1"}, "asks for FSDP 1; set fsdp_version: 2"),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy; leave it out"),
        ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}, r"names modules \(Block\); leave them out"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "use --gradient_checkpointing"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size 2, which is not supported"),
        (sizes(2, 3), r"2 replicas .* of 3 processes .*, and 4 processes were started"),
    ],
)
def test_what_is_not_supported_is_one_line(environment, why, asked) -> None:
    with pytest.raises(UserError, match=why):
        asked(4, **{**FSDP2, **environment})


def test_blocks_are_found_from_the_model() -> None:
    with torch.device("meta"):
        assert block_classes(GPT(GPTConfig(n_layer=2, n_head=2, n_embd=8, block_size=8), 16)) == {"Block"}
    said = nn.Sequential(nn.Linear(2, 2), nn.Bilinear(2, 2, 2))
    said._no_split_modules = ["Bilinear", "NotHere"]
    assert block_classes(said) == {"Bilinear"}
    with pytest.raises(UserError, match="Sequential has no repeated blocks"):
        block_classes(nn.Sequential(nn.Linear(2, 2)))
