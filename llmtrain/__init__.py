"""Train and fine-tune language models with Hugging Face Accelerate: the same run on any layout.

A name is imported when it is first used, so ``import llmtrain`` alone imports nothing heavy.
"""

import importlib
from typing import TYPE_CHECKING

from llmtrain.versions import __version__ as __version__

if TYPE_CHECKING:  # for type checkers and editors; a test keeps it equal to _MODULES
    from llmtrain.config.command_line import parse as parse
    from llmtrain.config.flags import Config as Config
    from llmtrain.config.flags import flag as flag
    from llmtrain.data.config import BatchConfig as BatchConfig
    from llmtrain.data.config import ChatConfig as ChatConfig
    from llmtrain.data.config import DataConfig as DataConfig
    from llmtrain.data.config import PairConfig as PairConfig
    from llmtrain.data.tokenized import Tokenized as Tokenized
    from llmtrain.errors import UserError as UserError
    from llmtrain.interfaces.callback import Callback as Callback
    from llmtrain.interfaces.model import Model as Model
    from llmtrain.interfaces.model import ModelBundle as ModelBundle
    from llmtrain.interfaces.objective import LossSums as LossSums
    from llmtrain.interfaces.objective import Objective as Objective
    from llmtrain.interfaces.part import Metric as Metric
    from llmtrain.interfaces.part import Part as Part
    from llmtrain.interfaces.part import Schedule as Schedule
    from llmtrain.launching.process import launch as launch
    from llmtrain.model_folders import newest_model as newest_model
    from llmtrain.models.config import GPTConfig as GPTConfig
    from llmtrain.models.config import ModelConfig as ModelConfig
    from llmtrain.models.gpt import GPT as GPT
    from llmtrain.models.lfm2 import build_gpt as build_gpt
    from llmtrain.models.lora_config import LoraConfig as LoraConfig
    from llmtrain.models.loss import summed_nll as summed_nll
    from llmtrain.models.preference import Answers as Answers
    from llmtrain.models.preference import PreferenceConfig as PreferenceConfig
    from llmtrain.models.preference import PreferenceLoss as PreferenceLoss
    from llmtrain.models.pretrained import load_model as load_model
    from llmtrain.parallel.config import ParallelConfig as ParallelConfig
    from llmtrain.training.muon import Muon as Muon
    from llmtrain.training.opening import open_run as open_run
    from llmtrain.training.optim import MuonWithAdamW as MuonWithAdamW
    from llmtrain.training.optim import make_optimizer as make_optimizer
    from llmtrain.training.rows import tokenize as tokenize
    from llmtrain.training.settings import EvalConfig as EvalConfig
    from llmtrain.training.settings import LogConfig as LogConfig
    from llmtrain.training.settings import OptimConfig as OptimConfig
    from llmtrain.training.settings import RunConfig as RunConfig
    from llmtrain.training.settings import Settings as Settings
    from llmtrain.training.start import fit as fit
    from llmtrain.training.start import loaders as loaders
    from llmtrain.training.start import place as place
    from llmtrain.training.start import start as start
    from llmtrain.training.train import train as train
    from llmtrain.training.weight_average import WeightAverage as WeightAverage

# Each public name and the module that defines it.
_MODULES = {
    "parse": "llmtrain.config.command_line",
    "Config": "llmtrain.config.flags",
    "flag": "llmtrain.config.flags",
    "BatchConfig": "llmtrain.data.config",
    "ChatConfig": "llmtrain.data.config",
    "DataConfig": "llmtrain.data.config",
    "PairConfig": "llmtrain.data.config",
    "Tokenized": "llmtrain.data.tokenized",
    "UserError": "llmtrain.errors",
    "Callback": "llmtrain.interfaces.callback",
    "Model": "llmtrain.interfaces.model",
    "ModelBundle": "llmtrain.interfaces.model",
    "LossSums": "llmtrain.interfaces.objective",
    "Objective": "llmtrain.interfaces.objective",
    "Metric": "llmtrain.interfaces.part",
    "Part": "llmtrain.interfaces.part",
    "Schedule": "llmtrain.interfaces.part",
    "launch": "llmtrain.launching.process",
    "newest_model": "llmtrain.model_folders",
    "GPTConfig": "llmtrain.models.config",
    "ModelConfig": "llmtrain.models.config",
    "GPT": "llmtrain.models.gpt",
    "build_gpt": "llmtrain.models.lfm2",
    "LoraConfig": "llmtrain.models.lora_config",
    "summed_nll": "llmtrain.models.loss",
    "Answers": "llmtrain.models.preference",
    "PreferenceConfig": "llmtrain.models.preference",
    "PreferenceLoss": "llmtrain.models.preference",
    "load_model": "llmtrain.models.pretrained",
    "ParallelConfig": "llmtrain.parallel.config",
    "Muon": "llmtrain.training.muon",
    "open_run": "llmtrain.training.opening",
    "MuonWithAdamW": "llmtrain.training.optim",
    "make_optimizer": "llmtrain.training.optim",
    "tokenize": "llmtrain.training.rows",
    "EvalConfig": "llmtrain.training.settings",
    "LogConfig": "llmtrain.training.settings",
    "OptimConfig": "llmtrain.training.settings",
    "RunConfig": "llmtrain.training.settings",
    "Settings": "llmtrain.training.settings",
    "fit": "llmtrain.training.start",
    "loaders": "llmtrain.training.start",
    "place": "llmtrain.training.start",
    "start": "llmtrain.training.start",
    "train": "llmtrain.training.train",
    "WeightAverage": "llmtrain.training.weight_average",
}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604 - all of them are strings


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'llmtrain' has no attribute '{name}'")

    module = importlib.import_module(_MODULES[name])
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
