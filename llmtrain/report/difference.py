"""The difference between two runs: the first update at which anything of them parts, and the possible causes.

An update is a chain: weights and rows, the tokens in them, the labels, the loss, the gradient, the weights after it.
What parts first along the chain points at the settings, or the code, that act there; the rest follows from it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from llmtrain.config import flags_of
from llmtrain.contract import Facts, Json
from llmtrain.record.history import History, read_lines

Read: TypeAlias = Callable[[History], Mapping[int, Json]]  # by update


class Link(NamedTuple):
    """One thing of an update that is compared."""

    name: str
    read: Read
    acting: tuple[str, ...]  # groups of settings that act there
    otherwise: str  # what else could be the cause, where no setting is
    rounding: int = 0  # how much more than a loss it may round; 0: it has no rounding
    of_same_data: bool = False  # else it is another before anything is wrong


class Parting(NamedTuple):
    """The first reading at which something parts."""

    link: str
    step: int  # the update; 0: before the first
    one: Json
    other: Json


class Comparison(NamedTuple):
    """Two runs, compared."""

    first: Parting | None  # the cause; of all that part at its step the first along the chain
    all: list[Parting]  # by link
    causes: list[str]
    also: list[str]  # that differ, too, and act elsewhere
    rounding: float  # the largest relative difference of a loss, where nothing parts
    readings: int  # that both runs have


def _series(key: str, at_start: bool = False) -> Read:
    """Return a reader of one key. A number that is not finite, for which JSON has no word, is read as NaN."""
    return lambda run: {
        line["step"]: math.nan if line[key] is None else line[key]
        for line in run.readings
        if key in line and not (at_start and line["step"])
    }


def _rows(run: History) -> Mapping[int, Json]:
    return {line["step"]: line.get("rows") for line in read_lines(run.folder / "rows.jsonl")}


def _fingerprint(place: int) -> Read:
    return lambda run: {
        line["step"]: line["batch"].split("-")[place]
        for line in run.readings
        if isinstance(line.get("batch"), str)
    }


_LABELS = "labels are masked or shifted otherwise"
_COMPUTES = f"the model or its loss computes otherwise: attention, dropout, precision, or {_LABELS}"
_TOKENS = (
    "text becomes tokens otherwise: another file, or tokens at the beginning or the end of a text that are put in "
    "twice or left out; or rows are ordered otherwise (--log_rows tells)"
)
_GRADIENT = (
    "the gradient is put together otherwise: a mean of micro-batches' means for one over all tokens, a missing sync, "
    "or a factor of the number of processes"
)
_UPDATED = "the optimizer computes otherwise, or the gradient is clipped otherwise"
_FIRST_WEIGHTS, _WEIGHTS = _series("train/weight_norm", at_start=True), _series("train/weight_norm")
_FIRST_LOSS, _NORM = _series("eval/loss", at_start=True), _series("train/grad_norm")
_DRAWN, _DEALT = "weights are drawn or loaded otherwise", "rows are ordered or dealt out otherwise"
_FORWARD = ("model", "pass")
CHAIN = {
    "weights": Link(
        "weights before the first update", _FIRST_WEIGHTS, ("model", "seed"), _DRAWN, 1
    ),
    "rows": Link("rows", _rows, ("data", "seed"), _DEALT),
    "inputs": Link("tokens", _fingerprint(0), ("data", "seed"), _TOKENS),
    "labels": Link("labels of the same tokens", _fingerprint(1), ("data",), _LABELS),
    "tokens": Link(
        "number of trained tokens", _series("tokens"), ("data",), f"{_LABELS}, or counted otherwise"
    ),
    "rate": Link(
        "learning rate",
        _series("train/learning_rate"),
        ("update",),
        "the schedule is computed otherwise",
    ),
    "first loss": Link(
        "loss of the same weights", _FIRST_LOSS, _FORWARD, _COMPUTES, 1, of_same_data=True
    ),
    "loss": Link("loss", _series("train/loss"), _FORWARD, _COMPUTES, 1),
    "norm": Link(
        "gradient norm of the same loss", _NORM, ("gradient", "pass", "model"), _GRADIENT, 10
    ),
    "updated": Link(
        "weights after the same gradient", _WEIGHTS, ("update", "gradient"), _UPDATED, 1
    ),
    "held out": Link(
        "held-out loss",
        _series("eval/loss"),
        ("data", "pass"),
        "the evaluation computes otherwise",
        1,
        True,
    ),
}

# What rounding may do to a loss where a run is spread otherwise, relative to it; it grows from update to update.
_ROUNDING = {"no": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
_GROWTH = 30  # times, from one reading to the next: what is faster is no rounding
_LAYOUT = ("processes", "sharded", "device", "threads", "versions", "host")
_LAYOUT_SETTINGS = (
    "per_device_train_batch_size",
    "pipeline_stages",
    "torch_compile",
    "gradient_checkpointing",
    "bitwise",
    "ddp_bucket_cap_mb",
)


def compare(one: History, other: History) -> Comparison:
    """Compare two runs, of which either may have been interrupted, or made on another layout."""
    precisions = {
        str(run.starts[0].get("mixed_precision")) if run.starts else "no" for run in (one, other)
    }
    limit = (
        0.0 if _same_layout(one, other) else max(_ROUNDING.get(name, 2e-2) for name in precisions)
    )
    same_data = one.record.get("data_sha256") == other.record.get("data_sha256")
    found = [
        _parting(name, one, other, limit)
        for name, link in CHAIN.items()
        if same_data or not link.of_same_data
    ]
    partings = [parting for parting in found if parting is not None]
    first = min(partings, key=lambda parting: parting.step, default=None)
    facts = differing_facts(one, other)
    losses, others = one.series("train/loss"), other.series("train/loss")
    steps = losses.keys() & others.keys()
    rounding = max((_apart(losses[step], others[step]) for step in steps), default=0.0)
    if first is None:
        return Comparison(None, [], [], [said for _, said in facts], rounding, len(steps))
    acting = {"any", *CHAIN[first.link].acting}
    before = max((step for step in steps if step < first.step), default=0)
    unseen = first.step - before > 1  # an update in between may have been another
    if first.link in ("loss", "norm", "updated") and (unseen or (first.link == "loss" and before)):
        acting |= {"model", "pass", "gradient", "update"}
    causes = [said for group, said in facts if group in acting]
    also = [said for group, said in facts if group not in acting]
    if not causes:
        code = [said for group, said in facts if group == "code"]
        causes, also = (
            [CHAIN[first.link].otherwise, *code],
            [said for said in also if said not in code],
        )
    return Comparison(first, partings, causes, also, rounding, len(steps))


def _parting(name: str, one: History, other: History, limit: float) -> Parting | None:
    """Return the first reading of a link that is further apart than rounding makes it.

    It may also have grown from the reading before as fast as rounding does.
    """
    link, before = CHAIN[name], 0.0
    mine, others = link.read(one), link.read(other)
    for step in sorted(mine.keys() & others.keys()):
        apart = _apart(mine[step], others[step])
        if apart > limit * link.rounding:
            return (
                None
                if before and apart < _GROWTH * before
                else Parting(name, step, mine[step], others[step])
            )
        before = apart
    return None


def _apart(one: Json, other: Json) -> float:
    """Return the relative difference of two numbers; infinite between other values that differ."""
    if one == other:
        return 0.0
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return math.inf
    if math.isnan(one) and math.isnan(other):
        return 0.0
    return abs(one - other) / max(abs(one), abs(other)) if math.isfinite(one - other) else math.inf


def _same_layout(one: History, other: History) -> bool:
    """Return whether both were computed in the same way, so that on a CPU they have the same bits."""
    ways = [[start.get(key) for key in _LAYOUT] for run in (one, other) for start in run.starts]
    on_cpu = all(run.starts and run.starts[0].get("device") == "cpu" for run in (one, other))
    same_settings = all(
        one.settings.get(key) == other.settings.get(key) for key in _LAYOUT_SETTINGS
    )
    return on_cpu and same_settings and all(way == ways[0] for way in ways)


_FACTS = {  # of a run's record or its first start: where it acts, and its name for a person
    "data_sha256": ("data", "content of the data"),
    "tokenizer_sha256": ("data", "tokenizer"),
    "train_rows": ("data", "rows to train on"),
    "vocabulary": ("model", "tokens of the vocabulary"),
    "mixed_precision": ("pass", "precision"),
    "git_sha": ("code", "commit"),
    "code_sha256": ("code", "code of the package, the recipe and the modules beside it"),
    "versions": ("code", "versions"),
    **{name: ("layout", name) for name in ("processes", "sharded", "threads", "device")},
}


def differing_facts(one: History, other: History) -> list[tuple[str, str]]:
    """Return how two runs' records differ: for each fact the group that says where it acts, and a line for a person."""
    groups = groups_of_settings()
    found = []
    for name in dict.fromkeys([*one.settings, *other.settings]):
        a, b = one.settings.get(name), other.settings.get(name)
        if a != b:
            said = f"--{name} {_short(a)} and {_short(b)}"
            found += [(group, said) for group in groups.get(name, ["any"]) if group != "nowhere"]
    if more := _tokens_a_document(one.record, other.record):
        found.append(("data", more))
    mine, others = map(_made_of, (one, other))
    for key, (group, name) in _FACTS.items():
        a, b = mine.get(key), others.get(key)
        if a != b and None not in (a, b):
            found.append((group, f"{name}: {_short(a)} and {_short(b)}"))
    return [*dict.fromkeys(found)]


