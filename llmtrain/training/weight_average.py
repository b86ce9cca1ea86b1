"""An average of the weights over the steps of a run."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.parallel.shards import local_shard
from llmtrain.training.adamw import assign

# A name that is not that of a folder or a file of the run.
_FOLDER = re.compile(
    r"(?!(model|checkpoints|merged|export|tensorboard|trackers|wandb|xray)$)"
    r"(?!.*\.(json|jsonl|html|log|txt)$)\w[\w.+-]*"
)


class WeightAverage(Callback):
    """Averages the weights over the steps, and evaluates the average beside the weights.

    With ``decay``, the average is exponential: in each step it moves towards the weights by
    ``1 - decay`` (Polyak & Juditsky 1992 average uniformly; Morales-Brotons et al. 2024,
    arXiv:2411.18704, compare exponential averages of networks). As long as fewer steps than
    ``1 / (1 - decay)`` were made, it is their mean, so the initial weights have no part in it.

    With ``tail``, it is the mean over this last share of the run (Izmailov et al. 2018,
    arXiv:1803.05407). Before that, there is no average to evaluate.

    Only trained parameters are averaged, in float32. Weights in bfloat16 get the average rounded.
    Every rank holds the average of its own shards. Evaluations log the metrics of the average as
    ``eval/average/loss`` and so on.

    Args:
        decay: the decay of an exponential average, at least 0 and below 1.
        tail: a share of the run, above 0 and at most 1.
        folder: a folder in the run folder. At the end of the run, the model with the average
            weights is written there, as Hugging Face loads it.

    Raises:
        UserError: if not exactly one of ``decay`` and ``tail`` is given, or if it is out of range.
    """

    takes_late_results = True

    def __init__(
        self, decay: float | None = None, tail: float | None = None, folder: str | None = None
    ) -> None:
        is_decay = decay is not None and 0 <= decay < 1
        is_tail = tail is not None and 0 < tail <= 1
        if None not in (decay, tail) or not (is_decay or is_tail):
            raise UserError(
                f"WeightAverage: decay {decay} and tail {tail}: give either decay, at least 0 and "
                "below 1, such as 0.999, or tail, above 0 and at most 1, such as 0.2 for the last "
                "fifth of the run."
            )
        if folder is not None and not _FOLDER.fullmatch(folder):
            raise UserError(
                f"WeightAverage: folder {folder!r} must be the name of a new folder in the run "
                "folder, such as model-average."
            )
        self.decay = decay
        self.tail = tail
        self._folder = folder

    def setup(self, training: Any) -> None:
        self._training = training
        if self._folder is not None:
            path = training.folder / self._folder
            # An earlier start may have written a model there.
            if path.exists() and not any(path.glob("*.safetensors")):
                raise UserError(
                    f"WeightAverage: {path} exists; name another folder, such as model-ema."
                )
        # As the decimal number that the user wrote: 0.1 is a little more in binary.
        tail = Fraction(str(self.tail or 1))
        self._skipped_steps = math.floor((1 - tail) * training.max_steps)  # before the first one

        self._count = 0  # steps in the average
        self._average: dict[str, torch.Tensor] = {}
        # This rank's shards of the weights and of their average.
        self._shards: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, parameter in training.model.named_parameters():
            if parameter.requires_grad:
                average = torch.zeros_like(parameter.detach(), dtype=torch.float32)
                self._average[name] = average
                self._shards.append((local_shard(parameter), local_shard(average)))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._count, "average": self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = state["steps"]
        for name, average in self._average.items():
            local_shard(average).copy_(local_shard(state["average"][name]))

    @torch.no_grad()
    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if info.step <= self._skipped_steps:
            return
        # All earlier steps are counted by now. Only the device knows whether it skipped this one.
        weight = 1 / (self._count + 1)
        if self.decay is not None:
            weight = max(weight, 1 - self.decay)
        for weights, average in self._shards:
            moved = average.lerp(weights.float(), weight)
            assign(average, moved, skip=result.is_skipped.to(average.device))

    def on_step_result(self, step: int, result: StepResult) -> None:
        if step > self._skipped_steps and math.isfinite(result.grad_norm):
            self._count += 1

    def on_evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        if not self._count:
            return {}
        with self.weights_replaced():
            return {f"average/{name}": value for name, value in evaluate().items()}

    def on_train_end(self) -> None:
        if self._folder is not None and self._count and self._training.is_last:
            with self.weights_replaced():
                self._training.write_model(self._training.folder / self._folder)

    @contextlib.contextmanager
    def weights_replaced(self) -> Iterator[None]:
        """Give the model the average weights until the block ends; all ranks call this."""
        kept = [weights.clone() for weights, _ in self._shards]
        try:
            for weights, average in self._shards:
                weights.copy_(average)
            yield
        finally:
            for (weights, _), kept_weights in zip(self._shards, kept, strict=True):
                weights.copy_(kept_weights)
