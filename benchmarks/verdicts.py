"""How often `llmtrain compare --verdict` is wrong, and how many seeds it needs to be right.

The runs are simulated: losses that share the noise of their seed, as those of real runs do, and have
noise of their own. They are judged by the functions that the command calls.

    python -m benchmarks.verdicts              # about five minutes on one core
    python -m benchmarks.verdicts --pairs 200 --loops 5
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import stats

from llmtrain.lab.commands.compare import compare_groups, judge
from llmtrain.record.history import History

# As in recipes/gpt.py with 2 layers of 32 after 200 steps, by 8 seeds: the deviation of the loss is
# 0.020, and that of a pair's difference 0.015. A learning rate of 0.03 instead of 0.02 gains 0.048,
# which is 3.3 of these.
SEED_DEVIATION = 0.0177
OWN_DEVIATION = 0.0103
CHANGES = 30
# The seeds to search with, by the effect of the two changes in deviations of a pair's difference.
SEEDS = {3: (3, 5, 8, 10, 12), 2: (8, 12, 16, 20), 1: (24, 32, 40, 50)}


def simulated_runs(name: str, losses: np.ndarray) -> list[History]:
    """Return finished runs of one setting, one for each seed, without any file."""
    runs = []
    for seed, loss in enumerate(losses.tolist()):
        values = {"seed": (seed, "data"), "change": (name, "numbers")}
        settings = {key: {"value": value, "affects": kind} for key, (value, kind) in values.items()}
        run = History(
            folder=Path(f"runs/{name}-seed-{seed}"),
            record={"settings": settings},
            status={"state": "finished", "step": 1},
            entries=[{"step": 1, "eval/loss": loss}],
            events=[],
            samples=[],
            is_in_progress=False,
        )
        runs.append(run)
    return runs


def verdict(baseline: np.ndarray, candidate: np.ndarray, level: float, looks: int = 1) -> str:
    """Return the verdict about the losses of two settings, by seed."""
    runs = [*simulated_runs("baseline", baseline), *simulated_runs("candidate", candidate)]
    return judge(compare_groups(runs, level=level, looks=looks))["verdict"]


def noise(draw: np.random.Generator, kind: str, seeds: int) -> np.ndarray:
    """Return the noise of single runs, with a deviation of 1: normal, or Student's with 3 degrees."""
    if kind == "normal":
        return draw.normal(size=seeds)
    return draw.standard_t(3, size=seeds) / np.sqrt(3)


def false_verdicts(kind: str, seeds: int, level: float, pairs: int) -> int:
    """Count the verdicts better and worse about pairs of settings that are equally good."""
    draw = np.random.default_rng(seeds)
    count = 0
    for _ in range(pairs):
        of_seeds = SEED_DEVIATION * draw.normal(size=seeds)
        baseline = of_seeds + OWN_DEVIATION * noise(draw, kind, seeds)
        candidate = of_seeds + OWN_DEVIATION * noise(draw, kind, seeds)
        count += verdict(baseline, candidate, level) != "not told apart"
    return count


def search(seeds: int, effect: float, number: int, kind: str = "normal") -> tuple[int, int]:
    """Try 30 changes one after the other, of which two at random places help.

    A change that is judged better becomes the baseline, and the later ones have one look less.

    Returns:
        How many of the two were judged better; and how many of the other changes were judged
        better or worse.
    """
    draw = np.random.default_rng([seeds, number])
    helpful = {*draw.choice(CHANGES, size=2, replace=False).tolist()}
    of_seeds = SEED_DEVIATION * draw.normal(size=seeds)
    true_loss = 2.0
    looks = CHANGES
    right = 0
    wrong = 0
    baseline = true_loss + of_seeds + OWN_DEVIATION * noise(draw, kind, seeds)
    for change in range(CHANGES):
        changed_loss = true_loss - effect * (change in helpful)
        candidate = changed_loss + of_seeds + OWN_DEVIATION * noise(draw, kind, seeds)
        result = verdict(baseline, candidate, level=0.01, looks=looks)
        if result == "better":
            baseline = candidate
            true_loss = changed_loss
            looks -= 1
        if change in helpful:
            right += result == "better"
        else:
            wrong += result != "not told apart"
    return right, wrong


def share(count: int, total: int) -> str:
    """Return a share with its 95 % interval, of Clopper and Pearson."""
    interval = stats.binomtest(count, total).proportion_ci()
    return f"{count / total:6.2%} ({interval.low:.2%} to {interval.high:.2%})"


def table(pairs: int, loops: int) -> Iterator[str]:
    yield f"false verdicts of {pairs:,} pairs of equal settings"
    for kind in ("normal", "heavy"):
        for seeds in (3, 5):
            for level in (0.01, 0.05):
                count = false_verdicts(kind, seeds, level, pairs)
                yield f"{kind:<8}{seeds} seeds, level {level:.0%}: {share(count, pairs)}"

    yield f"\n{loops} searches of {CHANGES} changes, two of which help, at 1 % with --looks {CHANGES}"
    for kind in ("normal", "heavy"):
        for ratio, seed_counts in SEEDS.items():
            effect = ratio * OWN_DEVIATION * np.sqrt(2)
            for seeds in seed_counts:
                results = [search(seeds, effect, number, kind) for number in range(loops)]
                both = sum(right == 2 for right, _ in results)
                wrong = sum(wrong for _, wrong in results)
                yield (
                    f"{kind:<8}effect {ratio} deviations, {seeds:>2} seeds: both found in {both} of "
                    f"{loops}, false verdicts {wrong}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--loops", type=int, default=20)
    arguments = parser.parse_args()
    for line in table(arguments.pairs, arguments.loops):
        print(line, flush=True)


if __name__ == "__main__":
    main()
