"""What a mirror has, and what it had at every moment."""

from pathlib import Path
from urllib.parse import unquote

from llmtrain.record.checkpoint import MANIFEST
from llmtrain.storage import Storage
from tests.buckets import Proxy


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a run folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def files_at(address: str) -> dict[str, bytes]:
    """Return the content of all files of a mirror, except for its claim."""
    place = Storage(address)
    return {name: place.read(name) for name in place.sizes() if name != "claim.json"}


def assert_never_half(proxy: Proxy, file_count: int) -> None:
    """Assert that each checkpoint with a manifest was complete after every request.

    Once there were two of them, there were never fewer.

    Args:
        proxy: has passed on the requests for one mirror, since its beginning.
        file_count: the number of files of a checkpoint.
    """
    present: set[str] = set()
    most = 0
    for method, path, _ in proxy.requests:
        _, part, name = unquote(path.partition("?")[0]).partition("/checkpoints/")
        if part and method == "PUT":
            present.add(name)
        elif part and method == "DELETE":
            present.discard(name)
        complete = [name.split("/")[0] for name in present if name.endswith(MANIFEST)]
        for step in complete:
            names = [name for name in present if name.startswith(f"{step}/")]
            assert len(names) == file_count, (method, path, names)
        assert len(complete) >= most, (method, path)
        most = min(2, max(most, len(complete)))
    assert most == 2


def count_puts(proxy: Proxy, part: str) -> int:
    """Return how often a file was uploaded whose path contains a part."""
    return sum(method == "PUT" and part in path for method, path, _ in proxy.requests)
