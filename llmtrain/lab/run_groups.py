"""Group runs that differ only in their seed, and name each group by the settings that set it apart.

On a CPU, and on a GPU with ``--bitwise``, a run that is repeated with the same seed has the same
bits. So the seed is the only noise, and the runs of a group are a sample of it.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.files import Json, json_text
from llmtrain.lab.differences import differences, have_same_eval_loss, shorten_hash
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
    setting_apart = [
        difference
        for difference in differences(runs)
        if difference.affects != "nothing"
        and not difference.is_code
        and difference.name != "--seed"
    ]
    by_values: dict[str, list[History]] = {}
    names: dict[str, str] = {}
    for index, run in enumerate(runs):
        values = {difference.name: difference.values[index] for difference in setting_apart}
        key = json_text(values)
        by_values.setdefault(key, []).append(run)
        recorded = {name: value for name, value in values.items() if value is not None}
        names[key] = _name(recorded)

    groups = []
    for key, same_values in by_values.items():
        by_code = _split_by_code(same_values)
        for code, same_code in by_code.items():
            parts = [names[key], f"code {shorten_hash(code)}" if len(by_code) > 1 else ""]
            groups.append((", ".join(filter(None, parts)), same_code))
    return groups


def _split_by_code(runs: Sequence[History]) -> dict[str, list[History]]:
    """Return runs of the same settings by their code, if it has changed the loss of a seed."""
    by_code: dict[str, list[History]] = {}
    for run in runs:
        by_code.setdefault(code_of(run), []).append(run)

    for a, b in itertools.combinations(runs, 2):
        is_same_seed = a.settings.get("seed") == b.settings.get("seed")
        if is_same_seed and code_of(a) != code_of(b) and not have_same_eval_loss(a, b):
            return by_code
    return {"": [*runs]}


def code_of(run: History) -> str:
    """Return the hash of the code with which a run began; empty if it is unknown."""
    return str(run.starts[0].get("code_sha256", "")) if run.starts else ""


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
