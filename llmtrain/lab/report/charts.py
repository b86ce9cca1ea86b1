"""Curves and bars for the report page, as JSON that its script passes to plotly."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from llmtrain.files import JsonObject
from llmtrain.phase_names import PHASES, describe_phase
from llmtrain.record.history import History

AXES = {"step": "steps", "tokens": "target tokens", "hours": "hours of training"}

_MAX_POINTS = 2000  # per curve, so that a page still opens after weeks of training
_MEMORY = "memory"

# The title and the unit of each chart, and by its label the key of each curve.
_CHARTS = {
    ("Loss", "nats per token"): {"train": "train/loss", "eval": "eval/loss"},
    ("Pairs whose chosen answer has the higher reward", "share"): {
        "train": "train/rewards/accuracies",
        "eval": "eval/rewards/accuracies",
    },
    ("Margin between the rewards of two answers", ""): {
        "train": "train/rewards/margins",
        "eval": "eval/rewards/margins",
    },
    ("Log-probability of an answer", "nats"): {
        "chosen, train": "train/logps/chosen",
        "chosen, eval": "eval/logps/chosen",
        "rejected, train": "train/logps/rejected",
        "rejected, eval": "eval/logps/rejected",
    },
    ("KL divergence from the reference model", "nats per answer"): {
        "train": "train/kl",
        "eval": "eval/kl",
    },
    ("Gradient norm before clipping", ""): {"": "train/grad_norm"},
    ("Learning rate", ""): {"": "train/learning_rate"},
    ("Throughput of all processes", "tokens/s"): {"": "train/tokens_per_second"},
    ("Memory of the process that holds the most", "GiB"): {"": _MEMORY},
}


def charts(runs: Sequence[History]) -> list[JsonObject]:
    """Return the charts for which at least one run has logged values.

    Returns:
        Each with its ``title`` and ``unit``, its ``curves``, and whether it ``is_logarithmic``. A
        curve has a ``name``, the number of its ``color``, which is that of its run, the values of
        ``x`` for each of :data:`AXES`, and those of ``y``. If it ``has_markers``, its values are
        measured only now and then, and each of its points is shown.
    """
    # The loss of preference training is not in nats per token.
    has_rewards = any("train/rewards/margins" in entry for run in runs for entry in run.entries)

    drawn = []
    for (title, unit), keys in _CHARTS.items():
        curves = [curve for label, key in keys.items() for curve in _curves(runs, key, label)]
        if curves:
            chart = {
                "title": title,
                "unit": "" if title == "Loss" and has_rewards else unit,
                "curves": curves,
                "is_logarithmic": title.startswith("Gradient norm"),
            }
            drawn.append(chart)
    return drawn


def run_names(runs: Sequence[History]) -> list[str]:
    """Return a short name for each run: its folder's name, or the path if two names are equal."""
    names = [Path(run.address or run.folder).absolute().name for run in runs]
    if len(set(names)) < len(names):
        return [run.address or str(run.folder) for run in runs]
    return names


def peak_memory(entry: JsonObject) -> float | None:
    """Return how many GiB the process with the most memory held, if the log entry has it."""
    memory = entry.get(_MEMORY)
    if not isinstance(memory, dict):
        return None
    return max(itertools.chain.from_iterable(memory.values()), default=None)


def phase_bars(runs: Sequence[History]) -> JsonObject | None:
    """Return the median seconds per phase and process, or ``None`` if no run has logged any.

    If the number of processes has changed during a run, only log entries with the latest number
    count.

    Returns:
        The names of the ``processes``, and ``phases``: by the displayed name of each phase, a
        number of seconds for each process.
    """
    processes: list[str] = []
    medians: dict[str, list[float]] = {describe_phase(phase): [] for phase in PHASES}
    for name, run in zip(run_names(runs), runs, strict=True):
        entries = [
            entry["phases"] for entry in run.entries if isinstance(entry.get("phases"), dict)
        ]
        # Each phase has a list of seconds, with a number for each rank.
        ranks = len(entries[-1]["forward"]) if entries else 0
        entries = [phases for phases in entries if len(phases["forward"]) == ranks]
        for rank in range(ranks):
            # If the page shows one run, its name would only repeat.
            processes.append(f"{name}, rank {rank}" if len(runs) > 1 else f"rank {rank}")
            for phase in PHASES:
                seconds = statistics.median(phases[phase][rank] for phases in entries)
                medians[describe_phase(phase)].append(seconds)
    return {"processes": processes, "phases": medians} if processes else None


def _curves(runs: Sequence[History], key: str, label: str) -> list[JsonObject]:
    """Return one curve for each run that has logged values.

    Args:
        runs: all runs on the page.
        key: a key of the log entries.
        label: distinguishes these curves from others in the same chart.
    """
    curves = []
    for color, (run_name, run) in enumerate(zip(run_names(runs), runs, strict=True)):
        values = []
        x: dict[str, list[float | None]] = {axis: [] for axis in AXES}
        for entry, hours in zip(run.entries, run.training_hours(), strict=True):
            value = peak_memory(entry) if key == _MEMORY else entry.get(key)
            if value is not None:  # one that was not finite is null in the file
                values.append(value)
                x["step"].append(entry["step"])
                x["tokens"].append(entry.get("tokens"))
                x["hours"].append(hours)
        if not values:
            continue

        # The legend names the run if there are several, and the label if the chart has several.
        parts = [run_name, label] if len(runs) > 1 else [label or run_name]
        shown = downsample(values)
        curve = {
            "name": ", ".join(part for part in parts if part),
            "color": color,
            "has_markers": key.startswith("eval/"),
            "x": {axis: [numbers[i] for i in shown] for axis, numbers in x.items()},
            "y": [values[i] for i in shown],
        }
        curves.append(curve)
    return curves


def downsample(values: Sequence[float], limit: int = _MAX_POINTS) -> Iterable[int]:
    """Choose at most ``limit`` values for a curve, such that no spike is lost.

    If there are more values, the lowest and the highest of each stretch are chosen.

    Returns:
        The indices of the values, in ascending order.
    """
    if len(values) <= limit:
        return range(len(values))

    stretch_length = math.ceil(2 * len(values) / limit)
    indices: list[int] = []
    for start in range(0, len(values), stretch_length):
        stretch = range(start, min(start + stretch_length, len(values)))
        extremes = {
            min(stretch, key=values.__getitem__),
            max(stretch, key=values.__getitem__),
        }
        indices += sorted(extremes)
    return indices
