"""Open a run: choose its folder and its resume point, record its start, and how it has ended."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator

from llmtrain.config.flags import resolved, settings_fingerprint, value_of
from llmtrain.console import check_interrupt, say
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError, explain, first_line
from llmtrain.files import JsonObject
from llmtrain.interfaces.callback import Callback
from llmtrain.interfaces.model import ModelBundle
from llmtrain.interfaces.part import Metric, MetricFunction, Schedule, ScheduleFunction
from llmtrain.launching.process import check_first_run, leave_group, seconds_since_start
from llmtrain.models.preference_objective import PreferenceObjective
from llmtrain.parallel.placement import parameter_counts
from llmtrain.parallel.ranks import Ranks, ranks_of
from llmtrain.planning import current_plan
from llmtrain.record.folder import RunFolder
from llmtrain.record.mirror import Mirror
from llmtrain.record.resume import ResumePoint, choose_folder
from llmtrain.record.run_record import check_ranks_agree, run_description, run_record
from llmtrain.record.saver import Saver
from llmtrain.record.stopping import Deadline, Patience, stop_signals
from llmtrain.record.trackers.tracker import TrackedRun
from llmtrain.record.trackers.weights_and_biases import sweep_run_id
from llmtrain.record.tracking import MetricsLog
from llmtrain.redaction import redacted
from llmtrain.seeds import RANDOM_VERSION
from llmtrain.training.layout import Layout, fit_to_rows
from llmtrain.training.learning_rates import LearningRates
from llmtrain.training.optim import check_optimizer_flags
from llmtrain.training.parts import Parts
from llmtrain.training.reference import weights_key, with_reference
from llmtrain.training.run import Run, RunStatus
from llmtrain.training.settings import RunConfig, Settings
from llmtrain.training.summary import publish


@contextlib.contextmanager
def open_run(
    accelerator: Accelerator,
    settings: Settings,
    rows: Tokenized,
    bundle: ModelBundle,
    optimizer: torch.optim.Optimizer,
    *,
    schedule: Schedule | ScheduleFunction | None = None,
    callbacks: Sequence[Callback] = (),
    metrics: Sequence[Metric | MetricFunction] = (),
) -> Iterator[Run]:
    """Open the run folder until the block ends: a new folder, or that of an unfinished run.

    An unfinished run is resumed if its fingerprint is the same. After a block without an error, the
    processes leave their group, and a finished model is uploaded if the settings ask for it. A dry
    run makes no folder.

    Args:
        accelerator: the Accelerator that :func:`llmtrain.start` made.
        settings: the settings of the recipe.
        rows: the rows to train and evaluate on.
        bundle: the model that :func:`llmtrain.place` has returned.
        optimizer: an optimizer of the model's parameters. Each parameter group keeps its
            proportion to the others in learning rate.
        schedule: replaces the warmup and ``--lr_scheduler_type``. It is a
            :class:`llmtrain.Schedule`, or a function like its ``share``.
        callbacks: are called around each step.
        metrics: are computed in every evaluation. Each is a :class:`llmtrain.Metric`, or a function
            like its ``compute``.

    Raises:
        UserError: if the ranks do not have the same settings, code or data, if the folder cannot be
            used, or if the optimizer, the schedule, a callback or a metric is unusable.
    """
    if current_plan() is not None:
        raise UserError(
            "llmtrain plan cannot plan this recipe: it opens a run whose model was not placed by "
            "llmtrain.place or llmtrain.fit."
        )
    check_first_run()
    ranks = ranks_of(accelerator)
    fit_to_rows(settings, rows)  # for a recipe that does not call `place`
    layout = Layout.of(settings.data, ranks.world_size, bitwise=settings.parallel.bitwise)
    if settings.eval.keeps_best and rows.eval is None:
        raise UserError(
            "the best model (--load_best_model_at_end, --early_stopping_patience) needs eval rows, "
            "and there are none; raise --eval_fraction, or name eval data with --eval_dataset."
        )
    has_weights = "loss_weight" in rows.train.column_names
    if has_weights and isinstance(bundle.objective, PreferenceObjective):
        raise UserError(
            "the rows have a weight for each token (loss_weight), which a loss of preferences does "
            "not use; leave that column out."
        )
    parts = Parts.of(
        bundle.model, bundle.objective, optimizer, callbacks=callbacks, metrics=metrics
    )
    check_optimizer_flags(settings.optim, bundle.model, optimizer, schedule)
    rates = LearningRates(optimizer, settings.optim, schedule)
    if not settings.run.dry_run:
        rows = with_reference(ranks, settings.optim.seed, rows, bundle)

    fingerprint = run_fingerprint(accelerator, settings, rows, bundle, parts, rates, layout)
    resolved_settings = resolved(settings)
    details = {**asdict(rows.metadata), "settings": resolved_settings}
    description = run_description(fingerprint, resolved_settings, accelerator.mixed_precision)
    check_ranks_agree(ranks, description, details)

    with contextlib.ExitStack() as contexts:
        resume_point = _choose_folder(contexts, ranks, settings.run, fingerprint, details)
        if bundle.recomputation is not None and bundle.recomputation.reason:
            say("recompute", bundle.recomputation.reason)

        check_interrupt()
        saver = Saver(
            resume_point.folder / "checkpoints",
            bundle.files,
            keep=settings.run.save_total_limit,
            in_background=settings.run.async_save,
        )
        if resume_point.checkpoint:
            saver.verified.append(resume_point.checkpoint)
        patience = Patience(
            settings.eval.early_stopping_patience,
            settings.eval.metric_for_best_model,
            keeps_best=settings.eval.keeps_best,
        )
        patience.restore(resume_point.state.get("best"))
        run = Run(
            accelerator=accelerator,
            ranks=ranks,
            settings=settings,
            layout=layout,
            rows=rows,
            bundle=bundle,
            parts=parts,
            rates=rates,
            fingerprint=fingerprint,
            resume_point=resume_point,
            writer=RunFolder(resume_point.folder, resume_point.start_id, ranks.is_main),
            saver=saver,
            metrics_log=MetricsLog(ranks, resume_point.folder, settings.parallel.ddp_timeout),
            # Tokenising, loading the model and the reference pass have taken part of the time.
            deadline=Deadline.of(settings.run.max_hours, seconds_since_start()),
            patience=patience,
            status=RunStatus.of(resume_point.state),
        )
        if not settings.run.dry_run:
            contexts.enter_context(_recorded(run, resolved_settings, description))
        yield run

    leave_group()
    if run.is_finished and run.ranks.is_main:
        publish(run.folder / "model", settings.run.push_to_hub)


def run_fingerprint(
    accelerator: Accelerator,
    settings: Settings,
    rows: Tokenized,
    bundle: ModelBundle,
    parts: Parts,
    rates: LearningRates,
    layout: Layout,
) -> JsonObject:
    """Return everything that a run's steps depend on, as a JSON object.

    A run resumes from a checkpoint only if the fingerprints match. If the user names the
    checkpoint, the keys in :data:`llmtrain.record.resume.MAY_CHANGE` may differ. The parallel
    layout is not part of the fingerprint, except with ``--bitwise``: its bits depend on the layout.
    """
    stopping = None
    if settings.eval.keeps_best:
        stopping = [
            settings.eval.early_stopping_patience,
            settings.eval.metric_for_best_model,
            settings.eval.eval_steps,
        ]

    rounds = None
    if value_of(settings, "rounds", default=0):
        # The number of rounds follows from that of steps, and may be raised like it.
        names = ("prompts_per_round", "max_new_tokens")
        rounds = {name: value_of(settings, name, default=0) for name in names}

    ranks = ranks_of(accelerator)
    return {
        "model": bundle.files.config,
        "initial_weights": bundle.start,
        "frozen": {name: weights_key(ranks, frozen) for name, frozen in bundle.frozen.items()},
        "random": RANDOM_VERSION,
        "data": rows.metadata.data_sha256,
        "mixture": [] if rows.mixture is None else rows.mixture.weights,
        "tokenizer": rows.metadata.tokenizer_sha256,
        "block_size": rows.metadata.block_size,
        "global_batch_size": settings.data.global_batch_size,
        "seed": settings.optim.seed,
        "bitwise": layout.bitwise_fingerprint(accelerator) if settings.parallel.bitwise else None,
        "optimizer": {**settings.optim.fingerprint, **parts.optimizer_fingerprint()},
        "learning_rates": rates.fingerprint,
        **parts.fingerprint(),
        "order": rows.order,
        "early_stopping": stopping,
        "rounds": rounds,
        "own_settings": settings_fingerprint(settings),
    }


def _choose_folder(
    contexts: contextlib.ExitStack,
    ranks: Ranks,
    config: RunConfig,
    fingerprint: JsonObject,
    details: JsonObject,
) -> ResumePoint:
    """Choose the folder on rank 0, and hold its lock until ``contexts`` closes."""
    if config.dry_run:
        return ResumePoint(Path(config.output_dir), state={})

    choosing = choose_folder(
        config.output_dir,
        resume=config.resume_from_checkpoint,
        mirror=config.mirror,
        fingerprint=fingerprint,
        record=details,
        run_id=sweep_run_id() if {"auto", "wandb"} & {*config.trackers} else None,
    )
    resume_point = ranks.on_main(lambda: contexts.enter_context(choosing))
    say("run", f"{resume_point.folder} ({resume_point.reason})")
    return resume_point


def _begin(run: Run, settings: dict[str, JsonObject], description: JsonObject) -> JsonObject:
    """Add this start to ``run.json``, begin to write the run's folder, and return the record."""
    resume_point = run.resume_point
    recomputation = run.bundle.recomputation
    start = {
        "step": resume_point.step,
        "from": None if resume_point.checkpoint is None else str(resume_point.checkpoint),
        "versions": description["versions"],
        "code_sha256": description["code"],
        "processes": run.ranks.world_size,
        "sharded": run.ranks.sharding.layout if run.ranks.is_sharded else None,
        "device": run.ranks.device.type,
        "mixed_precision": run.accelerator.mixed_precision,
        "recomputes": None if recomputation is None else recomputation.enabled,
        "threads": torch.get_num_threads(),
    }
    record = run_record(
        resume_point.earlier_record,
        run_id=resume_point.run_id,
        extends=resume_point.extends,
        fingerprint=run.fingerprint,
        fingerprint_sha256=resume_point.fingerprint_sha256,
        settings=settings,
        details=asdict(run.rows.metadata),
        start=start,
    )
    # run.json comes first: without it, a start that fails here would use up the folder's name.
    run.writer.write("run.json", record)
    run.writer.begin(run.step, resume_point.extends)
    return record


