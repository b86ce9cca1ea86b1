"""The runs of a recipe with several seeds: their folders, and the command that makes them."""

import re
import shlex
from pathlib import Path

from llmtrain.record.history import History

# The paired test finds a difference of twice its deviation in nine cases of ten.
SUGGESTED_SEEDS = 5


def seed_folder(output_dir: Path, seed: int) -> Path:
    """Return the folder of the run with a seed, such as ``runs/gpt-seed-1`` for ``runs/gpt``."""
    return output_dir.with_name(f"{output_dir.name}-seed-{seed}")


def repeat_command(run: History, count: int) -> str | None:
    """Return the command that makes runs with so many seeds of the settings of a run.

    Returns:
        ``None`` if the run has not recorded its command, as in a notebook.
    """
    start = run.starts[-1] if run.starts else {}
    words = [str(word) for word in start.get("command") or []]
    if not words:
        return None

    # If the run is one of several seeds already, leave out the flags that made it one of them.
    seed = run.settings.get("seed")
    folder = str(run.settings.get("output_dir"))
    base = re.sub(rf"-seed-{seed}$", "", folder)
    if base != folder and words[-4:] == ["--seed", str(seed), "--output_dir", folder]:
        words = words[:-4]

    options = []
    if start.get("sharded") or start.get("mixed_precision") not in (None, "no"):
        options += ["--config_file", "ACCELERATE_CONFIG"]
    elif (start.get("processes") or 1) > 1:
        options += ["--processes", str(start["processes"])]
    return shlex.join(["llmtrain", "repeat", *options, str(count), *words])
