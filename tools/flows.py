"""Count what a flow of the package passes: functions, modules and records.

``python tools/flows.py chat`` prints it for a conversation on its way from JSON to rows on disk,
and ``python tools/flows.py batch`` for such a row on its way from disk to a tensor.
``python tools/flows.py model`` prints it for a model from its name to the first loss, ``step`` for
a training step, from one batch to the next, ``save`` for a checkpoint, the finished model and a
resume, ``run`` for a run of six steps, ``plan`` for a plan of it on two GPUs, and ``flag`` for
``--learning_rate`` from the command line to the parameter groups of the optimizer. ``--list``
prints the names, too. Comprehensions and lambdas are part of the function that has them.
"""

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "llmtrain")


class Passed:
    """The functions, modules and records that were passed while it was on the stack.

    Attributes:
        functions: as ``module:function``.
        records: the names of the records that were made.
    """

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.records: set[str] = set()

    def __enter__(self) -> "Passed":
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def modules(self) -> set[str]:
        return {function.partition(":")[0] for function in self.functions}

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            name = code.co_qualname
            is_part_of_another = name.endswith("comp>") or name.endswith(">")
            if not is_part_of_another:
                module = code.co_filename[len(PACKAGE) + 1 :].removesuffix(".py")
                self.functions.add(f"{module}:{name}")
        elif code.co_filename == "<string>":
            # Constructors of named tuples and dataclasses, which Python has made from a string.
            made = frame.f_locals.get("_cls") or type(frame.f_locals.get("self"))
            if made.__module__.startswith("llmtrain"):
                self.records.add(made.__name__)


def rows_of_chats(folder: Path) -> Callable[[], Any]:
    """Return a function that makes rows of 40 conversations in a folder."""
    import llmtrain as lt
    from recipes import finetune
    from tests.launching import write_chats

    chats = write_chats(folder / "chats.jsonl", count=40)
    flags = f"--from_config llama --tokenizer byte --max_length 128 --dataset {chats}"
    settings = lt.parse(finetune.DEFAULTS, flags.split())
    return lambda: finetune.tokenized(settings)


def first_batch(folder: Path) -> Callable[[], Any]:
    """Return a function that loads the batch of the first step of such rows."""
    from llmtrain.data.loader import train_loader

    rows = rows_of_chats(folder)()

    def load() -> Any:
        steps = range(1)
        loader = train_loader(rows.train, global_batch_size=8, micro_batch=4, steps=steps, seed=0)
        return next(iter(loader)).batches

    return load


