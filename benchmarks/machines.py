"""Two machines on one computer: network namespaces that are joined by a cable. This needs root."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

INTERFACE = "cable0"  # the name of the cable's end in each namespace


@dataclass(frozen=True)
class Machine:
    """A network namespace.

    Attributes:
        name: the name of the namespace.
        address: its address on the cable.
    """

    name: str
    address: str

    def command(self, words: list[str]) -> list[str]:
        """Return a command that runs ``words`` on this machine.

        gloo needs the variable ``GLOO_SOCKET_IFNAME`` with the name of the ``INTERFACE``.
        """
        return ["ip", "netns", "exec", self.name, *words]


@contextlib.contextmanager
def two_machines(mbit: int) -> Iterator[list[Machine]]:
    """Make two machines that reach each other and nothing else, and remove them after the block.

    Args:
        mbit: the most that each sends, in Mbit/s.

    Raises:
        SystemExit: if this process may not make network namespaces.
    """
    if shutil.which("ip") is None:
        raise SystemExit("network namespaces need iproute2 (the ip command)")

    suffix = os.getpid() % 10000
    first = Machine(f"llmtrain-a{suffix}", "10.231.0.1")
    second = Machine(f"llmtrain-b{suffix}", "10.231.0.2")
    with contextlib.ExitStack() as cleanup:
        for machine in (first, second):
            _run(f"ip netns add {machine.name}")
            cleanup.callback(_run, f"ip netns delete {machine.name}")
        _run(
            f"ip link add {INTERFACE} netns {first.name} "
            f"type veth peer name {INTERFACE} netns {second.name}"
        )
        for machine in (first, second):
            _run(f"ip -n {machine.name} address add {machine.address}/24 dev {INTERFACE}")
            _run(f"ip -n {machine.name} link set lo up")
            _run(f"ip -n {machine.name} link set {INTERFACE} up")
            _run(
                f"tc -n {machine.name} qdisc add dev {INTERFACE} root "
                f"tbf rate {mbit}mbit burst 256kbit latency 50ms"
            )
        yield [first, second]


def _run(command: str) -> None:
    process = subprocess.run(
        command.split(), capture_output=True, text=True, timeout=20, check=False
    )
    if process.returncode:
        raise SystemExit(f"{command}: {process.stderr.strip()}")
