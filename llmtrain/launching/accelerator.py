"""From the environment to the Accelerator of a run: device, precision, threads, sharding, and the process group."""

import ctypes
import os
from datetime import timedelta

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate import __version__ as accelerate_version
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs
from torch._C._distributed_c10d import PrefixStore, TCPStore

from llmtrain.console import say
from llmtrain.errors import UserError, require
from llmtrain.launching.launcher import Launcher, asked_sharding, check_launch, sharding_is_asked
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import DDPHandler
from llmtrain.parallel.fsdp import is_sharded, let_cpus_shard, sharding_settings
from llmtrain.parallel.mesh import Sharding
from llmtrain.shipped import shipped_config


def start_accelerator(parallel: ParallelConfig | None = None, bitwise: bool = False) -> Accelerator:
    """Join the process group and make the one Accelerator of this run, which shards where its config asks for it.

    Without an accelerator device the processes meet over gloo. Precision is the launcher's; where it was told none, a
    GPU uses bfloat16, or float16 where it has no other. ``bitwise`` gives a CPU process one thread, on every layout,
    unless another number was asked for: sums over more threads round differently. A collective that is not joined
    within ``ddp_timeout`` seconds, and a minute in which the heartbeat says who is missing, fails.
    """
    if "WORLD_SIZE" not in os.environ:  # an earlier run of this process, in a notebook say, is over
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    parallel = parallel or ParallelConfig()
    check_launch()
    launcher, world = Launcher.find(), int(os.environ.get("WORLD_SIZE", "1"))
    cpu, timeout = use_cpu(launcher), timedelta(seconds=parallel.ddp_timeout + 60)
    _set_arithmetic(on_gpu=not cpu, bitwise=bitwise)
    threads = _share_threads(launcher, bitwise) if cpu else torch.get_num_threads()
    if cpu and not any(name.startswith("MALLOC_") for name in os.environ):
        _keep_freed_memory()
    sharding = asked_sharding(world, parallel.pipeline_stages)
    precision = _precision(launcher, cpu, sharding is not None)
    _check_precision(precision, cpu, sharding, bitwise)
    _check_exchange(parallel, sharding, bitwise)
    if sharding_is_asked() and sharding is None:
        say("sharded", "nothing, nor is anything offloaded: no two processes share a model")
    backend = (
        "gloo" if cpu else "cuda:nccl,cpu:gloo" if sharding and sharding.cpu_offload else "nccl"
    )
    _meet_after_restart(backend, timeout)
    accelerator = _make_accelerator(cpu, precision, timeout, sharding)
    accelerator.ddp_handler = DDPHandler(parallel, bitwise)  # which it does not take as an argument
    require(
        accelerator.num_processes == world,
        f"the launcher started {world} processes and this one is in a group of {accelerator.num_processes}; each would "
        "train alone. Start with: accelerate launch --multi_gpu --num_processes N, or torchrun.",
    )
    if sharding is not None:
        sharding.set_mesh(accelerator)
    as_asked = bool(sharding) == is_sharded(accelerator)
    require(
        as_asked,
        f"accelerate {accelerate_version} does not shard as it was asked to; use 1.15, or a DDP config.",
    )
    device = (
        torch.cuda.get_device_name()
        if accelerator.device.type == "cuda"
        else accelerator.device.type
    )
    several = ("MULTI_GPU", "FSDP")
    asked_gpu = (
        launcher.config.get("distributed_type") in several or "--multi_gpu" in launcher.words
    ) and world > 1
    over = " over gloo (no GPU here)" if cpu and asked_gpu and not launcher.said("use_cpu") else ""
    plain = (
        "float32" if accelerator.device.type != "cuda" or bitwise else "float32 (products in TF32)"
    )
    how = {"no": plain}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    said = (
        ""
        if launcher.said("mixed_precision", "ACCELERATE_MIXED_PRECISION") or how == plain
        else " (default)"
    )
    if cpu and how == "bf16" and not cpu_has_bfloat16():
        said = ", which this CPU emulates: --mixed_precision no is many times as fast"
    say(
        "device",
        f"{counted(world, 'process')} on {device}{over}, {counted(threads, 'thread')} each, {how}{said}",
    )
    return accelerator


