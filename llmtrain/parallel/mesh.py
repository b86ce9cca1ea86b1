"""Which ranks share a model, and which ranks share a batch."""

from dataclasses import dataclass, field
from typing import NoReturn

from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmtrain.errors import UserError


@dataclass
class Sharding:
    """How many ranks hold one copy of the model, and how they divide it.

    Each of the ``replicas`` is a group of ``shards`` x ``stages`` x ``tensor`` ranks that holds
    one copy of the model. Within a group, ``stages`` x ``tensor`` neighbouring ranks compute on
    the same rows of the batch.

    Attributes:
        replicas: copies of the model.
        shards: ranks over which FSDP2 shards each weight.
        cpu_offload: whether FSDP2 keeps the weights in the memory of the host.
        tensor: ranks over which tensor parallelism shards each matrix.
        stages: pipeline stages.
        mesh: the mesh of all ranks, which :meth:`set_mesh` makes.
    """

    replicas: int
    shards: int
    cpu_offload: bool = False
    tensor: int = 1
    stages: int = 1
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)

    @property
    def method(self) -> str:
        """The parallel methods in words, such as ``FSDP2 and tensor parallelism (2)``."""
        methods = []
        if self.shards > 1 or self.model_parallel_size == 1:
            methods.append("FSDP2")
        if self.tensor > 1:
            methods.append(f"tensor parallelism ({self.tensor})")
        if self.stages > 1:
            methods.append(f"{self.stages} stages")
        return " and ".join(methods)

    @property
    def layout(self) -> str:
        """The sizes as ``run.json`` records them, such as ``1x2x2`` or ``2x1 in 2 stages``."""
        layout = f"{self.replicas}x{self.shards}"
        if self.tensor > 1:
            layout += f"x{self.tensor}"
        if self.stages > 1:
            layout += f" in {self.stages} stages"
        return layout

    @property
    def processes(self) -> int:
        """The number of ranks of all replicas."""
        return self.replicas * self.shards * self.model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """The number of neighbouring ranks that compute on the same rows."""
        return self.stages * self.tensor

    def submesh(self, *names: str) -> DeviceMesh:
        """Return the mesh of some dimensions: ``dp_replicate``, ``dp_shard``, ``pp``, ``tp``."""
        assert self.mesh is not None, "set_mesh() comes first"
        return self.mesh[names]

    def set_mesh(self, accelerator: Accelerator) -> None:
        """Make the mesh if several ranks compute on the same rows, and hand it to Accelerate.

        Accelerate needs it to give those ranks the same rows. All ranks call this.
        """
        if self.model_parallel_size == 1:
            return

        device = accelerator.device.type
        self.mesh = init_device_mesh(
            device,
            (self.replicas, self.shards, self.stages, self.tensor),
            mesh_dim_names=("dp_replicate", "dp_shard", "pp", "tp"),
        )

        # Accelerate expects the ranks with the same rows in a single dimension, named "tp".
        if self.stages > 1:
            accelerator.state.device_mesh = init_device_mesh(
                device,
                (self.replicas, self.shards, self.model_parallel_size),
                mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
            )
        else:
            accelerator.state.device_mesh = self.submesh("dp_replicate", "dp_shard", "tp")


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


def sharding_of(accelerator: Accelerator) -> Sharding:
    """Return how models are sharded: into one shard if every rank holds the full model."""
    if isinstance(accelerator, TrainingAccelerator):
        return accelerator.sharding
    return Sharding(replicas=int(accelerator.num_processes), shards=1)
