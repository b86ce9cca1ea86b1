"""Train and fine-tune language models with Hugging Face Accelerate: the same run on any layout.

Names are loaded when they are used: ``import llmtrain`` itself costs nothing.
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain._version import __version__ as __version__

if TYPE_CHECKING:  # the public names; what stands here is what __getattr__ loads
    from llmtrain.config import parse as parse
    from llmtrain.contract import Built as Built
    from llmtrain.data.config import BatchConfig as BatchConfig
    from llmtrain.data.config import ChatConfig as ChatConfig
    from llmtrain.data.config import DataConfig as DataConfig
    from llmtrain.data.config import PairConfig as PairConfig
    from llmtrain.data.rows import Tokenized as Tokenized
    from llmtrain.data.rows import tokenize as tokenize
    from llmtrain.launching.process import launch as launch
    from llmtrain.models.config import GPTConfig as GPTConfig
    from llmtrain.models.config import LoraConfig as LoraConfig
    from llmtrain.models.config import ModelConfig as ModelConfig
    from llmtrain.models.config import PreferenceConfig as PreferenceConfig
    from llmtrain.models.gpt import GPT as GPT
    from llmtrain.models.loss import summed_nll as summed_nll
    from llmtrain.models.pretrained import load_model as load_model
    from llmtrain.parallel.config import PipelineConfig as PipelineConfig
    from llmtrain.record.resume import newest_model as newest_model
    from llmtrain.training.loop import train as train
    from llmtrain.training.optim import make_optimizer as make_optimizer
    from llmtrain.training.run import open_run as open_run
    from llmtrain.training.settings import LoopConfig as LoopConfig
    from llmtrain.training.settings import OptimConfig as OptimConfig
    from llmtrain.training.settings import RunConfig as RunConfig
    from llmtrain.training.settings import Settings as Settings
    from llmtrain.training.start import loaders as loaders
    from llmtrain.training.start import place as place
    from llmtrain.training.start import start as start

_HOMES = {
    name.name: node.module or ""
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom)
    for name in node.names
    if name.asname
}

__all__ = [*_HOMES]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'llmtrain' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
