"""The progress bar, on the main process alone."""

import contextlib
import sys

from tqdm import tqdm


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
            mininterval=0.1 if sys.stderr.isatty() else 10,  # a log file wants few lines
        )

    def advance(self) -> None:
        self.bar.update()

    def logged(self, metrics: dict[str, float]) -> None:
        speed = metrics["train/tokens_per_second"]
        self.bar.set_postfix_str(f"loss {metrics['train/loss']:.4f}, {speed:,.0f} tokens/s", refresh=False)

    def evaluated(self, step: int, results: dict[str, float]) -> None:
        if self.bar.disable:
            return
        with contextlib.suppress(BrokenPipeError):
            self.bar.write(
                f"step {step:>6}  held out: loss {results['eval/loss']:.4f}  "
                f"perplexity {results['eval/perplexity']:,.1f}  bits per byte {results['eval/bits_per_byte']:.3f}",
                file=sys.stdout,
            )
            sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()
