"""The devices to plan for, and their links."""

import time
import timeit
from typing import NamedTuple

import psutil
import torch

from llmtrain.devices import (
    DEVICES,
    USUAL_MFU,
    Device,
    known_device,
    size_bytes,
)
from llmtrain.errors import UserError
from llmtrain.lab.plan.speed import Cluster, Link
from llmtrain.launching.children import gpu_count

# Seconds of the shortest message from one process to another.
NCCL_LATENCY = {"inside": 2e-6, "between": 10e-6}
GLOO_LATENCY = {"inside": 30e-6, "between": 100e-6}

# Sizes of the square matrices whose product measures a CPU, and how often it is computed.
_MATRIX_SIZES = (192, 768)
_PRODUCTS = 20


class PlanRequest(NamedTuple):
    """A recipe, and the hardware to plan it for.

    Attributes:
        recipe: path of the recipe.
        flags: its flags.
        processes: the number of processes.
        device: name of the device; ``None`` for this machine's.
        link: the rate at which a process sends to another machine, such as ``400Gbit``.
        per_machine: processes of a machine; ``None`` for the usual number.
        mfu: the share of its peak that the device reaches.
    """

    recipe: str
    flags: list[str]
    processes: int = 1
    device: str | None = None
    link: str | None = None
    per_machine: int | None = None
    mfu: float = USUAL_MFU


def hardware_of(request: PlanRequest) -> tuple[Device, Cluster]:
    """Return the device of each process, and the machines.

    Raises:
        UserError: if the device or a link is unknown, or an option is out of range.
    """
    if request.processes < 1:
        raise UserError(f"--processes {request.processes}: use at least one process.")
    if request.per_machine is not None and request.per_machine < 1:
        raise UserError(f"--per_machine {request.per_machine}: a machine has at least one process.")
    if not 0 < request.mfu <= 1:
        raise UserError(
            f"--mfu {request.mfu}: write a fraction of the peak, above 0 and at most 1."
        )

    name = device_name(request.device)
    is_gpu = name.lower() != "cpu"
    if is_gpu:
        if name.lower() not in DEVICES:
            names = ", ".join(DEVICES)
            raise UserError(f"--device {name} is not known; use one of {names}, or cpu.")
        device = DEVICES[name.lower()]
        per_machine = request.per_machine or device.per_machine
    else:
        per_machine = request.per_machine or 1
        device = _this_cpu(per_machine)

    if request.processes > per_machine and not request.link:
        raise UserError(
            f"--processes {request.processes} takes several machines with {per_machine} processes "
            "each: add the rate at which a process sends to another machine, such as "
            "--link 400Gbit."
        )
    latency = NCCL_LATENCY if is_gpu else GLOO_LATENCY
    bandwidth_between = size_bytes(request.link, "--link ") if request.link else device.link
    cluster = Cluster(
        per_machine=per_machine,
        inside=Link(bandwidth=device.link, latency=latency["inside"]),
        between=Link(bandwidth=bandwidth_between, latency=latency["between"]),
        nccl=is_gpu,
    )
    return device, cluster


def device_name(requested: str | None) -> str:
    """Return the name of the device to plan for: this machine's, if none is requested.

    Raises:
        UserError: if this machine's GPU is unknown.
    """
    if requested:
        return requested
    if gpu_count() == 0:
        return "cpu"

    title = torch.cuda.get_device_name()
    name = known_device(title)
    if name is None:
        raise UserError(
            f"this machine's {title} is unknown; choose a device with --device: "
            f"{', '.join(DEVICES)}, or cpu."
        )
    return name


def _this_cpu(processes: int) -> Device:
    """Measure the memory of this machine's CPU, and divide it among some processes.

    Its peak depends on the precision of the recipe: see :func:`measured_peak`.
    """
    source = torch.ones(1 << 24)
    target = torch.empty(1 << 24)
    copy_seconds = min(timeit.repeat(lambda: target.copy_(source), number=1))
    memory_bandwidth = 2 * source.nbytes / copy_seconds  # read and written

    return Device(
        title="cpu",
        peak=0.0,
        memory=psutil.virtual_memory().total / processes,
        memory_bandwidth=memory_bandwidth / processes,
        link=memory_bandwidth / 4,
    )


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product, the best of several."""
    best = 0.0
    for size in _MATRIX_SIZES:
        flops = 2 * size**3
        # If the larger product would take more than a second, this precision is emulated here.
        if best and _PRODUCTS * flops / best > 1:
            break

        a = torch.ones(size, size, device=device, dtype=dtype)
        b = torch.ones(size, size, device=device, dtype=dtype)
        float((a @ b)[0, 0])  # the first product loads the kernel
        for _ in range(_PRODUCTS):
            start = time.perf_counter()
            float((a @ b)[0, 0])  # reading the result waits for the device
            best = max(best, flops / (time.perf_counter() - start))
    return best
