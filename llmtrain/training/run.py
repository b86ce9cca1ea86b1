"""A run from its start to its end: its identity, its folder, and its checkpoints."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator

from llmtrain.config import resolved
from llmtrain.console import say
from llmtrain.data.prepare import Tokenized
from llmtrain.errors import UserError, explained, first_line
from llmtrain.launching.process import leave_group
from llmtrain.parallel.fsdp import is_sharded
from llmtrain.parallel.mesh import sharding_of
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.team import Team
from llmtrain.record.folder import RunFolder
from llmtrain.record.provenance import (
    check_same_everywhere,
    run_record,
    what_runs,
)
from llmtrain.record.publish import publish
from llmtrain.record.resume import choose_folder
from llmtrain.record.resume_point import ResumePoint
from llmtrain.record.saver import Saver
from llmtrain.record.stopping import Deadline, Patience, stop_signals
from llmtrain.record.tracking import Metrics
from llmtrain.secrets import redacted
from llmtrain.training.identity import identity_of
from llmtrain.training.layout import Layout
from llmtrain.training.reference import with_reference
from llmtrain.training.settings import AnySettings
from llmtrain.training.summary import show_result
from llmtrain.types import Facts, ModelBundle

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
    bundle: ModelBundle
    identity: Facts
    folder: RunFolder
    saver: Saver
    metrics: Metrics
    deadline: Deadline
    patience: Patience
    resume_point: ResumePoint  # what it goes on from
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
        return Ranks(self.accelerator).is_main

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

    def show(self) -> None:
        """Show what a finished run has learned."""
        if self.finished:
            show_result(self.folder.path, self.rows.unseen_question())

    def failed(self, reason: str) -> None:
        """Note in ``status.json`` why this process is about to end."""
        with contextlib.suppress(OSError):
            self.folder.status("failed", self.step, redacted(reason))


@contextlib.contextmanager
def open_run(
    accelerator: Accelerator,
    settings: AnySettings,
    rows: Tokenized,
    bundle: ModelBundle,
) -> Iterator[Run]:
    """Open the run's folder until the block ends: a new one, or that of an unfinished run.

    An unfinished run is continued if it has the same identity. After a block without an error the
    processes leave their group, and a finished model is published. A dry run makes no folder.

    Raises:
        UserError: the ranks are about to train different things, or the folder cannot be used.
    """
    layout = Layout.of(settings.data, Ranks(accelerator).data_parallel_size, settings.loop.bitwise)
    if not settings.loop.dry_run:
        rows = with_reference(accelerator, settings.loop.seed, rows, bundle)
    if settings.loop.early_stopping_patience and rows.eval is None:
        raise UserError("--early_stopping_patience needs held-out rows to evaluate.")

    identity = identity_of(accelerator, settings, rows, bundle, layout)
    team = Team.everyone()
    facts = what_runs(identity, resolved(settings), accelerator.mixed_precision)
    check_same_everywhere(team, facts)

    with contextlib.ExitStack() as held:

        def choose() -> ResumePoint:
            choosing = choose_folder(
                settings.run.output_dir,
                resume=settings.run.resume_from_checkpoint,
                identity=identity,
            )
            return held.enter_context(choosing)

        if settings.loop.dry_run:
            resume_point = ResumePoint(Path(settings.run.output_dir))
        else:
            resume_point = team.main(choose)
            say("run", f"{resume_point.folder} ({resume_point.why})")

        run = _new_run(accelerator, settings, layout, rows, bundle, identity, resume_point)
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
    bundle: ModelBundle,
    identity: Facts,
    resume_point: ResumePoint,
) -> Run:
    saver = Saver(
        resume_point.folder / "checkpoints",
        bundle.files,
        keep=settings.run.save_total_limit,
        in_background=settings.run.async_save,
    )
    if resume_point.checkpoint:
        saver.verified.append(resume_point.checkpoint)

    is_replay = settings.loop.replay_step is not None
    return Run(
        accelerator=accelerator,
        settings=settings,
        layout=layout,
        rows=rows,
        bundle=bundle,
        identity=identity,
        folder=RunFolder(resume_point.folder, resume_point.incarnation, Ranks(accelerator).is_main),
        saver=saver,
        metrics=Metrics(accelerator, resume_point.folder, settings.parallel.ddp_timeout),
        deadline=Deadline() if is_replay else Deadline.of(settings.loop.max_hours),
        patience=Patience(
            settings.loop.early_stopping_patience,
            settings.loop.metric_for_best_model,
        ),
        resume_point=resume_point,
        step=resume_point.step,
        tokens=resume_point.tokens,
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
                run_id=run.resume_point.run_id,
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
        "processes": Ranks(accelerator).world_size,
        "sharded": sharding_of(accelerator).layout if is_sharded(accelerator) else None,
        "device": accelerator.device.type,
        "mixed_precision": accelerator.mixed_precision,
    }
    return run_record(
        run.folder.path,
        identity=run.identity,
        settings=settings,
        details=asdict(run.rows.facts),
        resume_point=run.resume_point,
        start=start,
    )
