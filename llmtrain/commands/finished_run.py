"""A run that ``verify`` has started, and how another one differs from it."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.files import digest
from llmtrain.record.history import History, read_lines
from llmtrain.record.tolerances import (
    QUANTITIES,
    Deviation,
    Tolerance,
    deviation,
    tolerance_of,
    weight_difference,
)

if TYPE_CHECKING:
    import torch

# The weights themselves are compared. A sharded run computes their norm in float32 even if it
# trains in float64.
_NOT_COMPARED = ("initial_weights", "weight_norm")


class FinishedRun:
    """A run that has ended.

    Attributes:
        name: what messages call it.
        history: everything that it has logged.
        record: its ``run.json``.
        precision: the precision in which it computed.
        target_tokens: the target tokens up to each step, as its rows have them.
        weights: the weights of its last checkpoint, in float64. Those of the finished model may be
            rounded to another dtype.
        state_hashes: a hash of each file in its last checkpoint that has weights or a state.
    """

    def __init__(self, name: str, folder: Path, *, is_float64: bool) -> None:
        self.name = name
        self.history = History.of_run(folder)
        self.record = self.history.record
        self.precision = "float64" if is_float64 else self.record["starts"][0]["mixed_precision"]
        self.target_tokens = _target_tokens(folder)
        self.weights = _read_weights(folder)
        self.state_hashes = _state_hashes(folder)

    @property
    def digest(self) -> str:
        """A hash of the weights and of all states in the last checkpoint."""
        return digest(self.state_hashes)

    def has(self, setting: str) -> bool:
        """Return whether a setting was switched on. Not every recipe has every setting."""
        return bool(self.history.settings.get(setting))

    def token_count_faults(self) -> list[str]:
        """Return the faults of the logged target tokens: one if they are not those of the rows.

        A wrong count is the same on every layout, so comparing layouts cannot show it.
        """
        logged_tokens = QUANTITIES["target_tokens"].read(self.history)
        for step, logged in logged_tokens.items():
            in_rows = self.target_tokens.get(step, logged)
            if logged != in_rows:
                return [
                    f"{self.name}: {logged} target tokens were counted up to step {step}, "
                    f"but its rows have {in_rows}"
                ]
        return []

    def compare(self, other: "FinishedRun", same_bits: bool) -> "ComparedRun":
        """Compare another run with this one.

        Args:
            other: the other run. Its precision determines what rounding can explain.
            same_bits: whether weights, optimizer, the state of parts and eval losses must be the
                same to the last bit.
        """
        deviations = {
            key: deviation(quantity, self.history, other.history)
            for key, quantity in QUANTITIES.items()
            if key not in _NOT_COMPARED
        }
        weights = weight_difference(self.weights, other.weights)

        tolerance = tolerance_of(other.precision, other.history.settings)
        faults = _faults(deviations, weights, tolerance)
        syncs = other.most_gradient_syncs()
        if syncs > 1 and not other.has("sync_each_batch"):
            faults.append(f"gradients are reduced {syncs} times in a step; once is enough")
        if same_bits:
            faults += _differing_bits(self.state_hashes, other.state_hashes)
        if same_bits and deviations["eval_loss"].first_step is not None:
            faults.append("eval losses differ in some bits")

        return ComparedRun(
            layout=other.name,
            same_rows=deviations["rows"].first_step is None,
            loss=_largest_loss_deviation(deviations),
            grad_norm=deviations["grad_norm"].largest,
            weights=weights,
            digest=other.digest,
            wrong=[f"{other.name}: {fault}" for fault in faults],
        )

    def most_gradient_syncs(self) -> int:
        """Return how often gradients were reduced in a step, at most."""
        entries = self.history.entries
        return max((entry.get("train/gradient_syncs") or 0 for entry in entries), default=0)


class ComparedRun(NamedTuple):
    """A run, and how it differs from the reference.

    Attributes:
        layout: the name of the run.
        same_rows: whether every step had the same rows.
        loss: the largest relative difference of a loss, at any step.
        grad_norm: the largest relative difference of the gradient norm, at any step.
        weights: the relative difference of the final weights.
        digest: the hash of the run's last checkpoint.
        wrong: the faults, each with the name of the run.
    """

    layout: str
    same_rows: bool
    loss: float
    grad_norm: float
    weights: float
    digest: str
    wrong: list[str]


def table(reference: FinishedRun, comparisons: list[ComparedRun]) -> list[str]:
    """Return the lines of a table with the reference and the runs compared with it."""
    head = f"{'layout':<18}{'rows':>8}{'loss':>11}{'grad norm':>11}{'weights':>11}{'bits':>8}"
    lines = [head, f"{reference.name:<18}{reference.digest[:7]:>49}"]
    for run in comparisons:
        rows = "same" if run.same_rows else "differ"
        numbers = f"{run.loss:>11.1e}{run.grad_norm:>11.1e}{run.weights:>11.1e}"
        lines.append(f"{run.layout:<18}{rows:>8}{numbers}{run.digest[:7]:>8}")
    return lines


def _target_tokens(folder: Path) -> dict[int, int]:
    """Return the target tokens up to each step, counted in the rows of ``rows.jsonl``."""
    ledger = {entry["step"]: sum(entry["targets"]) for entry in read_lines(folder / "rows.jsonl")}
    return dict(zip(ledger, itertools.accumulate(ledger.values()), strict=True))


def _read_weights(folder: Path) -> dict[str, "torch.Tensor"]:
    """Return the weights of a run's last checkpoint in float64."""
    import torch

    from llmtrain.record.checkpoint import checkpoints
    from llmtrain.record.tensor_files import read_tensors

    model = checkpoints(folder / "checkpoints")[-1] / "model"
    return {name: tensor.to(torch.float64) for name, tensor in read_tensors(model)}


