"""Say where two runs diverge first, and what could be the cause.

A step is a chain: weights and rows, the tokens in the rows, the labels, the loss, the gradient, the weights after the
step. The first link of the chain that differs points at the settings, or the code, that act there. Everything after it
follows from it.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.config import flags_of
from llmtrain.record.history import History
from llmtrain.report.comparison import (
    NO_TOLERANCE,
    QUANTITIES,
    Tolerance,
    differences,
    tolerance_of,
)
from llmtrain.types import Facts, Json


class Link(NamedTuple):
    """What a difference in one quantity says about its cause, if everything before it in the chain is the same."""

    acting: tuple[str, ...]  # the groups of settings that can change this quantity
    otherwise: str  # the cause to name if none of those settings differs
    given: str = ""  # what is known to be the same
    needs_same_data: bool = False  # on other data this quantity differs with nothing wrong


class Divergence(NamedTuple):
    """The first step at which two runs differ in one quantity."""

    link: str  # a key of CHAIN
    step: int  # 0: before the first step
    one: Json
    other: Json


class Comparison(NamedTuple):
    """Two runs, compared."""

    first: (
        Divergence | None
    )  # the earliest, and of those the first along the chain; the others follow from it
    all: list[Divergence]  # in the order of the chain
    causes: list[str]
    also: list[str]  # other settings and versions that differ
    rounding: float  # the largest relative difference of a training loss
    readings: int  # log entries that both runs have


_LABELS = "labels are masked or shifted differently"
_MODEL = f"the model or its loss computes differently: attention, dropout, precision, or {_LABELS}"
_TOKENS = (
    "text is tokenized differently: another file, or a token at the beginning or the end of a text that is added "
    "twice or left out; or rows are ordered differently (--log_rows tells)"
)
_GRADIENT = (
    "the gradient is accumulated differently: a mean of micro-batches' means instead of one mean over all tokens, "
    "a missing sync, or a factor of the number of processes"
)
_OPTIMIZER = "the optimizer or the clipping of the gradient computes differently"

# The quantities of report/comparison.py, in the order in which a difference in one causes one in the next.
CHAIN = {
    "initial_weights": Link(
        acting=("model", "seed"), otherwise="weights are initialised or loaded differently"
    ),
    "rows": Link(acting=("data", "seed"), otherwise="rows are ordered or dealt out differently"),
    "input_tokens": Link(acting=("data", "seed"), otherwise=_TOKENS),
    "labels": Link(acting=("data",), otherwise=_LABELS, given="of the same tokens"),
    "target_tokens": Link(acting=("data",), otherwise=f"{_LABELS}, or counted differently"),
    "learning_rate": Link(acting=("update",), otherwise="the schedule is computed differently"),
    "initial_loss": Link(
        acting=("model", "pass"),
        otherwise=_MODEL,
        given="with the same weights",
        needs_same_data=True,
    ),
    "loss": Link(acting=("model", "pass"), otherwise=_MODEL),
    "grad_norm": Link(
        acting=("gradient", "pass", "model"), otherwise=_GRADIENT, given="with the same loss"
    ),
    "weight_norm": Link(
        acting=("update", "gradient"), otherwise=_OPTIMIZER, given="after the same gradient"
    ),
    "eval_loss": Link(
        acting=("data", "pass"),
        otherwise="the evaluation computes differently",
        needs_same_data=True,
    ),
    "eval_bits_per_byte": Link(
        acting=("data", "pass"),
        otherwise="the bytes of the eval text are counted differently",
        needs_same_data=True,
    ),
}
assert [*CHAIN] == [*QUANTITIES]

# Rounding errors grow from one log entry to the next, but by no more than this factor.
_LARGEST_GROWTH = 30

# Two runs on a CPU that agree in all of these must agree to the last bit.
_LAYOUT_FACTS = ("processes", "sharded", "device", "threads", "versions", "host")
_LAYOUT_SETTINGS = (
    "per_device_train_batch_size",
    "pipeline_stages",
    "torch_compile",
    "gradient_checkpointing",
    "bitwise",
    "ddp_bucket_cap_mb",
)


def compare(one: History, other: History) -> Comparison:
    """Compare two runs. Either may have been interrupted, and they may have had different parallel layouts."""
    tolerance = _tolerance_between(one, other)
    has_same_data = one.record.get("data_sha256") == other.record.get("data_sha256")
    candidates = [
        _divergence(key, one, other, tolerance)
        for key, link in CHAIN.items()
        if has_same_data or not link.needs_same_data
    ]
    divergences = [candidate for candidate in candidates if candidate is not None]
    first = min(divergences, key=lambda divergence: divergence.step, default=None)

    losses = differences(QUANTITIES["loss"], one, other)
    causes, also = _causes(first, differing_facts(one, other), [loss.step for loss in losses])
    return Comparison(
        first=first,
        all=divergences,
        causes=causes,
        also=also,
        rounding=max((loss.relative for loss in losses), default=0.0),
        readings=len(losses),
    )


def _tolerance_between(one: History, other: History) -> Tolerance:
    """Return the tolerance for two runs: none on the same layout, else that of the lower precision."""
    if _has_same_layout(one, other):
        return NO_TOLERANCE

    tolerances = []
    for run in (one, other):
        start = run.starts[0] if run.starts else {"mixed_precision": "no"}
        tolerances.append(tolerance_of(str(start.get("mixed_precision"))))
    return max(tolerances, key=lambda tolerance: tolerance.loss)


def _divergence(key: str, one: History, other: History, tolerance: Tolerance) -> Divergence | None:
    """Return the first step at which a quantity is further apart than rounding explains.

    A difference above the tolerance is still rounding if it has grown from the log entry before as slowly as rounding
    errors grow.
    """
    quantity = QUANTITIES[key]
    limit = quantity.limit(tolerance)
    before = 0.0
    for difference in differences(quantity, one, other):
        if difference.relative <= limit:
            before = difference.relative
            continue

        has_grown_slowly = before > 0 and difference.relative < _LARGEST_GROWTH * before
        if has_grown_slowly:
            return None
        return Divergence(
            link=key, step=difference.step, one=difference.first, other=difference.second
        )
    return None


def _causes(
    first: Divergence | None, facts: list[tuple[str, str]], steps: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Split the facts that differ into possible causes of the first divergence, and the others.

    Args:
        first: The divergence to explain.
        facts: What :func:`differing_facts` returns.
        steps: The steps at which both runs have logged a loss.
    """
    if first is None:
        return [], [text for _, text in facts]

    acting = {"any", *CHAIN[first.link].acting}
    if _may_begin_earlier(first, steps):
        acting |= {"model", "pass", "gradient", "update"}
    causes = [text for group, text in facts if group in acting]
    also = [text for group, text in facts if group not in acting]
    if causes:
        return causes, also

    code = [text for group, text in facts if group == "code"]
    return [CHAIN[first.link].otherwise, *code], [text for text in also if text not in code]


