"""Train and fine-tune language models with Hugging Face Accelerate: the same run on any layout.

Names are loaded when they are used: ``import llmtrain`` itself costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from llmtrain._version import __version__

if TYPE_CHECKING:
    from llmtrain.config import flag as flag
    from llmtrain.config import given as given
    from llmtrain.config import parse as parse
    from llmtrain.config import resolved as resolved
    from llmtrain.console import say as say
    from llmtrain.data.config import DataConfig as DataConfig
    from llmtrain.data.conversations import ChatConfig as ChatConfig
    from llmtrain.data.loader import eval_loader as eval_loader
    from llmtrain.data.loader import train_loader as train_loader
    from llmtrain.data.rows import prepare as prepare
    from llmtrain.errors import UserError as UserError
    from llmtrain.models.export import ModelFiles as ModelFiles
    from llmtrain.models.gpt import GPT as GPT
    from llmtrain.models.gpt import GPTConfig as GPTConfig
    from llmtrain.models.lora import LoraConfig as LoraConfig
    from llmtrain.models.loss import summed_nll as summed_nll
    from llmtrain.models.pretrained import ModelConfig as ModelConfig
    from llmtrain.models.pretrained import load_model as load_model
    from llmtrain.observe.preview import preview as preview
    from llmtrain.parallel.ddp import DDPConfig as DDPConfig
    from llmtrain.parallel.ddp import data_parallel_size as data_parallel_size
    from llmtrain.parallel.fsdp import empty_if_sharded as empty_if_sharded
    from llmtrain.parallel.fsdp import shard as shard
    from llmtrain.parallel.pipeline import PipelineConfig as PipelineConfig
    from llmtrain.record.publish import publish as publish
    from llmtrain.record.run import RunConfig as RunConfig
    from llmtrain.record.run import open_run as open_run
    from llmtrain.start import launch as launch
    from llmtrain.start import leave_group as leave_group
    from llmtrain.start import start_accelerator as start_accelerator
    from llmtrain.training.identity import identity_of as identity_of
    from llmtrain.training.layout import Layout as Layout
    from llmtrain.training.loop import train as train
    from llmtrain.training.optim import OptimConfig as OptimConfig
    from llmtrain.training.optim import make_optimizer as make_optimizer
    from llmtrain.training.summary import show_result as show_result

_HOMES = {
    "GPT": "models.gpt",
    "ChatConfig": "data.conversations",
    "DDPConfig": "parallel.ddp",
    "DataConfig": "data.config",
    "GPTConfig": "models.gpt",
    "Layout": "training.layout",
    "LoraConfig": "models.lora",
    "ModelConfig": "models.pretrained",
    "ModelFiles": "models.export",
    "OptimConfig": "training.optim",
    "RunConfig": "record.run",
    "UserError": "errors",
    "data_parallel_size": "parallel.ddp",
    "empty_if_sharded": "parallel.fsdp",
    "PipelineConfig": "parallel.pipeline",
    "eval_loader": "data.loader",
    "flag": "config",
    "given": "config",
    "identity_of": "training.identity",
    "launch": "start",
    "leave_group": "start",
    "load_model": "models.pretrained",
    "make_optimizer": "training.optim",
    "open_run": "record.run",
    "parse": "config",
    "prepare": "data.rows",
    "preview": "observe.preview",
    "publish": "record.publish",
    "resolved": "config",
    "say": "console",
    "shard": "parallel.fsdp",
    "show_result": "training.summary",
    "start_accelerator": "start",
    "summed_nll": "models.loss",
    "train": "training.loop",
    "train_loader": "data.loader",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llmtrain' has no attribute '{name}'")
    return getattr(importlib.import_module(f"llmtrain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
