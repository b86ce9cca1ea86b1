"""Made-up run folders of one setting with several seeds, whose true loss and noise are known."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.recorded_settings import recorded

BEGAN = 1_767_225_600  # 2026-01-01, in seconds since 1970
STEPS = (0, 10, 20, 30, 40)
SEED_NOISE = 0.03  # deviation that all settings share for the same seed
OWN_NOISE = 0.01  # deviation of one run


def write_run(
    folder: Path,
    seed: int | None,
    losses: dict[int, float | None],
    *,
    state: str = "finished",
    code: str = "c0de",
    data: str = "da7a",
    **settings: Any,
) -> Path:
    """Write a run that took a second for each step, with eval losses by step."""
    folder.mkdir(parents=True)
    values = {"output_dir": str(folder), "seed": seed, **settings}
    if seed is None:
        del values["seed"]
    command = ["recipes/gpt.py", "--seed", str(seed), "--output_dir", str(folder)]
    start = {
        "time": "2026-01-01T00:00:00+0000",
        "step": 0,
        "command": command,
        "processes": 1,
        "mixed_precision": "no",
        "code_sha256": code,
    }
    record = {
        "format_version": 1,
        "settings": recorded(values),
        "data_sha256": data,
        "starts": [start],
    }
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "status.json").write_text(
        json.dumps({"state": state, "step": max(losses, default=0)})
    )
    entries = []
    for step, loss in losses.items():
        entries.append(
            {"step": step, "tokens": 100 * step, "train/loss": loss, "time": BEGAN + step}
        )
        entries.append(
            {"step": step, "tokens": 100 * step, "eval/loss": loss, "time": BEGAN + step}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def write_setting(
    folder: Path, seeds: Iterable[int], mean: float, noise_seed: int = 0, **settings: Any
) -> list[Path]:
    """Write a run for each seed, in FOLDER-seed-0 and so on, whose final losses have this mean."""
    own_noise = random.Random(f"{folder.name} {noise_seed}")
    paths = []
    for seed in seeds:
        shared_noise = random.Random(1000 * noise_seed + seed).gauss(0, SEED_NOISE)
        final = mean + shared_noise + own_noise.gauss(0, OWN_NOISE)
        losses = {step: final + 3 * 0.8**step - 3 * 0.8 ** STEPS[-1] for step in STEPS}
        path = folder.with_name(f"{folder.name}-seed-{seed}")
        paths.append(write_run(path, seed, losses, **settings))
    return paths
