"""The progress bar, which only rank 0 shows."""

import contextlib
import sys

from tqdm import tqdm

# How the line of an evaluation shows each metric. Custom metrics follow, by their own names.
_EVAL_FORMATS = {
    "eval/loss": "loss {:.4f}",
    "eval/perplexity": "perplexity {:,.1f}",
    "eval/bits_per_byte": "bits per byte {:.3f}",
    "eval/rewards/accuracies": "chosen above rejected {:.1%}",
    "eval/rewards/margins": "margin {:.3f}",
    "eval/kl": "KL {:.3f}",
}
# Details that would make the line too long.
_NOT_SHOWN = ("eval/loss/", "eval/rewards/", "eval/logps/")

# Seconds between two refreshes of the bar. A log file should get few lines.
_REFRESH_SECONDS_TERMINAL = 0.1
_REFRESH_SECONDS_FILE = 10


class Progress:
    """A bar with the loss, tokens/s and time left, and a line above it for each evaluation.

    Args:
        shown: whether this process shows anything.
        step: steps made before this start.
        max_steps: steps of the run.
    """

    def __init__(self, shown: bool, step: int, max_steps: int) -> None:
        on_terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=max_steps,
            initial=step,
            disable=not shown,
            unit="step",
            desc="training",
            dynamic_ncols=True,
            mininterval=_REFRESH_SECONDS_TERMINAL if on_terminal else _REFRESH_SECONDS_FILE,
        )

    def show_entry(self, metrics: dict[str, float]) -> None:
        """Show the loss and the tokens/s of a log entry."""
        loss = metrics["train/loss"]
        speed = metrics["train/tokens_per_second"]
        self.bar.set_postfix_str(f"loss {loss:.4f}, {speed:,.0f} tokens/s", refresh=False)

    def write_evaluation(self, step: int, results: dict[str, float]) -> None:
        """Write a line with the results of an evaluation."""
        if self.bar.disable:
            return
        metrics = [
            text.format(results[name]) for name, text in _EVAL_FORMATS.items() if name in results
        ]
        for name, value in results.items():
            if name not in _EVAL_FORMATS and not name.startswith(_NOT_SHOWN):
                metrics.append(f"{name.removeprefix('eval/')} {value:.4g}")
        # A reader that has gone (`| head`) does not end the run.
        with contextlib.suppress(BrokenPipeError):
            self.bar.write(f"step {step:>6}  eval: {'  '.join(metrics)}", file=sys.stdout)
            sys.stdout.flush()
