"""Measure the loss, perplexity and bits per byte of a data set under a model.

They are computed as the eval metrics of a run are. The records become rows as in the run that the
model is from, if it is in the folder of one; otherwise as recipes/finetune.py would make them.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.files import json_text

EXAMPLES = (
    "llmtrain eval runs/finetune --dataset test.jsonl",
    "llmtrain eval ORG/MODEL --dataset articles/ --max_length 2048 --json",
)
# Settings of a run that say how its records become rows.
_DATA_SETTINGS = ("columns", "text_suffixes", "isolate_documents")
_CHAT_SETTINGS = ("format", "turns", "overlong", "on_bad_row")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        help="folder of a run, a checkpoint, a model or an adapter, or a hub name",
    )
    parser.add_argument(
        "--dataset",
        nargs="+",
        required=True,
        help="data, named as for a recipe; name several files or data sets to get a loss of each",
    )
    parser.add_argument("--columns", nargs="+", help="names of fields (default: the run's)")
    parser.add_argument("--max_length", type=int, help="tokens in a row (default: the run's)")


def run(arguments: argparse.Namespace) -> None:
    # The start-up log and progress bars go to stderr, so that stdout has only the metrics.
    with contextlib.redirect_stdout(sys.stderr):
        metrics = _evaluate(arguments)
    lines = [f"{name:<15} {value:,.4f}" for name, value in metrics.items()]
    print(json_text(metrics) if arguments.json else "\n".join(lines))


def _evaluate(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the metrics of the data set under the model."""
    import llmtrain as lt
    from llmtrain.data.loader import eval_loader
    from llmtrain.launching.accelerator import start_accelerator
    from llmtrain.model_folders import is_adapter, model_folder
    from llmtrain.models.export import folder_config, gives_scores
    from llmtrain.parallel.placement import engine_for, move_to_devices
    from llmtrain.record.history import History, is_run
    from llmtrain.training.evaluate import evaluate

    name = model_folder(arguments.model)
    if gives_scores(folder_config(Path(name))):
        raise UserError(f"{name} is a reward model, which predicts no tokens; name a causal LM.")
    # A model is in a subfolder of its run, or in that of a checkpoint.
    parents = Path(name).absolute().parents[:3] if Path(name).is_dir() else ()
    run_folder = next(filter(is_run, parents), None)
    settings = {} if run_folder is None else History.read(run_folder).settings
    # Runs of recipes/gpt.py train on text, whatever other fields the records have.
    settings.setdefault("format", "text" if "block_size" in settings else "auto")

    data = lt.DataConfig(dataset=[], eval_dataset=arguments.dataset, tokenizer=None)
    chat = lt.ChatConfig()
    for config, keys in ((data, _DATA_SETTINGS), (chat, _CHAT_SETTINGS)):
        vars(config).update({key: settings[key] for key in keys if key in settings})
    if arguments.columns:
        data.set(columns=arguments.columns)
    # Merging an adapter would round its weights.
    model_config = lt.ModelConfig(model_name_or_path=name, continue_adapter=is_adapter(Path(name)))
    length = arguments.max_length or settings.get("max_length") or settings.get("block_size")
    if length:
        model_config.set(max_length=length)
    rows = lt.tokenize(data, chat=chat, model=model_config)
    assert rows.eval is not None, "or it would have been an error"
    if rows.new_tokens and not model_config.continue_adapter:
        raise UserError(f"{name} has no chat template; evaluate text, or another model.")
    data.fit_micro_batch(rows.positions)

    accelerator = start_accelerator()
    if accelerator.ranks.world_size > 1:
        raise UserError("llmtrain eval works on one process; start it without a launcher.")
    bundle = lt.load_model(model_config, None, rows, seed=0, precision=accelerator.mixed_precision)
    move_to_devices(accelerator.ranks, bundle)
    batches = eval_loader(
        rows.eval,
        processes=1,
        micro_batch=data.per_device_train_batch_size,
        prepare=bundle.prepare_batch,
        source_rows=[*rows.eval_sources.values()],
    )
    model, eval_batches = accelerator.prepare(bundle.model, batches)
    engine = engine_for(accelerator.ranks, model, bundle.objective, lt.ParallelConfig())
    return evaluate(engine, eval_batches, rows.metadata.eval_bytes, sources=rows.eval_sources)
