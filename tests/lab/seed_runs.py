"""Writes run folders of one setting with several seeds, whose true loss and noise are known."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.recorded_settings import recorded

START_TIME = 1_767_225_600  # 2026-01-01, in seconds since 1970
STEPS = (0, 10, 20, 30, 40)
SEED_NOISE = 0.03  # standard deviation of the noise that all settings share for the same seed
OWN_NOISE = 0.01  # standard deviation of the noise of a single run


def write_run(
    folder: Path,
    seed: int | None,
    losses: dict[int, float | None],
    *,
    state: str = "finished",
    code: str = "c0de",
    data: str | None = "da7a",
    record: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write a run that took a second for each step.

    Args:
        folder: the run folder.
        seed: the seed; ``None`` for a run without one.
        losses: the training loss and eval loss, by step.
        state: the state in status.json.
        code: the hash of its code.
        data: the hash of its data; ``None`` for a run that has not recorded it.
        record: further keys of run.json.
        settings: further settings.
    """
    folder.mkdir(parents=True)
    values = {"output_dir": str(folder), **settings}
    if seed is not None:
        values["seed"] = seed

    command = ["recipes/gpt.py", "--seed", str(seed), "--output_dir", str(folder)]
    start = {
        "time": "2026-01-01T00:00:00+0000",
        "step": 0,
        "command": command,
        "processes": 1,
        "mixed_precision": "no",
        "code_sha256": code,
    }
    content = {
        "format_version": 2,
        "settings": recorded(values),
        "starts": [start],
        **({} if data is None else {"data_sha256": data}),
        **(record or {}),
    }
    (folder / "run.json").write_text(json.dumps(content))
    status = {"state": state, "step": max(losses, default=0)}
    (folder / "status.json").write_text(json.dumps(status))

    entries = []
    for step, loss in losses.items():
        counters = {"step": step, "tokens": 100 * step, "time": START_TIME + step}
        entries.append(counters | {"train/loss": loss})
        entries.append(counters | {"eval/loss": loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def write_setting(
    folder: Path, seeds: Iterable[int], mean: float, noise_seed: int = 0, **settings: Any
) -> list[Path]:
    """Write a run for each seed, and return their folders.

    Args:
        folder: the folder of seed 0 is FOLDER-seed-0, and so on.
        seeds: the seeds.
        mean: the true mean of the final losses.
        noise_seed: chooses the noise.
        settings: the settings of all runs.
    """
    own_noise = random.Random(f"{folder.name} {noise_seed}")
    paths = []
    for seed in seeds:
        shared_noise = random.Random(1000 * noise_seed + seed).gauss(0, SEED_NOISE)
        final = mean + shared_noise + own_noise.gauss(0, OWN_NOISE)
        losses = {step: final + 3 * 0.8**step - 3 * 0.8 ** STEPS[-1] for step in STEPS}
        path = folder.with_name(f"{folder.name}-seed-{seed}")
        paths.append(write_run(path, seed, losses, **settings))
    return paths
