"""Load folders in each way, and print what happens: a line of JSON for each.

    untrusted_loads.py FOLDER [FOLDER ...]

A folder with an adapter is loaded as one. Other folders are loaded as models, and as the base of an
adapter.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from llmtrain.data.tokenizer import load_tokenizer
from llmtrain.model_folders import is_adapter, tokenizer_of
from llmtrain.models.adapters import adapted_model, merged_model, write_outline
from llmtrain.models.config import ModelConfig
from llmtrain.models.generation import TextModel
from llmtrain.models.hub_models import load_pretrained
from llmtrain.models.pretrained import load_model
from tests.models.some_rows import SomeRows


def train(folder: Path) -> None:
    rows = SomeRows(AutoTokenizer.from_pretrained(folder.parent / "honest"))
    config = ModelConfig(str(folder), max_length=8)
    bundle = load_model(config, lora=None, rows=rows, seed=3, precision="no")
    list(bundle.weights or [])


def new_folder(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))


def adapter_of(folder: Path) -> Path:
    """Return a folder with an honest adapter whose base is the folder."""
    adapter = shutil.copytree(
        folder.parent / "honest-adapter", new_folder(folder), dirs_exist_ok=True
    )
    path = adapter / "adapter_config.json"
    settings = json.loads(path.read_text()) | {"base_model_name_or_path": str(folder)}
    path.write_text(json.dumps(settings))
    return adapter


OF_ADAPTERS = {
    "generate": lambda folder: TextModel(str(folder)),
    "load": lambda folder: load_pretrained(str(folder)),
    "adapter": lambda folder: adapted_model(folder, 1),
    "merge": merged_model,
    "plan": lambda folder: write_outline(folder, new_folder(folder)),
}
OF_MODELS = {
    "generate": lambda folder: TextModel(str(folder)),
    "load": lambda folder: load_pretrained(str(folder)),
    "reward": lambda folder: load_pretrained(str(folder), gives_scores=True),
    "train": train,
    "tokenizer": lambda folder: load_tokenizer(str(folder)),
    "rows": lambda folder: tokenizer_of(str(folder)),
    **{
        f"{name} of an adapter": lambda folder, load=load: load(adapter_of(folder))
        for name, load in OF_ADAPTERS.items()
    },
}

for argument in sys.argv[1:]:
    folder = Path(argument)
    for name, load in (OF_ADAPTERS if is_adapter(folder) else OF_MODELS).items():
        result = "loaded"
        try:
            load(folder)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        print(json.dumps([folder.name, name, result]), flush=True)
