"""What can be found out about a machine by one process of it."""

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
from typing import Any, NamedTuple

import psutil
import torch

from llmtrain.errors import UserError, first_line
from llmtrain.files import sync_file, sync_folder
from llmtrain.launch.accelerator import cpu_has_bfloat16, use_cpu
from llmtrain.launch.launcher import Launcher, check_launch
from llmtrain.record.provenance import versions

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"
_PATIENCE = 5.0  # seconds, of a server elsewhere
_LITTLE_SPACE = 20 * 2**30
_LITTLE_SHARED_MEMORY = 2**28  # what Docker gives is 64 MiB


class Finding(NamedTuple):
    level: str
    subject: str
    said: str
    remedy: str = ""


def findings(output_dir: Path, launcher: Launcher) -> list[Finding]:
    """Of this process's machine."""
    return [*_versions(), *_launch(launcher), *_devices(), *_memory(), *_folder(output_dir), *_servers()]


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    here = versions()
    said = ", ".join(f"{name} {here[name]}" for name in ("python", "llmtrain", "torch", "accelerate", "transformers"))
    wrong, right = [], []
    for line in _required():
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            version = "absent"
        if version == "absent" or not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"{needed.name} is {version}, and {needed.specifier or 'any'} is needed")
            needed.marker = None
            right.append(str(needed))
    if wrong:
        yield Finding(BAD, "versions", f"{said}; {'; '.join(wrong)}", shlex.join(["pip", "install", *right]))
    else:
        yield Finding(GOOD, "versions", said)


def _required() -> list[str]:
    try:
        return importlib.metadata.requires("llmtrain") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is on the path, and not installed
        return []


def _launch(launcher: Launcher) -> Iterator[Finding]:
    """What the launcher was told, and where; and whether it did that."""
    try:
        check_launch()
        use_cpu(launcher)
    except UserError as error:
        yield Finding(BAD, "launch", str(error))
    started = f"{os.environ.get('WORLD_SIZE', '1')} process(es)"
    file = f"config file {launcher.config_file}" if launcher.config_file else "no accelerate config"
    if launcher.config_file and not launcher.config:
        remedy = "remove it, or write it anew with accelerate config"
        yield Finding(BAD, "launch", f"{file} says nothing that can be read", remedy)
    said = [f"{key} {value} ({where})" for key, value, where in _told(launcher)]
    yield Finding(GOOD, "launch", f"{started}; {', '.join([file, *(said or ['no flags'])])}")


def _told(launcher: Launcher) -> Iterator[tuple[str, Any, str]]:
    flags = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in launcher.words if word[:2] == "--"}
    plain = {key: value for key, value in launcher.config.items() if not isinstance(value, dict | type(None))}
    nested = {f"{name}.{key}": v for name, d in launcher.config.items() if isinstance(d, dict) for key, v in d.items()}
    for key in dict.fromkeys([*sorted(flags - {"config_file"}), *plain, *nested]):
        if key in flags:
            yield key, launcher.said(key), "command line"
        elif key not in ("compute_environment", "debug"):
            yield key, (plain | nested)[key], "config file"
    for name, value in sorted(launcher.environment.items()):
        if name.startswith("ACCELERATE_"):
            yield name, value, "environment"


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        yield from _no_gpu(f"{cores} CPU cores")
    elif device.type == "cuda":
        yield from _gpus(f"{cores} CPU cores")
    else:
        one = ", for one process alone" if device.type == "mps" else ""
        yield Finding(GOOD, "devices", f"{torch.accelerator.device_count()} x {device.type}{one}, {cores} CPU cores")
        yield Finding(GOOD, "precision", "float32, where no other is asked for")


