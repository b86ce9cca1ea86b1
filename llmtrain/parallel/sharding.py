"""The Accelerator of a run, which knows the ranks."""

from typing import NoReturn

from accelerate import Accelerator

from llmtrain.errors import UserError
from llmtrain.parallel.ranks import Ranks, Sharding


class TrainingAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """Accelerate's Accelerator, which also knows how this run shards models.

    Args:
        sharding: how ranks share models; ``None`` if every rank holds the full model.
        bitwise: whether the bits of the run must not depend on the number of ranks.
        settings: the arguments of Accelerate's own class.

    Attributes:
        ranks: who this process is, and how the ranks share models.
    """

    def __init__(
        self, sharding: Sharding | None = None, bitwise: bool = False, **settings: object
    ) -> None:
        super().__init__(**settings)
        replicated = Sharding(replicas=int(self.num_processes), shards=1)
        self.ranks = Ranks(self, sharding or replicated)
        self.bitwise = bitwise

    def register_for_checkpointing(self, *objects: object) -> NoReturn:
        """Refuse objects, because a run does not call ``save_state``."""
        raise UserError(
            "Accelerator.register_for_checkpointing has no effect here; return the state from the "
            "state_dict of a llmtrain.Callback."
        )


def ranks_of(accelerator: Accelerator) -> Ranks:
    """Return the ranks that an Accelerator of :func:`llmtrain.start` holds.

    Raises:
        UserError: if it is another Accelerator.
    """
    if not isinstance(accelerator, TrainingAccelerator):
        raise UserError("use the Accelerator that llmtrain.start() makes, instead of another one.")
    return accelerator.ranks