def _state_hashes(folder: Path) -> dict[str, str]:
    """Return a hash of each file in a run's last checkpoint that has weights or a state."""
    from llmtrain.record.checkpoint import checkpoints, state_hashes

    return state_hashes(checkpoints(folder / "checkpoints")[-1])


def _differing_bits(hashes: dict[str, str], other_hashes: dict[str, str]) -> list[str]:
    """Return a fault for the weights and the optimizer, and one for each part, that differ."""
    faults = set()
    for file in hashes.keys() | other_hashes.keys():
        if hashes.get(file) == other_hashes.get(file):
            continue
        folder, name, *_ = Path(file).parts
        if folder == "parts":
            faults.add(f"the state of {name} differs in some bits")
        else:
            faults.add("weights or optimizer differ in some bits")
    return sorted(faults, reverse=True)


def _faults(deviations: dict[str, Deviation], weights: float, tolerance: Tolerance) -> list[str]:
    """Return the differences that rounding cannot explain.

    Args:
        deviations: how far the logged quantities are apart.
        weights: the relative difference of the final weights.
        tolerance: what rounding explains.
    """
    faults = []
    for key, deviated in deviations.items():
        name = QUANTITIES[key].name
        limit = QUANTITIES[key].limit(tolerance)
        if limit == 0 and deviated.first_step is not None:
            faults.append(f"different {name} from step {deviated.first_step} on")
        elif deviated.largest > limit:
            faults.append(_above(f"{name} differs", deviated.largest, limit))

    if not weights <= tolerance.weights:  # NaN is a fault, too
        faults.append(_above("weights differ", weights, tolerance.weights))
    return faults


def _largest_loss_deviation(deviations: dict[str, Deviation]) -> float:
    """Return the largest relative difference of a loss: train, eval or bits per byte."""
    return max(
        deviated.largest
        for key, deviated in deviations.items()
        if QUANTITIES[key].rounds_like == "loss"
    )


def _above(text: str, largest: float, limit: float) -> str:
    return f"{text} by {largest:.1e}, more than {limit:.0e}"
