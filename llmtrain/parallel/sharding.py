"""How a run shards its model over the ranks, and the Accelerator that knows it."""

from dataclasses import dataclass
from typing import NoReturn

from accelerate import Accelerator

from llmtrain.errors import UserError
from llmtrain.interfaces.part import Part


@dataclass
class Sharding:
    """How many ranks hold one copy of the model, each of them a shard.

    These are the sizes of the device mesh of torch that Accelerate makes. Its dimensions are named
    ``dp_replicate`` and ``dp_shard``.

    Attributes:
        replicas: copies of the model.
        shards: ranks over which FSDP2 shards each weight.
        cpu_offload: whether FSDP2 keeps the weights in the memory of the host.
    """

    replicas: int
    shards: int
    cpu_offload: bool = False

    @property
    def layout(self) -> str:
        """The sizes as ``run.json`` records them, such as ``1x2``."""
        return f"{self.replicas}x{self.shards}"

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only a shard of the weights."""
        return self.shards > 1

    @property
    def processes(self) -> int:
        """The number of ranks of all replicas."""
        return self.replicas * self.shards


class TrainingAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """Accelerate's Accelerator, which also knows how this run shards models.

    Args:
        sharding: how ranks share models; ``None`` if every rank holds the full model.
        bitwise: whether the bits of the run must not depend on the number of ranks.
        settings: the arguments of Accelerate's own class.
    """

    def __init__(
        self, sharding: Sharding | None = None, bitwise: bool = False, **settings: object
    ) -> None:
        super().__init__(**settings)
        self.sharding = sharding or Sharding(replicas=int(self.num_processes), shards=1)
        self.bitwise = bitwise
        self.registered: list[Part] = []

    def register_for_checkpointing(self, *objects: object) -> NoReturn:
        """Refuse objects, because the checkpoints of a run do not hold them.

        Raises:
            UserError: always.
        """
        _refuse("register_for_checkpointing")

    def register_save_state_pre_hook(self, hook: object) -> NoReturn:
        """Refuse a hook; see :meth:`register_for_checkpointing`."""
        _refuse("register_save_state_pre_hook")

    def register_load_state_pre_hook(self, hook: object) -> NoReturn:
        """Refuse a hook; see :meth:`register_for_checkpointing`."""
        _refuse("register_load_state_pre_hook")


def _refuse(method: str) -> NoReturn:
    raise UserError(
        f"Accelerator.{method} has no effect here: checkpoints hold the model, the optimizer and "
        "the step, and a resumed run would silently start without the rest. Compute what you need "
        "from the step, or make it a buffer of the model."
    )
