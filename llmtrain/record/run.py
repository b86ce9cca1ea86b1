"""A run's folder: what it is, how it stands, what it measured, and the checkpoints it can go on from."""

import contextlib
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import filelock
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn

from llmtrain.config import flag, require, require_at_least
from llmtrain.console import say
from llmtrain.errors import UserError, explained, first_line
from llmtrain.files import append_json_line, forget_after, sync_file, write_json
from llmtrain.parallel.mesh import fill, gather_rows, local_shard, of_all_stages
from llmtrain.record import checkpoint
from llmtrain.record.agreement import check_same_everywhere, on_all, on_main
from llmtrain.record.provenance import digest, run_record, versions
from llmtrain.record.resume import choose_folder, lock
from llmtrain.record.saver import Saver
from llmtrain.record.status import Status
from llmtrain.record.stopping import Deadline, stop_signals
from llmtrain.record.team import Team
from llmtrain.record.tensors import headers, read_tensors
from llmtrain.record.tracking import Metrics, tracker_names
from llmtrain.secrets import redacted

_LEDGERS = ("metrics.jsonl", "rows.jsonl", "samples.jsonl")
_TOLD = ("git_sha", "code_sha256", "processes", "sharded", "device", "mixed_precision")  # to trackers, of a start


@dataclass
class RunConfig:
    """A run's folder, what is looked at on the way, how often, and what is kept. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "run"

    output_dir: str = flag("runs/run", "the run's folder; where it is taken by another run, the next free name")
    run_name: str | None = flag(None, "name shown by trackers; the folder's name where left out")
    seed: int = flag(0, "of weights, data order and dropout")
    logging_steps: int = flag(10, "updates between two readings of the training loss")
    eval_steps: int = flag(
        100, "updates between two evaluations, beside one before the first update and one at the end; 0: never"
    )
    sample_steps: int = flag(0, "updates between two looks at what the model writes, kept in samples.jsonl; 0: never")
    sample_prompts: list[str] = flag(["The"], "what it is to continue, or to answer where it has a chat template")
    save_steps: int = flag(100, "updates between two checkpoints; there is one at the end")
    save_total_limit: int = flag(2, "checkpoints that are kept, at least 2, beside the one with the best held-out loss")
    async_save: bool = flag(False, "write checkpoints in the background, from a copy in the host's memory")
    max_hours: float | None = flag(None, "save and stop before this time has passed since the start")
    skip_nonfinite: int = flag(0, "updates with a gradient that is not finite that are skipped before the run stops")
    resume_from_checkpoint: str = flag(
        "auto", "auto: go on with an unfinished run of the same settings; never; or a run's or checkpoint's folder"
    )
    bitwise: bool = flag(
        False, "add gradients in one fixed order, so that 1, 2, 4, ... processes give the same bits (slower)"
    )
    sync_each_batch: bool = flag(
        False,
        "reduce gradients in every micro-batch, not once an update: less memory where the model is sharded",
    )
    torch_compile: Literal["auto", "always", "never"] = flag(
        "never",
        "compile the model's blocks; auto: where the run is long enough and gains by it, and not with --bitwise",
    )
    check_replicas_steps: int = flag(
        100, "updates between two comparisons of all processes' weights, beside one before each checkpoint; 0: never"
    )
    dry_run: bool = flag(False, "go up to the first update, and show what would be trained on")
    push_to_hub: str | None = flag(None, "upload the finished model to this hub repository; a new one is private")
    xray_steps: str | None = flag(None, "A:B records the updates A to B, as a timeline in the run's folder xray/")
    log_rows: bool = flag(False, "write the rows of every update to rows.jsonl")
    replay_step: int | None = flag(None, "stop after this update, save nothing, and write its rows' losses; see replay")
    log_model: bool = flag(False, "send the finished model to Weights & Biases, as an artifact")
    report_to: list[str] = flag(["wandb"], "trackers: wandb, tensorboard, or none")

    def __post_init__(self) -> None:
        require_at_least(self, 1, "logging_steps", "save_steps")
        require_at_least(self, 2, "save_total_limit")
        require_at_least(self, 0, "check_replicas_steps", "eval_steps", "sample_steps")
        require_at_least(self, 0, "skip_nonfinite")
        require(self.replay_step is None or self.replay_step > 0, f"--replay_step {self.replay_step} must be above 0.")
        require(self.max_hours is None or self.max_hours > 0, f"--max_hours {self.max_hours} must be above 0.")
        require(0 <= self.seed < 2**63, f"--seed {self.seed} is out of range: it must be from 0 to 2**63 - 1.")
        require(bool(self.output_dir.strip()), "--output_dir is empty: name a folder for the run.")
        if self.replay_step is not None:  # nothing else that a run was asked for is wanted again
            self.max_hours = self.push_to_hub = self.xray_steps = None
            self.sample_steps, self.eval_steps, self.log_model = 0, 0, False
        _ = self.xray_range
        trackers = tracker_names(self.report_to)
        require(not self.log_model or "wandb" in trackers, "--log_model sends to W&B: --report_to wandb.")

    @property
    def xray_range(self) -> range | None:
        """The updates to record, counted from 1."""
        if self.xray_steps is None:
            return None
        asked = re.fullmatch(r"([1-9]\d*):(\d+)", self.xray_steps)
        if asked is None or int(asked[1]) > int(asked[2]):
            raise UserError(f"--xray_steps {self.xray_steps}: write two updates, such as 6:8; the first of a run is 1.")
        return range(int(asked[1]), int(asked[2]) + 1)


@dataclass
class Run:
    """An open run: ``step`` updates are made, on ``tokens`` trained tokens."""

    accelerator: Accelerator
    config: RunConfig
    folder: Path
    identity: dict[str, Any]
    files: checkpoint.ModelWriter
    metrics: Metrics
    saver: Saver
    incarnation: str
    resumed_from: Path | None = None
    update_before: dict[str, Any] | None = None  # settings of the update under which a named checkpoint was made
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    compiled: bool | None = None  # whether its blocks are; None: not chosen yet
    stop_reason: str = ""
    deadline: Deadline = field(default_factory=Deadline)
    _evaluated: tuple[int, float] | None = None
    _outcome: dict[str, str] = field(default_factory=lambda: {"state": "failed", "reason": "ended without a word"})

    def updated(self, tokens: int) -> None:
        """One more update, on so many trained tokens."""
        self.step += 1
        self.tokens += tokens

    def log(self, reading: dict[str, Any]) -> None:
        """One line of ``metrics.jsonl``, and the same to the trackers."""
        now = round(time.time(), 3)
        self.metrics.write({"step": self.step, "tokens": self.tokens, **reading, "time": now})
        if "eval/loss" in reading:
            self._evaluated = self.step, reading["eval/loss"]

    def incident(self, kind: str, text: str) -> None:
        """Something to know of when the run is looked at later: said now, and kept in ``incidents.jsonl``."""
        say(kind, text)
        self._keep_incident(kind, text)

    def _keep_incident(self, kind: str, text: str) -> None:
        line = {"step": self.step, "time": round(time.time(), 3), "kind": kind, "text": text}
        if self.accelerator.is_main_process:
            with contextlib.suppress(UserError):  # a full disk, which the run itself will meet
                append_json_line(self.folder / "incidents.jsonl", line)

    @property
    def stop_requested(self) -> bool:
        """Whether this process wants all of them to save and stop after the step at hand."""
        if not self.stop_reason and self.deadline.is_near():
            self.stop_reason = self.deadline.why
        return bool(self.stop_reason) or self.saver.failed or self.is_replayed_next

    @property
    def is_replayed_next(self) -> bool:
        """Whether the update at hand is the one to look at, with which the run stops."""
        return self.config.replay_step == self.step + 1

    def keep_row_losses(self, rows: list[dict[str, Any]]) -> None:
        """Write ``replay.json``: the rows of the update at hand."""
        if self.accelerator.is_main_process:
            write_json(self.folder / "replay.json", {"step": self.step + 1, "rows": rows})

    def keep_samples(self, texts: list[str]) -> None:
        """A line of ``samples.jsonl`` for each prompt."""
        for prompt, text in zip(self.config.sample_prompts, texts, strict=True):
            if self.accelerator.is_main_process:
                append_json_line(self.folder / "samples.jsonl", {"step": self.step, "prompt": prompt, "text": text})

    def log_rows(self, rows: torch.Tensor, targets: torch.Tensor) -> None:
        """With ``--log_rows``, one line of ``rows.jsonl``: of each slot of the last update its row, -1 where empty, and
        its trained tokens, as the data has them: a second count beside the loop's. All processes call this, each with
        its own slots."""
        if not self.config.log_rows:
            return
        rows, targets = gather_rows(self.accelerator, rows), gather_rows(self.accelerator, targets)
        if self.accelerator.is_main_process:
            line = {"step": self.step, "rows": rows.tolist(), "targets": targets.tolist()}
            append_json_line(self.folder / "rows.jsonl", line)

    def ask_to_stop(self, reason: str) -> None:
        """Save and stop after the step at hand."""
        self.stop_reason = reason

    def save(self, model: nn.Module, optimizer: Any) -> None:
        """Commit a checkpoint of the updates made so far; all processes call this and agree whether it worked."""
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        _check_finite(self.accelerator, plain)
        scaler = self.accelerator.scaler
        carried = self._exchange.tensors(plain) if self._exchange is not None else {}

        def ready() -> None:
            self.saver.wait()
            if not self.accelerator.is_main_process:
                return
            if self._taken_over():
                raise UserError(f"{self.folder}: another run has taken over this folder; nothing was saved here.")
            for name in _LEDGERS:  # what is logged of the updates before a checkpoint is as durable as it
                if (self.folder / name).exists():
                    sync_file(self.folder / name)

        def write() -> None:
            at_step, loss = self._evaluated or (None, None)
            state = {
                "step": self.step,
                "tokens": self.tokens,
                "skipped": self.skipped,
                "compiled": self.compiled,
                "eval_loss": loss if at_step == self.step and loss is not None and math.isfinite(loss) else None,
                "identity": self.identity,
                "identity_sha256": digest(self.identity),
                "processes": self.accelerator.num_processes,
                "threads": torch.get_num_threads(),
                "mixed_precision": self.accelerator.mixed_precision,
                "loss_scaler": scaler.state_dict() if scaler is not None else None,
                "versions": versions(),
            }
            tensors = self._of_all(plain, checkpoint.optimizer_tensors(plain, optimizer.optimizer)) | carried
            weights = self._of_all(plain, self.files.tensors(plain))
            self.saver.save(self.step, weights, tensors, state, self._status("running").write)

        self._on_writers(ready)
        self._on_writers(write)
        self.deadline.reserve("save", 2 * self.saver.longest_seconds)

    def restore(self, model: nn.Module, optimizer: Any) -> None:
        """Load the checkpoint that this run goes on from, where there is one. The main process reads it and sends it
        to the others, which need not see its disk."""
        if self.resumed_from is None:
            return
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        path = self.resumed_from
        fill(self.files.tensors(plain), self._from_main_process(path / "model"))
        state = self._from_main_process(path / "optimizer")
        if self._exchange is not None:
            state = self._exchange.keep(plain, state)
        checkpoint.restore_optimizer(plain, optimizer.optimizer, state)
        facts = on_main(self.accelerator, lambda: checkpoint.read_state(path))
        self.skipped, self.compiled = facts.get("skipped", 0), facts.get("compiled")
        if self.accelerator.scaler is not None and facts["loss_scaler"]:
            self.accelerator.scaler.load_state_dict(facts["loss_scaler"])

    def end(self, model: nn.Module, finished: bool) -> None:
        """The updates are over, all of them (``finished``) or because the run was asked to stop."""
        if self.config.replay_step is not None:
            self._outcome = {"state": "preempted", "reason": f"made up to update {self.step} again, to look at it"}
        elif finished:
            self.finish(model)
        else:
            self.preempted()

    def finish(self, model: nn.Module) -> None:
        """Write ``model/``: the finished model."""
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        _check_finite(self.accelerator, plain)
        self._on_writers(self.saver.wait)
        team, target = self.saver.team, self.folder / "model"

        def write() -> None:
            if team.group is None:
                checkpoint.write_model(target, self.files, self.files.exported(plain))
            else:
                tensors, published = self._of_all(plain, self.files.tensors(plain)), self.files.publishing(plain)
                checkpoint.write_model(target, self.files, tensors, team, published)

        self._on_writers(write)
        self._outcome = {"state": "finished", "reason": "all updates were made"}

    def preempted(self) -> None:
        """The run stops before its last update, with a checkpoint of where it stands."""
        self._on_writers(self.saver.wait)
        why = self.stop_reason or "asked to stop"
        self._outcome = {"state": "preempted", "reason": f"{why}; step {self.step} is saved"}
        how = f" with --resume_from_checkpoint auto --output_dir {self.folder}"
        if self.config.resume_from_checkpoint != "never":
            how = ""
        say("stopped", f"{why}: step {self.step} is saved in {self.folder}; the same command{how} goes on from there")

    def failed(self, reason: str) -> None:
        """Note in ``status.json`` why this process is about to end."""
        with contextlib.suppress(OSError):
            self._write_status("failed", redacted(reason))

    def _of_all(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return of_all_stages(self.accelerator, model, tensors)

    @property
    def _exchange(self) -> Any:
        """What sends gradients, where that may carry something from update to update."""
        return getattr(self.accelerator.ddp_handler, "exchange", None)

    def _on_writers(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the processes that write; a failure of one is everyone's."""
        (on_main if self.saver.team.group is None else on_all)(self.accelerator, action)

    def _status(self, state: str, reason: str = "") -> Status:
        return Status(self.folder, state, self.step, reason, self.incarnation)

    def _write_status(self, state: str, reason: str = "") -> None:
        if self.accelerator.is_main_process and not self._taken_over():
            self._status(state, reason).write()
            if state != "finished":
                self._keep_incident(state, reason)

    def _taken_over(self) -> bool:
        """The lock keeps two runs apart on one machine; where a file system does not keep locks, this notices."""
        return self._incarnation() not in (None, self.incarnation)

    def _can_write(self) -> bool:
        """Whether this process sees the folder of this very run, and not one of its name, and may write there."""
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self.folder):
            return self._incarnation() == self.incarnation
        return False

    def _incarnation(self) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return json.loads((self.folder / "status.json").read_text())["incarnation"]
        return None

    def _from_main_process(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a folder that the main process sees, one at a time."""
        here = self.accelerator.is_main_process
        if self.accelerator.num_processes == 1:
            yield from read_tensors(folder)
            return
        tensors = read_tensors(folder) if here else None
        for name, shape, dtype in on_main(self.accelerator, lambda: headers(folder)):
            tensor = next(tensors)[1] if tensors is not None else torch.empty(shape, dtype=dtype)
            yield name, broadcast(tensor.to(self.accelerator.device))


@contextlib.contextmanager
def open_run(
    accelerator: Accelerator,
    config: RunConfig,
    identity: dict[str, Any],
    files: checkpoint.ModelWriter,
    settings: dict[str, dict[str, Any]],
    details: dict[str, Any] | None = None,
) -> Iterator[Run]:
    """The run's folder for the length of the block: a new one, or that of an unfinished run of the same identity.

    Args:
        identity: what makes this run this run; a checkpoint of another identity is never loaded.
        settings: every flag with its value and origin (:func:`llmtrain.config.resolved`).
        details: what else belongs into ``run.json``: facts of the data, the layout.
    """
    check_same_everywhere(accelerator, identity, settings)
    choice = on_main(accelerator, lambda: choose_folder(config.output_dir, config.resume_from_checkpoint, identity))
    folder = Path(choice["folder"])
    saver = Saver(folder / "checkpoints", files, config.save_total_limit, config.async_save)
    run = Run(
        accelerator,
        config,
        folder,
        identity,
        files,
        Metrics(accelerator, folder, config.log_model),
        saver,
        choice["incarnation"],
    )
    run.deadline = Deadline.of(config.max_hours) if config.replay_step is None else Deadline()
    if choice["checkpoint"]:
        run.resumed_from = Path(choice["checkpoint"])
        run.step, run.tokens = choice["step"], choice["tokens"]
        saver.verified.append(run.resumed_from)
        run.update_before = (choice["before"] or {}).get("update")
    say("run", f"{folder} ({choice['why']})")
    with contextlib.ExitStack() as cleanup:

        def claim() -> dict[str, Any]:
            try:
                cleanup.enter_context(lock(folder).acquire(timeout=1))  # one who looks holds it for a moment
            except filelock.Timeout:
                raise UserError(f"{folder}: another process has just begun to write here; start again.") from None
            # what a process that was killed left half-written
            for leftover in [*folder.glob(".tmp-*"), *folder.glob("checkpoints/.tmp-*")]:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            for name in _LEDGERS:
                forget_after(folder / name, run.step)
            record = run_record(accelerator, folder, identity, settings, details or {}, choice)
            write_json(folder / "run.json", record)
            run._status("running").write()
            return {key: record["starts"][-1][key] for key in _TOLD}

        about = on_main(accelerator, claim)
        if accelerator.is_fsdp2:
            saver.team = Team.of_all(run._can_write(), accelerator.ddp_handler.config.ddp_timeout + 60)
        values = {name: setting["value"] for name, setting in settings.items()}
        cleanup.enter_context(stop_signals(run.ask_to_stop))
        try:
            run_name = config.run_name or folder.name
            run.metrics.start(tracker_names(config.report_to), values | about, run_name, choice["run_id"])
            yield run
        except KeyboardInterrupt:  # who cannot wait waits neither for a save nor for trackers
            run.failed("left at once")
            raise
        except BaseException as error:
            reason = explained(error) or first_line(error)
            run.failed(reason)  # at once: launchers do not wait long for who has failed
            with contextlib.suppress(Exception):  # the error at hand is the one to tell
                saver.wait()
            run.failed(reason)  # a save that was under way has said that the run is running
            run.metrics.close(exit_code=1)
            raise
        run._write_status(**run._outcome)
        model = folder / "model" if run._outcome["state"] == "finished" else None
        run.metrics.close(exit_code=0, model=model)


def _check_finite(accelerator: Accelerator, model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    here = [torch.zeros(()) if p.is_meta else local_shard(p) for p in parameters.values()]
    bad = torch.stack([(~torch.isfinite(values)).any() for values in here])
    if accelerator.is_fsdp2:  # each process has seen its part
        bad = accelerator.reduce(bad.to(accelerator.device, torch.int32), reduction="sum")
    for name, found in zip(parameters, bad.tolist(), strict=True):
        if found:
            raise UserError(f"{name} has values that are not finite; nothing was saved. Lower --learning_rate.")