@contextlib.contextmanager
def _recorded(run: Run, settings: dict[str, JsonObject], description: JsonObject) -> Iterator[None]:
    """Write a run's record and feed its trackers until the block ends.

    However the block ends, ``status.json`` gets the reason. The caller holds the folder's lock.
    """
    record = run.ranks.on_main(lambda: _begin(run, settings, description))
    if run.ranks.is_sharded:
        # Ranks that share a model save it together.
        timeout = run.settings.parallel.ddp_timeout + 60
        team = run.ranks.with_new_group(timeout)
        run.saver.join(team, can_write=run.writer.can_write())

    with contextlib.ExitStack() as contexts:
        contexts.enter_context(stop_signals(run.status.ask_to_stop))
        config = run.settings.run
        mirror = None
        if run.ranks.is_main and config.mirror is not None:
            mirror = Mirror(
                config.mirror,
                run.writer,
                run_id=run.resume_point.run_id,
                record_event=run.record_event,
                is_restored=config.resume_from_checkpoint == config.mirror,
            )
        contexts.enter_context(_failures_recorded(run, mirror))
        run.ranks.on_main(lambda: None if mirror is None else mirror.start())
        run.metrics_log.start(run.settings.run.trackers, _tracked(run, record))
        if run.metrics_log.addresses:
            run.writer.write("run.json", record | {"trackers": run.metrics_log.addresses})
        yield

        if not run.is_finished:  # which is recorded since the model was written
            run.writer.set_status(run.status.state, run.step, run.status.reason)
        model = run.folder / "model" if run.is_finished else None
        run.metrics_log.close(exit_code=0, model=model)
        if mirror is not None:
            leave_group()  # no rank waits for the last upload
            mirror.close()