def _made_of(run: History) -> Facts:
    start = run.starts[0] if run.starts else {}
    return {**start, **run.record, "processes": start.get("processes")}


def groups_of_settings() -> dict[str, list[str]]:
    """Return the groups that say where each setting of this package acts."""
    from llmtrain.training.settings import CONFIGS

    flags = [
        (config, name, field) for config in CONFIGS for name, field in flags_of(config).items()
    ]
    return {name: (field.metadata["acts"] or config.acts).split() for config, name, field in flags}


def _tokens_a_document(one: Facts, other: Facts) -> str | None:
    """Return what the counts tell where the same documents have become other tokens."""
    keys = ("documents", "eval_documents", "train_tokens")
    if not all(isinstance(record.get(key), int) for record in (one, other) for key in keys):
        return None
    (documents, held_out, tokens), (*others, more) = sorted(
        ([record[key] for key in keys] for record in (one, other)), key=lambda counts: counts[2]
    )
    apart, rest = divmod(more - tokens, max(documents - held_out, 1))
    if (
        [documents, held_out] != others or not apart or rest > 1
    ):  # a first text may begin with one, too
        return None
    return (
        f"the same {documents - held_out} documents have {tokens:,} and {more:,} tokens, {apart} more for each: "
        "a token at the beginning or the end of a text is put in twice, or left out"
    )


