"""An optimizer with every kind of state that a checkpoint can hold. Most of it changes a step."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class Odd(torch.optim.Optimizer):
    """Momentum, with much further state that changes the steps."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "step": 0, "function": len})
        for group in self.param_groups:
            [p, *_] = group["params"]
            if isinstance(p, DTensor):
                # It has a single row, so only the first rank has numbers in its shard.
                placements = [*[Replicate()] * (p.device_mesh.ndim - 1), Shard(0)]
                group["row"] = distribute_tensor(torch.zeros(1, 2), p.device_mesh, placements)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            group["mean"] = group.get("mean", torch.zeros(())) + group["step"]
            if "row" in group:
                group["row"].add_(1)

            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(_first_state(p))
                self._change_state(p, group)
                self._change_parameter(p, group)

    def _change_state(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["moment"].lerp_(p.grad.float(), 0.1)
        state["codes"].add_(state["codes"] % 7 + 1)
        for value in state[0]["list"]:
            if value is not None:
                value.add_(0.25)

        state["seen"].add(group["step"] % 3)
        state["label"] = f"step {group['step']}"
        state["count"] = (*state["count"][-2:], group["step"])

    def _change_parameter(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        """Change a parameter by its momentum, times a factor that depends on the other numbers."""
        state = self.state[p]
        numbers = [float(value.sum()) for value in state[0]["list"] if value is not None]
        numbers += [float(group["mean"]), *state["count"]]

        factor = 1 + sum(numbers) / 1000
        change = state["moment"] * factor + state["codes"].float() / 1000
        p.add_((change * -group["lr"]).to(p.dtype))


def _first_state(p: torch.Tensor) -> dict[Any, Any]:
    """Return the state of a parameter before its first step."""
    state: dict[Any, Any] = {
        "moment": torch.zeros_like(p, dtype=torch.float32),
        "codes": torch.zeros_like(p, dtype=torch.uint8),
        "seen": set(),
        "label": "",
        "count": (),
        0: {"list": [torch.zeros(()), None]},
    }
    if isinstance(p, DTensor):
        mesh = p.device_mesh
        matrix = torch.zeros(3, 5)
        outer = [Replicate()] * (mesh.ndim - 1)
        for inner in (Shard(1), Shard(0), Replicate()):
            sharded = distribute_tensor(matrix, mesh, [*outer, inner])
            state[0]["list"].append(sharded)
    return state
