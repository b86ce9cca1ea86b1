"""An optimizer whose state has every form that a checkpoint can hold, and whose steps need all of it."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class Odd(torch.optim.Optimizer):
    """Momentum, with much else that changes the steps.

    Attributes:
        entries: what it adds to its ``state_dict``, and keeps nowhere else.
    """

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "step": 0})
        for group in self.param_groups:
            [p, *_] = group["params"]
            if isinstance(p, DTensor):  # a single row, so only the first rank has numbers of it
                placements = [*[Replicate()] * (p.device_mesh.ndim - 1), Shard(0)]
                group["row"] = distribute_tensor(torch.zeros(1, 2), p.device_mesh, placements)
        self.entries: dict[str, Any] = {"name": "odd", "inner": {"count": 0, "function": len}}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "odd": self.entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.entries = state_dict["odd"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.entries["inner"]["count"] += 1
        self.state["global"] = {"steps": self.entries["inner"]["count"], "seen": {1, 2}}  # type: ignore[index]
        for group in self.param_groups:
            group["step"] += 1
            if "row" in group:
                group["row"].add_(1)
            group["mean"] = group.get("mean", torch.zeros(())) + group["step"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(_first_state(p))
                self._update(p, state, group)

    def _update(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> None:
        gradient = p.grad.float()
        state["moment"].lerp_(gradient, 0.1)
        state["codes"].add_(state["codes"] % 7 + 1)
        for value in state[0]["list"]:
            if value is not None:
                value.add_(0.25)
        state["plain"].add_(1)
        state["label"] = f"step {group['step']}"
        state["count"] = (*state["count"][-2:], group["step"])

        entries = self.state["global"]["steps"] + self.entries["inner"]["count"]  # type: ignore[index]
        scale = sum(float(value.sum()) for value in state[0]["list"] if value is not None)
        scale += float(state["plain"].mean()) + float(group["mean"]) + sum(state["count"]) + entries
        update = state["moment"] * (1 + scale / 1000) + state["codes"].float() / 1000
        p.add_((update * -group["lr"]).to(p.dtype))


def _first_state(p: torch.Tensor) -> dict[Any, Any]:
    state: dict[Any, Any] = {
        "moment": torch.zeros_like(p, dtype=torch.float32),
        "codes": torch.zeros_like(p, dtype=torch.uint8),
        "plain": torch.zeros(p.shape),
        "label": "",
        "count": (),
        0: {"list": [torch.zeros(()), None]},
    }
    if isinstance(p, DTensor):
        mesh = p.device_mesh
        wide = torch.zeros(3, 5)
        outer = [Replicate()] * (mesh.ndim - 1)
        for inner in (Shard(1), Shard(0), Replicate()):
            sharded = distribute_tensor(wide, mesh, [*outer, inner])
            state[0]["list"].append(sharded)
    return state
