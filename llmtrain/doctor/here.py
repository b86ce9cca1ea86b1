"""Checks that one process can make of its own machine."""

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
from llmtrain.files import sync_file, sync_folder
from llmtrain.launch.accelerator import cpu_has_bfloat16, use_cpu
from llmtrain.launch.launcher import Launcher, check_launch
from llmtrain.record.provenance import versions

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"
_PATIENCE = 5.0  # seconds, for a server
_LITTLE_SPACE = 20 * 2**30  # bytes
_LITTLE_SHARED_MEMORY = 2**28  # bytes; Docker gives 64 MiB


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    subject: str
    said: str
    remedy: str = ""


def findings(output_dir: Path, launcher: Launcher) -> list[Finding]:
    """Return what is to be said of this process's machine."""
    return [*_versions(), *_launch(launcher), *_devices(), *_memory(), *_folder(output_dir), *_servers()]


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        required = importlib.metadata.requires("llmtrain") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is on the path, and not installed
        required = []
    wrong, install = [], ["pip", "install"]
    for needed in map(Requirement, required):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            version = "absent"
        if version == "absent" or not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"; {needed.name} is {version}, and {needed.specifier or 'any'} is needed")
            needed.marker = None
            install.append(str(needed))
    here = versions()
    said = ", ".join(f"{name} {here[name]}" for name in ("python", "llmtrain", "torch", "accelerate", "transformers"))
    yield Finding(BAD if wrong else GOOD, "versions", said + "".join(wrong), shlex.join(install) if wrong else "")


def _launch(launcher: Launcher) -> Iterator[Finding]:
    try:
        check_launch()
        use_cpu(launcher)
    except UserError as error:
        yield Finding(BAD, "launch", str(error))
    file = f"config file {launcher.config_file}" if launcher.config_file else "no accelerate config"
    if launcher.config_file and not launcher.config:
        remedy = "remove it, or write it anew with accelerate config"
        yield Finding(BAD, "launch", f"{file} says nothing that can be read", remedy)
    said = ", ".join([file, *(list(_settings(launcher)) or ["no flags"])])
    yield Finding(GOOD, "launch", f"{os.environ.get('WORLD_SIZE', '1')} process(es); {said}")


