"""Train and fine-tune language models with Hugging Face Accelerate: the same run on any layout.

A name is imported when it is first used, so ``import llmtrain`` alone imports nothing heavy.
"""

import importlib

from llmtrain.versions import __version__ as __version__

# Each module, and the public names that it defines. Type checkers read them in __init__.pyi.
_NAMES = {
    "llmtrain.config.command_line": ["parse"],
    "llmtrain.config.flags": ["Config", "flag"],
    "llmtrain.data.config": ["BatchConfig", "ChatConfig", "DataConfig", "PairConfig"],
    "llmtrain.data.tokenized": ["Tokenized"],
    "llmtrain.errors": ["UserError"],
    "llmtrain.interfaces.callback": ["Callback"],
    "llmtrain.interfaces.model": ["Model", "ModelBundle"],
    "llmtrain.interfaces.objective": ["LossSums", "Objective"],
    "llmtrain.interfaces.part": ["Metric", "Part", "Schedule"],
    "llmtrain.launching.process": ["launch"],
    "llmtrain.models.config": ["GPTConfig", "ModelConfig"],
    "llmtrain.models.distillation": ["DistillConfig"],
    "llmtrain.models.gpt": ["GPT"],
    "llmtrain.models.lfm2": ["build_gpt"],
    "llmtrain.models.lora_config": ["LoraConfig"],
    "llmtrain.models.loss": ["summed_nll"],
    "llmtrain.models.preference": ["Answers", "PreferenceConfig", "PreferenceLoss"],
    "llmtrain.models.pretrained": ["load_model"],
    "llmtrain.models.teacher": ["with_teacher"],
    "llmtrain.parallel.config": ["ParallelConfig"],
    "llmtrain.training.muon": ["Muon"],
    "llmtrain.training.opening": ["open_run"],
    "llmtrain.training.optim": ["MuonWithAdamW", "make_optimizer"],
    "llmtrain.training.rows": ["tokenize"],
    "llmtrain.training.settings": [
        "EvalConfig",
        "LogConfig",
        "OptimConfig",
        "RunConfig",
        "Settings",
    ],
    "llmtrain.training.start": ["fit", "loaders", "place", "start"],
    "llmtrain.training.train": ["train"],
}

_MODULES: dict[str, str] = {}
for _module, _names in _NAMES.items():
    _MODULES |= dict.fromkeys(_names, _module)

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604 - all of them are strings


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'llmtrain' has no attribute '{name}'")

    module = importlib.import_module(_MODULES[name])
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
