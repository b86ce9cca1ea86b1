"""Weights & Biases: online, offline and in sweeps."""

import configparser
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from accelerate.tracking import GeneralTracker

from llmtrain.console import note, say
from llmtrain.errors import first_line
from llmtrain.files import JsonObject
from llmtrain.record.history import read_lines
from llmtrain.record.stopping import is_lower_better
from llmtrain.record.trackers.tracker import Tracker
from llmtrain.redaction import redacted

_INIT_SECONDS = 30  # for one attempt to start
# W&B's own servers. Version 0.31 takes a login for the first for the second, too.
_CLOUD = ("https://api.wandb.ai", "https://api.forge.coreweave.com")


def wants_model() -> bool:
    """Return whether the finished model is uploaded, as ``WANDB_LOG_MODEL`` says."""
    return os.environ.get("WANDB_LOG_MODEL", "false").lower() in ("end", "checkpoint", "true")


def is_wanted(folder: Path) -> bool:
    """Return whether ``--report_to auto`` logs the run in a folder to W&B.

    It does if the user is logged in or has chosen W&B's offline mode, and if an earlier start of
    the run was logged. Otherwise a user who has set a project or an entity of W&B is told how to
    log in.
    """
    mode = _setting("mode")
    if mode == "disabled":
        return False
    if mode == "offline" or (folder / "wandb").exists() or _is_logged_in():
        return True
    if _setting("project") or _setting("entity"):
        say("wandb", "not logged in, so nothing is logged there; to log runs: wandb login")
    return False


def sweep_run_id() -> str | None:
    """Return the run id that the agent of a W&B sweep has chosen; ``None`` outside of a sweep."""
    if not os.environ.get("WANDB_SWEEP_ID"):
        return None
    return os.environ.get("WANDB_RUN_ID")


class WeightsAndBiases(Tracker):
    """W&B's copy of a run, which is one run of W&B in all starts: online if possible, else offline.

    Online, W&B itself knows the last step that it has got. Offline, each start writes the whole
    history to a new folder: when that is synced, it replaces what W&B has.

    Attributes:
        wandb_run: the ``wandb.Run``.
        best: the best value of each eval metric so far.
    """

    def open(self) -> None:
        import wandb

        mode = _setting("mode") or None
        if mode != "disabled" and not _is_logged_in():
            mode = "offline"
        if mode != "offline":
            try:
                self.inner = self._init(mode=mode, resume="allow")
            except Exception as error:
                note(f"W&B does not answer ({first_line(error)}); logging offline.")
                wandb.teardown()  # ends its service process, which still holds the run id
                mode = "offline"
        if mode == "offline":
            self.inner = self._init(mode=mode)

        self.inner.store_init_configuration(self.run.config)
        self.wandb_run: Any = self.inner.tracker
        self.sent_step = self.wandb_run.starting_step - 1
        self.best: dict[str, float] = {}
        self.wandb_run.define_metric("eval/*", summary="none")
        for metric in ("tokens", "tokens_seen", "epoch"):  # to choose as the x axis of a chart
            self.wandb_run.define_metric(metric, hidden=True)

        if mode == "offline":
            folder = os.path.relpath(self.wandb_run.settings.sync_dir)
            say("wandb", f"offline; to upload it later: wandb login && wandb sync {folder}")
        elif self.wandb_run.url:
            self.url = redacted(self.wandb_run.url)
            say("wandb", self.url)

    def _init(self, **arguments: object) -> GeneralTracker:
        """Call ``wandb.init``, through Accelerate's tracker."""
        import wandb

        settings = wandb.Settings(silent=True, init_timeout=_INIT_SECONDS)
        if sweep_run_id() is None:
            # The agent of a sweep chooses the project, the id and the name itself.
            arguments |= {"id": self.run.run_id, "name": self.run.name}
        return self.start(dir=str(self.run.folder), settings=settings, **arguments)

    def send(self, step: int, numbers: dict[str, float]) -> None:
        import wandb

        for name, value in numbers.items():
            if name.startswith("eval/"):
                # The summary has the best value, as a number, which Bayesian sweeps read. W&B's own
                # `define_metric(summary="min")` would make it {"min": value}.
                better = min if is_lower_better(name) else max
                self.best[name] = better(self.best.get(name, value), value)
                self.wandb_run.summary[name] = self.best[name]

        if step <= self.sent_step:
            return
        values: JsonObject = dict(numbers)
        samples = read_lines(self.run.folder / "samples.jsonl") if "eval/loss" in numbers else []
        rows = [[*sample.values()] for sample in samples if sample["step"] <= step]
        if rows:
            values["samples"] = wandb.Table(["step", "prompt", "text"], rows)
        self.inner.log(values, step=step, commit=True)

    def close(self) -> None:
        """Upload the finished model if ``WANDB_LOG_MODEL`` says so, and end the run of W&B."""
        import wandb

        if self.model is not None and wants_model():
            artifact = wandb.Artifact(f"model-{self.wandb_run.id}", type="model")
            artifact.add_dir(str(self.model))
            self.wandb_run.log_artifact(artifact, aliases=["latest", "finished"])
        self.wandb_run.finish(exit_code=self.exit_code)
        wandb.teardown()  # this waits until W&B's file is complete; `finish` does not


def _setting(name: str) -> str:
    """Return a setting of W&B, as the user has set it; empty if the user has not.

    It is read here because importing W&B and its ``setup`` take seconds, and start a process.
    """
    files = configparser.ConfigParser(interpolation=None)
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    try:
        files.read([Path(folder).expanduser() / "settings", "wandb/settings"])
    except (OSError, configparser.Error):
        files.clear()
    in_files = files.get("default", name, fallback="")
    return os.environ.get(f"WANDB_{name.upper()}") or in_files


def _is_logged_in() -> bool:
    """Return whether W&B has credentials for its server, in its settings or in a netrc file."""
    if _setting("api_key") or _setting("identity_token_file"):
        return True
    server = _setting("base_url")
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        logins = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return False
    hosts = [urlparse(url).netloc for url in ([server] if server else _CLOUD)]  # with their ports
    return any(logins.authenticators(host) for host in hosts)
