"""What processes find out together: who has come, how fast they send, whose clock is wrong, who sees whose files."""

import contextlib
import os
import platform
import statistics
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llmtrain.doctor.here import BAD, DOUBTFUL, GOOD, Finding, standing
from llmtrain.errors import first_line
from llmtrain.record.provenance import versions

_SIZE = 2**24  # bytes that are added up
_SLOW = 0.5  # of the median of all links
_SKEW_SECONDS = 1.0
_PREFIX = "llmtrain/doctor"


class Place(NamedTuple):
    rank: int
    host: str
    machine: int


def here() -> Place:
    rank, each = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Place(rank, platform.node(), rank // each)


def meet(backend: str, patience: float) -> tuple[list[Finding], bool]:
    """Join the process group; whether all have come. Of those that have, one names the others."""
    place, world = here(), int(os.environ["WORLD_SIZE"])
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    wait = timedelta(seconds=patience)
    try:
        is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        opens = place.rank == 0 and not is_launchers
        store = dist.TCPStore(address, port, world, opens, wait, wait_for_workers=False)
        store.set(f"{_PREFIX}/{place.rank}", place.host)
    except (RuntimeError, ValueError) as error:
        remedy = "is the first machine up, is its port open, is --main_process_ip its address?"
        return [Finding(BAD, "meeting", f"{place.host} does not reach {where}: {first_line(error)}", remedy)], False
    until = time.monotonic() + patience
    missing = set(range(world))
    while missing and time.monotonic() < until:
        missing = {rank for rank in missing if not store.check([f"{_PREFIX}/{rank}"])}
        time.sleep(0.05)
    if missing and place.rank != min({*range(world)} - missing):
        return [], False  # one tells it
    if missing:
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
    """All processes call this; rank 0 is told what was found."""
    return [*_same_versions(), *_clocks(), *_links(), *_shared(output_dir)]


def gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _device() -> torch.device:
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def _same_versions() -> list[Finding]:
    everyone = gathered((here(), versions()))
    found = []
    for package in everyone[0][1]:
        counts = Counter(there[package] for _, there in everyone)
        usual, _ = counts.most_common(1)[0]
        odd = sorted({f"{place.host} (machine {place.machine})": there[package] for place, there in everyone}.items())
        wrong = [f"{host} has {version}" for host, version in odd if version != usual]
        if wrong:
            said = f"{package}: {', '.join(wrong)}; the others have {usual}"
            found.append(Finding(BAD, "versions", said, "install the same everywhere: pip install --constraint ..."))
    return found


def _clocks() -> list[Finding]:
    dist.barrier()
    times = gathered((here(), time.time()))
    middle = statistics.median(moment for _, moment in times)
    wrong = {f"{place.host} (machine {place.machine})": moment - middle for place, moment in times}
    off = [f"{name} by {skew:+.1f} s" for name, skew in wrong.items() if abs(skew) > _SKEW_SECONDS]
    if off:
        return [Finding(DOUBTFUL, "clocks", f"off: {', '.join(off)}", "run an NTP client, such as chrony")]
    return [Finding(GOOD, "clocks", f"within {max(map(abs, wrong.values())):.2f} s of each other")]


def _seconds(tensor: torch.Tensor, times: int) -> float:
    """Of an all-reduce, the median of some."""
    taken = []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _links() -> list[Finding]:
    """The ring's latency and bandwidth, and each machine's way to the next."""
    world, device = dist.get_world_size(), _device()
    small = _seconds(torch.zeros(2, device=device), 20)
    large = _seconds(torch.zeros(_SIZE // 4, device=device), 5)
    rate = 2 * (world - 1) / world * _SIZE / large
    found = [Finding(GOOD, "all-reduce", f"{1e6 * small:.0f} us for 8 bytes; {rate / 1e6:,.0f} MB/s of a ring's link")]
    places = gathered(here())
    firsts = [min(p.rank for p in places if p.machine == machine) for machine in sorted({p.machine for p in places})]
    if len(firsts) < 3:  # of two, neither can be told to be the slow one
        return found
    mine = here().rank
    rates = {}
    for one, other in zip(firsts, [*firsts[1:], firsts[0]], strict=True):
        rates[one, other] = 0.0
        dist.barrier()
        if mine in (one, other):
            payload, peer = torch.zeros(_SIZE // 4, device=device), other if mine == one else one
            taken = []
            for _ in range(4):  # the first also makes the connection
                began = time.perf_counter()
                (dist.send if mine == one else dist.recv)(payload, peer)
                if payload.is_cuda:
                    torch.cuda.synchronize()
                taken.append(time.perf_counter() - began)
            rates[one, other] = _SIZE / statistics.median(taken[1:])
    everyone = gathered(rates)
    measured = {pair: everyone[pair[1]][pair] for pair in rates}
    usual = statistics.median(measured.values())
    slow = {pair: found for pair, found in measured.items() if found < _SLOW * usual}
    for (one, other), found_rate in slow.items():
        names = f"{places[one].host} (machine {places[one].machine}) to {places[other].host} ({places[other].machine})"
        said = f"{names}: {found_rate / 1e6:,.0f} MB/s, where {usual / 1e6:,.0f} are usual"
        found.append(Finding(DOUBTFUL, "links", said, "look at its cable and switch, and at NCCL_SOCKET_IFNAME"))
    return found


def _shared(output_dir: Path) -> list[Finding]:
    """Whether other machines see a run's folder, as rank 0 writes it."""
    place = standing(output_dir)
    name = [f".doctor-{os.getpid()}-{time.time_ns()}"]
    dist.broadcast_object_list(name)
    token = place / name[0]
    if here().rank == 0:
        with contextlib.suppress(OSError):
            token.write_text("1")
    dist.barrier()
    seen = gathered((here(), token.exists()))
    if here().rank == 0:
        if not token.exists():  # which is told of this machine
            return []
        token.unlink(missing_ok=True)
    blind = sorted({f"{p.host} (machine {p.machine})" for p, sees in seen if not sees})
    if not blind:
        return [Finding(GOOD, "run folder", f"{place.absolute()} is seen by all")]
    said = f"{place.absolute()} of the first machine is not seen by {', '.join(blind)}"
    return [Finding(DOUBTFUL, "run folder", said, "checkpoints are then written by the first machine alone")]


def part() -> None:
    """The last meeting: what happens to one process after it, the others do not see."""
    dist.barrier()