def _no_gpu(cores: str) -> Iterator[Finding]:
    if shutil.which("nvidia-smi"):
        why = f"this torch ({torch.__version__}) sees no GPU, though nvidia-smi is here"
        yield Finding(BAD, "devices", why, "install a torch for this driver's CUDA; see nvidia-smi")
    else:
        yield Finding(GOOD, "devices", f"no GPU, {cores}")
    said = "float32 and bfloat16" if cpu_has_bfloat16() else "float32; bfloat16 is emulated here, and slow"
    yield Finding(GOOD, "precision", said)


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
            who = "another process holds the rest: see nvidia-smi"
            yield Finding(DOUBTFUL, "devices", f"of GPU {i} {free / total:.0%} of the memory is free", who)
    bf16 = torch.cuda.is_bf16_supported()
    said = "bfloat16 and float32" if bf16 else "float16 and float32: no bfloat16"
    yield Finding(GOOD if bf16 else DOUBTFUL, "precision", said, "" if bf16 else "--mixed_precision fp16 or no")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding(GOOD, "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free")
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < _LITTLE_SHARED_MEMORY:
        remedy = "start the container with --ipc=host or --shm-size=8g"
        yield Finding(DOUBTFUL, "memory", f"/dev/shm has {size / 2**20:.0f} MiB, too little for NCCL", remedy)


def standing(folder: Path) -> Path:
    """What is there of a folder that may be yet to be made."""
    return next(place for place in [folder, *folder.parents, Path()] if place.exists())


def _folder(output_dir: Path) -> Iterator[Finding]:
    """Whether a run could be kept there: written, forced to the disk, renamed, locked; and how much."""
    import filelock

    place = standing(output_dir)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as scratch:
            folder = Path(scratch)
            (folder / "new").mkdir()
            (folder / "new" / "file").write_bytes(b"1" * 4096)
            sync_file(folder / "new" / "file")
            (folder / "new").rename(folder / "there")
            sync_folder(folder)
            if (folder / "there" / "file").read_bytes() != b"1" * 4096:
                yield Finding(BAD, "run folder", f"{place} gives back other bytes than were written")
            with filelock.FileLock(folder / "lock").acquire(blocking=False):
                pass
    except OSError as error:
        yield Finding(
            BAD, "run folder", f"{place}: {error.strerror or first_line(error)}", "name another with --output_dir"
        )
        return
    free = shutil.disk_usage(place).free
    said = f"{place.absolute()} writes, flushes, renames and locks; {free / 2**30:.1f} GiB are free"
    little = "a checkpoint needs three times the weights' size and more, and two are kept"
    yield Finding(*((DOUBTFUL, "run folder", said, little) if free < _LITTLE_SPACE else (GOOD, "run folder", said)))


def _servers() -> Iterator[Finding]:
    """Weights & Biases, and the hub."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        yield Finding(GOOD, "wandb", f"WANDB_MODE is {os.environ['WANDB_MODE']}")
    else:
        url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        yield _reached("wandb", url, "runs are logged offline: wandb sync sends them later")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Finding(GOOD, "hub", "HF_HUB_OFFLINE is set: folders and the cache alone")
    else:
        url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        yield _reached("hub", url, "name folders instead of hub names, or set HF_HUB_OFFLINE=1 to use the cache")


def _reached(subject: str, url: str, remedy: str) -> Finding:
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE):
            pass
    except urllib.error.HTTPError:  # it answers
        pass
    except (OSError, ValueError, http.client.HTTPException) as error:  # a port that is no number, say
        reason = getattr(error, "reason", error)
        return Finding(DOUBTFUL, subject, f"{url} does not answer: {reason}", remedy)
    return Finding(GOOD, subject, f"{url} answers")


def over_gloo(launcher: Launcher) -> bool:
    """Whether a run's processes would meet on the CPU; so do these where they are too many for the GPUs here."""
    try:
        return use_cpu(launcher)
    except UserError:  # which is among the findings
        return True


def address() -> list[Finding]:
    """By which address other machines are told to reach this one over gloo."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return []
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        found = "no address"
    if not found.startswith("127.") and found != "no address":
        return []
    said = f"{platform.node()} resolves to {found}, where no other machine can reach it"
    return [Finding(BAD, "address", said, "export GLOO_SOCKET_IFNAME=DEVICE (see ip address)")]
