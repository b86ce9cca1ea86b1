"""Checks that processes make together: who has come, versions, clocks, links, and who sees whose files."""

import contextlib
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from llmtrain.doctor.here import BAD, DOUBTFUL, GOOD, Finding, standing
from llmtrain.errors import first_line
from llmtrain.parallel.team import Team
from llmtrain.record.provenance import versions

_SIZE = 2**24  # bytes of the tensor that is sent
_SLOW, _SKEW_SECONDS = (
    0.5,
    1.0,
)  # a link's share of the median rate; a clock's distance from the median time
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
    rank = int(os.environ.get("RANK", "0"))
    return Place(rank, platform.node(), _machine(rank))


def _machine(rank: int) -> int:
    return rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def meet(backend: str, patience: float) -> tuple[list[Finding], bool]:
    """Join the process group, and return whether all ranks have come within ``patience`` seconds.

    The first rank of those that have come names the others.
    """

    def failed(said: str, remedy: str) -> tuple[list[Finding], bool]:
        return [Finding(BAD, "meeting", said, remedy)], False

    place, world, wait = here(), int(os.environ["WORLD_SIZE"]), timedelta(seconds=patience)
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    where, opens = (
        f"{address}:{port}",
        place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )
    try:
        store = TCPStore(address, int(port), world, opens, wait, wait_for_workers=False)
        store.set(f"doctor/{place.rank}", place.host)
    except (RuntimeError, ValueError) as error:
        remedy = "is the first machine up, is its port open, is --main_process_ip its address?"
        return failed(f"{place.host} does not reach {where}: {first_line(error)}", remedy)
    until, missing = time.monotonic() + patience, set(range(world))
    while missing and time.monotonic() < until:
        missing = {rank for rank in missing if not store.check([f"doctor/{rank}"])}
        time.sleep(0.05)
    if missing:
        if place.rank != min({*range(world)} - missing):
            return [], False
        absent = (sorted(missing), sorted({_machine(rank) for rank in missing}))
        ranks, machines = (", ".join(map(str, numbers)) for numbers in absent)
        remedy = "was it started there with its --machine_rank, and what does it say of its way to that port?"
        return failed(
            f"rank {ranks} (machine {machines}) has not come to {where} in {patience:.0f} s", remedy
        )
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    began = time.monotonic()
    try:
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=world, timeout=wait
        )
        dist.all_reduce(torch.ones(1, device=_device()))
    except RuntimeError as error:
        remedy = "processes must reach each other on every port, not on that of the first alone"
        return failed(
            f"{place.host} reaches {where}, but not every other process: {first_line(error)}",
            remedy,
        )
    said = f"{world} processes over {backend} in {time.monotonic() - began:.2f} s"
    return [Finding(GOOD, "meeting", said)], True


def findings(output_dir: Path) -> list[Finding]:
    """Return what the ranks found together; all of them call this."""
    return [*_same_versions(), *_clocks(), *_links(), *_shared(output_dir)]


def gathered(mine: T) -> list[T]:
    """Gather an object of every rank, in their order."""
    return Team.everyone().each(lambda: mine)


part = dist.barrier  # the last meeting: the others do not see what happens to a process after it


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _same_versions() -> Iterator[Finding]:
    everyone = gathered((here(), versions()))
    for package in everyone[0][1]:
        [(usual, _)] = Counter(there[package] for _, there in everyone).most_common(1)
        odd = sorted(
            {
                f"{place} has {there[package]}"
                for place, there in everyone
                if there[package] != usual
            }
        )
        if odd:
            said = f"{package}: {', '.join(odd)}; the others have {usual}"
            yield Finding(
                BAD, "versions", said, "install the same everywhere: pip install --constraint ..."
            )


def _clocks() -> Iterator[Finding]:
    dist.barrier()
    times = gathered((here(), time.time()))
    middle = statistics.median(moment for _, moment in times)
    skews = {str(place): moment - middle for place, moment in times}
    off = [
        f"{place} by {skew:+.1f} s" for place, skew in skews.items() if abs(skew) > _SKEW_SECONDS
    ]
    apart = Finding(
        DOUBTFUL, "clocks", f"off: {', '.join(off)}", "run an NTP client, such as chrony"
    )
    same = Finding(GOOD, "clocks", f"within {max(map(abs, skews.values())):.2f} s of each other")
    yield apart if off else same


def _seconds(action: Callable[[], object], times: int) -> float:
    """Return this rank's median time of a collective or message, without the first, which may make the connection."""
    taken = []
    for _ in range(times + 1):
        dist.barrier()
        began = time.perf_counter()
        action()
        if _device().type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _links() -> Iterator[Finding]:
    """Measure an all-reduce, and each machine's link to the next."""
    world, mine, places = dist.get_world_size(), here().rank, gathered(here())
    few, many = torch.zeros(2, device=_device()), torch.zeros(_SIZE // 4, device=_device())
    latency = _seconds(partial(dist.all_reduce, few), 20)
    rate = 2 * (world - 1) / world * _SIZE / _seconds(partial(dist.all_reduce, many), 5)
    said = f"{1e6 * latency:.0f} us for 8 bytes; {rate / 1e6:,.0f} MB/s of a ring's link"
    yield Finding(GOOD, "all-reduce", said)
    firsts = [
        place
        for place in places
        if place.rank == 0 or place.machine != places[place.rank - 1].machine
    ]
    if len(firsts) < 3:  # of two, neither can be told to be the slow one
        return
    rates = {}
    for one, other in zip(firsts, [*firsts[1:], firsts[0]], strict=True):
        message = (
            partial(dist.send, many, other.rank)
            if mine == one.rank
            else partial(dist.recv, many, one.rank)
        )
        seconds = gathered(
            _seconds(message if mine in (one.rank, other.rank) else (lambda: None), 3)
        )[other.rank]
        rates[f"{one} to {other.host} ({other.machine})"] = _SIZE / seconds
    usual = statistics.median(rates.values())
    for link, rate in rates.items():
        if rate < _SLOW * usual:
            said = f"{link}: {rate / 1e6:,.0f} MB/s, where {usual / 1e6:,.0f} are usual"
            yield Finding(
                DOUBTFUL, "links", said, "look at its cable and switch, and at NCCL_SOCKET_IFNAME"
            )


def _shared(output_dir: Path) -> Iterator[Finding]:
    """Look from every machine for a file that rank 0 has written in a run's folder."""
    place, is_first = standing(output_dir), here().rank == 0
    token = place / gathered(f".doctor-{os.getpid()}-{time.time_ns()}")[0]
    if is_first:
        with contextlib.suppress(OSError):
            token.touch()
    dist.barrier()
    seen = gathered((here(), token.exists()))
    if is_first:
        token.unlink(missing_ok=True)
    if seen[0][1]:  # else the first machine's own check says that its folder cannot be written
        blind = sorted({str(machine) for machine, sees in seen if not sees})
        said = f"{place.absolute()} of the first machine is not seen by {', '.join(blind)}"
        alone = Finding(
            DOUBTFUL, "run folder", said, "checkpoints are then written by the first machine alone"
        )
        yield alone if blind else Finding(GOOD, "run folder", f"{place.absolute()} is seen by all")
