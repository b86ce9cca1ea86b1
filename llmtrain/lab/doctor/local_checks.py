"""Checks of one machine, which a single process makes."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from llmtrain.devices import cpu_cores
from llmtrain.errors import UserError, first_line
from llmtrain.files import new_folder
from llmtrain.launching.accelerator import use_cpu
from llmtrain.launching.launch_request import check_launch
from llmtrain.locks import file_lock
from llmtrain.versions import versions

# The levels of a finding.
GOOD = "ok"
DOUBTFUL = "look"
BAD = "BAD"

_PACKAGES_SHOWN = ("python", "llmtrain", "torch", "accelerate", "transformers")

# With less than this, a finding is doubtful.
_DISK_BYTES = 20 * 2**30
_SHARED_MEMORY_BYTES = 2**28  # Docker gives 64 MiB
_FREE_GPU_MEMORY = 0.9  # share of all memory


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f" - {self.remedy}" if self.remedy else ""
        return f"{self.level:<5} {self.subject:<11} {self.text}{remedy}"


def findings(output_dir: Path) -> list[Finding]:
    """Return the findings about this process's machine.

    Of several processes, the first reports for the machine, and the others only for their GPUs.
    """
    full_gpus = [*_full_gpus()]
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return full_gpus
    return [_versions(), *_launch(), _devices(), *full_gpus, *_shared_memory(), _folder(output_dir)]


def _versions() -> Finding:
    installed = versions()
    text = ", ".join(f"{package} {installed[package]}" for package in _PACKAGES_SHOWN)
    return Finding(GOOD, "versions", text)


def _launch() -> Iterator[Finding]:
    try:
        check_launch()
        use_cpu()
    except UserError as error:
        yield Finding(BAD, "launch", str(error))

    processes = os.environ.get("WORLD_SIZE", "1")
    noun = "process" if processes == "1" else "processes"
    variables = [
        f"{name} {value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
    ]
    settings = ", ".join(variables) or "no settings of accelerate"
    yield Finding(GOOD, "launch", f"{processes} {noun}; {settings}")


# --- devices and memory


def _devices() -> Finding:
    cores = f"{cpu_cores()} CPU cores"
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None and shutil.which("nvidia-smi"):
        return Finding(
            BAD,
            "devices",
            f"this PyTorch ({torch.__version__}) sees no GPU, although nvidia-smi is installed",
            remedy="install a PyTorch for the CUDA version of the driver, which nvidia-smi shows",
        )
    if device is None:
        return Finding(GOOD, "devices", f"no GPU, {cores}")

    names = {device.type}
    if device.type == "cuda":
        names = {torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())}
    limit = ", usable by one process only" if device.type == "mps" else ""
    count = torch.accelerator.device_count()
    return Finding(GOOD, "devices", f"{count} x {', '.join(sorted(names))}{limit}, {cores}")


def _full_gpus() -> Iterator[Finding]:
    """Look for GPUs whose memory others use: all, or that of this one of several processes."""
    gpus = range(torch.cuda.device_count())
    # Reading the free memory of a GPU takes some of it.
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        gpus = gpus[local_rank : local_rank + 1]
    for gpu in gpus:
        free, total = torch.cuda.mem_get_info(gpu)
        if free / total < _FREE_GPU_MEMORY:
            text = f"GPU {gpu} has {free / total:.0%} of its memory free"
            remedy = "another process uses the rest: see nvidia-smi"
            yield Finding(DOUBTFUL, "devices", text, remedy)


def _shared_memory() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    size = shutil.disk_usage(shared).total if shared.is_dir() else _SHARED_MEMORY_BYTES
    if size < _SHARED_MEMORY_BYTES:
        text = f"/dev/shm has {size / 2**20:.0f} MiB, too little for NCCL"
        remedy = "start the container with --ipc=host or --shm-size=8g"
        yield Finding(DOUBTFUL, "memory", text, remedy)


# --- the run folder


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in [folder, *folder.parents, Path()] if path.exists())


def _folder(output_dir: Path) -> Finding:
    """Try everything that a run does in its folder: write, append, flush to disk, rename, lock."""
    folder = nearest_existing(output_dir)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
            with new_folder(Path(scratch, "new")) as created:
                (created / "file").write_bytes(b"1" * 4096)
            for _ in range(2):  # a bucket that is mounted without a cache takes only new files
                with Path(scratch, "log").open("a") as log:
                    log.write("1\n")
            with file_lock(Path(scratch, ".lock"), timeout=0) as has_locks:
                pass
    except OSError as error:
        text = f"{folder}: {error.strerror or first_line(error)}"
        return Finding(BAD, "run folder", text, remedy="use another folder with --output_dir")

    free = shutil.disk_usage(folder).free
    locks = "locks" if has_locks else "has no locks"
    text = (
        f"{folder.absolute()} writes, appends, flushes, renames and {locks}; "
        f"{free / 2**30:.1f} GiB are free"
    )
    if free >= _DISK_BYTES:
        return Finding(GOOD, "run folder", text)
    remedy = "make room for two checkpoints, each of three times the weights or more"
    return Finding(DOUBTFUL, "run folder", text, remedy)


def uses_gloo() -> bool:
    """Return whether the processes of a run would connect over gloo rather than NCCL.

    They do if they train on the CPU, or if there are too few GPUs for them.
    """
    with contextlib.suppress(UserError):  # it is among the findings
        return use_cpu()
    return True
