"""Flags of how processes share the work."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain.config import Config, flag, require_at_least
from llmtrain.errors import UserError


@dataclass
class ParallelConfig(Config):
    """How processes exchange gradients, and how long they wait for each other. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "processes"
    acts: ClassVar[str] = "layout"

    ddp_comm_hook: Literal["none", "bf16", "fp16"] = flag(
        "none", "add up gradients in 16 bits, which sends half the bytes", acts="gradient"
    )
    sync_each_batch: bool = flag(
        False,
        "reduce gradients after every micro-batch: a sharded model holds less",
        acts="gradient",
        hidden=True,
    )
    ddp_bucket_cap_mb: float = flag(25.0, "MiB of gradients that DDP sends at once", hidden=True)
    ddp_timeout: int = flag(
        1800, "seconds that processes wait for one that is missing", hidden=True
    )

    pipeline_stages: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_at_least(self, 1, "ddp_timeout", "pipeline_stages")
        size = self.ddp_bucket_cap_mb
        if size <= 0 or not math.isfinite(size):
            raise UserError(f"--ddp_bucket_cap_mb {size} is out of range: give a size above 0.")

    @property
    def bucket_mib(self) -> float | None:
        """The size of a bucket of gradients in MiB; ``None`` for DDP's own sizes."""
        # Unless it gets a size, DDP makes the first bucket smaller than the others.
        size = self.ddp_bucket_cap_mb
        if self.given("ddp_bucket_cap_mb") or size != ParallelConfig.ddp_bucket_cap_mb:
            return size
        return None

    @property
    def approximation(self) -> dict[str, str] | None:
        """Settings that change the gradients of a run; ``None`` if they are exact."""
        if self.ddp_comm_hook == "none":
            return None
        return {"ddp_comm_hook": self.ddp_comm_hook}


@dataclass
class PipelineConfig(ParallelConfig):
    """How processes share the work on a model that can be split into stages. Each field is a flag."""

    pipeline_stages: int = flag(  # type: ignore[misc]
        1, "stages into which the model's layers are split, each on a process of its own"
    )
