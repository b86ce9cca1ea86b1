"""What an accelerate config may ask of sharding. What sharding computes is in tests/system/test_sharding.py."""

import pytest
import torch

from llmtrain.errors import UserError
from llmtrain.launching.sharding_request import requested_sharding
from llmtrain.parallel.fsdp import sharding_settings
from llmtrain.parallel.sharding import Sharding

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    def ask(processes: int, **environment: str) -> Sharding | None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return requested_sharding(processes)

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


@pytest.mark.parametrize("with_fsdp", [False, True])
def test_tensor_parallelism_is_refused_in_one_line_that_names_fsdp2(asked, with_fsdp: bool) -> None:
    config = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    # The launcher sets defaults of FSDP, even if FSDP is not used.
    environment = {**config, **(FSDP2 if with_fsdp else {"FSDP_VERSION": "1"})}
    why = r"has tp_size 2, but tensor parallelism is not supported; .* FSDP2 .*fsdp2\.yaml"
    for processes in (1, 4):
        with pytest.raises(UserError, match=why):
            asked(processes, **environment)


def test_in_bfloat16_gradients_are_summed_in_float32_and_the_loss_is_not_cast() -> None:
    policy = sharding_settings(Sharding(1, 2), True, "bf16")["fsdp_plugin"].mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (
        torch.bfloat16,
        torch.float32,
        None,
    )
    assert not policy.cast_forward_inputs  # the residual stream stays in float32


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (
            {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
            "without FSDP; see .*hsdp.yaml",
        ),
        ({"FSDP_VERSION": "1"}, "has fsdp_version 1, which is not supported; set fsdp_version: 2"),
        (
            {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
            "fsdp_auto_wrap_policy SIZE_BASED_WRAP; leave it out",
        ),
        (
            {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"},
            "fsdp_transformer_layer_cls_to_wrap Block; leave it out",
        ),
        (
            {"FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"},
            "FULL_SHARD, which is a value of FSDP 1; write true or false",
        ),
        (
            {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
            "fsdp_activation_checkpointing_offload true, which is not",
        ),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "use --gradient_checkpointing"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "2"}, "cp_size 2: rows are not sharded over processes"),
        (sizes(2, 3), r"2 replicas .* of 3 processes .*, but 4 processes were started"),
    ],
)
def test_what_is_not_supported_is_one_line(environment, why, asked) -> None:
    with pytest.raises(UserError, match=why):
        asked(4, **{**FSDP2, **environment})