def _may_begin_earlier(first: Divergence, steps: Sequence[int]) -> bool:
    """Return whether a step before the first divergence may already have differed without being logged.

    A loss shows what the step before it did to the weights, so only the very first loss is certain.
    """
    if first.link not in ("loss", "grad_norm", "weight_norm"):
        return False

    last_equal_step = max((step for step in steps if step < first.step), default=0)
    has_unlogged_steps = first.step - last_equal_step > 1
    return has_unlogged_steps or (first.link == "loss" and last_equal_step > 0)


def _has_same_layout(one: History, other: History) -> bool:
    """Return whether two runs were computed in the same way, so that on a CPU they have the same bits."""
    starts = [*one.starts, *other.starts]
    layouts = [[start.get(key) for key in _LAYOUT_FACTS] for start in starts]
    has_same_starts = all(layout == layouts[0] for layout in layouts)
    has_same_settings = all(
        one.settings.get(key) == other.settings.get(key) for key in _LAYOUT_SETTINGS
    )
    on_cpu = all(run.starts and run.starts[0].get("device") == "cpu" for run in (one, other))
    return on_cpu and has_same_settings and has_same_starts


# Facts of a run's record or its first start: the group that says where each acts, and its name in the output.
_FACTS = {
    "data_sha256": ("data", "content of the data"),
    "tokenizer_sha256": ("data", "tokenizer"),
    "train_rows": ("data", "rows to train on"),
    "vocabulary": ("model", "tokens of the vocabulary"),
    "mixed_precision": ("pass", "precision"),
    "git_sha": ("code", "commit"),
    "code_sha256": ("code", "code of the package, the recipe and the modules beside it"),
    "versions": ("code", "versions"),
    "processes": ("layout", "processes"),
    "sharded": ("layout", "sharded"),
    "threads": ("layout", "threads"),
    "device": ("layout", "device"),
}


def differing_facts(one: History, other: History) -> list[tuple[str, str]]:
    """Return how the records of two runs differ: for each fact the group that says where it acts, and a text."""
    facts = _differing_settings(one, other)
    extra_tokens = _extra_tokens_per_document(one.record, other.record)
    if extra_tokens is not None:
        facts.append(("data", extra_tokens))

    one_record = _flat_record(one)
    other_record = _flat_record(other)
    for key, (group, name) in _FACTS.items():
        a = one_record.get(key)
        b = other_record.get(key)
        if a is not None and b is not None and a != b:
            facts.append((group, f"{name}: {_short(a)} and {_short(b)}"))
    return [*dict.fromkeys(facts)]


