"""Metrics: ``metrics.jsonl`` is the truth, Accelerate's trackers (Weights & Biases, TensorBoard) mirror it."""

import contextlib
import logging
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from accelerate import Accelerator
from accelerate.tracking import filter_trackers

from llmtrain.console import note, say
from llmtrain.errors import UserError, first_line
from llmtrain.files import append_json_line

TRACKERS = ("wandb", "tensorboard")
_INIT_SECONDS = 30


def tracker_names(report_to: list[str]) -> list[str]:
    """The trackers that ``--report_to`` asks for; raises :class:`UserError` for one that is unknown or not there."""
    names = [name for name in report_to if name != "none"]
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--report_to {name}: llmtrain reports to {', '.join(TRACKERS)} or none.")
    if "none" in report_to and names:
        raise UserError(f"--report_to none and {' '.join(names)} contradict each other.")
    if "tensorboard" in names and not filter_trackers(["tensorboard"], "."):
        raise UserError("--report_to tensorboard needs it installed: pip install 'llmtrain[tensorboard]'.")
    return names


class Metrics:
    """Writes a line of ``metrics.jsonl`` a reading and passes it on to the trackers; used on every process."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.accelerator, self.path = accelerator, folder / "metrics.jsonl"
        self.broken = False

    def start(self, names: list[str], settings: dict[str, Any], run_name: str, run_id: str) -> None:
        """Open the trackers, on the main process; one that cannot be opened is left out, with one line."""
        self.accelerator.log_with = filter_trackers(names, str(self.path.parent))
        self.accelerator.project_configuration.set_directories(str(self.path.parent))
        if not names or not self.accelerator.is_main_process:
            return
        init: dict[str, Any] = {}
        if "wandb" in names:
            init["wandb"] = _wandb_settings(self.path.parent, run_name, run_id)
        logging.getLogger("accelerate.tracking").setLevel(logging.ERROR)
        plain = {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in settings.items()}
        try:
            self._open(plain, init)
        except Exception as error:  # a tracker's trouble is not the run's
            if init.get("wandb", {}).get("mode") == "offline" or "wandb" not in names:
                note(f"tracking is off: {first_line(error)}; metrics.jsonl has everything.")
                self.broken = True
                return
            note(f"W&B does not answer ({first_line(error)}); logging offline.")
            init["wandb"]["mode"] = "offline"
            try:
                _forget_wandb()
                self._open(plain, init)
            except Exception as again:
                note(f"tracking is off: {first_line(again)}; metrics.jsonl has everything.")
                self.broken = True
                return
        if "wandb" in names:
            self._say_where(init["wandb"]["mode"])

    def _open(self, settings: dict[str, Any], init: dict[str, Any]) -> None:
        self.accelerator.trackers = []
        self.accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "llmtrain"), config=settings, init_kwargs=init)

    def _say_where(self, mode: str | None) -> None:
        run = self.accelerator.get_tracker("wandb", unwrap=True)
        if mode == "offline":
            where = Path(run.settings.sync_dir)
            with contextlib.suppress(ValueError):
                where = where.relative_to(Path.cwd())
            why = "offline" if os.environ.get("WANDB_MODE") or _logged_in() else "not logged in, so logging offline"
            say("wandb", f"{why}; later: wandb login && wandb sync {where}")
        elif run.url:
            say("wandb", run.url)

    def write(self, reading: dict[str, Any]) -> None:
        """One reading; ``step`` is part of it. Only the main process writes."""
        if not self.accelerator.is_main_process:
            return
        append_json_line(self.path, reading)
        if self.accelerator.trackers and not self.broken:
            try:
                self.accelerator.log(reading, step=reading["step"])
            except Exception as error:
                self.broken = True
                note(f"tracking stopped: {first_line(error)}; metrics.jsonl goes on.")

    def close(self, exit_code: int) -> None:
        """Finish the trackers' runs, so that none is left open when the process ends."""
        for tracker in self.accelerator.trackers:
            try:
                if tracker.name == "wandb" and self.accelerator.is_main_process:
                    tracker.tracker.finish(exit_code=exit_code)
                else:
                    tracker.finish()
            except Exception as error:
                note(f"closing {tracker.name}: {first_line(error)}.")
        self.accelerator.trackers = []


def _wandb_settings(folder: Path, run_name: str, run_id: str) -> dict[str, Any]:
    import wandb

    return {
        "dir": str(folder),
        "name": run_name,
        "id": run_id,
        "resume": "allow",
        "mode": os.environ.get("WANDB_MODE") or (None if _logged_in() else "offline"),
        "settings": wandb.Settings(silent=True, console="off", init_timeout=_INIT_SECONDS, finish_timeout=120),
    }


def _forget_wandb() -> None:
    """End W&B's own service process, which still holds the run id of an init that failed."""
    import wandb

    wandb.teardown()


def _logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    host = urlparse(wandb.setup().settings.base_url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
