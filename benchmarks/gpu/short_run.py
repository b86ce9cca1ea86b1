"""A short run in a process of its own, whose weights are compared with those of other runs.

python -m benchmarks.gpu.short_run FOLDER OPTIONS

OPTIONS is a JSON object with the fields of ``ShortRun``. The same command resumes a killed run.
"""

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import PartialState

import llmtrain as lt
from benchmarks.gpu.call import FULL, TINY, GPTSize
from benchmarks.gpu.loops import GPTSettings, build_gpt
from benchmarks.gpu.rows import text_rows
from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult

_ROWS = 64


@dataclass(frozen=True)
class ShortRun:
    """How a short run computes.

    Attributes:
        tiny: use the size of a rehearsal.
        steps: of the run; it saves after half of them.
        bitwise: add gradients in a fixed order.
        compiled: compile the blocks.
        in_float32: compute in float32, and not in the precision of the device.
        micro_batch: rows of a micro-batch; 0 for all rows of the process.
        kill_at: the step after which the process kills itself; 0 for none.
        breaks_at: the step in which the last rank's gradient is NaN, so all ranks skip it; 0 for
            none.
    """

    tiny: bool
    steps: int
    bitwise: bool = False
    compiled: bool = False
    in_float32: bool = False
    micro_batch: int = 0
    kill_at: int = 0
    breaks_at: int = 0

    @property
    def size(self) -> GPTSize:
        """The model and the global batch."""
        return (TINY if self.tiny else FULL).short_run

    def as_json(self) -> str:
        """Return the options for the command line."""
        return json.dumps(asdict(self))


class _KillAt(lt.Callback):
    """Kills this process after a step, as a machine that dies would."""

    settings = None

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if info.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class _BreaksOnce(lt.Objective):
    """The usual loss, which is NaN while it is broken."""

    is_broken = False

    def loss(self, model: object, batch: Batch, extra: Batch) -> lt.LossSums:
        sums = super().loss(model, batch, extra)
        return sums._replace(loss=sums.loss * float("nan")) if self.is_broken else sums


class _BreakAt(lt.Callback):
    """Breaks the loss of the last rank in one step."""

    settings = None

    def __init__(self, objective: _BreaksOnce, step: int, is_last_rank: bool) -> None:
        self.objective = objective
        self.step = step
        self.steps = 0
        self.is_last_rank = is_last_rank

    def on_step_begin(self, batch: LocalBatch) -> None:
        self.steps += 1
        self.objective.is_broken = self.is_last_rank and self.steps == self.step


def train(folder: Path, options: ShortRun) -> None:
    """Train as ``recipes/gpt.py`` does, on random tokens."""
    _share_the_card()

    size = options.size
    settings = _settings(folder, options)
    rows = text_rows(vocabulary=size.width, block=size.block, count=_ROWS)

    accelerator = lt.start(settings)
    objective = _BreaksOnce()
    bundle = lt.place(accelerator, build_gpt, settings, rows, objective=objective)
    optimizer = lt.make_optimizer(accelerator, bundle.model, settings.optim)

    is_last_rank = accelerator.process_index == accelerator.num_processes - 1
    callbacks = [_KillAt(options.kill_at), _BreakAt(objective, options.breaks_at, is_last_rank)]

    with lt.open_run(accelerator, settings, rows, bundle, optimizer, callbacks=callbacks) as run:
        lt.train(run, *accelerator.prepare(bundle.model, optimizer, *lt.loaders(run)))


def _settings(folder: Path, options: ShortRun) -> GPTSettings:
    size = options.size
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return GPTSettings(
        model=size.config(dropout=0.1),
        data=lt.BatchConfig(
            global_batch_size=size.rows,
            per_device_train_batch_size=options.micro_batch or size.rows // processes,
        ),
        optim=lt.OptimConfig(
            max_steps=options.steps,
            warmup_steps=1,
            learning_rate=1e-3,
            skip_nonfinite=1 if options.breaks_at else 0,
        ),
        parallel=lt.ParallelConfig(
            bitwise=options.bitwise,
            threads=1,
            mixed_precision="no" if options.in_float32 else "auto",
            torch_compile="always" if options.compiled else "never",
        ),
        eval=lt.EvalConfig(eval_steps=0),
        log=lt.LogConfig(logging_steps=1),
        run=lt.RunConfig(output_dir=str(folder), report_to=["none"], save_steps=options.steps // 2),
    )


def _share_the_card() -> None:
    """Join the other processes over gloo, because NCCL refuses two processes on one card.

    Accelerate would choose NCCL. It keeps a group that exists already.
    """
    if "WORLD_SIZE" in os.environ and torch.cuda.is_available():
        PartialState(backend="gloo")


if __name__ == "__main__":
    train(Path(sys.argv[1]), ShortRun(**json.loads(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a process that is done
