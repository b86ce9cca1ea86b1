"""A result that one process of a launch computes, and that the others on its machine take."""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from llmtrain.files import write_json
from llmtrain.locks import file_lock

_calls: Counter[str] = Counter()  # how often this process has asked for a result, by its name


def once_per_machine(name: str, compute: Callable[[], str]) -> str:
    """Return a text that takes long to compute; one process of a launch on each machine does it.

    The others wait until it has finished. The n-th call with a name returns the same text in every
    process. If the computation fails, each process tries it. A process that no launcher has started
    computes its own text.

    Args:
        name: tells this text from others. Every process must use a name equally often.
        compute: returns the text.
    """
    number = _calls[name]
    _calls[name] += 1
    folder = _launch_folder()
    if folder is None:
        return compute()

    name_hash = hashlib.sha256(f"{number} {name}".encode()).hexdigest()[:16]
    path = folder / f"{name_hash}.json"
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(file_lock(folder / f"{name_hash}.lock"))
        except OSError:  # the folder cannot be written
            return compute()
        if path.is_file():
            return str(json.loads(path.read_text()))
        text = compute()
        with contextlib.suppress(OSError):
            write_json(path, text, durable=False)
        return text


def _launch_folder() -> Path | None:
    """Return a folder that only the processes of one launch on one machine know.

    ``torchrun``, ``accelerate launch`` and ``notebook_launcher`` all use torch's elastic agent. It
    makes a new folder for the errors of each launch, with one for each restart of its processes:
    ``.../attempt_0/LOCAL_RANK/error.json``. Neither the agent's process id nor its run id would do:
    a notebook launches several times with the same ones. So no result of an earlier launch is
    taken.

    Returns:
        The folder; ``None`` if this process is alone, or was not launched.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    folder = error_file.parent.parent
    attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    if error_file.parts[-3:] != (attempt, os.environ.get("LOCAL_RANK"), "error.json"):
        return None
    is_alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    return None if is_alone or not folder.is_dir() else folder
