"""Two machines, as two network namespaces that are joined by a cable (a veth pair)."""

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator

FIRST = f"llmtrain-a{os.getpid() % 10000}"
SECOND = f"llmtrain-b{os.getpid() % 10000}"
INTERFACE = "cable0"  # the name of the cable's end in each namespace
ADDRESS = {FIRST: "10.231.0.1", SECOND: "10.231.0.2"}


class UnavailableError(Exception):
    """This machine does not allow network namespaces."""


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def two_machines(mbit: int | None = None) -> Iterator[list[str]]:
    """Make two namespaces that reach only each other, and yield their names.

    Args:
        mbit: the most that each sends, in Mbit/s; ``None`` for no limit.
    """
    if shutil.which("ip") is None:
        raise UnavailableError("needs iproute2 (the ip command)")
    with contextlib.ExitStack() as cleanup:
        try:
            for name in (FIRST, SECOND):
                command("ip", "netns", "add", name)
                cleanup.callback(command, "ip", "netns", "delete", name)
            _connect()
            if mbit is not None:
                _limit(mbit)
        except subprocess.CalledProcessError as error:
            raise UnavailableError(
                f"may not make network namespaces here: {error.stderr.strip()}"
            ) from None
        yield [FIRST, SECOND]


def _connect() -> None:
    ends = f"netns {FIRST} type veth peer name {INTERFACE} netns {SECOND}"
    _call(f"ip link add {INTERFACE} {ends}")
    for name in (FIRST, SECOND):
        _call(f"ip -n {name} address add {ADDRESS[name]}/24 dev {INTERFACE}")
        _call(f"ip -n {name} link set lo up")
        _call(f"ip -n {name} link set {INTERFACE} up")


def _limit(mbit: int) -> None:
    for name in (FIRST, SECOND):
        rate = f"rate {mbit}mbit burst 256kbit latency 50ms"
        _call(f"tc -n {name} qdisc add dev {INTERFACE} root tbf {rate}")


def _call(line: str) -> None:
    command(*shlex.split(line))


def on_machine(name: str, words: list[str]) -> list[str]:
    """Return a command that runs on a machine. For gloo, set GLOO_SOCKET_IFNAME to the ``INTERFACE``."""
    return ["ip", "netns", "exec", name, *words]
