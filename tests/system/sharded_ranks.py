"""Run by test_sharding.py under one process, DDP, FSDP2 and HSDP: some steps of many models.

`sharded_ranks.py BASES FOLDER STEPS CASE...` writes losses, norms and counts, and the models. A case
is such as `gpt/4`, with four micro-batches. BASES holds the models to which adapters are added.
"""

import itertools
import json
import operator
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from llmtrain import (
    GPTConfig,
    LoraConfig,
    ModelBundle,
    ModelConfig,
    OptimConfig,
    launch,
    load_model,
    make_optimizer,
)
from llmtrain.data import tokenizer as tok
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.interfaces.model_bundle import ModelFormat
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.gpt_family import build_gpt
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.blocks import HasEmbeddings
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.engine_choice import engine_for
from llmtrain.parallel.fsdp import parameter_groups
from llmtrain.parallel.gradient_syncs import GradientSyncs
from llmtrain.parallel.placement import parameter_bytes, place
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.team import Team
from llmtrain.record.saver import write_model
from llmtrain.training.step import train_step
from tests.engines import split
from tests.families import OVERRIDES, rows_of

ROWS = 16
LENGTH = 24


def words() -> Any:
    """A tokenizer of 257 tokens."""
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)


def batches_of(engine: Engine, step: int, accumulation: int) -> list[Batch]:
    """Return this rank's share of a global batch with masked places, as micro-batches."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 250, (ROWS, LENGTH), generator=generator)
    shares_of_targets = torch.linspace(0.1, 0.9, ROWS)[:, None]
    is_target = torch.rand(ROWS, LENGTH, generator=generator) < shares_of_targets
    batch = {"input_ids": ids, "labels": torch.where(is_target, ids, IGNORED)}

    share = ROWS // engine.ranks.world_size
    return split(split(batch, share)[engine.ranks.rank], share // accumulation)


def model_of(case: str, accelerator: Accelerator, bases: Path) -> ModelBundle:
    kind, _, rest = case.partition("-")
    if kind in ("gpt", "lfm2"):
        # 66 rows do not divide by four. In lfm2, half of the width of a head is a whole number.
        config = GPTConfig(
            n_layer=2,
            n_head=2,
            n_embd=66 if kind == "gpt" else 64,
            block_size=LENGTH,
            architecture="gpt2" if kind == "gpt" else "lfm2",
        )
        with torch.device("meta"):
            gpt = build_gpt(config, 300)
        return place(accelerator, gpt.bundle(words(), trained_on="nothing", seed=3))

    rank = 0
    if "grown" in rest:
        rank = 1  # of one row, some ranks hold nothing
    elif "lora" in rest or "dora" in rest:
        rank = 3
    lora = LoraConfig(lora_r=rank, use_dora="dora" in rest)
    settings: dict[str, Any] = {"from_config": kind, "config_overrides": OVERRIDES}
    if rest:
        settings = {
            "model_name_or_path": str(bases / kind),
            "gradient_checkpointing": "again" in rest,
        }
    tokenizer = words()
    new_tokens = []
    if "grown" in rest:
        tokenizer.add_tokens(["<|one|>", "<|two|>"], special_tokens=True)
        new_tokens = [257, 258]
    config = ModelConfig(**settings, max_length=LENGTH)
    rows = rows_of(tokenizer, new_tokens=new_tokens)
    return place(accelerator, load_model(config, lora, rows, 3, accelerator.mixed_precision))


def measured(
    case: str, accelerator: Accelerator, bases: Path, folder: Path, steps: int
) -> dict[str, Any]:
    """Train the model of a case, write it, and return what was measured."""
    name, _, micro_batches = case.partition("/")
    accumulation = int(micro_batches)
    bundle = model_of(name.removesuffix("-each"), accelerator, bases)
    model = bundle.model

    optimizer = make_optimizer(accelerator, model, optim_of(case))
    trained = parameters_of(optimizer)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    kept = parameters_of(optimizer)
    are_same = len(kept) == len(trained) and all(map(operator.is_, kept, trained))
    held, full = parameter_bytes(model)
    engine = engine_for(
        Ranks(accelerator),
        prepared,
        objective=bundle.objective,
        config=ParallelConfig(sync_each_batch="-each" in name),
        accumulation=accumulation,
    )
    found: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "syncs": [],
        "scattered": [],
        "units": len(parameter_groups(model)),
        "same_parameters": bool(accelerator.gather(torch.tensor([are_same])).all()),
        "held": held,
        "all": full,
    }

    syncs = GradientSyncs(prepared)
    unused: Any = None
    with syncs.context():
        for step in range(steps):
            syncs.on_step_begin(unused)
            COUNTS.clear()
            batches = batches_of(engine, step, accumulation)
            result = train_step(engine, optimizer, batches, max_grad_norm=1.0)
            losses = engine.ranks.gather_rows(result.sums.loss[None])
            found["losses"].append(float(losses.sum() / result.denominator))
            found["norms"].append(result.grad_norm)
            found["syncs"].append(syncs.count)
            found["scattered"].append(len(COUNTS))
    check_replicas(Ranks(accelerator), prepared)

    target = folder / case.replace("/", "-")
    write(engine, bundle.files, target)
    if case == "mixtral/1":
        rounded = bundle.files.finished("bfloat16")
        write(engine, rounded, target.with_name(f"{target.name}-bfloat16"))
    if isinstance(model, HasEmbeddings):
        head = {*model.get_output_embeddings().parameters()}
        embedding = {*model.get_input_embeddings().parameters()}
        found["tied"] = bool(head & embedding)
    accelerator.free_memory()
    return found


def optim_of(case: str) -> OptimConfig:
    """Return the settings of a case.

    A large learning rate amplifies rounding. A low one is used if most gradients begin as zero, so
    that their signs are noise; for phi3 and qwen3, where ten steps in another order differ by 1e-4
    of the norm; and for a mixture of experts, where rounding may send a token to another expert.
    """
    needs_low_rate = case.startswith(
        ("base", "tied", "gpt2base", "lfm2", "phi3", "qwen3", "mixtral")
    )
    return OptimConfig(
        learning_rate=1e-3 if needs_low_rate else 1e-2,
        optim="muon" if "muon" in case else "adamw",
    )


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    groups = [group["params"] for group in optimizer.param_groups]
    return list(itertools.chain.from_iterable(groups))


def write(engine: Engine, files: ModelFormat, folder: Path) -> None:
    """Write the model as all ranks do that share it, or as the main process does alone."""
    model = engine.unwrapped
    if engine.ranks.is_sharded:
        tensors = files.tensors(model)
        write_model(
            folder,
            files,
            tensors,
            team=Team.with_new_group(),
            ranks=tuple(range(engine.ranks.world_size)),
            convert=files.tensor_converter(model),
        )
    elif engine.ranks.is_main:
        write_model(folder, files, files.export_tensors(model))


COUNTS: list[int] = []  # one for each reduce-scatter


def count_reduce_scatters() -> None:
    # torch 2.13 calls the first, 2.11 the second
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, partial(counting, getattr(dist, name)))


def counting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    COUNTS.append(1)
    return original(*args, **kwargs)


def main() -> None:
    bases, folder, steps, *cases = sys.argv[1:]
    accelerator = start_accelerator()
    Path(folder).mkdir(exist_ok=True)
    count_reduce_scatters()
    found = {
        case: measured(case, accelerator, Path(bases), Path(folder), int(steps)) for case in cases
    }
    if accelerator.is_main_process:
        Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
