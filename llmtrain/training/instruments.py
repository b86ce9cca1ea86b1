"""All that watches a loop, in one hand."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import nn

from llmtrain.observe.heartbeat import Heartbeat
from llmtrain.observe.memory import memory_held
from llmtrain.observe.phases import Phases
from llmtrain.observe.progress import Progress
from llmtrain.observe.throughput import Throughput
from llmtrain.observe.xray import XRay
from llmtrain.parallel.ddp import GradientSyncs
from llmtrain.record.run import Run, RunConfig


class Instruments:
    """What the loop tells as it goes, and what is read from it. All processes call all of it, at the same places."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, run: RunConfig, record: Run, max_steps: int) -> None:
        self.phases = Phases(accelerator, model)
        self.syncs = GradientSyncs(model)
        self.throughput = Throughput(accelerator, model)
        self.progress = Progress(accelerator.is_main_process, record.step, max_steps)
        timeout = accelerator.ddp_handler.config.ddp_timeout
        self.heartbeat = Heartbeat(accelerator, self.phases, record.folder, timeout, record.failed)
        self.device, self.tell = accelerator.device, record.incident
        self.xray: Callable[[int], None] = lambda step: None
        if run.xray_range is not None:
            xray = XRay(accelerator, self.phases, model, run.xray_range, record.folder / "xray")
            accelerator.ddp_handler.watch(model, xray.bucket)
            self.xray = xray.between

    def begin(self, step: int) -> None:
        """The loop begins, after ``step`` updates."""
        self.throughput.restart()
        self.xray(step)

    def before_update(self, step: int) -> None:
        self.phases.at("count", step)
        self.syncs.restart()

    def after_update(self, step: int, tokens: int, positions: int) -> None:
        self.phases.at("other", step)
        self.throughput.add(tokens, positions)

    def between_updates(self, step: int) -> None:
        self.progress.advance()
        self.xray(step)

    def read(self, metrics: dict[str, float]) -> dict[str, Any]:
        """The metrics and what was measured since the last reading; says who is late."""
        metrics |= {"train/gradient_syncs": self.syncs.count, **self.throughput.read()}
        self.progress.logged(metrics)
        where, held = memory_held(self.device)
        seconds, gib = self.phases.read_with(held / 2**30)
        if late := self.phases.late(seconds):
            self.tell("late", str(late))
        return {**metrics, "phases": seconds, "memory": {where: [round(size, 4) for size in gib]}}
