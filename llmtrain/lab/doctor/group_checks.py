"""Checks that several processes make together.

They find out which processes join the group, whether versions and clocks agree, how fast the links
are, and whether all see the same run folder.
"""

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
from torch.distributed import TCPStore

from llmtrain.errors import first_line
from llmtrain.lab.doctor.local_checks import BAD, DOUBTFUL, GOOD, Finding, nearest_existing
from llmtrain.parallel.team import Team
from llmtrain.record.provenance import versions

_MESSAGE_BYTES = 2**24  # of the tensor that is sent
_SLOW_LINK_SHARE = 0.5  # of the median rate; a link below it is slow
_LARGEST_SKEW = 1.0  # seconds between a clock and the median of all clocks

T = TypeVar("T")


class Process(NamedTuple):
    """A process, and the machine it runs on."""

    rank: int
    host: str
    machine: int  # the number of the machine

    def __str__(self) -> str:
        return f"{self.host} (machine {self.machine})"


class JoinResult(NamedTuple):
    """The outcome of :func:`join_group` on one process."""

    findings: list[Finding]
    is_complete: bool  # whether all ranks have joined


def this_process() -> Process:
    """Return this process, as its launcher describes it in the environment."""
    rank = int(os.environ.get("RANK", "0"))
    return Process(rank, platform.node(), _machine(rank))


def _machine(rank: int) -> int:
    return rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


# --- joining the process group


def join_group(backend: str, timeout: float) -> JoinResult:
    """Join the process group.

    If some ranks do not come, the first rank that came names them.

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout: seconds to wait for the other ranks.
    """
    process = this_process()
    world_size = int(os.environ["WORLD_SIZE"])
    endpoint = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _open_store(process, world_size, timeout)
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            return _failure(
                f"port {os.environ['MASTER_PORT']} of {process.host} is in use",
                remedy="choose another port with --main_process_port, the same on all machines",
            )
        return _failure(
            f"{process.host} does not reach {endpoint}: {first_line(error)}",
            remedy="check that the first machine is up, that its port is open, and that "
            "--main_process_ip is its address",
        )

    missing = _wait_for_ranks(store, world_size, timeout)
    if missing:
        is_first_present = process.rank == min(set(range(world_size)) - missing)
        if not is_first_present:
            return JoinResult([], is_complete=False)
        machines = {_machine(rank) for rank in missing}
        return _failure(
            f"rank {_join(missing)} (machine {_join(machines)}) has not come to {endpoint} in "
            f"{timeout:.0f} s",
            remedy="run llmtrain doctor there with its own --machine_rank, and read what it says "
            "about this port",
        )

    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    start = time.monotonic()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=process.rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        dist.all_reduce(torch.ones(1, device=_device()))
    except RuntimeError as error:
        return _failure(
            f"{process.host} reaches {endpoint}, but not every other process: {first_line(error)}",
            remedy="open all ports between the machines, not only that of the first process",
        )

    seconds = time.monotonic() - start
    text = f"{world_size} processes over {backend} in {seconds:.2f} s"
    return JoinResult([Finding(GOOD, "meeting", text)], is_complete=True)


def _open_store(process: Process, world_size: int, timeout: float) -> TCPStore:
    """Connect to the store, and write a key that tells the others that this process has come.

    Rank 0 opens the store, unless the launcher has one.
    """
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=process.rank == 0 and not launcher_has_store,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    store.set(f"doctor/{process.rank}", process.host)
    return store


def _failure(text: str, remedy: str) -> JoinResult:
    return JoinResult([Finding(BAD, "meeting", text, remedy)], is_complete=False)


def _wait_for_ranks(store: TCPStore, world_size: int, timeout: float) -> set[int]:
    """Wait until every rank has written its key, and return the ranks that have not in time."""
    deadline = time.monotonic() + timeout
    missing = set(range(world_size))
    while missing and time.monotonic() < deadline:
        missing = {rank for rank in missing if not store.check([f"doctor/{rank}"])}
        time.sleep(0.05)
    return missing


