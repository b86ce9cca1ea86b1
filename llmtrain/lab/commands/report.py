"""Make an HTML page about one or more runs: metrics, phases, memory, differences, events.

The page is a single file and opens without a network. With --json, the command prints the content
of the page and writes no file.
"""

import argparse
import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llmtrain.console import duration_text, labelled, size_text
from llmtrain.errors import UserError
from llmtrain.files import JsonObject, json_text, local_path
from llmtrain.lab.differences import differences, shorten_hash
from llmtrain.lab.report.charts import AXES, charts, peak_memory, phase_bars, run_names
from llmtrain.phase_names import PHASES
from llmtrain.record.history import History, seconds_of

EXAMPLES = (
    "llmtrain report runs/gpt",
    "llmtrain report runs/gpt runs/gpt-2 --output both.html",
)

_TEMPLATE = Path(__file__).parents[1] / "report" / "page.html"
_SAMPLE_STEPS = 8  # per run; the page shows samples of the last ones
_ABSENT = "\N{EN DASH}"

# Keys of each start in run.json that the page shows.
_START_KEYS = ("processes", "device", "sharded", "mixed_precision", "git_sha", "time", "host")


class Event(NamedTuple):
    """Something that happened during a run, such as a restart. Sorts by time."""

    when: float  # seconds since 1970
    run: int  # the index of the run
    step: int  # the last step before the event
    kind: str  # a word, such as "resumed" or "late"
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run: a folder or an address")
    parser.add_argument(
        "--output",
        type=local_path,
        metavar="FILE",
        help="the file to write (default: report.html in the run folder, or in the current folder "
        "if there are several runs, or an address)",
    )


def run(arguments: argparse.Namespace) -> None:
    runs = [History.at(name) for name in arguments.runs]
    if arguments.json:
        print(json_text(summary(runs), indent=1))
        return

    default = (Path() if len(runs) > 1 or runs[0].address else runs[0].folder) / "report.html"
    path = Path(arguments.output or default)
    try:
        path.write_text(html(runs), encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror}.") from None
    print(labelled("report", str(path)))


def html(runs: Sequence[History]) -> str:
    """Return the page as HTML.

    Raises:
        UserError: if plotly is not installed.
    """
    from jinja2 import Environment, StrictUndefined

    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("llmtrain report needs plotly: pip install 'llmtrain[lab]'.") from None

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    # By default, the filter `tojson` sorts keys. The page needs them in their own order.
    environment.policies["json.dumps_kwargs"] = {}
    environment.policies["json.dumps_function"] = json_text
    environment.filters["as_time"] = lambda seconds: time.strftime(
        "%Y-%m-%d %H:%M:%S", time.localtime(seconds)
    )

    names = run_names(runs)
    starts = [run.starts[-1] if run.starts else {} for run in runs]
    template = environment.from_string(_TEMPLATE.read_text())
    return template.render(
        title=" and ".join(names) if len(runs) <= 3 else f"{len(runs)} runs",
        runs=runs,
        names=names,
        commands=[shlex.join(start.get("command", [])) for start in starts],
        overviews=[_format_overview(overview(run)) for run in runs],
        charts=charts(runs),
        bars=phase_bars(runs),
        axes=AXES,
        phases=list(PHASES),
        differing=differing_values(runs),
        events=events(runs),
        samples=_shown_samples(runs),
        now=time.time(),
        plotly=get_plotlyjs(),
    )


def summary(runs: Sequence[History]) -> JsonObject:
    """Return the content of the page for programs, as one JSON object."""
    names = run_names(runs)
    return {
        "runs": {name: overview(run) for name, run in zip(names, runs, strict=True)},
        "differing": differing_values(runs),
        "events": [event._asdict() for event in events(runs)],
    }


