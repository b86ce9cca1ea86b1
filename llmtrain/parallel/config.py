"""The flags of the parallel methods."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain.config.flags import Affects, Config, flag, require_range
from llmtrain.errors import UserError

SECONDS_OF_A_YEAR = 365 * 24 * 60 * 60


@dataclass
class ParallelConfig(Config):
    """How a step is computed, and how processes exchange gradients. Each field is a flag."""

    group: ClassVar[str] = "processes"
    affects: ClassVar[Affects] = "nothing"

    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = flag(
        "auto",
        "mixed precision of products; no is float32; auto: the bf16 or fp16 of the launcher, else "
        "bf16 on a GPU (if it has none fp16, or no for a sharded model), and no on a CPU",
        affects="numbers",
        group="batch and memory",
    )
    sync_each_batch: bool = flag(
        False,
        "reduce gradients over the processes after every micro-batch instead of once per step; a "
        "sharded model then needs less memory",
        affects="nothing",
        hidden=True,
    )
    ddp_bucket_cap_mb: float | None = flag(
        None,
        "size of DDP's gradient buckets in MiB (default: 25, and a smaller first one)",
        hidden=True,
    )
    ddp_timeout: int = flag(
        1800,
        "seconds that a process waits for the others before the run fails",
        affects="nothing",
        hidden=True,
    )
    bitwise: bool = flag(
        False,
        "add gradients in a fixed order, so that 1, 2, 4, ... processes compute exactly the same "
        "bits; slower",
        hidden=True,
    )
    threads: int | None = flag(
        None,
        "threads of each process on the CPU (default: the processes of a machine share its cores; "
        "1 with --bitwise)",
        hidden=True,
    )
    torch_compile: Literal["auto", "always", "never"] = flag(
        "auto",
        "compile the model's blocks with torch.compile; auto: on a GPU, in a run of 2,000 steps or "
        "more, but not with --bitwise",
        hidden=True,
        group="batch and memory",
    )

    def __post_init__(self) -> None:
        if self.bitwise and self.sync_each_batch:
            raise UserError("--bitwise has an order of its own; leave --sync_each_batch out.")
        # A larger one overflows.
        require_range(self, "ddp_timeout", at_least=1, at_most=SECONDS_OF_A_YEAR)
        if self.threads is not None:
            require_range(self, "threads", at_least=1, at_most=1024)
        if self.ddp_bucket_cap_mb is not None:
            require_range(self, "ddp_bucket_cap_mb", above=0, below=math.inf)
