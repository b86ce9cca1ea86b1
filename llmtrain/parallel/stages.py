"""Pipeline stages: which stage holds a tensor, and how to gather it from there."""

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.mesh import Sharding, sharding_of
from llmtrain.parallel.shards import meta_like


@runtime_checkable
class Staged(Protocol):
    """A model that can be split into pipeline stages.

    Its ``forward`` computes the layers of one stage. It returns hidden states, or the summed
    negative log-likelihood on the last stage.
    """

    @property
    def width(self) -> int:
        """The size of the hidden states that a stage sends to the next one."""

    def stages_of(self, name: str, stages: int) -> tuple[int, ...]:
        """Return which of ``stages`` hold a parameter."""

    def keep(self, stage: int, stages: int) -> None:
        """Let ``forward`` compute only the layers of a stage from now on."""


def holders_of(model: nn.Module, stages: int) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter, by name.

    A tied parameter has several holders, such as an embedding that is also the head.
    """
    names = [name for name, _ in model.named_parameters()]
    if not isinstance(model, Staged):
        return dict.fromkeys(names, (0,))
    return {name: model.stages_of(name, stages) for name in names}


def select_stage(model: nn.Module, sharding: Sharding) -> set[nn.Parameter]:
    """Turn a model, in place, into this rank's pipeline stage.

    Returns:
        The parameters that only other stages hold. The set is empty if there is one stage.

    Raises:
        UserError: if there are several stages and the model cannot be split.
    """
    if sharding.stages == 1:
        return set()
    if not isinstance(model, Staged):
        raise UserError(
            f"{type(model).__name__} cannot be split into stages; leave out --pipeline_stages."
        )

    stage = sharding.submesh("pp").get_local_rank()
    model.keep(stage, sharding.stages)
    return {
        parameter
        for name, parameter in model.named_parameters()
        if stage not in model.stages_of(name, sharding.stages)
    }


def gather_stages(
    accelerator: Accelerator, model: nn.Module, tensors: dict[str, torch.Tensor]
) -> DistributedTensors:
    """Describe the tensors of all pipeline stages. All ranks call this.

    Stages exchange only names, shapes and dtypes. :meth:`DistributedTensors.gather_to` gathers
    values.

    Args:
        accelerator: the Accelerator of this run.
        model: the model to which the tensors belong.
        tensors: the tensors of this rank by name. A name is that of a parameter, or of a parameter
            and a key of the optimizer (``wte.weight.exp_avg``). Tensors of other stages may be
            missing or on the meta device.
    """
    sharding = sharding_of(accelerator)
    if sharding.stages == 1:
        return DistributedTensors(tensors)

    mesh = sharding.submesh("pp")
    stage = mesh.get_local_rank()
    first_holders = {name: stages[0] for name, stages in holders_of(model, sharding.stages).items()}

    # Tied tensors are gathered from the first stage that holds them.
    own_tensors = {}
    for name, tensor in tensors.items():
        parameter = name if name in first_holders else name.rpartition(".")[0]
        if first_holders[parameter] == stage:
            own_tensors[name] = tensor

    own_shapes = {name: meta_like(tensor) for name, tensor in own_tensors.items()}
    shapes_by_stage: list[dict[str, torch.Tensor]] = [{}] * sharding.stages
    dist.all_gather_object(shapes_by_stage, own_shapes, mesh.get_group())

    all_tensors: dict[str, torch.Tensor] = {}
    holders: dict[str, int] = {}
    for holder, shapes in enumerate(shapes_by_stage):
        all_tensors.update(own_tensors if holder == stage else shapes)
        holders.update(dict.fromkeys(shapes, holder))
    return DistributedTensors(tensors=all_tensors, holders=holders, stages=sharding.stages)
