"""One page about runs, in one file that opens without a network."""

import contextlib
import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llmtrain.observe.phases import PHASES
from llmtrain.record.history import History
from llmtrain.report.charts import AXES, bars, charts, most_memory, names_of
from llmtrain.types import Facts

_PAGE = Path(__file__).with_name("page.html")
_LOOKS = 8  # at what a run wrote
_ABSENT = "\N{EN DASH}"


class Incident(NamedTuple):
    """Something that happened on the way."""

    when: float  # seconds since 1970
    run: int
    step: int
    kind: str
    text: str


class Saved(NamedTuple):
    """A checkpoint."""

    run: int
    step: int
    written: float
    size: int  # bytes
    held_out: float | None
    is_best: bool  # of those of its run that are left


def html(runs: Sequence[History]) -> str:
    """Return the page."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {}  # whose keys keep their order
    environment.filters |= {"moment": _moment, "shown": _shown}
    drawn, processes = charts(runs), bars(runs)
    return environment.from_string(_PAGE.read_text()).render(
        title=" and ".join(names_of(runs)) if len(runs) <= 3 else f"{len(runs)} runs",
        runs=runs,
        names=names_of(runs),
        commands=[
            shlex.join(run.starts[-1].get("command", [])) if run.starts else "" for run in runs
        ],
        facts=[_for_a_person(facts(run)) for run in runs],
        charts=[
            {**chart._asdict(), "curves": [curve._asdict() for curve in chart.curves]}
            for chart in drawn
        ],
        bars=processes._asdict() if processes else None,
        axes=AXES,
        phases=list(PHASES),
        differing=differing(runs),
        incidents=incidents(runs),
        checkpoints=saved(runs),
        samples=[
            (number, line) for number, run in enumerate(runs) for line in _spread(run.samples)
        ],
        scores=scores(runs),
        now=time.time(),
        plotly=get_plotlyjs(),
    )


def facts(run: History) -> Facts:
    """Return what one asks first of a run; ``None`` for what is not known."""
    start = run.starts[-1] if run.starts else {}
    of_start = ("processes", "device", "sharded", "mixed_precision", "git_sha", "time", "host")
    held_out, memory = run.series("eval/loss"), [most_memory(line) for line in run.readings]
    best = min(held_out, key=held_out.__getitem__, default=None)
    speeds, shares = (
        run.series("train/tokens_per_second").values(),
        run.series("train/mfu").values(),
    )
    return {
        "state": run.state,
        "reason": run.status.get("reason") or None,
        "step": run.step,
        "max_steps": run.settings.get("max_steps"),
        "tokens": run.last("tokens"),  # that were trained
        "loss": run.last("train/loss"),
        "best_loss": None if best is None else held_out[best],  # held out
        "best_step": best,
        "hours": next((hour for hour in reversed(run.hours()) if hour is not None), None),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "mfu": statistics.median(shares) if shares else None,
        "memory_gib": max(
            (size for size in memory if size is not None), default=None
        ),  # of any process
        "data": run.record.get("dataset"),
        **{key: start.get(key) for key in of_start},
    }


def _for_a_person(known: Facts) -> dict[str, str]:
    """Return the rows of the first table from what :func:`facts` returns."""

    def told(key: str, text: str = "{}", absent: str = _ABSENT) -> str:
        return absent if known[key] is None else text.format(known[key])

    return {
        "state": told("state") + told("reason", ": {}", ""),
        "updates": told("step", "{:,}") + told("max_steps", " of {:,}", ""),
        "trained tokens": told("tokens", "{:,}"),
        "training loss": told("loss", "{:.4f}"),
        "best held-out loss": told("best_loss", "{:.4f}")
        + told("best_step", " at update {:,}", ""),
        "hours of training": told("hours", "{:.3g}"),
        "tokens a second": told("tokens_per_second", "{:,.0f}"),
        "MFU": told("mfu", "{:.1%}"),
        "memory of a process": told("memory_gib", "{:.2f} GiB at most"),
        "processes": told("processes")
        + told("device", " on {}", "")
        + told("sharded", ", sharded {}", ""),
        "precision": "float32" if known["mixed_precision"] == "no" else told("mixed_precision"),
        "data": told("data"),
        "code": _short_commit(known["git_sha"]),
        "started last": told("time") + told("host", " on {}", ""),
    }


def _short_commit(commit: str | None) -> str:
    if commit is None:
        return _ABSENT
    digits, separator, mark = commit.partition("-")
    return digits[:12] + separator + mark


def differing(runs: Sequence[History]) -> dict[str, list[str]]:
    """Return the settings, and what runs were made of and on, that are not the same in all."""
    sides: list[Facts] = []
    for run in runs:
        start = run.starts[-1] if run.starts else {}
        settings = {
            name: value
            for name, value in run.settings.items()
            if name not in ("output_dir", "run_name")
        }
        of_start = {
            key: start.get(key)
            for key in ("processes", "sharded", "device", "mixed_precision", "git_sha")
        }
        versions = {
            f"version of {name}": value for name, value in (start.get("versions") or {}).items()
        }
        made_of = {
            key: run.record.get(key) for key in ("data_sha256", "tokenizer_sha256", "train_tokens")
        }
        sides.append(settings | of_start | versions | made_of)
    keys = dict.fromkeys(key for side in sides for key in side)
    rows = {key: [side.get(key, _ABSENT) for side in sides] for key in keys}
    return {
        key: [str(value) for value in row]
        for key, row in rows.items()
        if any(value != row[0] for value in row)
    }


def incidents(runs: Sequence[History]) -> list[Incident]:
    """Return what happened on the way, in the order of time."""
    found = []
    for number, run in enumerate(runs):
        for line in run.incidents:
            if isinstance(when := line.get("time"), int | float):
                found.append(
                    Incident(
                        when, number, line["step"], str(line.get("kind")), str(line.get("text"))
                    )
                )
        for start, began in zip(run.starts, run.began(), strict=True):
            if began is not None and start.get("step"):
                again = (
                    f"; restart {start['restart']} by its launcher" if start.get("restart") else ""
                )
                who = f"{start.get('processes')} process(es) on {start.get('host')}{again}"
                found.append(Incident(began, number, start["step"], "resumed", who))
    # several ranks may have written one down, of which the earliest stays
    return sorted({one[1:]: one for one in sorted(found, reverse=True)}.values())


def saved(runs: Sequence[History]) -> list[Saved]:
    """Return the checkpoints that are there, newest first."""
    from llmtrain.record.checkpoint import MANIFEST, bytes_of, checkpoints, held_out_losses

    found = []
    for number, run in enumerate(runs):
        paths = checkpoints(run.folder / "checkpoints")
        losses = held_out_losses(paths)
        best = min(losses, key=losses.__getitem__, default=None)
        for path in reversed(paths):
            step = int(path.name.removeprefix("step-"))
            size = bytes_of(path)
            with contextlib.suppress(OSError):  # a run in progress deletes old ones
                written = (path / MANIFEST if size else path).stat().st_mtime
                found.append(Saved(number, step, written, size, losses.get(path), path == best))
    return found


def _spread(samples: list[Facts]) -> list[Facts]:
    """Return the samples of at most so many updates, the first and the last among them."""
    steps = sorted({line["step"] for line in samples})
    shown = {
        steps[round(place * (len(steps) - 1) / (_LOOKS - 1))]
        for place in range(_LOOKS if steps else 0)
    }
    return [line for line in samples if line["step"] in shown and {"prompt", "text"} <= line.keys()]


def data(runs: Sequence[History]) -> Facts:
    """Return what the page shows, for programs."""
    return {
        "runs": {name: facts(run) for name, run in zip(names_of(runs), runs, strict=True)},
        "differing": differing(runs),
        "incidents": [one._asdict() for one in incidents(runs)],
        "checkpoints": [one._asdict() for one in saved(runs)],
        "scores": [{"run": number, **line} for number, line in scores(runs)],
    }


def scores(runs: Sequence[History]) -> list[tuple[int, Facts]]:
    """Return the number of each run and what ``llmtrain eval`` found of it."""
    told = {"task", "metric", "value", "stderr", "questions", "num_fewshot", "model", "time"}
    return [
        (number, line)
        for number, run in enumerate(runs)
        for line in run.scores
        if told <= line.keys()
    ]


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