def _differing_settings(one: History, other: History) -> list[tuple[str, str]]:
    groups = groups_of_settings()
    facts = []
    for name in dict.fromkeys([*one.settings, *other.settings]):
        a = one.settings.get(name)
        b = other.settings.get(name)
        if a == b:
            continue
        text = f"--{name} {_short(a)} and {_short(b)}"
        facts += [(group, text) for group in groups.get(name, ["any"]) if group != "nowhere"]
    return facts


def _flat_record(run: History) -> Facts:
    """Return the run's record and its first start as one object."""
    start = run.starts[0] if run.starts else {}
    return {**start, **run.record, "processes": start.get("processes")}


def groups_of_settings() -> dict[str, list[str]]:
    """Return for each flag of this package the groups that say where it acts."""
    from llmtrain.training.settings import CONFIGS

    groups = {}
    for config in CONFIGS:
        for name, field in flags_of(config).items():
            groups[name] = (field.metadata["acts"] or config.acts).split()
    return groups


class _TokenCounts(NamedTuple):
    train_tokens: int
    documents: int
    eval_documents: int


def _token_counts(record: Facts) -> _TokenCounts | None:
    counts = [count for key in _TokenCounts._fields if isinstance(count := record.get(key), int)]
    if len(counts) < len(_TokenCounts._fields):
        return None
    return _TokenCounts(*counts)


def _extra_tokens_per_document(one: Facts, other: Facts) -> str | None:
    """Say how many tokens more each document has in one run, if the same documents have become other tokens.

    Returns ``None`` if the counts do not show that.
    """
    one_counts = _token_counts(one)
    other_counts = _token_counts(other)
    if one_counts is None or other_counts is None:
        return None
    if one_counts[1:] != other_counts[1:]:
        return None

    fewer, more = sorted((one_counts.train_tokens, other_counts.train_tokens))
    documents = one_counts.documents - one_counts.eval_documents
    extra, rest = divmod(more - fewer, max(documents, 1))
    # One token may be left over: the first text may begin with one, too.
    if extra == 0 or rest > 1:
        return None
    return (
        f"the same {documents} documents have {fewer:,} and {more:,} tokens, {extra} more for each: "
        "a token at the beginning or the end of a text is added twice, or left out"
    )


def _short(value: Json) -> str:
    """Return the beginning of a hash, with the mark of a dirty commit, and all of another value."""
    text = str(value)
    match = re.fullmatch(r"([0-9a-f]{40}|[0-9a-f]{64})(-dirty|-unknown)?", text)
    if match is None:
        return text
    return f"{text[:12]}...{match[2] or ''}"


def lines(names: tuple[str, str], comparison: Comparison) -> list[str]:
    """Return the comparison as text. ``names`` are those of the two runs."""
    also = [f"also      {fact}" for fact in comparison.also]
    if comparison.first is not None:
        causes = [f"cause     {cause}" for cause in comparison.causes]
        return [*_divergence_lines(names, comparison.first, comparison.all), *causes, *also]

    if comparison.readings == 0:
        return ["unknown   the two runs have logged no step in common: nothing can be compared"]

    agreement = "to the last bit"
    if comparison.rounding > 0:
        agreement = f"within {comparison.rounding:.0e} of each other, as rounding explains"
    quantities = f"rows, losses, norms and weights of {comparison.readings} log entries"
    return [f"same      {quantities}, {agreement}", *also]


def _divergence_lines(
    names: tuple[str, str], first: Divergence, divergences: Sequence[Divergence]
) -> list[str]:
    """Return a line about the first divergence, and one about those that follow from it."""
    when = f"at step {first.step}" if first.step > 0 else "before the first step"
    what = f"{QUANTITIES[first.link].name} {CHAIN[first.link].given}".rstrip()
    values = f"{_formatted(first.one)} in {names[0]}, {_formatted(first.other)} in {names[1]}"
    text = [f"differs   {when}: {what}: {values}"]

    later = sorted(
        (divergence for divergence in divergences if divergence != first),
        key=lambda divergence: divergence.step,
    )
    if later:
        named = (f"{QUANTITIES[each.link].name} at step {each.step}" for each in later)
        text.append(f"then      {', '.join(named)}")
    return text


def _formatted(value: Json) -> str:
    if isinstance(value, list):
        more = ", ..." if len(value) > 4 else ""
        return ", ".join(str(item) for item in value[:4]) + more
    return f"{value:.8g}" if isinstance(value, float) else str(value)
