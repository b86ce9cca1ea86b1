"""Run docs/migrate/trl_own.py, and resume it from step 12 in several ways. Its results go to FOLDER/trl.json.

Usage: trl_runs.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import trl_own  # of docs/migrate, which is on the path
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """Keeps the states that the callbacks have when training begins."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.states: list[dict[str, Any]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        callbacks = self.trainer.callback_handler.callbacks
        self.states = [each.state() for each in callbacks if isinstance(each, trl_own.Spikes)]


def run(folder: Path, *flags: str, limits: tuple[int, ...] = (3,)) -> dict[str, Any]:
    """Train in a folder with a callback for each limit, and return what is compared."""
    watch = Watch()
    callbacks = [*(trl_own.Spikes(limit) for limit in limits), watch]
    watch.trainer = trl_own.make_trainer(
        ["--output_dir", str(folder), "--disable_tqdm", "true", *flags], callbacks
    )
    watch.trainer.train(resume_from_checkpoint=watch.trainer.args.resume_from_checkpoint)
    state = watch.trainer.state
    return {
        "log": state.log_history,
        "begin": watch.states,
        "end": state.stateful_callbacks["Spikes"],
    }


def main(folder: Path) -> None:
    straight = folder / "straight"
    resume = ["--resume_from_checkpoint", str(straight / "checkpoint-12")]
    changed = ["--embedding_rate", "0.05", "--z_loss", "0.1"]
    restore = "--restore_callback_states_from_checkpoint"

    results = {
        "straight": run(straight),
        "resumed": run(folder / "resumed", *resume, limits=(7,)),
        "changed": run(folder / "changed", *resume, *changed, restore, "false", limits=(7,)),
    }
    two = folder / "two"
    run(two, "--max_steps", "6", limits=(3, 4))
    last = ["--max_steps", "7", "--resume_from_checkpoint", str(two / "checkpoint-6")]
    results["two"] = run(folder / "two-resumed", *last, limits=(3, 4))
    (folder / "trl.json").write_text(json.dumps(results))


main(Path(sys.argv[1]))
