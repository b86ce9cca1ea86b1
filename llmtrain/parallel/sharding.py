"""The Accelerator of a run, which knows the ranks."""

from collections.abc import Mapping
from typing import Any, NoReturn

from accelerate import Accelerator

from llmtrain.errors import UserError
from llmtrain.interfaces.part import Part, name_of
from llmtrain.parallel.ranks import Ranks, Sharding


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
    """Accelerate's Accelerator, which also holds the :class:`Ranks` of the run.

    Args:
        sharding: how ranks share models; ``None`` if every rank holds the full model.
        bitwise: whether the bits of the run must not depend on the number of ranks.
        settings: the arguments of Accelerate's own class.

    Attributes:
        ranks: who this process is, and how the ranks share models.
        registered: the objects of :meth:`register_for_checkpointing`, in order.
    """

    def __init__(
        self, sharding: Sharding | None = None, bitwise: bool = False, **settings: object
    ) -> None:
        super().__init__(**settings)
        replicated = Sharding(replicas=int(self.num_processes), shards=1)
        self.ranks = Ranks(self, sharding or replicated)
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


def ranks_of(accelerator: Accelerator) -> Ranks:
    """Return the ranks that an Accelerator of :func:`llmtrain.start` holds.

    Raises:
        UserError: if it is another Accelerator.
    """
    if not isinstance(accelerator, TrainingAccelerator):
        raise UserError("use the Accelerator that llmtrain.start() makes, instead of another one.")
    return accelerator.ranks
