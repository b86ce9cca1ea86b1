"""How a run stands, for whoever looks at its folder: launchers hide exit statuses."""

import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

from llmtrain.files import write_json


class Status(NamedTuple):
    """What ``status.json`` in ``folder`` says; ``state`` is running, preempted, failed or finished."""

    folder: Path
    state: str
    step: int
    reason: str
    incarnation: str

    def write(self) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        content = self._asdict() | {"pid": os.getpid(), "host": platform.node(), "time": now}
        del content["folder"]
        write_json(self.folder / "status.json", content)