def overview(run: History) -> JsonObject:
    """Return a run's most important numbers. A number that was not recorded is ``None``."""
    start = run.starts[-1] if run.starts else {}
    eval_losses = run.series("eval/loss")
    best_step = min(eval_losses, key=eval_losses.__getitem__, default=None)
    hours = [hours for hours in run.training_hours() if hours is not None]
    speeds = run.series("train/tokens_per_second").values()
    mfus = run.series("train/mfu").values()
    peaks = [peak_memory(entry) for entry in run.entries]
    return {
        "state": run.state,
        "reason": run.status.get("reason") or None,
        "step": run.step,
        "max_steps": run.settings.get("max_steps"),
        "tokens": run.latest("tokens"),
        "loss": run.latest("train/loss"),
        "best_loss": None if best_step is None else eval_losses[best_step],
        "best_step": best_step,
        "hours": hours[-1] if hours else None,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "mfu": statistics.median(mfus) if mfus else None,
        "memory_gib": max((gib for gib in peaks if gib is not None), default=None),
        "data": run.record.get("dataset"),
        "trackers": run.record.get("trackers", {}),
        **{key: start.get(key) for key in _START_KEYS},
    }


def differing_values(runs: Sequence[History]) -> dict[str, list[str]]:
    """Return what is not the same in all runs: by its name, a value for each run."""
    return {
        difference.name: [shorten_hash(value) for value in difference.values]
        for difference in differences(runs)
    }


def events(runs: Sequence[History]) -> list[Event]:
    """Return the events in all runs, ordered by time."""
    all_events: list[Event] = []
    for number, run in enumerate(runs):
        for entry in run.events:
            when = entry.get("time")
            if not isinstance(when, int | float):
                continue
            event = Event(
                when=when,
                run=number,
                step=entry["step"],
                kind=str(entry.get("kind")),
                text=str(entry.get("text")),
            )
            all_events.append(event)
        for start in run.starts:
            when = seconds_of(start.get("time"))
            if when is None or not start.get("step"):
                continue
            event = Event(
                when=when,
                run=number,
                step=start["step"],
                kind="resumed",
                text=_resume_text(run, start),
            )
            all_events.append(event)

    # Several ranks may have recorded the same event. The earliest record stays.
    unique: dict[tuple[int, int, str, str], Event] = {}
    for event in sorted(all_events):
        unique.setdefault(event[1:], event)
    return sorted(unique.values())


def _resume_text(run: History, start: JsonObject) -> str:
    """Return where a start of a run resumed it."""
    processes = start.get("processes")
    text = "1 process" if processes == 1 else f"{processes} processes"
    text += f" on {start.get('host')}"
    if start.get("restart"):
        text += f"; restart {start['restart']} by the launcher"
    if run.extends and start is run.starts[0]:
        text += f"; extends {run.extends.get('run')}"
    return text


def _format_overview(values: JsonObject) -> dict[str, str]:
    """Return the rows of the page's first table.

    Args:
        values: what :func:`overview` returned.
    """

    def text(key: str, template: str = "{}", absent: str = _ABSENT) -> str:
        if values[key] is None:
            return absent
        return template.format(values[key])

    state = text("state") + text("reason", ": {}", absent="")
    steps = text("step", "{:,}") + text("max_steps", " of {:,}", absent="")
    best_loss = text("best_loss", "{:.4f}") + text("best_step", " at step {:,}", absent="")
    processes = (
        text("processes")
        + text("device", " on {}", absent="")
        + text("sharded", ", sharded {}", absent="")
    )
    precision = "float32" if values["mixed_precision"] == "no" else text("mixed_precision")
    latest_start = text("time") + text("host", " on {}", absent="")
    hours = values["hours"]
    gib = values["memory_gib"]
    return {
        "state": state,
        "steps": steps,
        "target tokens": text("tokens", "{:,}"),
        "train loss": text("loss", "{:.4f}"),
        "best eval loss": best_loss,
        "time of training": _ABSENT if hours is None else duration_text(3600 * hours),
        "tokens per second": text("tokens_per_second", "{:,.0f}"),
        "MFU": text("mfu", "{:.1%}"),
        "peak memory of a process": _ABSENT if gib is None else size_text(gib * 2**30),
        "processes": processes,
        "precision": precision,
        "data": text("data"),
        "code": text("git_sha"),
        "latest start": latest_start,
    }


def _shown_samples(runs: Sequence[History]) -> list[tuple[int, JsonObject]]:
    """Return the samples to show, each after the index of its run."""
    shown = []
    for number, run in enumerate(runs):
        steps = sorted({sample["step"] for sample in run.samples})[-_SAMPLE_STEPS:]
        for sample in run.samples:
            is_complete = sample.keys() >= {"prompt", "text"}
            if sample["step"] in steps and is_complete:
                shown.append((number, sample))
    return shown