def _short(value: Json) -> str:
    """Return the beginning of a hash, with the mark of a dirty commit, and all of another value."""
    text = str(value)
    match = re.fullmatch(r"([0-9a-f]{40}|[0-9a-f]{64})(-dirty)?", text)
    if match is None:
        return text
    return f"{text[:12]}...{match[2] or ''}"


def lines(names: Sequence[str], found: Comparison) -> list[str]:
    """Return the comparison for a person."""
    one, other = names
    also = [f"also      {fact}" for fact in found.also]
    if found.first is None:
        if not found.readings:
            return [
                "unknown   the two runs have no reading of the same update: nothing can be compared"
            ]
        exactly = (
            f"within {found.rounding:.0e} of each other, as rounding may be"
            if found.rounding
            else "to the last bit"
        )
        return [
            f"same      rows, losses, norms and weights of {found.readings} readings, {exactly}",
            *also,
        ]
    link, step = CHAIN[found.first.link], found.first.step
    when = f"at update {step}" if step else "before the first update"
    values = f"{_value(found.first.one)} in {one}, {_value(found.first.other)} in {other}"
    partings = sorted(
        (parting for parting in found.all if parting != found.first),
        key=lambda parting: parting.step,
    )
    later = ", ".join(f"{CHAIN[parting.link].name} at {parting.step}" for parting in partings)
    then = [f"then      {later}"] if later else []
    return [
        f"parts     {when}: {link.name}: {values}",
        *then,
        *(f"cause     {cause}" for cause in found.causes),
        *also,
    ]


def _value(value: Json) -> str:
    if isinstance(value, list):
        return f"{', '.join(map(str, value[:4]))}{', ...' if len(value) > 4 else ''}"
    return f"{value:.8g}" if isinstance(value, float) else str(value)
