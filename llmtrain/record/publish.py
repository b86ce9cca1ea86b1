"""Upload a finished model to the Hugging Face hub."""

import sys
import threading
from pathlib import Path

import psutil

from llmtrain.console import note, say
from llmtrain.errors import hub_error
from llmtrain.model_folders import note_on_base

_PATIENCE_SECONDS = 600  # without progress
_LEAST_PROGRESS = 2**20  # bytes that are read in this time


def publish(folder: Path, repository: str | None) -> None:
    """Upload a finished model's folder to the hub, and say what others would lack of its base.

    The account is the one of ``hf auth login`` or of ``HF_TOKEN``. If the upload fails or makes no
    progress, a note says so, and the program continues: the model is still on the disk.

    Args:
        folder: the model's folder.
        repository: the name of the repository, which is made private if it does not exist. ``None``
            uploads nothing.
    """
    base_note = note_on_base(folder)
    if base_note:
        note(base_note)
    if repository is None:
        return
    from huggingface_hub import HfApi

    def note_failure(reason: str) -> None:
        remedy = f"to try again: hf upload {repository} {folder}"
        note(f"uploading to {repository} failed: {reason}; {remedy}")

    def upload() -> None:
        try:
            hub = HfApi()
            hub.create_repo(repository, private=True, exist_ok=True)
            hub.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message="A model trained with llmtrain",
            )
            say("uploaded", f"{folder} to {repository}")
        except Exception as error:  # the hub has many types, for the login, network and name
            note_failure(hub_error(error))

    thread = threading.Thread(target=upload, name="llmtrain-upload", daemon=True)
    thread.start()
    # The hub's library has no time limit. It reads files as fast as it sends them, and after a run
    # nothing else reads. Only Linux counts what a process reads.
    if sys.platform == "linux":
        bytes_read = psutil.Process().io_counters().read_chars
        thread.join(_PATIENCE_SECONDS)
        while thread.is_alive():
            bytes_before = bytes_read
            bytes_read = psutil.Process().io_counters().read_chars
            if bytes_read - bytes_before < _LEAST_PROGRESS:
                note_failure(f"no progress for {_PATIENCE_SECONDS} s")
                return
            thread.join(_PATIENCE_SECONDS)
    thread.join()
