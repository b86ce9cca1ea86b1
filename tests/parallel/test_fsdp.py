"""An accelerate config may ask for FSDP2 or HSDP, and for nothing else that shards.

What sharding computes is tested in tests/system/test_sharding.py.
"""

import pytest
import torch

from llmtrain.errors import UserError
from llmtrain.launching.launch_request import requested_sharding
from llmtrain.parallel.fsdp import sharding_settings
from llmtrain.parallel.ranks import Sharding

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture
def request_sharding(monkeypatch: pytest.MonkeyPatch):
    """A function that reads the sharding from the environment that the launcher sets."""

    def request_sharding(processes: int, environment: dict[str, str]) -> Sharding | None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return requested_sharding(processes)

    return request_sharding


def hsdp(replicas: int, shards: int) -> dict[str, str]:
    return FSDP2 | {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(replicas),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(shards),
    }


OFFLOAD = {"FSDP_OFFLOAD_PARAMS": "true"}


@pytest.mark.parametrize(
    ("environment", "processes", "expected"),
    [
        ({}, 4, None),
        (FSDP2, 1, None),
        (FSDP2, 4, Sharding(replicas=1, shards=4)),
        (FSDP2 | OFFLOAD, 4, Sharding(replicas=1, shards=4, cpu_offload=True)),
        (hsdp(2, 2), 4, Sharding(replicas=2, shards=2)),
    ],
    ids=["no FSDP", "FSDP2 on one process", "FSDP2", "offload", "HSDP"],
)
def test_a_config_asks_for_replicas_and_shards(
    environment: dict[str, str], processes: int, expected: Sharding | None, request_sharding
) -> None:
    assert request_sharding(processes, environment) == expected


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize(
    "fsdp", [FSDP2, {"FSDP_VERSION": "1"}], ids=["with FSDP2", "defaults of the launcher"]
)
def test_tensor_parallelism_is_refused_with_fsdp2_as_the_remedy(
    fsdp: dict[str, str], processes: int, request_sharding
) -> None:
    tensor_parallel = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
    }

    with pytest.raises(UserError, match=r"tp_size 2, .*fsdp2\.yaml"):
        request_sharding(processes, fsdp | tensor_parallel)


WITHOUT_FSDP = {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (WITHOUT_FSDP, r"without FSDP; see .*hsdp\.yaml"),
        ({"FSDP_VERSION": "1"}, "fsdp_version 1"),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy"),
        ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}, "fsdp_transformer_layer_cls_to_wrap"),
        ({"FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"}, "FULL_SHARD"),
        ({"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, "checkpointing_offload true"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "checkpointing true, .* use false"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "2"}, "cp_size 2"),
        (hsdp(2, 3), "2 replicas .* of 3 processes .* 4 processes"),
    ],
)
def test_settings_that_are_not_supported_are_refused(
    changes: dict[str, str], named: str, request_sharding
) -> None:
    with pytest.raises(UserError, match=named):
        request_sharding(4, FSDP2 | changes)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("no", None)])
def test_gradients_are_summed_in_float32_and_the_loss_is_not_cast(
    precision: str, dtype: torch.dtype | None
) -> None:
    settings = sharding_settings(Sharding(replicas=1, shards=2), True, precision)

    policy = settings["fsdp_plugin"].mixed_precision_policy
    assert policy.param_dtype == dtype
    assert policy.reduce_dtype == torch.float32
    assert policy.output_dtype is None
    if precision == "bf16":
        assert not policy.cast_forward_inputs, "the residual stream stays in float32"