@contextlib.contextmanager
def _failures_recorded(run: Run, mirror: Mirror | None) -> Iterator[None]:
    """Record an error that ends the block in ``status.json``, and end what follows the run."""
    try:
        yield
    except KeyboardInterrupt:  # second Ctrl-C: exit without saving or waiting for trackers
        run.record_failure("stopped at once by a second signal")
        raise
    except BaseException as error:
        reason = explain(error) or first_line(error)
        # Record it right away, because a launcher soon kills a process that has failed.
        run.record_failure(reason)
        with contextlib.suppress(Exception):  # the first error is the one to show
            run.saver.wait()
        # Record it again, because a save in the background may have written "running".
        run.record_failure(reason)
        run.metrics_log.close(exit_code=1)
        if mirror is not None:
            mirror.close()
        raise


def _tracked(run: Run, record: JsonObject) -> TrackedRun:
    """Return what trackers are told about a run, given its ``run.json``."""
    parameters, trained_parameters = parameter_counts(run.bundle.model)
    start = record["starts"][-1]
    facts = {
        "parameters": parameters,
        "trained_parameters": trained_parameters,
        "data_sha256": run.rows.metadata.data_sha256,
        "layout": run.layout._asdict(),
        "versions": start["versions"],
        "git_sha": start["git_sha"],
        "code_sha256": start["code_sha256"],
        "processes": start["processes"],
        "sharded": start["sharded"],
        "device": start["device"],
        "mixed_precision": start["mixed_precision"],
    }
    settings = {name: setting["value"] for name, setting in record["settings"].items()}
    return TrackedRun(
        folder=run.folder,
        name=run.settings.run.run_name or run.folder.name,
        run_id=run.resume_point.run_id,
        project=os.environ.get("WANDB_PROJECT", "llmtrain"),
        config=redacted(settings | facts),
    )
