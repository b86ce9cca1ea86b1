"""Checks of one machine, which a single process makes."""

import contextlib
import http.client
import importlib.metadata
import os
import platform
import shlex
import shutil
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from llmtrain.devices import cpu_cores
from llmtrain.errors import UserError, first_line
from llmtrain.files import new_folder
from llmtrain.launching.accelerator import cpu_has_bfloat16, use_cpu
from llmtrain.launching.launch_checks import check_launch
from llmtrain.locks import file_lock
from llmtrain.versions import version_of, versions

# The levels of a finding.
GOOD = "good"
DOUBTFUL = "doubtful"
BAD = "bad"

_PACKAGES_SHOWN = ("python", "llmtrain", "torch", "accelerate", "transformers")
_SERVER_TIMEOUT = 5.0  # seconds

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


def findings(output_dir: Path, on_cpu: bool) -> list[Finding]:
    """Return the findings about this process's machine.

    Args:
        output_dir: the folder in which runs are kept.
        on_cpu: whether the user chose the CPU.
    """
    return [
        *_versions(),
        *_launch(on_cpu),
        *_devices(),
        *_memory(),
        *_folder(output_dir),
        *_servers(),
    ]


# --- versions


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    requirements: list[Requirement] = []
    # A checkout may be on the path without being installed.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines = importlib.metadata.requires("llmtrain") or []
        requirements = [Requirement(line) for line in lines]

    installed = versions()
    text = ", ".join(f"{package} {installed[package]}" for package in _PACKAGES_SHOWN)
    install_command = ["pip", "install"]
    is_bad = False
    for requirement in requirements:
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies:
            continue
        version = version_of(requirement.name)
        is_met = bool(version) and requirement.specifier.contains(version, prereleases=True)
        if not is_met:
            is_bad = True
            text += (
                f"; {requirement.name} is {version or 'not installed'}, "
                f"but {requirement.specifier or 'any version'} is needed"
            )
            install_command.append(f"{requirement.name}{requirement.specifier}")

    if is_bad:
        yield Finding(BAD, "versions", text, remedy=shlex.join(install_command))
    else:
        yield Finding(GOOD, "versions", text)


# --- the launcher


def _launch(on_cpu: bool) -> Iterator[Finding]:
    try:
        check_launch()
        use_cpu(on_cpu)
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


def _devices() -> Iterator[Finding]:
    cores = f"{cpu_cores()} CPU cores"

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        yield from _cpu(cores)
    elif device.type == "cuda":
        yield from _gpus(cores)
    else:
        limit = ", usable by one process only" if device.type == "mps" else ""
        count = torch.accelerator.device_count()
        yield Finding(GOOD, "devices", f"{count} x {device.type}{limit}, {cores}")
        yield Finding(GOOD, "precision", "float32 by default")


def _cpu(cores: str) -> Iterator[Finding]:
    if shutil.which("nvidia-smi"):
        yield Finding(
            BAD,
            "devices",
            f"this PyTorch ({torch.__version__}) sees no GPU, although nvidia-smi is installed",
            remedy="install a PyTorch for the CUDA version of the driver, which nvidia-smi shows",
        )
    else:
        yield Finding(GOOD, "devices", f"no GPU, {cores}")

    if cpu_has_bfloat16():
        yield Finding(GOOD, "precision", "float32 and bfloat16")
    else:
        yield Finding(GOOD, "precision", "float32; this CPU only emulates bfloat16, which is slow")


