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

    @property
    def optim_settings(self) -> JsonObject | None:
        """The optimizer settings of a checkpoint that the user has named, if there is one."""
        if self.named_fingerprint is None:
            return None
        settings: JsonObject | None = self.named_fingerprint.get("optimizer")
        return settings