def _set_arithmetic(on_gpu: bool, bitwise: bool) -> None:
    """Set the precision of float32 products and the determinism of operations for this run.

    Both are set whichever way the run wants them, because an earlier run of this process may have
    wanted the other.
    """
    uses_tf32 = on_gpu and not bitwise
    torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")

    is_deterministic = on_gpu and bitwise  # a CPU repeats itself anyway
    if torch.are_deterministic_algorithms_enabled() != is_deterministic:
        torch.use_deterministic_algorithms(is_deterministic)  # imports a compiler: a second or more
    if is_deterministic:
        # Without a fixed workspace cuBLAS may choose another algorithm each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_cpu(launcher: Launcher) -> bool:
    """Return whether a run of this process is on the CPU. Raises :class:`UserError` where it has no GPU of its own."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or launcher.wants_cpu():
        return True
    if device.type == "mps" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return True  # Macs' GPUs form no group
    here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    require(
        here <= devices,
        f"{here} processes were started on a machine with {counted(devices, 'GPU')}; start one a GPU "
        f"(--num_processes), or use {shipped_config('cpu_ddp')}.",
    )
    return False


def cpu_has_bfloat16() -> bool:
    """Return whether products in bfloat16 have instructions here; else they take up to a hundred times as long."""
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return known is not None and bool(known())


def counted(n: int, word: str) -> str:
    """Return a number of things, for a person."""
    return f"{n} {word}" if n == 1 else f"{n} {word}{'es' if word.endswith(('s', 'ch')) else 's'}"


def _share_threads(launcher: Launcher, bitwise: bool = False) -> int:
    """Pin the threads of a CPU process: as many as were asked for, else its share of this machine's cores.

    The number is part of what a run computes (sums over more threads round differently), so it is set and recorded.
    """
    asked = launcher.said("num_cpu_threads_per_process", "OMP_NUM_THREADS")
    asked = None if asked == os.environ.get(_SHARED) else asked
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    share = 1 if bitwise else max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    threads = int(asked) if asked else share
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if not asked:
        os.environ[_SHARED] = str(threads)
    return threads


def _keep_freed_memory() -> None:
    """Let glibc keep what an update frees for the next one: to clear pages anew takes up to a fifth of an update.

    Values of ``mallopt`` of the GNU C library: nothing up to 1 GiB is mapped on its own, nothing is given back.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, size in ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1)):
            set_option(option, size)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_SHARED = "LLMTRAIN_SHARED_THREADS"  # what an earlier run of this process wrote, where nobody asked for a number


def _precision(launcher: Launcher, cpu: bool, sharded: bool) -> str:
    said = launcher.said("mixed_precision", "ACCELERATE_MIXED_PRECISION")
    if said is not None:
        return "no" if said is False else str(said).lower()  # YAML reads a bare `no` as false
    if cpu or not torch.cuda.is_available():
        return "no"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "no" if sharded else "fp16"  # which is not supported where models are sharded


def _meet_after_restart(backend: str, timeout: timedelta) -> None:
    """Join the group under keys of this attempt's own, where the launcher has restarted its processes.

    With a static rendezvous, which is accelerate's default, its store still holds the addresses of the processes that
    died, and whoever starts first would try to reach those.
    """
    attempt, world = (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        int(os.environ.get("WORLD_SIZE", "1")),
    )
    if attempt == "0" or world == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address, port, rank = (
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["RANK"]),
    )
    store = PrefixStore(
        f"attempt-{attempt}", TCPStore(address, port, world, is_master=False, timeout=timeout)
    )
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout
    )


def _check_precision(precision: str, cpu: bool, sharding: Sharding | None, bitwise: bool) -> None:
    known, half, sharded = (
        precision in ("no", "bf16", "fp16"),
        precision == "fp16",
        sharding is not None,
    )
    require(known, f"mixed precision '{precision}' is not supported; use no, bf16 or fp16.")
    # accelerate would take it, and compute in float32
    require(not (cpu and half), "mixed precision fp16 needs a GPU; on a CPU use no or bf16.")
    why = "mixed precision fp16 is not supported where the model is sharded; use bf16 or no."
    require(not (sharded and half), why)
    why = "--bitwise adds gradients in an order that FSDP does not know; use a DDP config, or leave it out."
    require(not (sharded and bitwise), why)


def _check_exchange(parallel: ParallelConfig, sharding: Sharding | None, bitwise: bool) -> None:
    """Raise :class:`UserError` if gradients cannot be compressed in this run."""
    if parallel.approximation is None:
        return
    hook = f"--ddp_comm_hook {parallel.ddp_comm_hook}"
    if bitwise:
        raise UserError(f"{hook} is approximate, and --bitwise is exact; leave one of them out.")
    if sharding is not None:
        raise UserError(
            f"{hook} is for DDP, and the accelerate config shards the model; leave one of them out."
        )


def _make_accelerator(
    cpu: bool, precision: str, timeout: timedelta, sharding: Sharding | None
) -> Accelerator:
    if not sharding:  # one process has nobody to share with, whatever its config says
        for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
            os.environ.pop(name, None)
    elif cpu:
        let_cpus_shard(timeout=timeout)
    loading = DataLoaderConfiguration(
        split_batches=True,
        even_batches=False,
        dispatch_batches=False,
        use_seedable_sampler=False,
        non_blocking=not cpu,
    )
    return Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=1,
        dataloader_config=loading,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        rng_types=[],  # the order of the data is a function of the seed, not of a generator
        **(sharding_settings(sharding, cpu, precision) if sharding else {}),
    )
