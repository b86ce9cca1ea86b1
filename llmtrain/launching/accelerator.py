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
from llmtrain.errors import UserError
from llmtrain.launching.launcher import (
    Launcher,
    check_launch,
    is_sharding_requested,
    requested_sharding,
)
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import DDPHandler
from llmtrain.parallel.fsdp import is_sharded
from llmtrain.parallel.fsdp_settings import let_cpus_shard, sharding_settings
from llmtrain.parallel.mesh import Sharding, TrainingAccelerator
from llmtrain.shipped import shipped_config


def start_accelerator(
    parallel: ParallelConfig | None = None, bitwise: bool = False
) -> TrainingAccelerator:
    """Join the process group and make the Accelerator of this run, sharded if its config says so.

    Without a GPU the processes communicate over gloo. The launcher chooses the precision. If the
    user gave it none, a GPU computes in bfloat16, or in float16 if it has no bfloat16.

    A collective fails that a process does not join within ``ddp_timeout`` seconds and one minute,
    in which the heartbeat says which one is missing.

    Args:
        bitwise: a CPU process has one thread on every layout, unless the user chose a number,
            because sums over more threads round differently.

    Raises:
        UserError: what was launched cannot be run.
    """
    if "WORLD_SIZE" not in os.environ:
        # An earlier run of this process, as in a notebook, is over.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    parallel = parallel or ParallelConfig()
    check_launch()
    launcher = Launcher.find()
    world = _world_size()
    cpu = use_cpu(launcher)
    # The heartbeat has a minute more, to say who is missing.
    timeout = timedelta(seconds=parallel.ddp_timeout + 60)

    _set_arithmetic(on_gpu=not cpu, bitwise=bitwise)
    threads = _share_threads(launcher, bitwise) if cpu else torch.get_num_threads()
    if cpu and not any(name.startswith("MALLOC_") for name in os.environ):
        _keep_freed_memory()
    sharding = requested_sharding(world, parallel.pipeline_stages)
    precision = _precision(launcher, cpu, sharding is not None)
    _check_precision(precision, cpu, sharding, bitwise)
    _check_exchange(parallel, sharding, bitwise)
    if is_sharding_requested() and sharding is None:
        say("sharded", "nothing, nor is anything offloaded: no two processes share a model")

    _meet_after_restart(_backend(cpu, sharding), timeout)
    accelerator = _make_accelerator(cpu, precision, timeout, sharding, bitwise)
    # Accelerate reads this when it wraps a model, and does not take it as an argument.
    accelerator.ddp_handler = DDPHandler(parallel.bucket_mib)
    if accelerator.num_processes != world:
        raise UserError(
            f"the launcher started {world} processes and this one is in a group of "
            f"{accelerator.num_processes}; each would train alone. "
            "Start with: accelerate launch --multi_gpu --num_processes N, or torchrun."
        )
    if sharding is not None:
        sharding.set_mesh(accelerator)
    if is_sharded(accelerator) != (sharding is not None):
        raise UserError(
            f"accelerate {accelerate_version} does not shard as it was asked to; "
            "use 1.15, or a DDP config."
        )
    say("device", _device_line(accelerator, launcher, threads, bitwise))
    return accelerator


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _backend(cpu: bool, sharding: Sharding | None) -> str:
    """Return the backend of torch.distributed over which the processes communicate."""
    if cpu:
        return "gloo"
    if sharding is not None and sharding.cpu_offload:
        return "cuda:nccl,cpu:gloo"
    return "nccl"


def _device_line(accelerator: Accelerator, launcher: Launcher, threads: int, bitwise: bool) -> str:
    """Return the line of the start-up log that says on which devices, and in which precision."""
    world = int(accelerator.num_processes)
    is_cuda = accelerator.device.type == "cuda"
    device = torch.cuda.get_device_name() if is_cuda else accelerator.device.type
    is_cpu = accelerator.device.type == "cpu"

    asked_for_gpus = (
        launcher.config.get("distributed_type") in ("MULTI_GPU", "FSDP")
        or "--multi_gpu" in launcher.words
    )
    over = ""
    if is_cpu and world > 1 and asked_for_gpus and not launcher.said("use_cpu"):
        over = " over gloo (no GPU here)"

    float32 = "float32 (products in TF32)" if is_cuda and not bitwise else "float32"
    mixed_precision = accelerator.mixed_precision
    precision = float32 if mixed_precision == "no" else mixed_precision
    remark = ""
    if is_cpu and precision == "bf16" and not cpu_has_bfloat16():
        remark = ", which this CPU emulates: --mixed_precision no is many times as fast"
    elif precision != float32 and not launcher.said(*_PRECISION_NAMES):
        remark = " (default)"
    return (
        f"{counted(world, 'process')} on {device}{over}, {counted(threads, 'thread')} each, "
        f"{precision}{remark}"
    )


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
    """Return whether this process runs on the CPU.

    Raises:
        UserError: this machine has fewer GPUs than processes.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or launcher.wants_cpu():
        return True
    if device.type == "mps" and _world_size() > 1:
        return True  # the GPUs of Macs form no group

    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.accelerator.device_count()
    if processes > gpus:
        raise UserError(
            f"{processes} processes were started on a machine with {counted(gpus, 'GPU')}; "
            f"start one a GPU (--num_processes), or use {shipped_config('cpu_ddp')}."
        )
    return False


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products in bfloat16.

    Without them such products take up to a hundred times as long.
    """
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())


