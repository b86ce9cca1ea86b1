"""Errors in one line, for the person who can mend them."""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator

from llmtrain.shipped import shipped_config


class UserError(Exception):
    """A mistake that the user can mend: one line that says what is wrong, where, and what to do instead.

    Programmers' mistakes are ``assert``s and ordinary exceptions, with a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # one line, whatever the parts held

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows; IPython asks for this name."""
        return [f"error: {self}"]


class ToldElsewhereError(UserError):
    """The end of another process, and of this one with it: the other says why on its own stderr."""


def first_line(error: BaseException) -> str:
    """Return the message of another library's error, without its essay; a line that ends in a colon has a second."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host has no memory left."""
    of_host = isinstance(error, OSError) and error.errno == errno.ENOMEM
    named = bool(_kinds(error) & {"OutOfMemoryError", "MemoryError"})
    return (
        named or of_host or "can't allocate memory" in str(error)
    )  # torch's allocator for CPUs raises RuntimeError


def _kinds(error: BaseException) -> set[str]:
    """Return the names of an error's classes: other libraries need not be imported to know theirs."""
    return {kind.__name__ for kind in type(error).__mro__}


def explained(error: BaseException) -> str | None:
    """Return a line for an error whose cause lies outside of the program: a disk, a right, memory, another machine.

    It is ``None`` for any other, of which the traceback is wanted.
    """
    return next(filter(None, map(_explained, _chain(error))), None)


def _explained(error: BaseException) -> str | None:
    said = first_line(error)
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return (
            f"out of memory ({said}): make the model or --per_device_train_batch_size smaller, or shard it with "
            f"{shipped_config('fsdp2')}; llmtrain plan says what it needs."
        )
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        place, remedy = (
            "" if error.filename is None else f"{str(error.filename)[:200]}: ",
            _REMEDIES[error.errno],
        )
        # a write to a full disk names no file; a right that is missing for something else than a file is not known here
        return f"{place}{error.strerror}; {remedy}." if place or remedy != _NO_RIGHT else None
    if {"DistNetworkError", "DistStoreError"} & _kinds(error):
        if "EADDRINUSE" in said or "already in use" in said:
            port = re.search(r"port: (\d+)", said)
            which = f"port {port[1]}" if port else "the port of the first process"
            return f"{which} is in use; name another: MASTER_PORT, accelerate's --main_process_port, or --master-port."
        return f"the processes lost each other ({said}); llmtrain doctor, on each machine, says which way is closed."
    return None


_NO_ROOM = "make room, or name another folder; what was saved before is whole"
_NO_RIGHT = "name a file or folder that this user may use"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _NO_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_RIGHT),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "name another file or folder"),
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
}


def hub_said(error: BaseException) -> str:
    """Return why the Hugging Face hub, or a folder in its place, gave or took nothing, and what to do about it."""
    names = set().union(*map(_kinds, _chain(error, contexts=True)))
    remedy = next((remedy for known, remedy in _HUB.items() if known in names), None)
    return first_line(error) if remedy is None else f"{first_line(error).rstrip('.')}: {remedy}"


_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_UNREACHED = "the hub cannot be reached; a local folder needs none"
_HUB = {  # by the names of huggingface_hub's errors, and of those of what it stands on
    "GatedRepoError": f"accept its terms on its page, and {_LOG_IN}",
    "RepositoryNotFoundError": f"is the name right? Where it is private, {_LOG_IN}",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and it has not been fetched before",
    **dict.fromkeys(
        ("LocalEntryNotFoundError", "ConnectError", "ConnectionError", "TimeoutException"),
        _UNREACHED,
    ),
}


@contextlib.contextmanager
def refused_as(what: str, said: Callable[[BaseException], str] = hub_said) -> Iterator[None]:
    """Raise :class:`UserError` for all that other libraries raise in the block: what failed, and what they said.

    Each has its own ways to refuse a folder, a name or a template.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {said(error)}") from None


def _chain(error: BaseException | None, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and what it was raised from; with ``contexts`` also what was being handled when it was raised."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        hidden = error.__suppress_context__ or not contexts
        error = error.__cause__ or (None if hidden else error.__context__)
