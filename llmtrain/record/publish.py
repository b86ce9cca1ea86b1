"""Upload a finished model to the Hugging Face hub."""

from pathlib import Path

from llmtrain.console import note, say
from llmtrain.errors import hub_error
from llmtrain.model_folders import note_on_base


def publish(folder: Path, repository: str | None) -> None:
    """Upload a finished model's folder to the hub, and say what others would lack of its base.

    The account is the one of ``hf auth login`` or of ``HF_TOKEN``. If the upload fails, a note says
    so, and the program continues: the model is still on the disk.

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

    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="A model trained with llmtrain",
        )
        say("uploaded", f"{folder} to {repository}")
    except Exception as error:  # the hub has many types of errors: for the login, network and name
        note(
            f"uploading to {repository} failed: {hub_error(error)}; to try again: "
            f"hf upload {repository} {folder}"
        )
