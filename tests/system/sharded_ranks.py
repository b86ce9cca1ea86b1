"""Run by test_sharding.py on one process, under DDP, FSDP2 and HSDP: some updates of many models; writes what each was
and did, and the model. `sharded_ranks.py BASES FOLDER UPDATES CASE...`, a case being such as `gpt/4`, with four
micro-batches; BASES holds the folders that adapters stand beside."""

import json
import os
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
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.gpt_family import build_gpt
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.blocks import HasEmbeddings
from llmtrain.parallel.config import ParallelConfig, PipelineConfig
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.engines import engine_for
from llmtrain.parallel.fsdp import parameter_groups
from llmtrain.parallel.gradient_syncs import GradientSyncs
from llmtrain.parallel.placement import held_bytes, place
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.team import Team
from llmtrain.record.checkpoint import write_model
from llmtrain.training.step import train_step
from tests.families import OVERRIDES, rows_of

ROWS, LENGTH = 16, 24
STAGES = int(os.environ.get("STAGES", "1"))  # of a pipeline


def words() -> Any:
    """A tokenizer of 257 tokens."""
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)


def batches(
    accelerator: Accelerator, step: int, accumulation: int
) -> list[dict[str, torch.Tensor]]:
    """This process's share of a global batch with masked places, in so many micro-batches."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 250, (ROWS, LENGTH), generator=generator)
    trained = (
        torch.rand(ROWS, LENGTH, generator=generator) < torch.linspace(0.1, 0.9, ROWS)[:, None]
    )
    ranks = Ranks(accelerator)
    share, rank = ROWS // ranks.data_parallel_size, ranks.data_parallel_rank
    mine = slice(share * rank, share * (rank + 1))
    columns = (
        ids[mine].chunk(accumulation),
        torch.where(trained, ids, -100)[mine].chunk(accumulation),
    )
    return [{"input_ids": ids, "labels": labels} for ids, labels in zip(*columns, strict=True)]


def model_of(case: str, accelerator: Accelerator, bases: Path) -> ModelBundle:
    kind, _, rest = case.partition("-")
    if kind in ("gpt", "lfm2"):
        size = (
            66 if kind == "gpt" else 64
        )  # 66 rows do not divide by four; of the others' heads half is a number
        architecture: Any = "gpt2" if kind == "gpt" else kind
        config = GPTConfig(
            n_layer=2, n_head=2, n_embd=size, block_size=LENGTH, architecture=architecture
        )
        with torch.device("meta"):
            gpt = build_gpt(config, 300)
        return place(
            accelerator, ModelBundle(gpt, gpt.files(words(), "nothing"), gpt.first_weights(3))
        )
    rank = (
        1 if "grown" in rest else 3 if "lora" in rest or "dora" in rest else 0
    )  # of one row some hold nothing
    lora = LoraConfig(lora_r=rank, use_dora="dora" in rest)
    settings: dict[str, Any] = {"from_config": kind, "config_overrides": OVERRIDES}
    if rest:
        settings = {
            "model_name_or_path": str(bases / kind),
            "gradient_checkpointing": "again" in rest,
        }
    new = {"tokenizer": words(), "new_tokens": []}
    if "grown" in rest:
        new["tokenizer"].add_tokens(["<|one|>", "<|two|>"], special_tokens=True)
        new["new_tokens"] = [257, 258]
    config = ModelConfig(**settings, block_size=LENGTH)
    rows = rows_of(new["tokenizer"], new_tokens=new["new_tokens"])
    return place(accelerator, load_model(config, lora, rows, 3, accelerator.mixed_precision))


def readings(
    case: str, accelerator: Accelerator, bases: Path, folder: Path, updates: int
) -> dict[str, Any]:
    name, _, accumulation = case.partition("/")
    built = model_of(name.removesuffix("-each"), accelerator, bases)
    model, files = built.model, built.files
    plain: Any = model
    # A large learning rate amplifies rounding. A low one is used if most gradients begin as zero, so that their signs
    # are noise; for phi3, where ten steps with one or four micro-batches differ by 1e-4 of the norm; and for a mixture
    # of experts, where rounding may send a token to another expert.
    gently = case.startswith(("base", "tied", "gpt2base", "lfm2", "phi3", "mixtral"))
    optim = OptimConfig(
        learning_rate=1e-3 if gently else 1e-2, optim="muon" if "muon" in case else "adamw"
    )
    optimizer = make_optimizer(accelerator, model, optim)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    model, optimizer = accelerator.prepare(model, optimizer)
    kept = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "syncs": [],
        "scattered": [],
        "units": len(parameter_groups(plain)),
    }
    same = len(kept) == len(trained) and all(a is b for a, b in zip(kept, trained, strict=True))
    found["same_parameters"] = bool(accelerator.gather(torch.tensor([same])).all())
    found["held"], found["all"] = held_bytes(plain)
    syncs, scattered = GradientSyncs(model), COUNTS
    engine = engine_for(
        accelerator,
        model,
        objective=built.objective,
        config=ParallelConfig(sync_each_batch="-each" in name),
        bitwise=False,
        accumulation=int(accumulation),
    )
    with syncs.counting():
        for step in range(updates):
            syncs.restart()
            scattered.clear()
            micro_batches = batches(accelerator, step, int(accumulation))
            result = train_step(engine, optimizer, micro_batches, max_grad_norm=1.0)
            losses = engine.gather_rows(result.sums.loss[None])
            found["losses"].append(float(losses.sum() / result.denominator))
            found["norms"].append(result.grad_norm)
            found["syncs"].append(syncs.count)
            found["scattered"].append(len(scattered))
    check_replicas(accelerator, model)
    if accelerator.is_fsdp2:
        tensors = engine.gatherable(files.exported(plain))
        write_model(folder / case.replace("/", "-"), files, tensors, Team.of_all(sees_folder=True))
    elif accelerator.is_main_process:
        write_model(
            folder / case.replace("/", "-"), files, DistributedTensors(files.exported(plain))
        )
    if isinstance(plain, HasEmbeddings):
        ends = plain.get_output_embeddings(), plain.get_input_embeddings()
        found["tied"] = bool({*ends[0].parameters()} & {*ends[1].parameters()})
    accelerator.free_memory()
    return found


COUNTS: list[int] = []  # one for each reduce-scatter


def count_reduce_scatters() -> None:
    for name in (
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    ):  # torch 2.13 calls the first, 2.11 the second
        if hasattr(dist, name):
            setattr(dist, name, partial(counting, getattr(dist, name)))


def counting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    COUNTS.append(1)
    return original(*args, **kwargs)


def main() -> None:
    bases, folder, updates, *cases = sys.argv[1:]
    accelerator = start_accelerator(PipelineConfig(pipeline_stages=STAGES))
    Path(folder).mkdir(exist_ok=True)
    count_reduce_scatters()
    found = {
        case: readings(case, accelerator, Path(bases), Path(folder), int(updates)) for case in cases
    }
    if accelerator.is_main_process:
        Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
