"""Folders in object storage, on the hub or on a web server, by their address.

fsspec reads and writes them. What it leaves open is decided here: how long a failure is retried,
that listings are never cached, and that no message shows a secret.
"""

import contextlib
import functools
import importlib.util
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from llmtrain.errors import UserError, first_line
from llmtrain.files import temporary_sibling
from llmtrain.redaction import redacted

T = TypeVar("T")

# The packages for addresses that need more than this package installs, and their extras.
_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs")}
_WRITABLE = ("s3://", "gs://", "hf://buckets/")
_READABLE = (*_WRITABLE, "hf://datasets/", "https://", "http://")
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
# For how many seconds an action is repeated after its first failure, and the pauses in between.
PATIENCE = 60.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 8.0
_CLAIM_PAUSE = 2.0  # before a claim is read back, in storage without a conditional create
# Seconds to wait for a connection, and for the next bytes of an answer.
_CONNECT_SECONDS = 10
_READ_SECONDS = 15
# s3fs sends a request so often by itself, and a read of a part the square of it. A second attempt
# keeps a large upload, which has many parts, from starting again.
_S3_ATTEMPTS = 2
# Answers to a request that would fail again: to one without permission, and S3's to a request for
# the size of a file if the credentials have expired.
_REFUSALS = re.compile("Bad Request|Forbidden|Unauthorized|bucket does not exist|validation failed")
_SIGNATURES = re.compile(r"(?<=\?)[^\s'\")]+|\b[0-9a-f]{64}\b")  # in URLs, and their shape
_MISSING_LOGINS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")


class StorageError(UserError):
    """A storage does not answer, or refuses what is asked."""


def is_address(name: str) -> bool:
    """Return whether a name is an address, such as ``s3://bucket/folder``, and not a path."""
    return _SCHEME.match(name) is not None and not Path(name).exists()