def _settings(launcher: Launcher) -> Iterator[str]:
    """Yield what the launcher was told, each with its source."""
    flags = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in launcher.words if word[:2] == "--"}
    for key in sorted(flags - {"config_file"}):
        yield f"{key} {launcher.said(key)} (command line)"
    for key, value in launcher.config.items():
        nested = {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
        for name, v in nested.items():
            if v is not None and name not in {*flags, "compute_environment", "debug"}:
                yield f"{name} {v} (config file)"
    for key, value in sorted(launcher.environment.items()):
        if key.startswith("ACCELERATE_"):
            yield f"{key} {value} (environment)"


def _devices() -> Iterator[Finding]:
    cores = f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPU cores"
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type == "cuda":
        yield from _gpus(cores)
        return
    computes = "float32, where no other is asked for"
    if device is not None:
        one = ", for one process alone" if device.type == "mps" else ""
        yield Finding(GOOD, "devices", f"{torch.accelerator.device_count()} x {device.type}{one}, {cores}")
    else:
        computes = "float32 and bfloat16" if cpu_has_bfloat16() else "float32; bfloat16 is emulated here, and slow"
        if shutil.which("nvidia-smi"):
            why = f"this torch ({torch.__version__}) sees no GPU, though nvidia-smi is here"
            yield Finding(BAD, "devices", why, "install a torch for this driver's CUDA; see nvidia-smi")
        else:
            yield Finding(GOOD, "devices", f"no GPU, {cores}")
    yield Finding(GOOD, "precision", computes)


def _gpus(cores: str) -> Iterator[Finding]:
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    yield Finding(GOOD, "devices", f"{count} x {names}, {cores}")
    several, own = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1, int(os.environ.get("LOCAL_RANK", "0"))
    for i in range(count):
        if several and i != own:
            continue  # to ask takes memory of a GPU: each process asks for its own
        free, total = torch.cuda.mem_get_info(i)
        if free / total < 0.9:
            remedy = "another process holds the rest: see nvidia-smi"
            yield Finding(DOUBTFUL, "devices", f"of GPU {i} {free / total:.0%} of the memory is free", remedy)
    if torch.cuda.is_bf16_supported():
        yield Finding(GOOD, "precision", "bfloat16 and float32")
    else:
        yield Finding(DOUBTFUL, "precision", "float16 and float32: no bfloat16", "--mixed_precision fp16 or no")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding(GOOD, "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free")
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < _LITTLE_SHARED_MEMORY:
        remedy = "start the container with --ipc=host or --shm-size=8g"
        yield Finding(DOUBTFUL, "memory", f"/dev/shm has {size / 2**20:.0f} MiB, too little for NCCL", remedy)


def standing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(place for place in [folder, *folder.parents, Path()] if place.exists())


def _folder(output_dir: Path) -> Iterator[Finding]:
    """Try all that keeps a run in its folder: write, force to the disk, rename, lock."""
    import filelock

    place, content = standing(output_dir), b"1" * 4096
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as scratch:
            folder = Path(scratch)
            (folder / "new").mkdir()
            (folder / "new" / "file").write_bytes(content)
            sync_file(folder / "new" / "file")
            (folder / "new").rename(folder / "there")
            sync_folder(folder)
            if (folder / "there" / "file").read_bytes() != content:
                yield Finding(BAD, "run folder", f"{place} gives back other bytes than were written")
            with filelock.FileLock(folder / "lock").acquire(blocking=False):
                pass
    except OSError as error:
        said = f"{place}: {error.strerror or first_line(error)}"
        yield Finding(BAD, "run folder", said, "name another with --output_dir")
        return
    free = shutil.disk_usage(place).free
    level, remedy = GOOD, ""
    if free < _LITTLE_SPACE:
        level, remedy = DOUBTFUL, "a checkpoint needs three times the weights' size and more, and two are kept"
    said = f"{place.absolute()} writes, flushes, renames and locks; {free / 2**30:.1f} GiB are free"
    yield Finding(level, "run folder", said, remedy)


def _servers() -> Iterator[Finding]:
    """Ask Weights & Biases, and the hub, where a run would."""
    if (mode := os.environ.get("WANDB_MODE")) in ("offline", "disabled"):
        yield Finding(GOOD, "wandb", f"WANDB_MODE is {mode}")
    else:
        url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        yield _ask("wandb", url, "runs are logged offline: wandb sync sends them later")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Finding(GOOD, "hub", "HF_HUB_OFFLINE is set: folders and the cache alone")
    else:
        url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        yield _ask("hub", url, "name folders instead of hub names, or set HF_HUB_OFFLINE=1 to use the cache")


def _ask(subject: str, url: str, remedy: str) -> Finding:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_PATIENCE):
            pass
    except urllib.error.HTTPError:  # it answers
        pass
    except (OSError, ValueError, http.client.HTTPException) as error:  # a port that is no number, say
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return Finding(DOUBTFUL, subject, f"{url} does not answer: {reason}", remedy)
    return Finding(GOOD, subject, f"{url} answers")


def over_gloo(launcher: Launcher) -> bool:
    """Return whether a run's processes would meet on the CPU, or are too many for the GPUs here."""
    try:
        return use_cpu(launcher)
    except UserError:  # which is among the findings
        return True


def address() -> list[Finding]:
    """Return a finding where gloo would tell other machines an address at which they cannot reach this one."""
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        found = "no address"
    if "GLOO_SOCKET_IFNAME" in os.environ or not (found.startswith("127.") or found == "no address"):
        return []
    said = f"{platform.node()} resolves to {found}, where no other machine can reach it"
    return [Finding(BAD, "address", said, "export GLOO_SOCKET_IFNAME=DEVICE (see ip address)")]