def first_loss(folder: Path) -> Callable[[], Any]:
    """Return a function that loads a model by the name of its folder, and computes a loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import llmtrain as lt
    from llmtrain.parallel.placement import move_to_devices
    from llmtrain.parallel.ranks import TrainingAccelerator

    rows = rows_of_chats(folder)()
    [batch, *_] = first_batch(folder)()
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=2, intermediate_size=96)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    model_config = lt.ModelConfig(str(folder / "base"), max_length=128)
    accelerator = TrainingAccelerator(cpu=True)

    def compute() -> Any:
        bundle = lt.load_model(model_config, lora=None, rows=rows, seed=0, precision="no")
        model = move_to_devices(accelerator.ranks, bundle).model
        return model(**batch, **bundle.prepare_batch(batch))

    return compute


def six_steps(folder: Path) -> Callable[..., Any]:
    """Return a function that fine-tunes a small model for six steps, with callbacks."""
    import llmtrain as lt
    from recipes import finetune
    from tests.launching import write_chats

    chats = write_chats(folder / "chats.jsonl", count=40)
    flags = (
        f"--from_config llama --tokenizer byte --max_length 128 --dataset {chats} --max_steps 6 "
        f"--eval_steps 0 --report_to none --output_dir {folder / 'run'}"
    )

    def run(*more_flags: str, callbacks: Sequence[Any] = ()) -> Any:
        settings = lt.parse(finetune.DEFAULTS, [*flags.split(), *more_flags])
        rows = finetune.tokenized(settings)
        return lt.fit(settings, rows, finetune.build, callbacks=callbacks)

    return run


def learning_rate(folder: Path) -> Callable[[], Any]:
    """Return a function that parses a learning rate, and sets it in an optimizer."""
    import torch

    from llmtrain.config.command_line import parse
    from llmtrain.parallel.ranks import TrainingAccelerator
    from llmtrain.training.learning_rates import LearningRates
    from llmtrain.training.optim import make_optimizer
    from recipes import gpt

    flags = ["--learning_rate", "0.01", "--optim", "adamw"]
    model = torch.nn.Linear(2, 2)
    accelerator = TrainingAccelerator(cpu=True)

    def set_rate() -> None:
        settings = parse(gpt.DEFAULTS, flags)
        optimizer = make_optimizer(accelerator, model, settings.optim)
        LearningRates(optimizer, settings.optim).set(step=100)
        assert 0 < optimizer.param_groups[0]["lr"] < 0.01

    return set_rate


def plan(folder: Path) -> Callable[[], Any]:
    """Return a function that plans a small model for two GPUs. Its rows are made before."""
    from llmtrain.cli import main
    from tests.launching import GPT, TINY, write_text

    data = ["--dataset", str(write_text(folder / "text.txt"))]
    command = ["plan", GPT, *TINY, *data, "--processes", "2", "--device", "h100-80gb"]
    main(command)
    return lambda: main(command)


def one_step(folder: Path, passed: Passed) -> None:
    """Pass a step of a run: from its batch to that of the next step."""
    import llmtrain as lt

    class Steps(lt.Callback):
        takes_late_results = True

        def setup(self, training: Any) -> None:
            self.training = training

        def on_step_begin(self, batch: Any) -> None:
            if self.training.step == 3:
                passed.__enter__()
            elif self.training.step == 4:
                passed.__exit__()

    six_steps(folder)("--logging_steps", "6", callbacks=[Steps()])


def save_and_resume(folder: Path, passed: Passed) -> None:
    """Pass a save, the writing of a finished model, and what a resumed run does differently."""
    from llmtrain.training import periodic, train

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with passed:
                return function(*arguments, **keywords)

        return call

    with (
        mock.patch.object(periodic, "save", watched(periodic.save)),
        mock.patch.object(periodic, "write_model", watched(periodic.write_model)),
        mock.patch.object(train, "restore", watched(train.restore)),
    ):
        run = six_steps(folder)
        run()
        named = str(folder / "run" / "checkpoints" / "step-00000006")
        run("--resume_from_checkpoint", named, "--max_steps", "7", "--learning_rate", "1e-4")


FLOWS = {
    "chat": rows_of_chats,
    "batch": first_batch,
    "model": first_loss,
    "run": six_steps,
    "flag": learning_rate,
    "plan": plan,
}
PARTS_OF_RUNS = {"step": one_step, "save": save_and_resume}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flow", choices=[*FLOWS, *PARTS_OF_RUNS])
    parser.add_argument("--list", action="store_true", help="print the names, too")
    arguments = parser.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))
    # The first time, modules are imported. What they do then is not part of the flow.
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LLMTRAIN_CACHE"] = str(Path(folder, "cache"))
            passed = Passed()
            if arguments.flow in PARTS_OF_RUNS:
                PARTS_OF_RUNS[arguments.flow](Path(folder), passed)
                continue
            flow = FLOWS[arguments.flow](Path(folder))
            with passed:
                flow()

    if arguments.list:
        print(*sorted(passed.functions), *sorted(passed.records), sep="\n")
    print(
        f"{len(passed.functions)} functions, {len(passed.modules)} modules, "
        f"{len(passed.records)} records: {', '.join(sorted(passed.records))}"
    )


if __name__ == "__main__":
    main()