class Storage:
    """A folder at an address. Its files are named by paths relative to it.

    An operation is repeated for a minute if it fails. A file that is absent raises
    ``FileNotFoundError`` at once.

    Args:
        address: the address, such as ``s3://bucket/folder``.
        source: what has the address, for error messages, such as ``--dataset`` and a space.
        writable: whether files will be written there.

    Raises:
        UserError: if there is no storage of this kind, if the address has a secret in it, or if a
            package is missing.
    """

    def __init__(self, address: str, source: str = "", writable: bool = False) -> None:
        kinds = _WRITABLE if writable else _READABLE
        shown = source + address
        scheme, _, rest = address.partition("://")
        # The secret keys of S3 may have a slash. After a host, only a port has a colon.
        if re.search(r"[?#]|^[^/]*@|^[^/\[]*:(?!\d+(/|$))", rest):
            raise UserError(
                f"{source}{scheme}://*** has a password or a query; name the folder alone, and log "
                "in as the storage's own tools do, by environment variables or their config files."
            )
        if not address.startswith(kinds) or not rest.strip("/"):
            *others, last = kinds
            raise UserError(
                f"{shown} is no address that can be {'written' if writable else 'read'}; use a "
                f"folder at {', '.join(others)} or {last}"
            )
        package, extra = _PACKAGES.get(scheme, ("fsspec", ""))
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{shown} needs {package}: pip install 'llmtrain[{extra}]'")
        self.address = address.rstrip("/")
        self._has_conditional_create = scheme in ("s3", "gs")
        if address.startswith("hf://datasets/"):
            self.address = self._patiently("", functools.partial(_pinned, self.address))

    def __str__(self) -> str:
        return self.address

    @functools.cached_property
    def _files(self) -> Any:
        """The file system of fsspec."""
        import fsspec

        scheme = self.address.partition("://")[0]
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if scheme == "s3":
            import s3fs

            class S3Files(s3fs.S3FileSystem):  # type: ignore[misc]
                retries = _S3_ATTEMPTS

            config = {
                "connect_timeout": _CONNECT_SECONDS,
                "read_timeout": _READ_SECONDS,
                "retries": {"mode": "standard", "total_max_attempts": 1},
            }
            return S3Files(config_kwargs=config, **options)
        return fsspec.filesystem(scheme, **options)

    def _patiently(self, name: str, action: Callable[[], T]) -> T:
        """Return what an action on a file returns, and repeat it while it fails.

        Raises:
            FileNotFoundError: at once, if the file is absent.
            StorageError: at once, if the storage refuses; after a minute, if it still fails.
        """
        place = f"{self.address}/{name}".rstrip("/")
        stop = None
        pause = _FIRST_PAUSE
        while True:
            try:
                return action()
            except (FileNotFoundError, FileExistsError) as error:
                if "bucket does not exist" in str(error):  # of S3 and Google Cloud Storage
                    raise StorageError(f"{place}: there is no such bucket; make it.") from None
                raise
            except UserError:
                raise
            except Exception as error:  # of many types
                reason = redacted(_SIGNATURES.sub("***", first_line(error)))
                is_refused = isinstance(error, PermissionError) or _REFUSALS.search(reason)
                if is_refused or type(error).__name__ in _MISSING_LOGINS:
                    raise StorageError(
                        f"{place}: the storage refuses ({reason}); check the name, log in, renew "
                        "the credentials, or ask for permission."
                    ) from None
                stop = stop or time.monotonic() + PATIENCE
                if time.monotonic() + pause > stop:
                    raise StorageError(
                        f"{place}: the storage does not answer ({reason}); start again when it "
                        "does."
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _path(self, name: str) -> str:
        return f"{self.address}/{name}"

    def read(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        is_intact: Callable[[bytes], bool] = lambda content: True,
    ) -> bytes:
        """Return the bytes of a file, or a part of them.

        Args:
            name: the file.
            start: the first byte.
            stop: the byte after the last one.
            is_intact: called with the bytes. While it returns ``False``, they are read again.
        """

        def attempt() -> bytes:
            content: bytes = self._files.cat_file(self._path(name), start=start, end=stop)
            if stop is not None and len(content) > stop - (start or 0):
                raise StorageError(
                    f"{self._path(name)}: the server does not send parts of files; download the "
                    "folder, and use its path."
                )
            if stop is not None and len(content) != stop - (start or 0):
                raise OSError(f"{len(content)} bytes instead of {stop - (start or 0)}")
            if not is_intact(content):
                raise OSError("the bytes differ from their hash")
            return content

        return self._patiently(name, attempt)

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file."""
        self._put(name, lambda: self._files.pipe_file(self._path(name), content))

    def upload(self, name: str, path: Path) -> None:
        """Create or replace a file by a local one.

        Raises:
            FileNotFoundError: if the local file is gone.
        """
        path.stat()
        self._put(name, lambda: self._files.put_file(str(path), self._path(name)))

    def _put(self, name: str, action: Callable[[], object]) -> None:
        """Repeat an action that creates a file while it fails."""

        def attempt() -> None:
            try:
                action()
            except FileNotFoundError as error:  # of the bucket, or of an upload that has ended
                raise OSError(str(error)) from None

        self._patiently(name, attempt)

    def download(self, name: str, path: Path) -> None:
        """Create or replace a local file by one of the storage. It is complete or absent."""
        path.parent.mkdir(parents=True, exist_ok=True)
        working = temporary_sibling(path)
        try:
            self._patiently(name, lambda: self._files.get_file(self._path(name), str(working)))
            working.replace(path)
        finally:
            working.unlink(missing_ok=True)

    def download_all(self, names: Iterable[str], folder: Path) -> None:
        """Download files into a folder, several at a time. Those that are absent are passed over.

        So are those whose name leads out of the folder.
        """

        def download(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.download(name, folder / name)

        with ThreadPoolExecutor() as threads:
            list(threads.map(download, [name for name in names if ".." not in Path(name).parts]))

    def create(self, name: str, content: bytes) -> bool:
        """Create a file, unless it exists, and return whether this call has created it.

        S3 and Google Cloud Storage decide between two callers. Other storage does not, so there the
        file is read back after two seconds.
        """
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            if self.read(name) != content:  # an attempt may succeed without an answer
                return False
        with contextlib.suppress(FileExistsError):
            self._put(name, lambda: self._files.pipe_file(path, content, mode="create"))
        if not self._has_conditional_create:
            time.sleep(_CLAIM_PAUSE)
        return self.read(name) == content

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size of each file in a folder and its subfolders, by its name."""

        def attempt() -> dict[str, int]:
            self._files.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                found = self._files.find(self._path(folder).rstrip("/"), detail=True)
                sizes = {path: entry["size"] for path, entry in found.items()}
                # Consoles mark a new folder by an empty object, whose name ends in a slash.
                return {path: size for path, size in sizes.items() if not path.endswith("/")}
            return {}

        root = self.address.partition("://")[2] + "/"
        sizes = self._patiently(folder, attempt)
        return {path.partition(root)[2]: size for path, size in sizes.items()}

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, one after the other. Those that are absent are passed over."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._patiently(name, functools.partial(self._files.rm_file, self._path(name)))


def _pinned(address: str) -> str:
    """Return the address of a data set on the hub with its present commit."""
    from huggingface_hub import HfApi, HfFileSystem

    place: Any = HfFileSystem().resolve_path(address)
    info = HfApi().dataset_info(place.repo_id, revision=place.revision)
    pinned = f"hf://datasets/{place.repo_id}@{info.sha}/{place.path_in_repo}"
    return pinned.rstrip("/")
