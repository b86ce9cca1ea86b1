"""A run from its start to its end: its identity, its folder, and its checkpoints."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast
from torch import nn

from llmtrain.config import resolved
from llmtrain.console import say
from llmtrain.contract import Built, Facts
from llmtrain.data.rows import Tokenized
from llmtrain.errors import UserError, explained, first_line
from llmtrain.launching.process import leave_group
from llmtrain.parallel.fsdp import is_sharded
from llmtrain.parallel.mesh import (
    Spread,
    data_parallel_size,
    fill,
    local_shard,
    of_all_stages,
    sharding_of,
)
from llmtrain.record import checkpoint
from llmtrain.record.folder import RunFolder
from llmtrain.record.provenance import (
    check_same_everywhere,
    digest,
    run_record,
    versions,
    what_runs,
)
from llmtrain.record.publish import publish
from llmtrain.record.resume import Choice, choose_folder
from llmtrain.record.saver import Saver
from llmtrain.record.stopping import Deadline, Patience, stop_signals
from llmtrain.record.team import Team
from llmtrain.record.tensors import headers, read_tensors
from llmtrain.record.tracking import Metrics
from llmtrain.secrets import redacted
from llmtrain.training.identity import identity_of
from llmtrain.training.layout import Layout
from llmtrain.training.reference import with_reference
from llmtrain.training.settings import AnySettings
from llmtrain.training.step import plain_of
from llmtrain.training.summary import show_result

_TRACKED_FACTS = (  # of a start, which trackers are sent beside the settings
    "git_sha",
    "code_sha256",
    "processes",
    "sharded",
    "device",
    "mixed_precision",
)


@dataclass
class Run:
    """An open run: ``step`` updates are made, on ``tokens`` trained tokens."""

    accelerator: Accelerator
    settings: AnySettings
    layout: Layout
    rows: Tokenized
    built: Built
    identity: Facts
    folder: RunFolder
    saver: Saver
    metrics: Metrics
    deadline: Deadline
    patience: Patience
    choice: Choice  # what it goes on from
    step: int
    tokens: int
    skipped: int = 0
    compiled: bool | None = None  # whether its blocks are; None: not chosen yet
    stop_reason: str = ""
    evaluated: tuple[int, Facts] | None = None  # step and results of the last evaluation
    outcome: tuple[str, str] = (
        "failed",
        "ended without a word",
    )  # state and reason, as status.json has them

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def finished(self) -> bool:
        return self.outcome[0] == "finished"

    def log(self, reading: Facts) -> None:
        """Write one line of ``metrics.jsonl``, and tell the trackers."""
        self.metrics.write(
            {"step": self.step, "tokens": self.tokens, **reading, "time": round(time.time(), 3)}
        )
        if "eval/loss" in reading:
            self.evaluated = self.step, reading

    def incident(self, kind: str, text: str) -> None:
        """Say something now, and keep it for whoever looks at the run later."""
        say(kind, text)
        self.folder.incident(self.step, kind, text)

    def ask_to_stop(self, reason: str) -> None:
        """Save and stop after the update at hand."""
        self.stop_reason = reason

    def wants_to_stop(self) -> bool:
        """Return whether this rank wants all of them to save and stop after the update at hand."""
        if not self.stop_reason and self.deadline.is_near():
            self.stop_reason = self.deadline.why
        return bool(self.stop_reason) or self.saver.failed

    def save(self, model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
        """Commit a checkpoint of the updates made so far; all ranks call this and agree whether it worked."""
        plain = plain_of(model)
        _check_finite(self.accelerator, plain)

        def ready() -> None:
            self.saver.wait()
            if self.is_main and self.folder.taken_over():
                raise UserError(
                    f"{self.folder.path}: another run has taken over this folder; nothing was saved here."
                )
            if self.is_main:
                self.folder.sync_ledgers()

        def write() -> None:
            state = checkpoint.optimizer_tensors(plain, optimizer.optimizer)
            weights = of_all_stages(self.accelerator, plain, self.built.files.tensors(plain))
            done = functools.partial(self.folder.status, "running", self.step)
            self.saver.save(
                self.step,
                weights,
                of_all_stages(self.accelerator, plain, state),
                self._state(),
                done,
            )

        self._on_writers(ready)
        self._on_writers(write)
        self.deadline.reserve("save", 2 * self.saver.longest_seconds)

    def _state(self) -> Facts:
        """Return the content of ``state.json``, except for its format version."""
        eval_step, results = self.evaluated or (None, {})
        eval_loss = results.get("eval/loss", math.inf)
        is_current = eval_step == self.step and math.isfinite(eval_loss)
        scaler = self.accelerator.scaler

        return {
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "compiled": self.compiled,
            "eval_loss": eval_loss if is_current else None,
            "best": self.patience.state if self.patience.allowed else None,
            "identity": self.identity,
            "identity_sha256": digest(self.identity),
            "processes": self.accelerator.num_processes,
            "threads": torch.get_num_threads(),
            "mixed_precision": self.accelerator.mixed_precision,
            "loss_scaler": scaler.state_dict() if scaler is not None else None,
            "versions": versions(),
        }

    def restore(self, model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
        """Load the checkpoint that this run resumes from, if there is one.

        Rank 0 reads it and sends it to the other ranks, which need not see its disk.
        """
        path = self.choice.checkpoint
        if path is None:
            return

        plain = plain_of(model)
        fill(self.built.files.tensors(plain), self._from_main(path / "model"))
        tensors = self._from_main(path / "optimizer")
        checkpoint.restore_optimizer(plain, optimizer.optimizer, tensors)

        state = Team.everyone().main(lambda: checkpoint.read_state(path))
        self.skipped = state["skipped"]
        self.compiled = state["compiled"]
        # The best checkpoint of another run's folder may be deleted before this run ends.
        is_own = path.parent == self.folder.path / "checkpoints"
        if state["best"] and is_own:
            self.patience.restore(state["best"])
        if self.accelerator.scaler is not None and state["loss_scaler"]:
            self.accelerator.scaler.load_state_dict(state["loss_scaler"])

    def end(self, model: nn.Module) -> None:
        """Note how the updates have ended: all of them made, or stopped before. A finished model is written."""
        if self.settings.loop.replay_step is not None:
            self.outcome = "preempted", f"made up to update {self.step} again, to look at it"
        elif self.patience.over or self.step == self.settings.optim.max_steps:
            self._on_writers(self.saver.wait)
            self._take_best(model)
            self._write_model(model)
            self.outcome = (
                "finished",
                self.patience.why if self.patience.over else "all updates were made",
            )
        else:
            self._on_writers(self.saver.wait)
            why = self.stop_reason or "asked to stop"
            self.outcome = "preempted", f"{why}; step {self.step} is saved"
            never = self.settings.run.resume_from_checkpoint == "never"
            how = (
                f" with --resume_from_checkpoint auto --output_dir {self.folder.path}"
                if never
                else ""
            )
            say(
                "stopped",
                f"{why}: step {self.step} is saved in {self.folder.path}; the same command{how} goes on",
            )

    def _take_best(self, model: nn.Module) -> None:
        """Load the weights that early stopping has found the best, where the last ones are others."""
        best = self.patience.best_step if self.patience.allowed else 0
        if best in (0, self.step):
            return
        path = checkpoint.path_of(self.folder.path / "checkpoints", best)
        if fault := Team.everyone().main(lambda: checkpoint.find_fault(path)):
            self.incident(
                "damaged", f"{path}, the best checkpoint: {fault}; model/ has the last weights"
            )
            return
        fill(self.built.files.tensors(plain_of(model)), self._from_main(path / "model"))
        say(
            "best",
            f"model/ has the weights of step {best}"
            + (f": {self.patience.why}" if self.patience.over else ""),
        )

    def show(self) -> None:
        """Show what a finished run has learned."""
        if self.finished:
            show_result(self.folder.path, self.rows.unseen_question())

    def failed(self, reason: str) -> None:
        """Note in ``status.json`` why this process is about to end."""
        with contextlib.suppress(OSError):
            self.folder.status("failed", self.step, redacted(reason))

    def _write_model(self, model: nn.Module) -> None:
        plain, files, target = plain_of(model), self.built.files, self.folder.path / "model"
        _check_finite(self.accelerator, plain)

        def write() -> None:
            if self.saver.team.group is None:
                checkpoint.write_model(target, files, Spread(files.exported(plain)))
            else:
                tensors = of_all_stages(self.accelerator, plain, files.tensors(plain))
                checkpoint.write_model(
                    target, files, tensors, self.saver.team, files.publishing(plain)
                )

        self._on_writers(write)

    def _on_writers(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the ranks that write; a failure of one is everyone's."""
        team = Team.everyone()
        (team.main if self.saver.team.group is None else team.each)(action)

    def _from_main(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a folder that rank 0 sees, one at a time."""
        if self.accelerator.num_processes == 1:
            yield from read_tensors(folder)
            return
        tensors = read_tensors(folder) if self.is_main else None
        for name, shape, dtype in Team.everyone().main(lambda: headers(folder)):
            tensor = next(tensors)[1] if tensors is not None else torch.empty(shape, dtype=dtype)
            yield name, broadcast(tensor.to(self.accelerator.device))


@contextlib.contextmanager
def open_run(
    accelerator: Accelerator,
    settings: AnySettings,
    rows: Tokenized,
    built: Built,
) -> Iterator[Run]:
    """Open the run's folder until the block ends: a new one, or that of an unfinished run.

    An unfinished run is continued if it has the same identity. After a block without an error the
    processes leave their group, and a finished model is published. A dry run makes no folder.

    Raises:
        UserError: the ranks are about to train different things, or the folder cannot be used.
    """
    layout = Layout.of(settings.data, data_parallel_size(accelerator), settings.loop.bitwise)
    if not settings.loop.dry_run:
        rows = with_reference(accelerator, settings.loop.seed, rows, built)
    if settings.loop.early_stopping_patience and rows.eval is None:
        raise UserError("--early_stopping_patience needs held-out rows to evaluate.")

    identity = identity_of(accelerator, settings, rows, built, layout)
    team = Team.everyone()
    facts = what_runs(identity, resolved(settings), accelerator.mixed_precision)
    check_same_everywhere(team, facts)

    with contextlib.ExitStack() as held:

        def choose() -> Choice:
            choosing = choose_folder(
                settings.run.output_dir,
                resume=settings.run.resume_from_checkpoint,
                identity=identity,
            )
            return held.enter_context(choosing)

        if settings.loop.dry_run:
            choice = Choice(Path(settings.run.output_dir))
        else:
            choice = team.main(choose)
            say("run", f"{choice.folder} ({choice.why})")

        run = _new_run(accelerator, settings, layout, rows, built, identity, choice)
        if not settings.loop.dry_run:
            held.enter_context(_recorded(run, team))
        yield run

    leave_group()
    if run.finished and run.is_main:
        publish(run.folder.path / "model", settings.run.push_to_hub)


def _new_run(
    accelerator: Accelerator,
    settings: AnySettings,
    layout: Layout,
    rows: Tokenized,
    built: Built,
    identity: Facts,
    choice: Choice,
) -> Run:
    saver = Saver(
        choice.folder / "checkpoints",
        built.files,
        keep=settings.run.save_total_limit,
        in_background=settings.run.async_save,
    )
    if choice.checkpoint:
        saver.verified.append(choice.checkpoint)

    is_replay = settings.loop.replay_step is not None
    return Run(
        accelerator=accelerator,
        settings=settings,
        layout=layout,
        rows=rows,
        built=built,
        identity=identity,
        folder=RunFolder(choice.folder, choice.incarnation, accelerator.is_main_process),
        saver=saver,
        metrics=Metrics(accelerator, choice.folder, settings.parallel.ddp_timeout),
        deadline=Deadline() if is_replay else Deadline.of(settings.loop.max_hours),
        patience=Patience(
            settings.loop.early_stopping_patience,
            settings.loop.metric_for_best_model,
        ),
        choice=choice,
        step=choice.step,
        tokens=choice.tokens,
    )


@contextlib.contextmanager
def _recorded(run: Run, team: Team) -> Iterator[None]:
    """Write a run's record and feed its trackers until the block ends.

    ``status.json`` names the reason for every end. Rank 0 holds the folder's lock.
    """
    settings = resolved(run.settings)

    def begin() -> Facts:
        run.folder.begin(run.step)
        record = _record_of(run, settings)
        run.folder.write("run.json", record)
        return {key: record["starts"][-1][key] for key in _TRACKED_FACTS}

    tracked = {name: setting["value"] for name, setting in settings.items()} | team.main(begin)
    if is_sharded(run.accelerator):
        timeout = run.settings.parallel.ddp_timeout + 60
        run.saver.team = Team.of_all(run.folder.can_write(), timeout)

    with stop_signals(run.ask_to_stop):
        try:
            run.metrics.start(
                run.settings.run.trackers,
                settings=tracked,
                run_name=run.settings.run.run_name or run.folder.path.name,
                run_id=run.choice.run_id,
            )
            yield
        except KeyboardInterrupt:  # second Ctrl-C: exit without saving or waiting for trackers
            run.failed("left at once")
            raise
        except BaseException as error:
            reason = explained(error) or first_line(error)
            run.failed(reason)  # at once: a launcher soon kills a process that has failed
            with contextlib.suppress(Exception):  # the first error is the one to show
                run.saver.wait()
            run.failed(reason)  # a save in the background may have written "running"
            run.metrics.close(exit_code=1)
            raise

        state, reason = run.outcome
        run.folder.status(state, run.step, reason)
        run.metrics.close(exit_code=0, model=run.folder.path / "model" if run.finished else None)


def _record_of(run: Run, settings: dict[str, Facts]) -> Facts:
    """Return the new content of ``run.json``."""
    accelerator = run.accelerator
    start = {
        "processes": accelerator.num_processes,
        "sharded": sharding_of(accelerator).layout if is_sharded(accelerator) else None,
        "device": accelerator.device.type,
        "mixed_precision": accelerator.mixed_precision,
    }
    return run_record(
        run.folder.path,
        identity=run.identity,
        settings=settings,
        details=asdict(run.rows.facts),
        choice=run.choice,
        start=start,
    )


def _check_finite(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise :class:`UserError` if a parameter has values that are not finite, on any rank."""
    device = accelerator.device
    parameters = dict(model.named_parameters())
    flags = []
    for parameter in parameters.values():
        if parameter.is_meta:  # another pipeline stage holds it
            flags.append(torch.zeros((), dtype=torch.bool, device=device))
        else:
            flags.append((~torch.isfinite(local_shard(parameter))).any().to(device))

    bad = torch.stack(flags)
    if is_sharded(accelerator):  # each rank has looked at its own shard
        bad = accelerator.reduce(bad.int(), reduction="sum")
    for name, is_bad in zip(parameters, bad.tolist(), strict=True):
        if is_bad:
            raise UserError(
                f"{name} has values that are not finite; nothing was saved. Lower --learning_rate."
            )
