"""Where a run begins: its folder, and the checkpoint that it resumes from."""

from pathlib import Path
from typing import NamedTuple

from llmtrain.types import JsonObject


class ResumePoint(NamedTuple):
    """The folder of a run, and the checkpoint that it resumes from, if there is one."""

    folder: Path
    checkpoint: Path | None = None
    step: int = 0  # steps made until the checkpoint
    tokens: int = 0  # target tokens of those steps
    run_id: str = ""
    start_id: str = ""  # distinguishes the starts in one folder
    reason: str = ""  # the reason for this start, for the start-up log
    named_fingerprint: JsonObject | None = None  # of the checkpoint that the user has named
    lost_checkpoints: tuple[
        str, ...
    ] = ()  # the run's damaged checkpoints, if it starts again for them

    @property
    def extended_run(self) -> Path | None:
        """The folder of the run that this run extends: another one, which made the checkpoint."""
        if self.checkpoint is None:
            return None
        folder = self.checkpoint.parent.parent
        is_own = folder.absolute() == self.folder.absolute()
        return None if is_own or not (folder / "run.json").exists() else folder

    @property
    def optim_settings(self) -> JsonObject | None:
        """The optimizer settings of a checkpoint that the user has named, if there is one."""
        if self.named_fingerprint is None:
            return None
        settings: JsonObject | None = self.named_fingerprint.get("optimizer")
        return settings
