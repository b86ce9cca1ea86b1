"""Checks that one process can make of its own machine."""

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

from llmtrain.errors import UserError, first_line
from llmtrain.files import new_folder
from llmtrain.launching.accelerator import cpu_has_bfloat16, use_cpu
from llmtrain.launching.launcher import Launcher, check_launch
from llmtrain.record.provenance import version_of, versions
from llmtrain.record.resume import lock

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"
_PATIENCE = 5.0  # seconds, for a server
_LITTLE_SPACE, _LITTLE_SHARED_MEMORY = (
    20 * 2**30,
    2**28,
)  # bytes; Docker gives 64 MiB of shared memory


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    subject: str
    said: str
    remedy: str = ""


def findings(output_dir: Path, launcher: Launcher) -> list[Finding]:
    """Return what is to be said of this process's machine."""
    return [
        *_versions(),
        *_launch(launcher),
        *_devices(),
        *_memory(),
        *_folder(output_dir),
        *_servers(),
    ]


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    here, required, wrong, install = versions(), [], "", ["pip", "install"]
    with contextlib.suppress(
        importlib.metadata.PackageNotFoundError
    ):  # a checkout that is on the path, not installed
        required = [Requirement(line) for line in importlib.metadata.requires("llmtrain") or []]
    for needed in required:
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        version = version_of(needed.name)
        if applies and not (version and needed.specifier.contains(version, prereleases=True)):
            wrong += f"; {needed.name} is {version or 'absent'}, and {needed.specifier or 'any'} is needed"
            install.append(f"{needed.name}{needed.specifier}")
    said = ", ".join(
        f"{name} {here[name]}"
        for name in ("python", "llmtrain", "torch", "accelerate", "transformers")
    )
    yield Finding(
        BAD if wrong else GOOD, "versions", said + wrong, shlex.join(install) if wrong else ""
    )


def _launch(launcher: Launcher) -> Iterator[Finding]:
    try:
        check_launch()
        use_cpu(launcher)
    except UserError as error:
        yield Finding(BAD, "launch", str(error))
    file = f"config file {launcher.config_file}" if launcher.config_file else "no accelerate config"
    if launcher.config_file and not launcher.config:
        yield Finding(
            BAD,
            "launch",
            f"{file} says nothing that can be read",
            "remove it, or run accelerate config",
        )
    said = ", ".join([file, *(list(_settings(launcher)) or ["no flags"])])
    yield Finding(GOOD, "launch", f"{os.environ.get('WORLD_SIZE', '1')} process(es); {said}")


def _settings(launcher: Launcher) -> Iterator[str]:
    """Yield what the launcher was told, each with its source."""
    flags = {
        word.partition("=")[0].removeprefix("--").replace("-", "_")
        for word in launcher.words
        if word[:2] == "--"
    }
    for key in sorted(flags - {"config_file"}):
        yield f"{key} {launcher.said(key)} (command line)"
    for key, value in launcher.config.items():
        for name, inner in value.items() if isinstance(value, dict) else [("", value)]:
            full = f"{key}.{name}".rstrip(".")
            if inner is not None and full not in {*flags, "compute_environment", "debug"}:
                yield f"{full} {inner} (config file)"
    told = sorted(launcher.environment.items())
    yield from (
        f"{key} {value} (environment)" for key, value in told if key.startswith("ACCELERATE_")
    )


def _devices() -> Iterator[Finding]:
    cores = f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPU cores"
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type == "cuda":
        yield from _gpus(cores)
    elif device is not None:
        one = ", for one process alone" if device.type == "mps" else ""
        yield Finding(
            GOOD, "devices", f"{torch.accelerator.device_count()} x {device.type}{one}, {cores}"
        )
        yield Finding(GOOD, "precision", "float32, where no other is asked for")
    else:
        why = f"this torch ({torch.__version__}) sees no GPU, though nvidia-smi is here"
        blind = Finding(
            BAD, "devices", why, "install a torch for this driver's CUDA; see nvidia-smi"
        )
        yield blind if shutil.which("nvidia-smi") else Finding(GOOD, "devices", f"no GPU, {cores}")
        said = (
            "float32 and bfloat16"
            if cpu_has_bfloat16()
            else "float32; bfloat16 is emulated here, and slow"
        )
        yield Finding(GOOD, "precision", said)


