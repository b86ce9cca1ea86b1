"""Checks that processes make together: who has come, versions, clocks, links, and who sees whose files."""

import contextlib
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from llmtrain.doctor.here import BAD, DOUBTFUL, GOOD, Finding, standing
from llmtrain.errors import first_line
from llmtrain.record.provenance import versions

_SIZE = 2**24  # bytes of the tensor that is sent
_SLOW = 0.5  # of the median rate of all links
_SKEW_SECONDS = 1.0
_PREFIX = "llmtrain/doctor"
T = TypeVar("T")


class Place(NamedTuple):
    """A process, and the machine that it is on."""

    rank: int
    host: str
    machine: int

    def __str__(self) -> str:
        return f"{self.host} (machine {self.machine})"


def here() -> Place:
    """Return this process's place, as its launcher told it."""
    rank, each = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Place(rank, platform.node(), rank // each)


def meet(backend: str, patience: float) -> tuple[list[Finding], bool]:
    """Join the process group, and return whether all ranks have come within ``patience`` seconds.

    The first rank of those that have come names the others.
    """
    place, world, wait = here(), int(os.environ["WORLD_SIZE"]), timedelta(seconds=patience)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    opens = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, world, opens, wait, wait_for_workers=False)
        store.set(f"{_PREFIX}/{place.rank}", place.host)
    except (RuntimeError, ValueError) as error:
        remedy = "is the first machine up, is its port open, is --main_process_ip its address?"
        return [Finding(BAD, "meeting", f"{place.host} does not reach {where}: {first_line(error)}", remedy)], False
    until, missing = time.monotonic() + patience, set(range(world))
    while missing and time.monotonic() < until:
        missing = {rank for rank in missing if not store.check([f"{_PREFIX}/{rank}"])}
        time.sleep(0.05)
    if missing:
        if place.rank != min({*range(world)} - missing):
            return [], False
        each = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        machines = ", ".join(map(str, sorted({rank // each for rank in missing})))
        said = f"rank {', '.join(map(str, sorted(missing)))} (machine {machines}) has not come to {where}"
        remedy = "was it started there with its --machine_rank, and what does it say of its way to that port?"
        return [Finding(BAD, "meeting", f"{said} in {patience:.0f} s", remedy)], False
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    began = time.monotonic()
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=world, timeout=wait)
        dist.all_reduce(torch.ones(1, device=_device()))
    except RuntimeError as error:
        remedy = "processes must reach each other on every port, not on that of the first alone"
        said = f"{place.host} reaches {where}, but not every other process: {first_line(error)}"
        return [Finding(BAD, "meeting", said, remedy)], False
    seconds = time.monotonic() - began
    return [Finding(GOOD, "meeting", f"{world} processes over {backend} in {seconds:.2f} s")], True


def findings(output_dir: Path) -> list[Finding]:
    """Return what the ranks found together; all of them call this."""
    return [*_same_versions(), *_clocks(), *_links(), *_shared(output_dir)]


def gathered(mine: T) -> list[T]:
    """Gather an object of every rank, in their order."""
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def part() -> None:
    """Meet for the last time: the others do not see what happens to a process after it."""
    dist.barrier()


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _same_versions() -> list[Finding]:
    everyone = gathered((here(), versions()))
    found = []
    for package in everyone[0][1]:
        [(usual, _)] = Counter(there[package] for _, there in everyone).most_common(1)
        odd = sorted({f"{place} has {there[package]}" for place, there in everyone if there[package] != usual})
        if odd:
            said = f"{package}: {', '.join(odd)}; the others have {usual}"
            found.append(Finding(BAD, "versions", said, "install the same everywhere: pip install --constraint ..."))
    return found


def _clocks() -> list[Finding]:
    dist.barrier()
    times = gathered((here(), time.time()))
    middle = statistics.median(moment for _, moment in times)
    skews = {str(place): moment - middle for place, moment in times}
    off = [f"{place} by {skew:+.1f} s" for place, skew in skews.items() if abs(skew) > _SKEW_SECONDS]
    if off:
        return [Finding(DOUBTFUL, "clocks", f"off: {', '.join(off)}", "run an NTP client, such as chrony")]
    return [Finding(GOOD, "clocks", f"within {max(map(abs, skews.values())):.2f} s of each other")]


def _seconds(action: Callable[[], object], times: int, meeting: bool = True) -> float:
    """Return the median time of some collectives or messages, without the first, which may make the connection."""
    taken = []
    for _ in range(times + 1):
        if meeting:
            dist.barrier()
        began = time.perf_counter()
        action()
        if _device().type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _links() -> list[Finding]:
    """Measure an all-reduce, and each machine's link to the next."""
    world, mine, places = dist.get_world_size(), here().rank, gathered(here())
    few, many = torch.zeros(2, device=_device()), torch.zeros(_SIZE // 4, device=_device())
    latency = _seconds(lambda: dist.all_reduce(few), 20)
    rate = 2 * (world - 1) / world * _SIZE / _seconds(lambda: dist.all_reduce(many), 5)
    said = f"{1e6 * latency:.0f} us for 8 bytes; {rate / 1e6:,.0f} MB/s of a ring's link"
    found = [Finding(GOOD, "all-reduce", said)]
    firsts = [min(p.rank for p in places if p.machine == machine) for machine in sorted({p.machine for p in places})]
    if len(firsts) < 3:  # of two, neither can be told to be the slow one
        return found
    rates = {}
    for one, other in zip(firsts, [*firsts[1:], firsts[0]], strict=True):
        dist.barrier()
        if mine == one:
            _seconds(lambda peer=other: dist.send(many, peer), 3, meeting=False)
        elif mine == other:
            rates[one, other] = _SIZE / _seconds(lambda peer=one: dist.recv(many, peer), 3, meeting=False)
    measured = {pair: rate for theirs in gathered(rates) for pair, rate in theirs.items()}
    usual = statistics.median(measured.values())
    for (one, other), rate in measured.items():
        if rate < _SLOW * usual:
            names = f"{places[one]} to {places[other].host} ({places[other].machine})"
            said = f"{names}: {rate / 1e6:,.0f} MB/s, where {usual / 1e6:,.0f} are usual"
            found.append(Finding(DOUBTFUL, "links", said, "look at its cable and switch, and at NCCL_SOCKET_IFNAME"))
    return found


def _shared(output_dir: Path) -> list[Finding]:
    """Look from every machine for a file that rank 0 has written in a run's folder."""
    place, is_first = standing(output_dir), here().rank == 0
    name = [f".doctor-{os.getpid()}-{time.time_ns()}"]
    dist.broadcast_object_list(name)
    token = place / name[0]
    if is_first:
        with contextlib.suppress(OSError):
            token.write_text("1")
    dist.barrier()
    seen = gathered((here(), token.exists()))
    if is_first:
        token.unlink(missing_ok=True)
    blind = sorted({str(p) for p, sees in seen if not sees})
    if not seen[0][1]:  # the first machine's own check says that its folder cannot be written
        return []
    if not blind:
        return [Finding(GOOD, "run folder", f"{place.absolute()} is seen by all")]
    said = f"{place.absolute()} of the first machine is not seen by {', '.join(blind)}"
    return [Finding(DOUBTFUL, "run folder", said, "checkpoints are then written by the first machine alone")]
