"""Train a GPT as recipes/gpt.py does, with the fault that the variable FAULT names.

Faults of one rank are those of rank 1, or of the only process.
"""

import functools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import llmtrain as lt
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.callback import StepResult
from llmtrain.interfaces.objective import LossSums
from recipes.gpt import DEFAULTS, build, tokenized

FAULT = os.environ["FAULT"]
IS_FAULTY_RANK = os.environ.get("RANK", "1") == "1"

# With a save and an evaluation after every third step: a step after a save, one before an
# evaluation and a save, and one after a step that was skipped.
NAN_STEPS = {"NaN": (4, 6, 7), "NaN on one rank": (3, 5)}


class FaultyLoss(lt.Objective):
    """The next-token loss, or a fault.

    Attributes:
        step: the step that is being made. It is 0 during evaluations.
    """

    settings = None
    step = 0

    def loss(self, model: nn.Module, batch: Batch, extra: Batch) -> LossSums:
        sums = super().loss(model, batch, extra)
        if FAULT == "slow steps" and self.step > 2:
            time.sleep(60)
        if FAULT == "out of memory" and self.step > 0 and IS_FAULTY_RANK:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.step in NAN_STEPS.get(FAULT, ()) and (FAULT == "NaN" or IS_FAULTY_RANK):
            return sums._replace(loss=sums.loss * torch.nan)
        return sums


class Fault(lt.Callback):
    settings = None

    def __init__(self, loss: FaultyLoss) -> None:
        self.loss = loss

    def setup(self, training: Any) -> None:
        self.training = training

    def on_step_begin(self, batch: object) -> None:
        self.loss.step = self.training.step + 1
        if self.training.step == 5 and IS_FAULTY_RANK:
            self.fail()

    def fail(self) -> None:
        if FAULT == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "stops for a while":
            subprocess.Popen(["sh", "-c", f"sleep $SECONDS; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "hangs in a callback":
            time.sleep(600)
        if FAULT == "raises":
            raise ValueError("a bug in a callback")

    def on_step_end(self, batch: object, result: StepResult, info: object) -> None:
        self.loss.step = 0
        if FAULT == "NaN on one rank":
            print(result.grad_norm)
        if FAULT == "pauses":  # so that a test can act while the run trains
            time.sleep(float(Path("pause").read_text()))


def main(argv: list[str] | None = None) -> object:
    settings = lt.parse(DEFAULTS, argv, description=__doc__)
    loss = FaultyLoss()
    return lt.fit(settings, tokenized(settings), build, objective=loss, callbacks=[Fault(loss)])


def hang_in_data_loading() -> None:
    """Let the eighth batch never come."""
    from llmtrain.data.loader import LocalBatches

    read = LocalBatches.__getitems__
    calls = []

    def read_or_hang(self: LocalBatches, slots: list) -> object:
        calls.append(1)
        if len(calls) == 8:
            time.sleep(600)
        return read(self, slots)

    LocalBatches.__getitems__ = read_or_hang


def break_compiler() -> None:
    """Let the compiler fail on one rank. On the others it works and takes no time."""
    from llmtrain.training import compiling

    def fail(graph: object, inputs: object) -> None:
        Path(os.environ["FAILURE_FILE"]).write_text(str(time.time()))
        raise RuntimeError("no C++ compiler here\nand more")

    backend = fail if IS_FAULTY_RANK else "eager"
    compiling._compile = functools.partial(compiling._compile, backend=backend)


if __name__ == "__main__":
    if FAULT == "hangs in data loading" and IS_FAULTY_RANK:
        hang_in_data_loading()
    if FAULT == "broken compiler":
        break_compiler()
    if FAULT == "comes back late" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        time.sleep(3 * IS_FAULTY_RANK)
    lt.launch(main)
