"""Started by test_sharding.py in each parallel layout: train models for some steps.

`sharded_ranks.py BASES FOLDER STEPS CASE...` writes the trained models and FOLDER/results.json.
BASES has the models that are fine-tuned. See `Case` for the names of cases.
"""

import itertools
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from llmtrain.interfaces.model import HasEmbeddings, ModelFormat
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.lfm2 import build_gpt
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import parameter_groups
from llmtrain.parallel.placement import engine_for, move_to_devices
from llmtrain.parallel.ranks import ranks_of
from llmtrain.record.saver import write_model
from llmtrain.training.step import train_step
from tests.engines import parameter_bytes, split
from tests.families import OVERRIDES, rows_of

LENGTH = 24

# A large learning rate amplifies rounding. These models need a low one: in fine-tuned models and
# lfm2, most gradients begin as zero, so that their signs are noise; in phi3 and qwen3, ten steps in
# another order differ by 1e-4 of the norm; and in a mixture of experts, rounding may send a token
# to another expert.
LOW_RATE_MODELS = shlex.split("base base_of_experts gpt2base lfm2 mixtral phi3 qwen3 tied")


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the number of micro-batches: `base-lora-grown/4`.

    The options of models in BASES are:
        full: train all weights.
        lora, dora: train an adapter.
        saved: train whole modules as well.
        grown: add two tokens.
        again: recompute activations.

    Those of other models are:
        each: synchronise the gradients in each micro-batch.
        muon, 8bit: train with Muon, or with AdamW in eight bits.
        packed: each row has two documents.
    """

    name: str
    model: str
    options: frozenset[str]
    micro_batches: int

    @classmethod
    def parse(cls, name: str) -> "Case":
        model_and_options, _, micro_batches = name.partition("/")
        model, *options = model_and_options.split("-")
        return cls(name, model, frozenset(options), int(micro_batches))

    @property
    def folder_name(self) -> str:
        return self.name.replace("/", "-")

    @property
    def rows(self) -> int:
        """The size of a global batch."""
        return 8 if "packed" in self.options else 16

    @property
    def optim(self) -> OptimConfig:
        names = {"muon": "muon", "8bit": "adamw_torch_8bit"}
        [name] = [names[option] for option in self.options & names.keys()] or ["adamw"]
        learning_rate = 1e-3 if self.model in LOW_RATE_MODELS else 1e-2
        return OptimConfig(learning_rate=learning_rate, optim=name)

    @property
    def lora(self) -> LoraConfig:
        rank = 0
        if "grown" in self.options:
            rank = 1  # with one row, some ranks have an empty shard
        elif self.options & {"lora", "dora"}:
            rank = 3
        saved_modules = ["embed_tokens", "lm_head", "model.norm"]
        return LoraConfig(
            lora_r=rank,
            use_dora="dora" in self.options,
            lora_modules_to_save=saved_modules if "saved" in self.options else [],
        )


# --- models and batches


def byte_tokenizer() -> Any:
    """Return a tokenizer of 257 tokens."""
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)


def build_model(case: Case, accelerator: Accelerator, bases: Path) -> ModelBundle:
    if case.model in ("gpt", "lfm2"):
        return build_own_model(case, accelerator)

    tokenizer = byte_tokenizer()
    new_tokens = []
    if "grown" in case.options:
        tokenizer.add_tokens(["<|one|>", "<|two|>"], special_tokens=True)
        new_tokens = [257, 258]
    is_packed = "packed" in case.options
    rows = rows_of(tokenizer, packed=is_packed, new_tokens=new_tokens)

    if case.options and not is_packed:
        config = ModelConfig(
            model_name_or_path=str(bases / case.model),
            gradient_checkpointing="again" in case.options,
            max_length=LENGTH,
        )
    else:
        config = ModelConfig(from_config=case.model, config_overrides=OVERRIDES, max_length=LENGTH)
    bundle = move_to_devices(
        accelerator.ranks, load_model(config, case.lora, rows, 3, accelerator.mixed_precision)
    )
    # The random numbers of these modules depend on the layout.
    for module in bundle.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return bundle


def build_own_model(case: Case, accelerator: Accelerator, dropout: float = 0.0) -> ModelBundle:
    is_lfm2 = case.model == "lfm2"
    config = GPTConfig(
        n_layer=2,
        n_head=2,
        # 66 rows do not divide by four ranks. In lfm2, the width of a head must be even.
        n_embd=64 if is_lfm2 else 66,
        block_size=LENGTH,
        dropout=dropout,
        architecture="lfm2" if is_lfm2 else "gpt2",
    )
    with torch.device("meta"):
        gpt = build_gpt(config, 300)
    return move_to_devices(
        accelerator.ranks, gpt.bundle(byte_tokenizer(), trained_on="nothing", seed=3)
    )


def micro_batches_of(engine: Engine, case: Case, step: int) -> list[Batch]:
    """Return this rank's micro-batches of a global batch. Its rows have different numbers of targets."""
    generator = torch.Generator().manual_seed(step)
    token_ids = torch.randint(1, 250, (case.rows, LENGTH), generator=generator)
    target_shares = torch.linspace(0.1, 0.9, case.rows)[:, None]
    is_target = torch.rand(case.rows, LENGTH, generator=generator) < target_shares
    batch = {"input_ids": token_ids, "labels": torch.where(is_target, token_ids, IGNORED)}
    if "packed" in case.options:
        positions = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])
        batch["position_ids"] = positions.expand(case.rows, -1)

    rows_per_rank = case.rows // engine.ranks.world_size
    batch_of_rank = split(batch, rows_per_rank)[engine.ranks.rank]
    return split(batch_of_rank, rows_per_rank // case.micro_batches)


# --- counts


class ReduceScatterCounter:
    """Counts the reduce-scatters that FSDP starts."""

    def __init__(self) -> None:
        self.count = 0
        # torch 2.13 calls the first, and torch 2.11 the second.
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(dist, name):
                setattr(dist, name, partial(self._call, getattr(dist, name)))

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return function(*args, **kwargs)


REDUCE_SCATTERS = ReduceScatterCounter()


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    groups = [group["params"] for group in optimizer.param_groups]
    return list(itertools.chain.from_iterable(groups))


def has_tied_embeddings(model: HasEmbeddings) -> bool:
    head = {*model.get_output_embeddings().parameters()}
    embedding = {*model.get_input_embeddings().parameters()}
    return bool(head & embedding)


# --- training


def train(
    case: Case, accelerator: Accelerator, bundle: ModelBundle, steps: int
) -> tuple[Engine, dict[str, Any]]:
    """Train the model of a case, and return its engine and the results of each step."""
    model = bundle.model
    optimizer = make_optimizer(accelerator, model, case.optim)
    parameters = parameters_of(optimizer)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    prepared_parameters = parameters_of(optimizer)
    assert [*map(id, prepared_parameters)] == [*map(id, parameters)], "the optimizer has others"

    local_bytes, total_bytes = parameter_bytes(model)
    engine = engine_for(
        ranks_of(accelerator),
        prepared,
        objective=bundle.objective,
        config=ParallelConfig(sync_each_batch="each" in case.options),
    )
    results: dict[str, Any] = {
        "losses": [],
        "grad_norms": [],
        "gradient_syncs": [],
        "reduce_scatters": [],
        "units": len(parameter_groups(model)),
        "local_share": local_bytes / total_bytes,
        "is_tied": isinstance(model, HasEmbeddings) and has_tied_embeddings(model),
    }
    for step in range(steps):
        REDUCE_SCATTERS.count = 0
        batches = micro_batches_of(engine, case, step)
        result = train_step(engine, optimizer, batches, max_grad_norm=1.0)

        loss_sums = engine.ranks.gather_rows(result.sums.loss[None])
        results["losses"].append(float(loss_sums.sum() / result.denominator))
        results["grad_norms"].append(result.grad_norm)
        results["gradient_syncs"].append(engine.gradient_syncs)
        results["reduce_scatters"].append(REDUCE_SCATTERS.count)
    check_replicas(ranks_of(accelerator), prepared)
    accelerator.free_memory()
    return engine, results


def write(engine: Engine, files: ModelFormat, folder: Path) -> None:
    """Write a sharded model with all ranks, or a replicated one with the main process."""
    model = engine.unwrapped
    if engine.ranks.is_sharded:
        write_model(
            folder,
            files,
            files.tensors(model),
            team=engine.ranks.with_new_group(),
            ranks=tuple(range(engine.ranks.world_size)),
            convert=files.tensor_converter(model),
        )
    elif engine.ranks.is_main:
        write_model(folder, files, files.export_tensors(model))


def main() -> None:
    bases, folder, steps, *names = sys.argv[1:]
    accelerator = start_accelerator()
    Path(folder).mkdir(exist_ok=True)

    results = {}
    for name in names:
        case = Case.parse(name)
        bundle = build_model(case, accelerator, Path(bases))
        engine, results[name] = train(case, accelerator, bundle, int(steps))
        write(engine, bundle.files, Path(folder, case.folder_name))
        if name == "mixtral/1":
            in_bfloat16 = Path(folder, f"{case.folder_name}-bfloat16")
            write(engine, bundle.files.finished("bfloat16"), in_bfloat16)

    if accelerator.is_main_process:
        Path(folder, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    launch(main)
