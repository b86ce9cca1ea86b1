"""How a run shards its model over the ranks, and the Accelerator that knows it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from accelerate import Accelerator

from llmtrain.errors import UserError
from llmtrain.interfaces.part import Part, name_of


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


class RegisteredPart(Part):
    """An object that was registered with the Accelerator: its state is in every checkpoint.

    Args:
        name: the name of the part.
        stateful: an object with ``state_dict`` and ``load_state_dict``.
    """

    fingerprint = None

    def __init__(self, name: str, stateful: Any) -> None:
        self.name = name
        self._stateful = stateful

    def state_dict(self) -> Any:
        return self._stateful.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stateful.load_state_dict(state)


class TrainingAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """Accelerate's Accelerator, which also knows how this run shards models.

    Args:
        sharding: how ranks share models; ``None`` if every rank holds the full model.
        bitwise: whether the bits of the run must not depend on the number of ranks.
        settings: the arguments of Accelerate's own class.

    Attributes:
        registered: the objects of :meth:`register_for_checkpointing`, in order.
    """

    def __init__(
        self, sharding: Sharding | None = None, bitwise: bool = False, **settings: object
    ) -> None:
        super().__init__(**settings)
        self.sharding = sharding or Sharding(replicas=int(self.num_processes), shards=1)
        self.bitwise = bitwise
        self.registered: list[Part] = []

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let the checkpoints of a run hold the states of these objects.

        Register the objects in the same order at every start. Their names in a checkpoint are
        those of their classes, with -2, -3 and so on if there are several.

        Raises:
            UserError: if an object does not have ``state_dict`` and ``load_state_dict``.
        """
        for stateful in objects:
            class_name = type(stateful).__name__
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(stateful, method, None)):
                    raise UserError(
                        f"register_for_checkpointing got a {class_name}, which has no {method}; "
                        "give it state_dict and load_state_dict."
                    )
            names = {name_of(part) for part in self.registered}
            name = class_name
            number = 2
            while name in names:
                name = f"{class_name}-{number}"
                number += 1
            self.registered.append(RegisteredPart(name, stateful))

    def register_save_state_pre_hook(self, hook: object) -> NoReturn:
        """Refuse a hook, because a run does not call ``save_state``.

        Raises:
            UserError: always.
        """
        _refuse("register_save_state_pre_hook")

    def register_load_state_pre_hook(self, hook: object) -> NoReturn:
        """Refuse a hook; see :meth:`register_save_state_pre_hook`."""
        _refuse("register_load_state_pre_hook")


def _refuse(method: str) -> NoReturn:
    raise UserError(
        f"Accelerator.{method} has no effect here: a run does not call save_state. Register an "
        "object with state_dict and load_state_dict with Accelerator.register_for_checkpointing."
    )
