"""A finished model on the hub."""

from pathlib import Path

from llmtrain.console import note, say
from llmtrain.errors import hub_said


def publish(folder: Path, repository: str | None) -> None:
    """Upload a model's folder, where a repository is named; a new one is private.

    The account is that of Hugging Face's own login or of ``HF_TOKEN``. A failure is a note: the model is on the disk.
    """
    if repository is None:
        return
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="A model trained with llmtrain"
        )
        say("uploaded", f"{folder} to {repository}")
    except Exception as error:  # no login, no network, no such name: each with an error of its own
        note(
            f"uploading to {repository} failed: {hub_said(error)}; later: hf upload {repository} {folder}"
        )
