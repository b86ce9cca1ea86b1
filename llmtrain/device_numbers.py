"""Numbers that the device computes now and the host reads later, and how precise they can be.

Reading them does not wait for kernels that were launched after them.
"""

from collections.abc import Mapping
from typing import Any

import torch


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the most precise type of floating-point numbers that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


class DeviceNumbers:
    """A copy of a tensor, which begins at once and is read later.

    On CUDA the copy goes to pinned memory, and an event marks its end. On other devices, the tensor
    is copied when it is read.

    Args:
        values: a tensor. It must not be changed before it is read.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._copied: torch.Event | None = None
        if values.device.type == "cuda":
            # A copy to the host that does not block is a copy to pinned memory.
            self._values = values.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> Any:
        """Return the values as (nested) lists, after waiting for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class DeviceScalars:
    """Copies of scalars, which begin at once and are read later.

    Args:
        scalars: tensors without dimensions, by name.
        device: where they are collected, in one tensor.
    """

    def __init__(self, scalars: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._scalars = scalars
        self._copies: DeviceNumbers | None = None
        self._numbers: dict[str, float] | None = None
        # Float64 holds any count. MPS lacks it, so its scalars are read one by one.
        if scalars and device.type != "mps":
            values = [scalar.to(device, torch.float64) for scalar in scalars.values()]
            self._copies = DeviceNumbers(torch.stack(values))

    @property
    def is_read(self) -> bool:
        """Whether the numbers are on the host."""
        return self._numbers is not None

    def read(self) -> dict[str, float]:
        """Return the numbers, after waiting for the copy."""
        if self._numbers is None:
            if self._copies is None:
                numbers = [scalar.item() for scalar in self._scalars.values()]
            else:
                numbers = self._copies.read()
            self._numbers = dict(zip(self._scalars, numbers, strict=True))
        return self._numbers

    def read_tensors(self) -> dict[str, torch.Tensor]:
        """Return the scalars on the host, in their dtypes, after waiting for the copy."""
        return {
            name: torch.tensor(value, dtype=self._scalars[name].dtype)
            for name, value in self.read().items()
        }
