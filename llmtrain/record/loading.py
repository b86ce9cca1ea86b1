"""Load tensors from a run folder onto all ranks, and check tensors before they are saved."""

from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.utils import broadcast
from torch import nn

from llmtrain.errors import UserError
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import fill, local_shard
from llmtrain.parallel.team import Team
from llmtrain.record.tensors import read_headers, read_tensors
from llmtrain.types import ModelWriter


def load_weights(files: ModelWriter, model: nn.Module, folder: Path, device: torch.device) -> None:
    """Fill a model, in place, with the weights in a folder that rank 0 sees.

    Args:
        files: which tensors of the model are stored.
        model: the model, whose parameters may be sharded.
        folder: the folder with the weights. Other ranks need not see it.
        device: the device over which rank 0 sends them.
    """
    fill(files.tensors(model), tensors_from_main(folder, device))


def tensors_from_main(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder that rank 0 sees, by name and one at a time, on every rank."""
    team = Team.everyone()
    if team.group is None:
        yield from read_tensors(folder)
        return

    tensors = read_tensors(folder) if team.is_main else None
    for name, shape, dtype in team.on_main(lambda: read_headers(folder)):
        if tensors is not None:
            _, tensor = next(tensors)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        yield name, broadcast(tensor.to(device))


def check_finite(model: nn.Module, ranks: Ranks) -> None:
    """Check that all parameters are finite, on every rank.

    Raises:
        UserError: on every rank, if a parameter is not.
    """
    parameters = dict(model.named_parameters())
    flags = []
    for parameter in parameters.values():
        if parameter.is_meta:  # another pipeline stage holds it
            flags.append(torch.zeros((), dtype=torch.bool, device=ranks.device))
        else:
            is_bad = (~torch.isfinite(local_shard(parameter))).any()
            flags.append(is_bad.to(ranks.device))

    # Each rank has checked only the shards that it holds.
    bad_counts = ranks.accelerator.reduce(torch.stack(flags).int(), reduction="sum")
    for name, bad_count in zip(parameters, bad_counts.tolist(), strict=True):
        if bad_count > 0:
            raise UserError(
                f"{name} has values that are not finite, so nothing was saved; "
                "lower --learning_rate."
            )