def _join(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def leave_group() -> None:
    """Wait for all ranks, so that none sees how another one ends."""
    dist.barrier()


# --- checks


def findings(output_dir: Path) -> list[Finding]:
    """Return the findings about all ranks; all of them call this.

    Args:
        output_dir: the folder in which runs are kept.
    """
    return [*_same_versions(), *_clocks(), *_links(), *_shared_folder(output_dir)]


def gather(value: T) -> list[T]:
    """Gather an object from every rank, in rank order."""
    return Team.everyone().on_all(lambda: value)


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _same_versions() -> Iterator[Finding]:
    gathered = gather((this_process(), versions()))
    _, first_versions = gathered[0]
    for package in first_versions:
        counts = Counter(installed[package] for _, installed in gathered)
        [(usual, _)] = counts.most_common(1)
        different = {
            f"{process} has {installed[package]}"
            for process, installed in gathered
            if installed[package] != usual
        }
        if different:
            yield Finding(
                BAD,
                "versions",
                f"{package}: {', '.join(sorted(different))}; the others have {usual}",
                remedy="install the same version everywhere: pip install --constraint ...",
            )


def _clocks() -> Iterator[Finding]:
    dist.barrier()
    times = gather((this_process(), time.time()))
    median = statistics.median(seconds for _, seconds in times)
    skews = {str(process): seconds - median for process, seconds in times}
    large_skews = [
        f"{process} by {skew:+.1f} s"
        for process, skew in skews.items()
        if abs(skew) > _LARGEST_SKEW
    ]
    if large_skews:
        yield Finding(
            DOUBTFUL,
            "clocks",
            f"off: {', '.join(large_skews)}",
            remedy="run an NTP client, such as chrony",
        )
    else:
        largest = max(map(abs, skews.values()))
        yield Finding(GOOD, "clocks", f"within {largest:.2f} s of their median")


def _links() -> Iterator[Finding]:
    """Measure an all-reduce, and each machine's link to the next machine."""
    processes = gather(this_process())
    short_message = torch.zeros(2, device=_device())
    long_message = torch.zeros(_MESSAGE_BYTES // 4, device=_device())
    yield _all_reduce_speed(short_message, long_message)
    yield from _slow_links(processes, long_message)


def _all_reduce_speed(short_message: torch.Tensor, long_message: torch.Tensor) -> Finding:
    world_size = dist.get_world_size()
    latency = _median_seconds(partial(dist.all_reduce, short_message), times=20)
    long_seconds = _median_seconds(partial(dist.all_reduce, long_message), times=5)
    # Each process of a ring sends 2 (N - 1) / N of the bytes that are reduced.
    rate = 2 * (world_size - 1) / world_size * _MESSAGE_BYTES / long_seconds
    text = f"{1e6 * latency:.0f} us for 8 bytes; {rate / 1e6:,.0f} MB/s on each link of a ring"
    return Finding(GOOD, "all-reduce", text)


def _slow_links(processes: list[Process], message: torch.Tensor) -> Iterator[Finding]:
    """Send a message from each machine to the next, and report the links that are slow."""
    first_processes = [
        process
        for process in processes
        if process.rank == 0 or process.machine != processes[process.rank - 1].machine
    ]
    if len(first_processes) < 3:  # of two links, neither can be called the slow one
        return

    rates = {}
    receivers = [*first_processes[1:], first_processes[0]]
    for sender, receiver in zip(first_processes, receivers, strict=True):
        seconds = gather(_link_seconds(sender, receiver, message))[receiver.rank]
        rates[f"{sender} to {receiver.host} ({receiver.machine})"] = _MESSAGE_BYTES / seconds

    median = statistics.median(rates.values())
    for link, rate in rates.items():
        if rate < _SLOW_LINK_SHARE * median:
            yield Finding(
                DOUBTFUL,
                "links",
                f"{link}: {rate / 1e6:,.0f} MB/s; the median link has {median / 1e6:,.0f}",
                remedy="check its cable and switch, and NCCL_SOCKET_IFNAME",
            )


def _link_seconds(sender: Process, receiver: Process, message: torch.Tensor) -> float:
    """Return this rank's median time to send or receive a message; all ranks call this."""

    def do_nothing() -> None:
        pass

    action: Callable[[], object] = do_nothing
    rank = this_process().rank
    if rank == sender.rank:
        action = partial(dist.send, message, receiver.rank)
    elif rank == receiver.rank:
        action = partial(dist.recv, message, sender.rank)
    return _median_seconds(action, times=3)


def _median_seconds(action: Callable[[], object], times: int) -> float:
    """Return this rank's median time of a collective or a message; all ranks call this.

    The first call, which may open the connection, does not count.
    """
    seconds = []
    for _ in range(times + 1):
        dist.barrier()
        start = time.perf_counter()
        action()
        if _device().type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _shared_folder(output_dir: Path) -> Iterator[Finding]:
    """Look on every rank for a file that rank 0 has written near the run folder."""
    folder = nearest_existing(output_dir)
    is_first = this_process().rank == 0
    token_name = gather(f".doctor-{os.getpid()}-{time.time_ns()}")[0]
    token = folder / token_name
    if is_first:
        with contextlib.suppress(OSError):
            token.touch()
    dist.barrier()
    gathered = gather((this_process(), token.exists()))
    if is_first:
        token.unlink(missing_ok=True)

    _, first_sees_token = gathered[0]
    if not first_sees_token:  # the first machine's own check says that it cannot write there
        return
    blind = {str(process) for process, sees_token in gathered if not sees_token}
    if blind:
        yield Finding(
            DOUBTFUL,
            "run folder",
            f"{folder.absolute()} of the first machine is not visible to "
            f"{', '.join(sorted(blind))}",
            remedy="only the first machine then writes checkpoints; mount the folder on all",
        )
    else:
        yield Finding(GOOD, "run folder", f"{folder.absolute()} is visible to all processes")