def _gpus(cores: str) -> Iterator[Finding]:
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(gpu) for gpu in range(count)}
    yield Finding(GOOD, "devices", f"{count} x {', '.join(sorted(names))}, {cores}")

    # Reading the free memory of a GPU takes some of it. So each of several processes looks at its
    # own GPU only.
    gpus = range(count)
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        gpus = gpus[local_rank : local_rank + 1]
    for gpu in gpus:
        free, total = torch.cuda.mem_get_info(gpu)
        if free / total < _FREE_GPU_MEMORY:
            yield Finding(
                DOUBTFUL,
                "devices",
                f"GPU {gpu} has {free / total:.0%} of its memory free",
                remedy="another process uses the rest: see nvidia-smi",
            )

    if torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding(GOOD, "precision", "bfloat16 and float32")
    else:
        yield Finding(GOOD, "precision", "float16 and float32, but no bfloat16")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    free_gib = memory.available / 2**30
    total_gib = memory.total / 2**30
    yield Finding(GOOD, "memory", f"{free_gib:.1f} of {total_gib:.1f} GiB are free")

    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    size = shutil.disk_usage(shared).total
    if size < _SHARED_MEMORY_BYTES:
        yield Finding(
            DOUBTFUL,
            "memory",
            f"/dev/shm has {size / 2**20:.0f} MiB, too little for NCCL",
            remedy="start the container with --ipc=host or --shm-size=8g",
        )


# --- the run folder


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in [folder, *folder.parents, Path()] if path.exists())


def _folder(output_dir: Path) -> Iterator[Finding]:
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
        yield Finding(
            BAD,
            "run folder",
            f"{folder}: {error.strerror or first_line(error)}",
            remedy="use another folder with --output_dir",
        )
        return

    free = shutil.disk_usage(folder).free
    locks = "locks" if has_locks else "has no locks"
    text = (
        f"{folder.absolute()} writes, appends, flushes, renames and {locks}; "
        f"{free / 2**30:.1f} GiB are free"
    )
    if free < _DISK_BYTES:
        yield Finding(
            DOUBTFUL,
            "run folder",
            text,
            remedy="make room for two checkpoints, each of three times the weights or more",
        )
    else:
        yield Finding(GOOD, "run folder", text)


# --- servers


def _servers() -> Iterator[Finding]:
    """Try to reach Weights & Biases and the hub, unless a run would not use them."""
    mode = os.environ.get("WANDB_MODE", "")
    yield _server(
        "wandb",
        url=os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"),
        offline=f"WANDB_MODE is {mode}" if mode in ("offline", "disabled") else "",
        remedy="runs are logged offline; upload them later with wandb sync",
    )

    offline = ""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        offline = "HF_HUB_OFFLINE is set: only folders and the cache are used"
    yield _server(
        "hub",
        url=os.environ.get("HF_ENDPOINT", "https://huggingface.co"),
        offline=offline,
        remedy="use folders instead of hub names, or set HF_HUB_OFFLINE=1 to use the cache",
    )


def _server(subject: str, *, url: str, offline: str, remedy: str) -> Finding:
    """Return whether a server answers.

    Args:
        subject: the subject of the finding.
        url: the server.
        offline: why a run would not use the server; empty if it would.
        remedy: what to do if it does not answer.
    """
    if offline:
        return Finding(GOOD, subject, offline)

    try:
        request = urllib.request.Request(url, method="HEAD")
        urllib.request.urlopen(request, timeout=_SERVER_TIMEOUT).close()
    except urllib.error.HTTPError:
        pass  # an error status is an answer, too
    except (OSError, ValueError, http.client.HTTPException) as error:
        # ValueError and HTTPException: the URL is wrong, such as a port that is no number.
        return Finding(
            DOUBTFUL, subject, f"{url} does not answer: {first_line(error)}", remedy=remedy
        )
    return Finding(GOOD, subject, f"{url} answers")


# --- how processes would connect


def uses_gloo(on_cpu: bool) -> bool:
    """Return whether the processes of a run would connect over gloo rather than NCCL.

    They do if they train on the CPU, or if there are too few GPUs for them.
    """
    with contextlib.suppress(UserError):  # it is among the findings
        return use_cpu(on_cpu)
    return True


def check_address() -> list[Finding]:
    """Return a finding if gloo would tell others an address that does not reach this machine."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return []

    address = None
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    if address is not None and not address.startswith("127."):
        return []

    text = f"{platform.node()} resolves to no address"
    if address is not None:
        text = f"{platform.node()} resolves to {address}, which no other machine can reach"
    return [
        Finding(
            BAD,
            "address",
            text,
            remedy="export GLOO_SOCKET_IFNAME=DEVICE, with a device that ip address lists",
        )
    ]
