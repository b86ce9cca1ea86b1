"""Run by test_sharding.py on one process, under DDP, FSDP2 and HSDP: some updates of many models; writes what each was
and did, and its last weights. `sharded_ranks.py FOLDER CASE...`; FOLDER holds the bases of adapters."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import save_file

from llmtrain import (
    GPT,
    GPTConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    empty_if_sharded,
    launch,
    load_model,
    make_optimizer,
    shard,
    start_accelerator,
)
from llmtrain.data import tokenizer as tok
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.ddp import GradientSyncs
from llmtrain.parallel.fsdp import held_bytes, units
from llmtrain.shards import gathered
from llmtrain.training.loop import accumulate, train_step

ROWS, LENGTH, UPDATES = 16, 24, 10
SMALL = "num_hidden_layers=2,hidden_size=64"


def words() -> Any:
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)


def batches(accelerator: Accelerator, step: int, accumulation: int) -> list[dict[str, torch.Tensor]]:
    """This process's share of a global batch with masked places, in so many micro-batches."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 250, (ROWS, LENGTH), generator=generator)
    trained = torch.rand(ROWS, LENGTH, generator=generator) < torch.linspace(0.1, 0.9, ROWS)[:, None]
    share = ROWS // accelerator.num_processes
    mine = slice(share * accelerator.process_index, share * (accelerator.process_index + 1))
    columns = ids[mine].chunk(accumulation), torch.where(trained, ids, -100)[mine].chunk(accumulation)
    return [{"input_ids": ids, "labels": labels} for ids, labels in zip(*columns, strict=True)]


def model_of(case: str, accelerator: Accelerator, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model of a case, and the tensors that its checkpoint would hold."""
    kind, _, rest = case.partition("-")
    if kind == "gpt":
        config = GPTConfig(n_layer=2, n_head=2, n_embd=66, block_size=LENGTH)  # 66 rows do not divide by four
        with empty_if_sharded(accelerator):
            gpt = GPT(config, 300, seed=3)
        shard(accelerator, gpt, gpt.first_weights(3))
        return gpt, gpt.state_dict()
    lora = LoraConfig(lora_r=3, use_dora="dora" in rest) if "lora" in rest or "dora" in rest else LoraConfig()
    settings: dict[str, Any] = {"from_config": kind, "config_overrides": SMALL}
    if rest:
        settings = {"model_name_or_path": str(folder / kind), "gradient_checkpointing": "again" in rest}
    new = {"tokenizer": words(), "new_tokens": []}
    if "grown" in rest:
        new["tokenizer"].add_tokens(["<|one|>", "<|two|>"], special_tokens=True)
        new["new_tokens"] = [257, 258]
    config = ModelConfig(**settings, block_size=LENGTH)
    model, files, _ = load_model(
        config, lora, new["tokenizer"], accelerator, 3, shard, packed=False, new_tokens=new["new_tokens"]
    )
    return model, files.tensors(model)


def readings(case: str, accelerator: Accelerator, folder: Path, accumulation: int, each: bool = False) -> dict:
    model, tensors = model_of(case, accelerator, folder)
    plain: Any = model
    optimizer = make_optimizer(model, OptimConfig(learning_rate=1e-2, optim="muon" if "muon" in case else "adamw"))
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    model, optimizer = accelerator.prepare(model, optimizer)
    kept = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[str, Any] = {"losses": [], "norms": [], "syncs": [], "scattered": [], "units": units(plain)}
    found["same_parameters"] = len(kept) == len(trained) and all(a is b for a, b in zip(kept, trained, strict=True))
    found["held"], found["all"] = held_bytes(plain)
    syncs, scattered = GradientSyncs(model), []
    original = dist.reduce_scatter_tensor

    def counting(*args: Any, **kwargs: Any) -> Any:
        scattered.append(1)
        return original(*args, **kwargs)

    dist.reduce_scatter_tensor = counting
    for step in range(UPDATES):
        syncs.restart()
        scattered.clear()
        window = batches(accelerator, step, accumulation)
        how = (lambda *a: accumulate(*a, sync_each_batch=True)) if each else None
        update = train_step(accelerator, model, optimizer, window, 1.0, forward_backward=how)
        found["losses"].append(float(accelerator.reduce(update.nll, reduction="sum") / update.tokens))
        found["norms"].append(update.grad_norm)
        found["syncs"].append(syncs.count)
        found["scattered"].append(len(scattered))
    dist.reduce_scatter_tensor = original
    check_replicas(accelerator, model)
    wholes = {name: gathered(tensor, 0) for name, tensor in tensors.items()}
    if accelerator.is_main_process:
        save_file({name: whole.contiguous() for name, whole in wholes.items()}, folder / f"{case}-{accumulation}.tmp")
    if hasattr(plain, "get_output_embeddings"):
        ends = plain.get_output_embeddings(), plain.get_input_embeddings()
        found["tied"] = bool({*ends[0].parameters()} & {*ends[1].parameters()})
    accelerator.free_memory()
    return found


def main() -> None:
    folder, *cases = sys.argv[1:]
    accelerator = start_accelerator()
    found = {}
    for case in cases:
        for accumulation in (1, 4):
            found[f"{case} {accumulation}"] = readings(case, accelerator, Path(folder), accumulation)
    found["each"] = readings(cases[0], accelerator, Path(folder), 4, each=True)
    if accelerator.is_main_process:
        Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
