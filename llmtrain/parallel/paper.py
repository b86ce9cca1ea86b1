"""For ``llmtrain plan``: what stands where a recipe expects the Accelerator, when nothing is to be trained."""

from typing import Any, NoReturn

import torch
from torch import nn


class Taken(BaseException):
    """Ends a recipe that has made its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__("the model of a recipe")
        self.model = model


class PaperAccelerator:
    """One process that shards, so that models are built on the meta device; and takes them where they would be."""

    is_fsdp2 = is_main_process = native_amp = True
    num_processes, process_index = 1, 0
    device = torch.device("cpu")
    state = None

    def __init__(self, mixed_precision: str) -> None:
        self.mixed_precision = mixed_precision

    def take(self, model: Any) -> NoReturn:
        raise Taken(model)
