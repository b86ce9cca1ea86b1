"""Two machines, as two network namespaces joined by a cable (a veth pair)."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

FIRST, SECOND = f"llmtrain-a{os.getpid() % 10000}", f"llmtrain-b{os.getpid() % 10000}"
ADDRESS = {FIRST: "10.231.0.1", SECOND: "10.231.0.2"}


class UnavailableError(Exception):
    """This machine does not let one make namespaces."""


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def two_machines(mbit: int | None = None) -> Iterator[list[str]]:
    """The names of two namespaces that reach each other and nothing else; each sends at most ``mbit`` Mbit/s."""
    if shutil.which("ip") is None:
        raise UnavailableError("needs iproute2 (the ip command)")
    with contextlib.ExitStack() as cleanup:
        try:
            for name in (FIRST, SECOND):
                command("ip", "netns", "add", name)
                cleanup.callback(command, "ip", "netns", "delete", name)
            words = ("type", "veth", "peer", "name", "cable0", "netns", SECOND)
            command("ip", "link", "add", "cable0", "netns", FIRST, *words)
            for name in (FIRST, SECOND):
                command("ip", "-n", name, "address", "add", f"{ADDRESS[name]}/24", "dev", "cable0")
                for device in ("lo", "cable0"):
                    command("ip", "-n", name, "link", "set", device, "up")
                if mbit is not None:
                    limit = ("rate", f"{mbit}mbit", "burst", "256kbit", "latency", "50ms")
                    command(
                        "tc", "-n", name, "qdisc", "add", "dev", "cable0", "root", "tbf", *limit
                    )
        except subprocess.CalledProcessError as error:
            raise UnavailableError(
                f"may not make network namespaces here: {error.stderr.strip()}"
            ) from None
        yield [FIRST, SECOND]


def on_machine(name: str, words: list[str]) -> list[str]:
    """A command, run there; gloo has to be told GLOO_SOCKET_IFNAME=cable0."""
    return ["ip", "netns", "exec", name, *words]
