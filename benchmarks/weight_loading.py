"""Memory and time to load a Hugging Face model: our loader beside from_pretrained and from_config.

export MALLOC_MMAP_THRESHOLD_=65536  # freed memory goes back to the system at once
python -m benchmarks.weight_loading
torchrun --nproc_per_node 2 -m benchmarks.weight_loading

One process loads the full model. Several processes shard it with FSDP2. The model is a Llama with
271 million parameters, and it is loaded as float32. Each line is the worst process of one method:

- own: peak of the memory that the process allocates (RssAnon)
- mapped: peak of the file pages that it maps (RssFile), which the system can free
- the first digits of a hash of all weights

Linux only.
"""

import gc
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from llmtrain.models.weight_loading import random_weights, stored_weights

CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=16,
    num_attention_heads=16,
    vocab_size=32000,
)
SEED = 5
MIB = 2**20


class PeakMemory:
    """Samples the memory of this process in a thread, relative to what the process held before."""

    def __init__(self) -> None:
        self.own = 0
        self.mapped = 0
        self._before = _resident()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_done.wait(0.001):
            now = _resident()
            self.own = max(self.own, now["RssAnon"] - self._before["RssAnon"])
            self.mapped = max(self.mapped, now["RssFile"] - self._before["RssFile"])


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo")
    folder_names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder_names)
    folder = Path(folder_names[0])
    for dtype in (torch.bfloat16, torch.float32):
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} processes, files of {dtype}")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype)
            model.save_pretrained(folder, max_shard_size="300MB")
            del model
        dist.barrier()
        for name, load in loaders(folder).items():
            measure(name, load)
        dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


def loaders(folder: Path) -> dict[str, Callable[[], PreTrainedModel]]:
    """Return the methods to compare, by name."""
    methods = {
        "stored_weights": lambda: filled(
            lambda model: stored_weights(model, folder, torch.float32)
        ),
        "from_pretrained": lambda: sharded(from_pretrained(folder)),
    }
    if dist.get_world_size() > 1:
        plan = DistributedConfig(fsdp_size=dist.get_world_size())
        methods["from_pretrained, its own FSDP"] = lambda: from_pretrained(
            folder, distributed_config=plan
        )
    methods["random_weights"] = lambda: filled(lambda model: random_weights(model, SEED))
    methods["from_config"] = lambda: sharded(from_config())
    if dist.get_world_size() > 1:
        methods["initialise shards in place"] = initialised_in_place
    return methods


def measure(name: str, load: Callable[[], PreTrainedModel]) -> None:
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    with PeakMemory() as peak:
        model = load()
    seconds = time.perf_counter() - start
    worst = torch.tensor([peak.own / MIB, peak.mapped / MIB, seconds])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    digest = digest_of(model)
    if dist.get_rank() == 0:
        own, mapped, seconds = worst.tolist()
        memory = f"own {own:6.0f} MiB   mapped {mapped:5.0f} MiB"
        print(f"{name:<30} {memory}   {seconds:5.1f} s   {digest}")


def from_pretrained(folder: Path, **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def from_config() -> PreTrainedModel:
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)


def meta_model() -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)


def sharded(model: PreTrainedModel) -> PreTrainedModel:
    """Shard a model by blocks if there are several processes."""
    if dist.get_world_size() > 1:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def filled(make_weights: Callable[[PreTrainedModel], object]) -> PreTrainedModel:
    """Shard a model on the meta device, and copy this rank's shards from full tensors."""
    model = sharded(meta_model())
    make_real(model)
    parameters = dict(model.named_parameters())
    for name, full in make_weights(meta_model()):
        shard = local_tensor(parameters[name])
        if shard.shape != full.shape:
            shard.copy_(full.chunk(dist.get_world_size())[dist.get_rank()])
        else:
            shard.copy_(full)
    return model


def initialised_in_place() -> PreTrainedModel:
    model = sharded(meta_model())
    make_real(model)
    for module in model.modules():
        module._is_hf_initialized = False
    torch.manual_seed(SEED)
    model.initialize_weights()
    return model


def make_real(model: nn.Module) -> None:
    """Give the parameters of a model memory on the CPU; its buffers have values already."""
    model._apply(
        lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
    )


def local_tensor(parameter: nn.Parameter) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        tensor = parameter.detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(full.contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]


def _resident() -> dict[str, int]:
    """Return the resident memory of this process in bytes, by kind: proc_pid_status(5)."""
    sizes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("RssAnon", "RssFile"):
            sizes[key] = 1024 * int(value.split()[0])
    return sizes


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    main()
