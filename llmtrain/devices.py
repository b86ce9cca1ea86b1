"""The CPU cores of this process, and data sheets of GPUs: arithmetic, memory and links."""

import os
import re
from typing import NamedTuple

from llmtrain.config.unknown_names import did_you_mean
from llmtrain.errors import UserError

# The share of a GPU's memory that tensors cannot have: the context of CUDA and NCCL takes some, and
# the allocator leaves gaps.
RESERVED_MEMORY = 0.06


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Device(NamedTuple):
    """An accelerator.

    Attributes:
        title: its name in ``torch.cuda.get_device_name()``, without the brand.
        peak: FLOP/s of dense 16-bit matrix products.
        memory: bytes that a process can use, which are less than the data sheet says.
        memory_bandwidth: bytes/s.
        link: bytes/s that it sends to its neighbours in the same machine, while it receives as
            many.
    """

    title: str
    peak: float
    memory: float
    memory_bandwidth: float
    link: float

    @property
    def per_machine(self) -> int:
        """The usual number in a machine."""
        return 8 if self.link >= 100e9 else 4


_GIB = 2**30

_BRANDS = re.compile(r"^(NVIDIA |Tesla |GeForce )*")  # at the beginning of a name in torch

DEVICES = {  # by the names that --device takes
    "h100-pcie": Device("H100 PCIe", 756e12, 79 * _GIB, 2.0e12, 64e9),
    "h100-80gb": Device("H100 80GB HBM3", 989e12, 79 * _GIB, 3.35e12, 450e9),
    "h200-141gb": Device("H200", 989e12, 139 * _GIB, 4.8e12, 450e9),
    "b200-180gb": Device("B200", 2250e12, 178 * _GIB, 7.7e12, 900e9),
    "a100-40gb": Device("A100-SXM4-40GB", 312e12, 39 * _GIB, 1.555e12, 300e9),
    "a100-80gb": Device("A100-SXM4-80GB", 312e12, 79 * _GIB, 2.039e12, 300e9),
    "a100-pcie-40gb": Device("A100-PCIE-40GB", 312e12, 39 * _GIB, 1.555e12, 32e9),
    "a100-pcie-80gb": Device("A100 80GB PCIe", 312e12, 79 * _GIB, 1.935e12, 32e9),
    "l40s-48gb": Device("L40S", 362e12, 44 * _GIB, 0.864e12, 32e9),
    "l40-48gb": Device("L40", 181e12, 44 * _GIB, 0.864e12, 32e9),
    "l4-24gb": Device("L4", 121e12, 22 * _GIB, 0.3e12, 32e9),
    "rtx4090-24gb": Device("RTX 4090", 165e12, 23 * _GIB, 1.008e12, 32e9),
    "v100-32gb": Device("V100-SXM2-32GB", 125e12, 31 * _GIB, 0.9e12, 150e9),
    "t4-16gb": Device("T4", 65e12, 14 * _GIB, 0.32e12, 16e9),
}

# The share of its peak that a GPU reaches in a well-tuned run. Plans assume it if nothing was
# measured.
USUAL_MFU = 0.4

_BYTES_PER_UNIT = {
    "bit": 1 / 8,
    "kbit": 1e3 / 8,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    "mb": 1e6,
    "gb": 1e9,
}


def get_device(name: str) -> Device:
    """Return the device with a name that ``--device`` takes.

    Raises:
        UserError: if there is no such device. The message lists the names.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        suggestion = did_you_mean(name.lower(), DEVICES) or "."
        raise UserError(
            f"--device {name} is not known{suggestion} Use one of {', '.join(DEVICES)}, or cpu."
        )
    return device


def known_device(title: str) -> str | None:
    """Return the name of a device in :data:`DEVICES`, or ``None`` if it is not known.

    A name such as ``H100 NVL`` contains that of another device, so the whole name has to match.

    Args:
        title: the device's name in torch, such as ``NVIDIA H100 PCIe``.
    """
    without_brand = _BRANDS.sub("", title)
    for name, device in DEVICES.items():
        if device.title == without_brand:
            return name
    return None


def bytes_per_second(text: str) -> float:
    """Parse a rate, such as 400Gbit or 50GB or 50GB/s.

    Raises:
        UserError: if the text is not a rate, or if the rate is 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+?)(?:/s|ps)?\s*", text)
    unit = _BYTES_PER_UNIT.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise UserError(f"--link {text}: write a rate per second, such as 400Gbit or 50GB.")
    return float(match[1]) * unit
