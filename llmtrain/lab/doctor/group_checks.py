"""Checks that several processes make together.

They find out which processes join the group, whether versions agree, how fast the links are, and
whether all see the same run folder.
"""

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from llmtrain.errors import first_line
from llmtrain.lab.doctor.local_checks import BAD, DOUBTFUL, GOOD, Finding, nearest_existing
from llmtrain.parallel.ranks import Team
from llmtrain.versions import versions

_MESSAGE_BYTES = 2**24  # of the tensor that is sent

T = TypeVar("T")


def findings(
    output_dir: Path, local_findings: list[Finding], backend: str, timeout: float
) -> list[Finding]:
    """Check all processes together, and return what this one reports; all of them call this.

    The first process reports for all. If some do not come, or if one is lost, the first process of
    each machine reports what it has found.

    Args:
        output_dir: the folder in which runs are kept.
        local_findings: those about the machine of this process.
        backend: ``gloo`` or ``nccl``.
        timeout: seconds to wait for the other processes.
    """
    own_report = local_findings if os.environ.get("LOCAL_RANK", "0") == "0" else []
    meeting = join_group(backend, timeout)
    if meeting.level == BAD:
        return [*own_report, meeting]

    try:
        machine = dist.get_rank() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        names = _gather(f"{platform.node()} (machine {machine})")
        group_findings = [
            *_same_versions(names),
            _all_reduce(),
            *_shared_folder(output_dir, names),
        ]
        findings_by_rank = _gather(local_findings)
        dist.barrier()  # so that none sees how another one ends
    except RuntimeError as error:  # a process has gone meanwhile
        lost = Finding(BAD, "meeting", f"another process was lost: {first_line(error)}")
        return [*own_report, meeting, lost]

    if dist.get_rank() > 0:
        return []
    return [*merge_findings(names, findings_by_rank), meeting, *group_findings]


def merge_findings(names: Sequence[str], findings_by_rank: list[list[Finding]]) -> list[Finding]:
    """Return each finding once. One that not all machines have begins with the machine.

    Args:
        names: the machine of each rank.
        findings_by_rank: what each rank has found.
    """
    machines: dict[Finding, dict[str, None]] = {}
    for name, findings in zip(names, findings_by_rank, strict=True):
        for finding in findings:
            machines.setdefault(finding, {})[name] = None

    merged = []
    for finding, having in machines.items():
        if having.keys() == {*names}:
            merged.append(finding)
        else:
            merged.append(finding._replace(text=f"{', '.join(having)}: {finding.text}"))
    return merged


# --- joining the process group


def join_group(backend: str, timeout: float) -> Finding:
    """Join the process group, and return whether all ranks have come.

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout: seconds to wait for the other ranks.
    """
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    host = platform.node()
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=timeout)
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not launcher_has_store,
            timeout=limit,
            wait_for_workers=False,
        )
        store.set(f"doctor/{rank}", host)  # tells the others that this process has come
    except (RuntimeError, ValueError) as error:
        text = f"{host} does not reach {address}:{port}: {first_line(error)}"
        remedy = "check that the first machine is up, its port open, and --main_process_ip right"
        if "EADDRINUSE" in str(error):
            text = f"port {port} of {host} is in use"
            remedy = "choose another port with --main_process_port, the same on all machines"
        return Finding(BAD, "meeting", text, remedy)

    deadline = time.monotonic() + timeout
    missing = [*range(world_size)]
    while missing and time.monotonic() < deadline:
        missing = [other for other in missing if not store.check([f"doctor/{other}"])]
        time.sleep(0.05)
    if missing:
        ranks = ", ".join(map(str, missing))
        text = f"rank {ranks} has not come to {address}:{port} in {timeout:.0f} s"
        remedy = "run llmtrain doctor there with its own --machine_rank, and read its line meeting"
        return Finding(BAD, "meeting", text, remedy)

    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )
        dist.all_reduce(torch.ones(1, device=_device()))
    except RuntimeError as error:
        text = f"{host} reaches {address}:{port}, but not every other process: {first_line(error)}"
        remedy = "open all ports between them; for gloo, name the device: GLOO_SOCKET_IFNAME=eth0"
        return Finding(BAD, "meeting", text, remedy)

    return Finding(GOOD, "meeting", f"{world_size} processes over {backend}")


# --- checks, which all ranks call


def _gather(value: T) -> list[T]:
    """Gather an object from every rank, in rank order."""
    return Team(dist.get_rank(), dist.group.WORLD).on_all(lambda: value)


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _same_versions(names: Sequence[str]) -> Iterator[Finding]:
    versions_by_rank = _gather(versions())
    for package, first in versions_by_rank[0].items():
        different = {
            f"{name} has {installed[package]}"
            for name, installed in zip(names, versions_by_rank, strict=True)
            if installed[package] != first
        }
        if different:
            yield Finding(
                BAD,
                "versions",
                f"{package}: {', '.join(sorted(different))}; {names[0]} has {first}",
                remedy="install the same version everywhere: pip install --constraint ...",
            )


def _all_reduce() -> Finding:
    """Measure how long a short message takes, and how fast a long one is sent."""
    medians = []
    for message_bytes, times in ((8, 20), (_MESSAGE_BYTES, 5)):
        message = torch.zeros(message_bytes // 4, device=_device())
        seconds = []
        for _ in range(times + 1):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(message)
            if message.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        medians.append(statistics.median(seconds[1:]))  # the first may open the connection

    latency, long_seconds = medians
    world_size = dist.get_world_size()
    # Each process of a ring sends 2 (N - 1) / N of the bytes that are reduced.
    rate = 2 * (world_size - 1) / world_size * _MESSAGE_BYTES / long_seconds
    text = f"{1e6 * latency:.0f} us for 8 bytes; {rate / 1e6:,.0f} MB/s on each link of a ring"
    return Finding(GOOD, "all-reduce", text)


def _shared_folder(output_dir: Path, names: Sequence[str]) -> Iterator[Finding]:
    """Look on every rank for a file that rank 0 has written near the run folder."""
    folder = nearest_existing(output_dir)
    token = folder / _gather(f".doctor-{os.getpid()}-{time.time_ns()}")[0]
    is_first = dist.get_rank() == 0
    if is_first:
        with contextlib.suppress(OSError):
            token.touch()
    dist.barrier()
    sees_token = _gather(token.exists())
    if is_first:
        token.unlink(missing_ok=True)

    if not sees_token[0]:  # the first machine's own check says that it cannot write there
        return
    blind = {name for name, sees in zip(names, sees_token, strict=True) if not sees}
    if not blind:
        yield Finding(GOOD, "run folder", f"{folder.absolute()} is visible to all processes")
        return
    text = f"{folder.absolute()} of the first machine is not visible to {', '.join(sorted(blind))}"
    remedy = "only the first machine then writes checkpoints; mount the folder on all"
    yield Finding(DOUBTFUL, "run folder", text, remedy)
