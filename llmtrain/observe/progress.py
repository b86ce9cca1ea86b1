"""The progress bar, on the main process alone."""

import contextlib
import sys

from tqdm import tqdm

_TOLD = {  # of an evaluation
    "eval/loss": "loss {:.4f}",
    "eval/perplexity": "perplexity {:,.1f}",
    "eval/bits_per_byte": "bits per byte {:.3f}",
    "eval/rewards/accuracies": "chosen above rejected {:.1%}",
    "eval/rewards/margins": "margin {:.3f}",
}


class Progress:
    """Loss, tokens/s and time left, and a line for each evaluation above the bar."""

    def __init__(self, shown: bool, step: int, max_steps: int) -> None:
        self.bar = tqdm(
            total=max_steps,
            initial=step,
            disable=not shown,
            unit="step",
            desc="training",
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 10,  # seconds; a log file wants few lines
        )

    def logged(self, metrics: dict[str, float]) -> None:
        """Show the loss and the tokens/s of a reading."""
        speed = metrics["train/tokens_per_second"]
        self.bar.set_postfix_str(
            f"loss {metrics['train/loss']:.4f}, {speed:,.0f} tokens/s", refresh=False
        )

    def evaluated(self, step: int, results: dict[str, float]) -> None:
        """Write a line with the results of an evaluation."""
        if self.bar.disable:
            return
        told = "  ".join(
            text.format(results[name]) for name, text in _TOLD.items() if name in results
        )
        with contextlib.suppress(BrokenPipeError):
            self.bar.write(f"step {step:>6}  held out: {told}", file=sys.stdout)
            sys.stdout.flush()
