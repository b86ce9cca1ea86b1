"""Write the model of a checkpoint together with the tensors that its run did not train."""

import functools
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from llmtrain.files import read_object
from llmtrain.models.base_tensors import BASE_FILE, published, stored_base_tensors
from llmtrain.models.export import ModelFiles, copy_processor, gives_scores
from llmtrain.models.hub_models import auto_class, without_weights
from llmtrain.models.towers import outside_text_tower
from llmtrain.models.weight_loading import stored_tensors


def write_complete(checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint that does not hold all tensors, with those of its base.

    Args:
        checkpoint: the model folder of the checkpoint.
        folder: the folder to write, which exists.

    Raises:
        UserError: if the base cannot be read, or has other weights now.
    """
    import transformers

    model_config = transformers.AutoConfig.from_pretrained(checkpoint)
    is_reward_model = gives_scores(read_object(checkpoint / "config.json"))
    model_class: Any = auto_class(model_config)
    if is_reward_model:
        model_class = transformers.AutoModelForSequenceClassification
    model = without_weights(functools.partial(model_class.from_config, model_config))

    base_tensors = stored_base_tensors(
        model,
        outside_text_tower(model),
        str(checkpoint),
        revision="main",
        is_reward_model=is_reward_model,
    )
    tensors = {}
    for stored in stored_tensors(model, checkpoint):
        tensors[stored.name] = stored.read()
    tensors = published(model, tensors)
    if base_tensors is not None and base_tensors.folder is not None:
        tensors.update(base_tensors.read())
        copy_processor(base_tensors.folder, folder)

    for path in checkpoint.iterdir():
        is_weights = path.name.startswith(ModelFiles.weights_name.removesuffix(".safetensors"))
        if not is_weights and path.name != BASE_FILE:
            shutil.copyfile(path, folder / path.name)
    save_file(tensors, folder / ModelFiles.weights_name, {"format": "pt"})