def _gpus(cores: str) -> Iterator[Finding]:
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(i) for i in range(count)}
    yield Finding(GOOD, "devices", f"{count} x {', '.join(sorted(names))}, {cores}")
    own, several = (
        int(os.environ.get("LOCAL_RANK", "0")),
        os.environ.get("LOCAL_WORLD_SIZE", "1") != "1",
    )
    for i in (
        range(count)[own : own + 1] if several else range(count)
    ):  # to ask takes memory of a GPU
        free, total = torch.cuda.mem_get_info(i)
        if free / total < 0.9:
            said = f"of GPU {i} {free / total:.0%} of the memory is free"
            yield Finding(
                DOUBTFUL, "devices", said, "another process holds the rest: see nvidia-smi"
            )
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    yield Finding(
        GOOD, "precision", f"{'bfloat16' if has_bfloat16 else 'float16, no bfloat16,'} and float32"
    )


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding(
        GOOD, "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free"
    )
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < _LITTLE_SHARED_MEMORY:
        remedy = "start the container with --ipc=host or --shm-size=8g"
        yield Finding(
            DOUBTFUL, "memory", f"/dev/shm has {size / 2**20:.0f} MiB, too little for NCCL", remedy
        )


def standing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(place for place in [folder, *folder.parents, Path()] if place.exists())


def _folder(output_dir: Path) -> Iterator[Finding]:
    """Try all that keeps a run in its folder: write, force to the disk, rename, lock."""
    place = standing(output_dir)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as scratch:
            with new_folder(Path(scratch, "new")) as folder:
                (folder / "file").write_bytes(b"1" * 4096)
            with lock(Path(scratch)).acquire(blocking=False):
                pass
    except OSError as error:
        said = f"{place}: {error.strerror or first_line(error)}"
        yield Finding(BAD, "run folder", said, "name another with --output_dir")
        return
    free = shutil.disk_usage(place).free
    said = f"{place.absolute()} writes, flushes, renames and locks; {free / 2**30:.1f} GiB are free"
    little = Finding(
        DOUBTFUL,
        "run folder",
        said,
        "two checkpoints are kept, each of three times the weights or more",
    )
    yield Finding(GOOD, "run folder", said) if free >= _LITTLE_SPACE else little


def _servers() -> Iterator[Finding]:
    """Ask Weights & Biases, and the hub, where a run would."""
    mode, hub = os.environ.get("WANDB_MODE", ""), os.environ.get("HF_HUB_OFFLINE", "").lower()
    offline = f"WANDB_MODE is {mode}" if mode in ("offline", "disabled") else ""
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    yield _server("wandb", url, offline, "runs are logged offline: wandb sync sends them later")
    offline = (
        "HF_HUB_OFFLINE is set: folders and the cache alone"
        if hub in ("1", "true", "yes", "on")
        else ""
    )
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    yield _server(
        "hub",
        url,
        offline,
        "name folders instead of hub names, or set HF_HUB_OFFLINE=1 to use the cache",
    )


def _server(subject: str, url: str, offline: str, remedy: str) -> Finding:
    if offline:
        return Finding(GOOD, subject, offline)
    try:
        urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=_PATIENCE
        ).close()
    except (
        OSError,
        ValueError,
        http.client.HTTPException,
    ) as error:  # a port that is no number, say
        if not isinstance(error, urllib.error.HTTPError):  # which is an answer
            return Finding(DOUBTFUL, subject, f"{url} does not answer: {first_line(error)}", remedy)
    return Finding(GOOD, subject, f"{url} answers")


def over_gloo(launcher: Launcher) -> bool:
    """Return whether a run's processes would meet on the CPU, or are too many for the GPUs here."""
    with contextlib.suppress(UserError):  # which is among the findings
        return use_cpu(launcher)
    return True


def address() -> list[Finding]:
    """Return a finding where gloo would tell other machines an address at which they cannot reach this one."""
    found = "no address"
    with contextlib.suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
    if "GLOO_SOCKET_IFNAME" in os.environ or not found.startswith(("127.", "no ")):
        return []
    said = f"{platform.node()} resolves to {found}, where no other machine can reach it"
    return [Finding(BAD, "address", said, "export GLOO_SOCKET_IFNAME=DEVICE (see ip address)")]
