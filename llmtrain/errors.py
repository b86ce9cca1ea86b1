"""Errors that the user can fix, each in one line."""

import contextlib
import errno
import re
import sys
import traceback
from collections.abc import Callable, Iterator

from llmtrain.redaction import redacted

# What to do about an error of the disk, a permission or a name. A file that is not there is a
# mistake of the program, because the names that a user gives are checked.
_NO_SPACE = "free some space, or use another folder; what was saved before is intact"
_OS_REMEDIES = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EMFILE: "raise the limit on open files: ulimit -n 4096",
}
_OTHER_OS_REMEDY = (
    "check the disk, the name and your permissions, or use another one; what was saved before is "
    "intact"
)

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_UNREACHABLE = "the Hugging Face hub cannot be reached; a local folder works without it"
# By the names of errors of huggingface_hub, and of the libraries that it uses.
_HUB_REMEDIES = {
    "GatedRepoError": f"accept the terms on its page, and {_LOG_IN}",
    "RepositoryNotFoundError": f"check the name; if the repository is private, {_LOG_IN}",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and the local cache does not have it",
    "LocalEntryNotFoundError": _UNREACHABLE,
    "ConnectError": _UNREACHABLE,
    "ConnectionError": _UNREACHABLE,
    "TimeoutException": _UNREACHABLE,
}


class UserError(Exception):
    """A mistake that the user can fix.

    The message is one line: what is wrong, where, and what to do about it. Bugs of the program are
    ``assert`` and ordinary exceptions, with a traceback.
    """

    def __init__(self, message: str) -> None:
        # Parts of the message may come from elsewhere, and have several lines.
        super().__init__(" ".join(message.split()))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows; IPython calls this name."""
        return [f"error: {self}"]


class DamagedRowsError(UserError):
    """Rows that a run reads differ from their hashes. The run saves its state and ends."""


class ReportedElsewhereError(UserError):
    """This process ends because another one has failed, which prints the reason itself."""


class FailedElsewhereError(Exception):
    """Another rank has failed, and prints the traceback of its error. The message names the rank.

    This is no :class:`UserError`, so code that handles one on the failed rank does not handle this
    one here.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message.

    If that line ends in a colon, the second line is appended to it. An error without a message
    gives the name of its class.
    """
    lines = (str(error).strip() or type(error).__name__).splitlines()
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1].strip()}"
    return lines[0]


def short_repr(value: object) -> str:
    """Return how a message names an object of a wrong type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = " ".join(repr(value).split())  # in one line
    if " at 0x" in text:  # an address tells nothing
        return f"the {type(value).__name__} {getattr(value, '__name__', 'object')}"
    return text[:60]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host has no memory left."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if _class_names(error) & {"OutOfMemoryError", "MemoryError"}:
        return True
    # torch's allocator for CPUs raises RuntimeError.
    return "can't allocate memory" in str(error)


def _class_names(error: BaseException) -> set[str]:
    """Return the names of an error's class and its base classes.

    Comparing names needs no import of the library that defines the class.
    """
    return {kind.__name__ for kind in type(error).__mro__}


def explain(error: BaseException) -> str | None:
    """Return one line for an error whose cause is outside the program.

    Such causes are the disk, missing permissions, memory, and other machines. The errors that
    ``error`` was raised from are searched, too.

    Returns:
        ``None`` for any other error, whose traceback is needed.
    """
    for link in _chain(error):
        explanation = _explanation(link)
        if explanation:
            return explanation
    return None


def _explanation(error: BaseException) -> str | None:
    if isinstance(error, (UserError, FailedElsewhereError)):
        return str(error)
    if is_out_of_memory(error):
        return (
            f"out of memory ({first_line(error)}): use a smaller model, or more memory; llmtrain "
            "plan computes what a run needs on one GPU, and sharded over several."
        )
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        remedy = _OS_REMEDIES.get(error.errno or 0, _OTHER_OS_REMEDY)
        if error.filename is not None:
            return f"{str(error.filename)[:200]}: {error.strerror}; {remedy}."
        # A write to a full disk may name no file. Other errors without a name may be about
        # something else, such as a port or a connection.
        if remedy == _NO_SPACE:
            return f"{error.strerror}; {remedy}."
    if _class_names(error) & {"DistNetworkError", "DistStoreError"}:
        return _explain_network_error(first_line(error))
    return None


def _explain_network_error(message: str) -> str:
    if "EADDRINUSE" in message or "already in use" in message:
        match = re.search(r"port: (\d+)", message)
        port = f"port {match[1]}" if match else "the port of the first process"
        return (
            f"{port} is in use; choose another one with MASTER_PORT, accelerate's "
            "--main_process_port, or --master-port."
        )
    return (
        f"the processes lost contact with each other ({message}); run llmtrain doctor on each "
        "machine to find the connection that fails."
    )


def print_traceback_with_causes(error: BaseException) -> None:
    """Print the traceback of an error on stderr, after those of the errors that led to it.

    That includes errors that ``raise ... from None`` hides, because one line describes them.
    """
    for link in _chain(error, follow_context=True):
        if link.__cause__ is None:
            link.__suppress_context__ = False  # so that the chain goes on with the hidden error
    print(redacted("".join(traceback.format_exception(error))), end="", file=sys.stderr)


def hub_error(error: BaseException) -> str:
    """Return why a download or an upload failed, and what to do about it.

    Args:
        error: an error of huggingface_hub, or of reading a local folder instead.
    """
    names: set[str] = set()
    for link in _chain(error, follow_context=True):
        names |= _class_names(link)

    for name, remedy in _HUB_REMEDIES.items():
        if name in names:
            return f"{first_line(error).rstrip('.')}: {remedy}"
    return first_line(error)


@contextlib.contextmanager
def as_user_error(
    failure: str, describe: Callable[[BaseException], str] = hub_error
) -> Iterator[None]:
    """Turn every exception of the block into a :class:`UserError`.

    Libraries have many types of errors for a folder, a name or a template that they cannot use.

    Args:
        failure: what has failed, the beginning of the message.
        describe: returns the rest of the message, given the exception.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{failure}: {describe(error)}") from None


def _chain(error: BaseException | None, follow_context: bool = False) -> Iterator[BaseException]:
    """Yield an error, and the errors that it was raised from.

    Args:
        error: the error to begin with.
        follow_context: also yield the error that was being handled when another one was raised.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        origin = error.__cause__
        if origin is None and follow_context and not error.__suppress_context__:
            origin = error.__context__
        error = origin
