"""Why two runs differ: the first update at which anything of them parts, what that was, and what could have caused it.

An update is a chain: weights and rows, the tokens in them, the labels, the loss, the gradient, the weights after it.
What parts first along the chain points at the settings, or the code, that act there; the rest follows from it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from llmtrain.record.history import History, read_lines

Read = Callable[[History], dict[int, Any]]


class Link(NamedTuple):
    """Of the chain: what is compared, by update, and what acts there."""

    name: str
    read: Read
    acting: tuple[str, ...]  # groups of settings
    otherwise: str  # what else could be the cause, where no setting is
    rounding: int | None = None  # how much more than a loss it may round; None: it has no rounding
    of_same_data: bool = False  # else it is another before anything is wrong


class Parting(NamedTuple):
    """The first reading at which something parts."""

    link: str
    step: int  # the update; 0: before the first
    one: Any
    other: Any


class Comparison(NamedTuple):
    first: Parting | None  # the cause; of all that part at its step the first along the chain
    all: list[Parting]  # by link
    causes: list[str]
    also: list[str]  # that differ, too, and act elsewhere
    rounding: float  # the largest relative difference of a loss, where nothing parts
    readings: int  # that both runs have


def _series(key: str) -> Read:
    """What is not finite, for which JSON has no word, is a value, too."""
    return lambda run: {
        line["step"]: math.nan if line[key] is None else line[key] for line in run.readings if key in line
    }


def _at_start(key: str) -> Read:
    return lambda run: {step: value for step, value in _series(key)(run).items() if step == 0}


def _rows(run: History) -> dict[int, Any]:
    return {line["step"]: line.get("rows") for line in read_lines(run.folder / "rows.jsonl")}


def _fingerprint(place: int) -> Read:
    def read(run: History) -> dict[int, Any]:
        prints = {line["step"]: line.get("batch") for line in run.readings}
        return {step: said.split("-")[place] for step, said in prints.items() if isinstance(said, str)}

    return read


_LABELS = "labels are masked or shifted otherwise"
_COMPUTES = f"the model or its loss computes otherwise: attention, dropout, precision, or {_LABELS}"
CHAIN = {
    "weights": Link(
        "weights before the first update",
        _at_start("train/weight_norm"),
        ("model", "seed"),
        "weights are drawn or loaded otherwise",
        rounding=1,
    ),
    "rows": Link("rows", _rows, ("data", "seed"), "rows are ordered or dealt out otherwise"),
    "inputs": Link(
        "tokens",
        _fingerprint(0),
        ("data", "seed"),
        "text becomes tokens otherwise: another file, or tokens at the beginning or the end of a text that are put in "
        "twice or left out; or rows are ordered otherwise (--log_rows tells)",
    ),
    "labels": Link("labels of the same tokens", _fingerprint(1), ("data",), _LABELS),
    "tokens": Link("number of trained tokens", _series("tokens"), ("data",), f"{_LABELS}, or counted otherwise"),
    "rate": Link("learning rate", _series("train/learning_rate"), ("update",), "the schedule is computed otherwise"),
    "first loss": Link(
        "loss of the same weights", _at_start("eval/loss"), ("model", "pass"), _COMPUTES, rounding=1, of_same_data=True
    ),
    "loss": Link("loss", _series("train/loss"), ("model", "pass"), _COMPUTES, rounding=1),
    "norm": Link(
        "gradient norm of the same loss",
        _series("train/grad_norm"),
        ("gradient", "pass", "model"),
        "the gradient is put together otherwise: a mean of micro-batches' means for one over all tokens, a missing "
        "sync, or a factor of the number of processes",
        rounding=10,
    ),
    "updated": Link(
        "weights after the same gradient",
        _series("train/weight_norm"),
        ("update", "gradient"),
        "the optimizer computes otherwise, or the gradient is clipped otherwise",
        rounding=1,
    ),
    "held out": Link(
        "held-out loss",
        _series("eval/loss"),
        ("data", "pass"),
        "the evaluation computes otherwise",
        1,
        of_same_data=True,
    ),
}

# What rounding may do to a loss where a run is spread otherwise, relative to it; it grows from update to update.
_ROUNDING = {"no": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
_GROWTH = 30  # times, from one reading to the next: what is faster is no rounding
_LAYOUT = ("processes", "sharded", "device", "threads", "versions", "host")
_LAYOUT_SETTINGS = (
    *("per_device_train_batch_size", "pipeline_stages", "torch_compile", "gradient_checkpointing"),
    *("bitwise", "ddp_bucket_cap_mb", "ddp_first_bucket_mb", "ddp_static_graph"),
)


def compare(one: History, other: History) -> Comparison:
    """Two runs, of which either may have been interrupted, or made on another layout."""
    precisions = {str(run.starts[0].get("mixed_precision")) if run.starts else "no" for run in (one, other)}
    limit = 0.0 if _same_layout(one, other) else max(_ROUNDING.get(name, 2e-2) for name in precisions)
    same_data = one.record.get("data_sha256") == other.record.get("data_sha256")
    found = [_parting(name, one, other, limit) for name, link in CHAIN.items() if same_data or not link.of_same_data]
    partings = [parting for parting in found if parting is not None]
    order = [*CHAIN]
    first = min(partings, key=lambda parting: (parting.step, order.index(parting.link)), default=None)
    facts = differing_facts(one, other)
    losses = _paired(one.series("train/loss"), other.series("train/loss"))
    rounding = max((_apart(*pair) for pair in losses.values()), default=0.0)
    if first is None:
        return Comparison(None, [], [], [said for _, said in facts], rounding, len(losses))
    acting = _acting(first, sorted(losses))
    causes = [said for group, said in facts if group in acting]
    also = [said for group, said in facts if group not in acting]
    if not causes:
        code = [said for group, said in facts if group == "code"]
        causes, also = [CHAIN[first.link].otherwise, *code], [said for said in also if said not in code]
    return Comparison(first, partings, causes, also, rounding, len(losses))


def _acting(first: Parting, steps: list[int]) -> set[str]:
    """Groups of settings that could be the cause, where there are readings of these updates."""
    acting = {"any", *CHAIN[first.link].acting}
    before = max((step for step in steps if step < first.step), default=0)
    unseen = first.step - before > 1  # an update in between may have been another
    if first.link in ("loss", "norm", "updated") and (unseen or (first.link == "loss" and before)):
        acting |= {"model", "pass", "gradient", "update"}
    return acting


def _parting(name: str, one: History, other: History, limit: float) -> Parting | None:
    """The first reading of it that is not the same; or further apart than rounding, and than rounding may have grown
    from the one before."""
    link, before = CHAIN[name], 0.0
    for step, (a, b) in sorted(_paired(link.read(one), link.read(other)).items()):
        if link.rounding is None:
            if a != b:
                return Parting(name, step, a, b)
            continue
        apart = _apart(a, b)
        if apart > limit * link.rounding:
            return None if before and apart < _GROWTH * before else Parting(name, step, a, b)
        before = apart
    return None


def _paired(one: dict[int, Any], other: dict[int, Any]) -> dict[int, tuple[Any, Any]]:
    return {step: (value, other[step]) for step, value in one.items() if step in other}


def _apart(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / max(abs(one), abs(other)) if math.isfinite(one - other) else math.inf


def _same_layout(one: History, other: History) -> bool:
    """Whether both were computed in the same way, so that on a CPU they have the same bits."""
    ways = []
    for run in (one, other):
        starts = [[start.get(key) for key in _LAYOUT] for start in run.starts]
        if not starts or any(start != starts[0] for start in starts) or run.starts[0].get("device") != "cpu":
            return False
        ways.append((starts[0], [run.settings.get(key) for key in _LAYOUT_SETTINGS]))
    return ways[0] == ways[1]


def differing_facts(one: History, other: History) -> list[tuple[str, str]]:
    """What is not the same in two runs' records, each with the group that says where it acts, for a person."""
    groups = _groups()
    found = []
    for name in dict.fromkeys([*one.settings, *other.settings]):
        sides = [run.settings.get(name) for run in (one, other)]
        said = f"--{name} {_short(sides[0])} and {_short(sides[1])}"
        if sides[0] != sides[1]:
            found += [(group, said) for group in groups.get(name, ("any",)) if group != _NOWHERE]
    added = _tokens_a_document(one.record, other.record)
    found += [("data", added)] if added else []
    starts = [run.starts[0] if run.starts else {} for run in (one, other)]
    for name, group in _FACTS.items():
        sides = [_looked_up(name, run.record, start) for run, start in zip((one, other), starts, strict=True)]
        if sides[0] != sides[1] and None not in sides:
            found.append((group, f"{_FACT_NAMES.get(name, name)}: {_short(sides[0])} and {_short(sides[1])}"))
    return [*dict.fromkeys(found)]


