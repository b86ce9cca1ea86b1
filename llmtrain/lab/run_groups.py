"""Group runs that differ only in their seed, and name each group by the settings that set it apart.

On a CPU, and on a GPU with ``--bitwise``, a run that is repeated with the same seed has the same
bits. So the seed is the only noise, and the runs of a group are a sample of it.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.files import Json, JsonObject, json_text
from llmtrain.lab.differences import differences, facts_of, have_same_eval_loss, shorten_hash
from llmtrain.record.history import History, runs_in

_MAX_NAMED_SETTINGS = 5  # in the name of a group
_MAX_VALUE_LENGTH = 40  # characters of a setting in the name of a group


def find_runs(paths: Sequence[str]) -> list[History]:
    """Read the runs that the user has named: run folders, and folders that hold runs.

    Args:
        paths: the folders. A run that is found twice is read once.

    Raises:
        UserError: if a folder holds no run.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        found_folders = runs_in(Path(path))
        if not found_folders:
            raise UserError(f"{path} is not a run folder, and it contains no runs.")
        for folder in found_folders:
            folders.setdefault(folder.resolve(), folder)
    return [History.of_run(folder) for folder in folders.values()]


def group_runs(runs: Sequence[History]) -> list[tuple[str, list[History]]]:
    """Group runs by their settings, their data and their precision.

    If the same seed was run with several versions of the code, and has other losses with each, the
    code sets groups apart, too.

    Returns:
        The name of each group, the settings that set it apart, such as ``learning_rate 0.01``, and
        its runs.
    """
    by_values: dict[str, list[History]] = {}
    for run in runs:
        key = json_text(_compared_values(run), sort_keys=True)
        by_values.setdefault(key, []).append(run)

    groups: list[list[History]] = []
    for same_values in by_values.values():
        groups += _split_by_code(same_values)
    return list(zip(_names([group[0] for group in groups]), groups, strict=True))


def _compared_values(run: History) -> JsonObject:
    """Return what must be the same in all runs of a group, by name."""
    return {
        name: fact.value
        for name, fact in facts_of(run).items()
        if fact.affects != "nothing" and not fact.is_code and name != "--seed"
    }


def _split_by_code(runs: list[History]) -> list[list[History]]:
    """Split runs of the same settings by their code, if it has changed the loss of a seed."""
    by_code: dict[str, list[History]] = {}
    by_seed: dict[int | None, list[History]] = {}
    for run in runs:
        by_code.setdefault(code_of(run), []).append(run)
        by_seed.setdefault(seed_of(run), []).append(run)

    has_changed = any(_has_code_changed_loss(same_seed) for same_seed in by_seed.values())
    return [*by_code.values()] if has_changed else [runs]


def _has_code_changed_loss(runs: Sequence[History]) -> bool:
    """Return whether two runs of one seed have different code and different losses."""
    return any(
        code_of(a) != code_of(b) and not have_same_eval_loss(a, b)
        for a, b in itertools.combinations(runs, 2)
    )


def seed_of(run: History) -> int | None:
    """Return the seed of a run, or ``None`` if it has recorded none."""
    seed = run.settings.get("seed")
    return seed if isinstance(seed, int) else None


def code_of(run: History) -> str:
    """Return the hash of the code with which a run began; empty if it is unknown."""
    return str(run.starts[0].get("code_sha256", "")) if run.starts else ""


def _names(runs: Sequence[History]) -> list[str]:
    """Return a name for each group.

    Args:
        runs: a run of each group.
    """
    differing = [difference.name for difference in differences(runs)]
    names = []
    for run in runs:
        values = _compared_values(run)
        names.append(_name({name: values[name] for name in differing if name in values}))
    has_one_code = len({code_of(run) for run in runs}) == 1
    if len(set(names)) == len(names) or has_one_code:
        return names
    return [
        ", ".join(part for part in (name, f"code {shorten_hash(code_of(run))}") if part)
        for name, run in zip(names, runs, strict=True)
    ]


def _name(values: Mapping[str, Json]) -> str:
    """Return the names and the values of some settings as text."""
    parts = []
    for name, value in itertools.islice(values.items(), _MAX_NAMED_SETTINGS):
        text = shorten_hash(value)
        if len(text) > _MAX_VALUE_LENGTH:
            text = f"{text[:_MAX_VALUE_LENGTH]}..."
        parts.append(f"{name.removeprefix('--')} {text}")
    if len(values) > _MAX_NAMED_SETTINGS:
        parts.append(f"and {len(values) - _MAX_NAMED_SETTINGS} more")
    return ", ".join(parts)
