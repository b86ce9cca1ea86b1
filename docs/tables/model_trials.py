"""Try the steps of a run with a small model of a family, for its row in the table of models.

Each trial has one cell. Its text is ``yes``, or the reason for a failure in a few words.
"""

import contextlib
import copy
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from docs.tables.packing_trials import (
    ROW_LENGTH,
    Packing,
    build,
    packing_of,
    published_config,
    with_smallest,
)
from llmtrain import LoraConfig, ModelBundle, ModelConfig, load_model
from llmtrain.errors import first_line
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.hub_models import auto_class
from llmtrain.models.lora import AdapterFiles
from llmtrain.models.model_classes import build_model
from llmtrain.models.probe import differ, example_tokens
from llmtrain.models.text_tower import outside_text_tower
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.shards import local_shard
from llmtrain.record.saver import write_model
from tests.engines import parameter_bytes
from tests.models.small_models import byte_tokenizer
from tests.models.some_rows import SomeRows

_SEED = 3


class Step(NamedTuple):
    """The results of one step of a model, which two ranks must compute as one process does.

    Attributes:
        loss: the summed loss of a row.
        grad_norm: the norm of its gradient.
    """

    loss: float
    grad_norm: float


class Trial(NamedTuple):
    """The results of the trials of a family in one process.

    Attributes:
        cells: the texts of the cells, by column.
        packing: whether it keeps packed documents apart.
        step: a step of the model, or ``None`` if it cannot be trained.
    """

    cells: dict[str, str]
    packing: Packing
    step: Step | None


def try_family(family: str, folder: Path) -> Trial:
    """Try a family in this process, and leave its model in a folder, for :func:`try_sharded`.

    Raises:
        UntriedError: if no model is small enough.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of peft
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        config = published_config(family)
        return with_smallest(config, lambda small: _try_small(small, folder))


def _try_small(config: PreTrainedConfig, folder: Path) -> Trial:
    model = build(config)
    model.save_pretrained(folder)
    packing = packing_of(copy.deepcopy(model))
    cells = {
        "class": type(model).__name__,
        "packs": "yes" if packing.verdict != "leaks" else f"no: {packing.reason}",
        "prompts shared": {
            "shares": "yes",
            "packs": f"no: {packing.reason}",
            "leaks": "no",
        }[packing.verdict],
        "not reached": ", ".join(outside_text_tower(model)) or "-",
    }

    accelerator = start_accelerator()
    try:
        bundle = load(accelerator, folder)
        step = take_step(bundle)
    except Exception as error:  # each class fails in its own way
        cells["trains"] = f"no: {_in_few_words(error)}"
        return Trial(cells, packing, step=None)

    cells["trains"] = "yes"
    cells["reloads"] = _outcome(lambda: _reload(bundle, folder.with_suffix(".finished")))
    cells["LoRA"] = _outcome(lambda: _lora_targets(accelerator, folder))
    cells["reward"] = _outcome(lambda: _build_reward_model(folder))
    return Trial(cells, packing, step)


def _outcome(trial: Callable[[], str | None]) -> str:
    """Return the cell of a trial: its result, ``yes`` if it has none, or why it failed."""
    try:
        return trial() or "yes"
    except Exception as error:  # each class fails in its own way
        return f"no: {_in_few_words(error)}"


def _in_few_words(error: Exception) -> str:
    """Return the first clause of a message, without the names of flags before it."""
    message = re.sub(r"^(--\S+( \S+)?: |\[\S+\] )+", "", first_line(error))
    return re.split(r"[.;] |\.$| \(", message)[0].replace("|", "/")


def load(accelerator: Accelerator, folder: Path, lora: LoraConfig | None = None) -> ModelBundle:
    """Load a model as a run does, which also tries its attention and its gradients."""
    config = ModelConfig(str(folder), max_length=ROW_LENGTH)
    rows = SomeRows(byte_tokenizer(ROW_LENGTH))
    return move_to_devices(
        accelerator.ranks, load_model(config, lora, rows, seed=_SEED, precision="no")
    )


def take_step(bundle: ModelBundle) -> Step:
    """Take a step of plain gradient descent, without dropout."""
    model: Any = bundle.model
    ids = example_tokens(model, 1, 48)
    model.eval()
    loss = model(ids, labels=ids)
    loss.backward()
    squares = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            squares += float(local_shard(parameter.grad).double().square().sum())
            local_shard(parameter).sub_(1e-3 * local_shard(parameter.grad))
    return Step(loss.item(), squares**0.5)


@torch.no_grad()
def _reload(bundle: ModelBundle, folder: Path) -> None:
    """Write the trained model, load it with transformers, and compare the logits."""
    model: Any = bundle.model
    files = bundle.files.finished("auto")
    write_model(folder, files, files.export_tensors(model))
    model_class = auto_class(AutoConfig.from_pretrained(folder))
    loaded, info = model_class.from_pretrained(folder, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], f"{problem} {sorted(map(str, info[problem]))[0]}"
    assert type(loaded) is model.own_class, f"it is loaded as {type(loaded).__name__}"
    ids = example_tokens(model, 1, 48)
    logits = model(ids, use_cache=False).logits
    assert not differ(loaded.eval()(ids, use_cache=False).logits, logits), "other logits"


def _lora_targets(accelerator: Accelerator, folder: Path) -> str:
    """Add LoRA to all linear layers, and return the last names of the modules that got matrices."""
    files = load(accelerator, folder, LoraConfig(lora_r=2)).files
    assert isinstance(files, AdapterFiles)
    tuner = files.adapted.base_model
    names = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    names = [name.removesuffix(".weight").rpartition(".")[2] for name in names]
    return " ".join(sorted({*names}))


def _build_reward_model(folder: Path) -> None:
    """Build the class for sequence classification."""
    config_class = type(AutoConfig.from_pretrained(folder))
    assert config_class in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "no class"
    config = ModelConfig(str(folder), max_length=ROW_LENGTH)
    tokenizer = byte_tokenizer(ROW_LENGTH)
    build_model(config, tokenizer, torch.float32, is_reward_model=True)


def try_sharded(accelerator: Accelerator, folder: Path, expected: Step) -> str:
    """Return the cell of FSDP2. All ranks call this, and get the same."""
    outcomes: list[str] = [""] * accelerator.num_processes
    outcome = _outcome(lambda: _step_sharded(accelerator, folder, expected))
    torch.distributed.all_gather_object(outcomes, outcome)
    return next((text for text in outcomes if text != "yes"), "yes")


def _step_sharded(accelerator: Accelerator, folder: Path, expected: Step) -> None:
    bundle = load(accelerator, folder)
    loss, grad_norm = take_step(bundle)
    square = torch.tensor(grad_norm**2)
    torch.distributed.all_reduce(square)

    _check_close("loss", loss, expected.loss)
    _check_close("gradient", square.item() ** 0.5, expected.grad_norm)
    local, full = parameter_bytes(bundle.model)
    assert local < 0.6 * full, f"a rank holds {local / full:.0%} of the weights"


def _check_close(name: str, value: float, expected: float) -> None:
    """Check a number up to its rounding. The message becomes the text of a cell."""
    is_close = abs(value - expected) < 1e-4 * expected
    assert is_close, f"{name} {value:.6} instead of {expected:.6}"
