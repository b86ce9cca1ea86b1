"""Settings of runs that train a small GPT for a few steps, and a callback that stops them."""

from typing import Any

import llmtrain as lt
from recipes import gpt

_MODEL = lt.GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, architecture="gpt2")

THREE_STEPS = gpt.Settings(
    model=_MODEL,
    data=lt.DataConfig(tokenizer="byte", eval_fraction=0, global_batch_size=2),
    optim=lt.OptimConfig(optim="adamw", max_steps=3),
    run=lt.RunConfig(report_to=["none"]),
)

# It logs each step. Every four steps, it evaluates and saves a checkpoint.
TWELVE_STEPS = gpt.Settings(
    model=_MODEL,
    data=lt.DataConfig(tokenizer="byte", eval_fraction=0.02, global_batch_size=2),
    optim=lt.OptimConfig(optim="adamw", max_steps=12),
    eval=lt.EvalConfig(eval_steps=4),
    log=lt.LogConfig(logging_steps=1),
    run=lt.RunConfig(report_to=["none"], save_steps=4),
)


class StopAfter(lt.Callback):
    """Stops a run after a step. The run without it is the same run."""

    settings = None

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step

    def setup(self, training: Any) -> None:
        self._training = training

    def wants_to_stop(self) -> bool:
        return self._training.step + 1 == self.last_step