def counted(n: int, word: str) -> str:
    """Return a number and its noun, such as ``2 processes``."""
    if n == 1:
        return f"{n} {word}"
    ending = "es" if word.endswith(("s", "ch")) else "s"
    return f"{n} {word}{ending}"


# Where an earlier run of this process wrote the number of threads, if the user chose none.
_SHARED = "LLMTRAIN_SHARED_THREADS"


def _share_threads(launcher: Launcher, bitwise: bool = False) -> int:
    """Set the threads of a CPU process: the user's number, or its share of this machine's cores.

    Sums over more threads round differently, so the number is set, and recorded.
    """
    users_number = launcher.said("num_cpu_threads_per_process", "OMP_NUM_THREADS")
    if users_number == os.environ.get(_SHARED):
        users_number = None  # an earlier run of this process wrote it

    if users_number:
        threads = int(users_number)
    elif bitwise:
        threads = 1
    else:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = max(1, _usable_cores() // processes)

    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if not users_number:
        os.environ[_SHARED] = str(threads)
    return threads


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Options of mallopt, as malloc.h of the GNU C library has them.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def _keep_freed_memory() -> None:
    """Let the GNU C library keep the memory that a step frees, for the next step.

    Clearing new pages takes up to a fifth of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_THRESHOLD, 1 << 30)  # up to 1 GiB nothing is mapped on its own
    mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)  # nothing is given back


# The names of the precision as a flag, or in a config file, and in the environment.
_PRECISION_NAMES = ("mixed_precision", "ACCELERATE_MIXED_PRECISION")


def _precision(launcher: Launcher, cpu: bool, sharded: bool) -> str:
    """Return the mixed precision that the user chose, or the default of this device."""
    users_precision = launcher.said(*_PRECISION_NAMES)
    if users_precision is False:
        return "no"  # as YAML reads a bare `no`
    if users_precision is not None:
        return str(users_precision).lower()

    if cpu or not torch.cuda.is_available():
        return "no"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "no" if sharded else "fp16"  # sharded models do not support fp16


def _meet_after_restart(backend: str, timeout: timedelta) -> None:
    """Join the process group under new keys if the launcher has restarted its processes.

    With a static rendezvous, accelerate's default, the store still has the addresses of the
    processes that died, and the first one to start would try to reach those.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    world = _world_size()
    if attempt == "0" or world == 1 or not has_agent_store:
        return

    agent_store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=False,
        timeout=timeout,
    )
    torch.distributed.init_process_group(
        backend,
        store=PrefixStore(f"attempt-{attempt}", agent_store),
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=timeout,
    )


def _check_precision(precision: str, cpu: bool, sharding: Sharding | None, bitwise: bool) -> None:
    """Raise :class:`UserError` if this run cannot compute in a precision, or not ``bitwise``."""
    if precision not in ("no", "bf16", "fp16"):
        raise UserError(f"mixed precision '{precision}' is not supported; use no, bf16 or fp16.")
    if cpu and precision == "fp16":
        # Accelerate would accept it, and compute in float32.
        raise UserError("mixed precision fp16 needs a GPU; on a CPU use no or bf16.")
    if sharding is not None and precision == "fp16":
        raise UserError(
            "mixed precision fp16 is not supported for a model that is sharded; use bf16 or no."
        )
    if sharding is not None and bitwise:
        raise UserError(
            "--bitwise adds gradients in an order that FSDP does not know; "
            "use a DDP config, or leave it out."
        )


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
    cpu: bool, precision: str, timeout: timedelta, sharding: Sharding | None, bitwise: bool
) -> TrainingAccelerator:
    if sharding is None:
        # A process alone has no other to share with, whatever its config says.
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
    return TrainingAccelerator(
        sharding=sharding,
        bitwise=bitwise,
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=1,
        dataloader_config=loading,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        rng_types=[],  # the order of the data is a function of the seed, not of a generator
        **({} if sharding is None else sharding_settings(sharding, cpu, precision)),
    )
