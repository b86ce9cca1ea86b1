"""One page about runs, in one file that opens without a network."""

import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.files import read_object
from llmtrain.observe.phases import PHASES
from llmtrain.record.history import History
from llmtrain.report.charts import AXES, bars, charts, most_memory, names_of

_PAGE = Path(__file__).with_name("page.html")
_LOOKS = 8  # at what a run wrote
_ABSENT = "\N{EN DASH}"


class Facts(NamedTuple):
    """Of a run; what is not known is ``None``."""

    state: str
    reason: str | None
    step: int
    max_steps: int | None
    tokens: float | None  # that were trained
    loss: float | None  # the last that was read
    best_loss: float | None  # held out
    best_step: int | None
    hours: float | None
    tokens_per_second: float | None  # the median
    mfu: float | None
    memory_gib: float | None  # the most that any process held
    data: str | None
    processes: int | None
    device: str | None
    sharded: str | None
    mixed_precision: str | None
    git_sha: str | None
    time: str | None  # of the last start
    host: str | None


class Incident(NamedTuple):
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
    """The page."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {}  # whose keys keep their order
    environment.filters["moment"] = _moment
    environment.filters["shown"] = _shown
    drawn, processes = charts(runs), bars(runs)
    return environment.from_string(_PAGE.read_text()).render(
        title=" and ".join(names_of(runs)) if len(runs) <= 3 else f"{len(runs)} runs",
        runs=runs,
        names=names_of(runs),
        commands=[shlex.join(run.starts[-1].get("command", [])) if run.starts else "" for run in runs],
        facts=[_told(facts(run)) for run in runs],
        charts=[{**chart._asdict(), "curves": [curve._asdict() for curve in chart.curves]} for chart in drawn],
        bars=processes._asdict() if processes else None,
        axes=AXES,
        phases=list(PHASES),
        differing=differing(runs),
        incidents=incidents(runs),
        checkpoints=saved(runs),
        samples=[(number, line) for number, run in enumerate(runs) for line in _spread(run.samples)],
        now=time.time(),
        plotly=get_plotlyjs(),
    )


def facts(run: History) -> Facts:
    """Of a run, what one asks first."""
    start = run.starts[-1] if run.starts else {}
    held_out = run.series("eval/loss")
    best = min(held_out, key=held_out.__getitem__) if held_out else None
    speeds, shares = run.series("train/tokens_per_second").values(), run.series("train/mfu").values()
    return Facts(
        state=run.state,
        reason=run.status.get("reason") or None,
        step=run.step,
        max_steps=run.settings.get("max_steps"),
        tokens=run.last("tokens"),
        loss=run.last("train/loss"),
        best_loss=None if best is None else held_out[best],
        best_step=best,
        hours=next((hour for hour in reversed(run.hours()) if hour is not None), None),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        mfu=statistics.median(shares) if shares else None,
        memory_gib=max((size for line in run.readings if (size := most_memory(line)) is not None), default=None),
        data=run.record.get("dataset"),
        **{
            key: start.get(key)
            for key in ("processes", "device", "sharded", "mixed_precision", "git_sha", "time", "host")
        },
    )


def _told(one: Facts) -> dict[str, str]:
    """For a person."""

    def told(value: Any, as_text: str = "{}") -> str:
        return _ABSENT if value is None else as_text.format(value)

    precision = {"no": "float32"}.get(one.mixed_precision or "", one.mixed_precision)
    return {
        "state": one.state + told(one.reason, ": {}").removeprefix(_ABSENT),
        "updates": f"{one.step:,}" + told(one.max_steps, " of {:,}").removeprefix(_ABSENT),
        "trained tokens": told(one.tokens, "{:,}"),
        "training loss": told(one.loss, "{:.4f}"),
        "best held-out loss": told(one.best_loss, "{:.4f}")
        + told(one.best_step, " at update {:,}").removeprefix(_ABSENT),
        "hours of training": told(one.hours, "{:.3g}"),
        "tokens a second": told(one.tokens_per_second, "{:,.0f}"),
        "MFU": told(one.mfu, "{:.1%}"),
        "memory of a process": told(one.memory_gib, "{:.2f} GiB at most"),
        "processes": told(one.processes)
        + told(one.device, " on {}")
        + told(one.sharded, ", sharded {}").removeprefix(_ABSENT),
        "precision": told(precision),
        "data": told(one.data),
        "code": told(one.git_sha, "{:.12}"),
        "started last": told(one.time) + told(one.host, " on {}"),
    }


def differing(runs: Sequence[History]) -> dict[str, list[str]]:
    """Settings, and what runs were made of and on, that are not the same in all."""
    sides = []
    for run in runs:
        start = run.starts[-1] if run.starts else {}
        of_start = {key: start.get(key) for key in ("processes", "sharded", "device", "mixed_precision", "git_sha")}
        versions = {f"version of {name}": value for name, value in (start.get("versions") or {}).items()}
        made_of = {key: run.record.get(key) for key in ("data_sha256", "tokenizer_sha256", "train_tokens")}
        settings = {name: value for name, value in run.settings.items() if name not in ("output_dir", "run_name")}
        sides.append({**settings, **of_start, **versions, **made_of})
    keys = list(dict.fromkeys(key for side in sides for key in side))
    rows = {key: [side.get(key, _ABSENT) for side in sides] for key in keys}
    return {key: [str(value) for value in row] for key, row in rows.items() if any(v != row[0] for v in row)}


def incidents(runs: Sequence[History]) -> list[Incident]:
    """What happened on the way, in the order of time."""
    found = []
    for number, run in enumerate(runs):
        for line in run.incidents:
            when = line.get("time")
            if isinstance(when, int | float):
                found.append(Incident(when, number, line["step"], str(line.get("kind")), str(line.get("text"))))
        for start, began in zip(run.starts, run.began(), strict=True):
            if began is not None and start.get("step"):
                again = f"; restart {start['restart']} by its launcher" if start.get("restart") else ""
                who = f"{start.get('processes')} process(es) on {start.get('host')}{again}"
                found.append(Incident(began, number, start["step"], "resumed", who))
    once: dict[tuple[int, int, str, str], Incident] = {}
    for one in sorted(found):
        once.setdefault(one[1:], one)
    return list(once.values())


def saved(runs: Sequence[History]) -> list[Saved]:
    """Checkpoints that are there, newest first."""
    from llmtrain.record.checkpoint import MANIFEST, checkpoints

    found = []
    for number, run in enumerate(runs):
        here = []
        for path in reversed(checkpoints(run.folder / "checkpoints")):
            manifest, state = read_object(path / MANIFEST), read_object(path / "state.json")
            sizes = [entry.get("bytes", 0) for entry in manifest.values()]
            step = state.get("step", int(path.name.removeprefix("step-")))
            try:
                written = (path / MANIFEST if manifest else path).stat().st_mtime
            except OSError:  # a run in progress deletes old ones
                continue
            here.append(Saved(number, step, written, sum(sizes), state.get("eval_loss"), False))
        measured = [one for one in here if one.held_out is not None]
        best = min(measured, key=lambda one: one.held_out or 0.0, default=None)
        found += [one._replace(is_best=one is best) for one in here]
    return found


def _spread(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of at most so many updates, the first and the last among them."""
    steps = sorted({line["step"] for line in samples})
    places = (
        {round(place * (len(steps) - 1) / (_LOOKS - 1)) for place in range(_LOOKS)} if len(steps) > _LOOKS else None
    )
    shown = {steps[place] for place in places} if places is not None else {*steps}
    return [line for line in samples if line["step"] in shown and {"prompt", "text"} <= line.keys()]


def data(runs: Sequence[History]) -> dict[str, Any]:
    """What the page shows, for programs."""
    return {
        "runs": {name: facts(run)._asdict() for name, run in zip(names_of(runs), runs, strict=True)},
        "differing": differing(runs),
        "incidents": [one._asdict() for one in incidents(runs)],
        "checkpoints": [one._asdict() for one in saved(runs)],
    }


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