def _tokens_a_document(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """What the counts tell where the same documents have become other tokens."""
    counts: list[list[Any]] = [
        [record.get(key) for key in ("documents", "eval_documents", "train_tokens")] for record in (one, other)
    ]
    if not all(isinstance(count, int) for side in counts for count in side):
        return None
    (*all_and_held_out, tokens), (*others, more) = sorted(counts, key=lambda side: side[2])
    documents = all_and_held_out[0] - all_and_held_out[1]
    apart, rest = divmod(more - tokens, max(documents, 1))
    if all_and_held_out != others or not apart or rest > 1:  # a first text may begin with one, too
        return None
    what = f"the same {documents} documents have {tokens:,} and {more:,} tokens, {apart} more for each"
    return f"{what}: a token at the beginning or the end of a text is put in twice, or left out"


_NOWHERE = "nowhere"  # in what is computed
_FACTS = {
    "data_sha256": "data",
    "tokenizer_sha256": "data",
    "train_rows": "data",
    "vocabulary": "model",
    "mixed_precision": "pass",
    "code_sha256": "code",
    "versions": "code",
    "processes": "layout",
    "sharded": "layout",
    "threads": "layout",
    "device": "layout",
}
_FACT_NAMES = {
    "data_sha256": "content of the data",
    "tokenizer_sha256": "tokenizer",
    "train_rows": "rows to train on",
    "vocabulary": "tokens of the vocabulary",
    "mixed_precision": "precision",
    "code_sha256": "code of the package and the recipe",
}


def _looked_up(name: str, record: dict[str, Any], start: dict[str, Any]) -> Any:
    return record.get(name) if name in record and name != "processes" else start.get(name)


def _groups() -> dict[str, tuple[str, ...]]:
    """Where each setting of this package acts."""
    from llmtrain.data.config import DataConfig
    from llmtrain.data.conversations import ChatConfig
    from llmtrain.models.gpt import GPTConfig
    from llmtrain.models.lora import LoraConfig
    from llmtrain.models.pretrained import ModelConfig
    from llmtrain.parallel.ddp import DDPConfig
    from llmtrain.parallel.pipeline import PipelineConfig
    from llmtrain.record.run import RunConfig
    from llmtrain.training.optim import OptimConfig

    owners: list[tuple[Any, str]] = [(RunConfig, _NOWHERE), (PipelineConfig, "layout"), (DDPConfig, "layout")]
    owners += [(GPTConfig, "model"), (ModelConfig, "model"), (LoraConfig, "model")]
    owners += [(OptimConfig, "update"), (DataConfig, "data"), (ChatConfig, "data")]
    found = {field.name: (group,) for owner, group in owners for field in fields(owner)}
    return found | {
        "seed": ("seed",),
        "block_size": ("model", "data"),
        "tokenizer": ("model", "data"),
        "dropout": ("pass",),
        "lora_dropout": ("pass",),
        "attn_implementation": ("pass",),
        "gradient_checkpointing": ("layout",),
        "per_device_train_batch_size": ("layout",),
        "torch_compile": ("layout",),
        "ddp_comm_hook": ("gradient",),
        "sync_every": ("gradient",),
        "sync_each_batch": ("gradient",),
        "bitwise": ("layout",),
        "skip_nonfinite": ("update",),
    }


def _short(value: Any) -> str:
    """Of hashes the beginning; of what differs inside, all."""
    text = str(value)
    return f"{text[:12]}..." if len(text) in (40, 64) and all(c in "0123456789abcdef" for c in text) else text


def lines(names: Sequence[str], found: Comparison) -> list[str]:
    """For a person."""
    one, other = names
    if found.first is None:
        if not found.readings:
            return ["unknown   the two runs have no reading of the same update: nothing can be compared"]
        exactly = (
            f"within {found.rounding:.0e} of each other, as rounding may be" if found.rounding else "to the last bit"
        )
        said = [f"same      rows, losses, norms and weights of {found.readings} readings, {exactly}"]
    else:
        link, step = CHAIN[found.first.link], found.first.step
        when = f"at update {step}" if step else "before the first update"
        said = [
            f"parts     {when}: {link.name}: {_value(found.first.one)} in {one}, {_value(found.first.other)} in {other}"
        ]
        later = [
            f"{CHAIN[p.link].name} at {p.step}" for p in sorted(found.all, key=lambda p: p.step) if p != found.first
        ]
        said += [f"then      {', '.join(later)}"] if later else []
        said += [f"cause     {cause}" for cause in found.causes]
    return [*said, *(f"also      {fact}" for fact in found.also)]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"{', '.join(map(str, value[:4]))}{', ...' if len(value) > 4 else ''}"
    return f"{value:.8g}" if isinstance(value, float) else str(value)
