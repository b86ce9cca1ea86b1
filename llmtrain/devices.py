"""The CPU cores of this process, and data sheets of GPUs: arithmetic, memory and links.

The numbers of a device that a user writes are read here, too.
"""

import os
import re
from typing import NamedTuple

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

_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}


def known_device(title: str) -> str | None:
    """Return the name of a device in :data:`DEVICES`, or ``None`` if it is not known.

    A name such as ``H100 NVL`` contains that of another device, so all but the brand has to match.

    Args:
        title: the device's name in torch, such as ``NVIDIA H100 PCIe``.
    """
    for name, device in DEVICES.items():
        if f" {title}".endswith(f" {device.title}"):
            return name
    return None


def size_bytes(text: str, source: str = "") -> float:
    """Return the bytes of a size such as ``80gb`` or ``1.5 GiB``, or of a rate such as ``400Gbit``.

    Args:
        text: a number and a unit.
        source: what has the size, for the error message, such as ``--link`` and a space.

    Raises:
        UserError: if the text is neither.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]+?)(/s|ps)?", text.strip().lower())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0.0
    if match and match[3] == "ps" and match[2].endswith("b"):
        size /= 8  # 400Gbps are bits, 400 GB/s are bytes
    if size == 0:
        raise UserError(
            f"{source}{text} is no size; write a number and a unit: 80gb or 24gib of memory, or "
            "400gbit or 50gb of a link in a second."
        )
    return size
