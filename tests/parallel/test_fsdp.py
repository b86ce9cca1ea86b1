"""An accelerate config may ask for FSDP2 or HSDP, and for nothing else that shards.

What sharding computes is tested in tests/system/test_sharding.py.
"""

import pytest
import torch

from llmtrain.errors import UserError
from llmtrain.launching.sharding_request import requested_sharding
from llmtrain.parallel.fsdp import sharding_settings
from llmtrain.parallel.sharding import Sharding

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


@pytest.mark.parametrize(
    ("environment", "processes", "expected"),
    [
        pytest.param({}, 4, None, id="no FSDP"),
        pytest.param(FSDP2, 1, None, id="FSDP2 on one process"),
        pytest.param(FSDP2, 4, Sharding(replicas=1, shards=4), id="FSDP2"),
        pytest.param(
            FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"},
            4,
            Sharding(replicas=1, shards=4, cpu_offload=True),
            id="offload",
        ),
        pytest.param(hsdp(2, 2), 4, Sharding(replicas=2, shards=2), id="HSDP"),
    ],
)
def test_a_config_asks_for_replicas_and_shards(
    environment: dict[str, str], processes: int, expected: Sharding | None, request_sharding
) -> None:
    assert request_sharding(processes, environment) == expected


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(FSDP2, id="with FSDP2"),
        # The launcher sets defaults of FSDP even if it is not used.
        pytest.param({"FSDP_VERSION": "1"}, id="without FSDP"),
    ],
)
def test_tensor_parallelism_is_refused_with_fsdp2_as_the_remedy(
    environment: dict[str, str], processes: int, request_sharding
) -> None:
    tensor_parallel = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
    }

    message = r"has tp_size 2, but tensor parallelism is not supported; .* FSDP2 .*fsdp2\.yaml"
    with pytest.raises(UserError, match=message):
        request_sharding(processes, environment | tensor_parallel)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
            "without FSDP; see .*hsdp.yaml",
            id="parallelism config without FSDP",
        ),
        pytest.param(
            {"FSDP_VERSION": "1"},
            "has fsdp_version 1, which is not supported; set fsdp_version: 2",
            id="FSDP1",
        ),
        pytest.param(
            {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
            "fsdp_auto_wrap_policy SIZE_BASED_WRAP; leave it out",
            id="wrap policy",
        ),
        pytest.param(
            {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"},
            "fsdp_transformer_layer_cls_to_wrap Block; leave it out",
            id="class to wrap",
        ),
        pytest.param(
            {"FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"},
            "FULL_SHARD, which is a value of FSDP 1; write true or false",
            id="value of FSDP1",
        ),
        pytest.param(
            {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
            "fsdp_activation_checkpointing_offload true, which is not",
            id="checkpointing offload",
        ),
        pytest.param(
            {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "use --gradient_checkpointing",
            id="activation checkpointing",
        ),
        pytest.param(
            {"PARALLELISM_CONFIG_CP_SIZE": "2"},
            "cp_size 2: rows are not sharded over processes",
            id="context parallelism",
        ),
        pytest.param(
            hsdp(2, 3),
            r"2 replicas .* of 3 processes .*, but 4 processes were started",
            id="another number of processes",
        ),
    ],
)
def test_settings_that_are_not_supported_are_refused(
    changes: dict[str, str], message: str, request_sharding
) -> None:
    with pytest.raises(UserError, match=message):
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
