"""Write the model of a run to a folder of its own; with --merge, an adapter and its base as one model."""

import argparse
import json
import shutil
from pathlib import Path

_ROUNDING = 1e-4  # of the largest logit, in float32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", help="a run's folder, or a model's")
    parser.add_argument(
        "--merge", action="store_true", help="add a LoRA adapter to its base's weights, in float32"
    )
    parser.add_argument(
        "--check", action="store_true", help="load it with transformers, and compare its logits"
    )
    parser.add_argument(
        "--to", metavar="FOLDER", help="where to (default: RUN/merged or RUN/export)"
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.errors import UserError
    from llmtrain.files import new_folder
    from llmtrain.models.generation import logits_apart, model_folder
    from llmtrain.models.lora import is_adapter, write_merged

    model = Path(arguments.model)
    if not model.is_dir():
        raise UserError(f"{model} is no folder.")
    source = Path(model_folder(arguments.model))
    target = Path(arguments.to or model / ("merged" if arguments.merge else "export"))
    if target.exists():
        raise UserError(f"{target} exists; name another folder with --to.")
    if arguments.merge and not is_adapter(source):
        raise UserError(
            f"{source} is a whole model, no adapter: there is nothing to merge; leave --merge out."
        )

    result: dict[str, str | float] = {"model": str(target)}
    message = f"{target} holds the model (transformers: AutoModelForCausalLM.from_pretrained)"
    with new_folder(target) as working:
        if arguments.merge:
            write_merged(source, working)
        else:
            shutil.copytree(source, working, dirs_exist_ok=True)

        if arguments.check:
            apart, size = logits_apart(str(source), str(working))
            is_same = apart <= _ROUNDING * size  # False for NaN
            if not is_same:
                raise UserError(
                    f"{source}: its export has other logits, by {apart:.2g} of {size:.2g}; nothing is kept."
                )
            result |= {"logits_differ_by": apart, "largest_logit": size}
            message += f"; its logits differ by {apart:.2g} of {size:.2g}"
    print(json.dumps(result) if arguments.json else message)
