"""Make the Accelerator of a run: device, precision, threads, sharding and the process group."""

import ctypes
import os
from datetime import timedelta

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs
from torch.distributed import PrefixStore, TCPStore

from llmtrain.console import pluralize, rank, say
from llmtrain.devices import cpu_cores
from llmtrain.errors import UserError
from llmtrain.files import shipped_config
from llmtrain.launching.launch_request import check_launch, is_on, requested_sharding
from llmtrain.launching.process import check_first_run
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import DDPHandler
from llmtrain.parallel.fsdp import let_cpus_shard, sharding_settings
from llmtrain.parallel.ranks import Sharding, TrainingAccelerator


def start_accelerator(parallel: ParallelConfig | None = None) -> TrainingAccelerator:
    """Join the process group and make the Accelerator of this run.

    The accelerate config says whether models are sharded. Without a GPU the processes communicate
    over gloo.

    If a process does not join a collective within ``ddp_timeout`` seconds and one minute, the
    collective fails. In that minute the heartbeat reports which process is missing.

    Args:
        parallel: the flags of a run. Without them, all have their defaults, and the threads stay as
            they are.

    Raises:
        UserError: if the processes were not started as the user asked or have made a run already,
            or if the run is not supported.
    """
    check_first_run()
    if _world_size() == 1:
        # This process may have made an earlier run. Its state is no longer needed.
        forget_accelerator()

    if parallel is None:
        parallel = ParallelConfig(threads=torch.get_num_threads())
    bitwise = parallel.bitwise
    check_launch()
    cpu = use_cpu()
    # The heartbeat has another minute to report which process is missing.
    timeout = timedelta(seconds=parallel.ddp_timeout + 60)
    threads = _set_up_process(parallel, cpu)

    sharding = requested_sharding(_world_size())
    precision, remark = _choose_precision(
        parallel.mixed_precision, cpu, is_sharded=sharding is not None
    )
    _check_precision(precision, cpu, sharding=sharding, bitwise=bitwise)

    backend = "gloo" if cpu else "nccl"
    if sharding is not None and sharding.cpu_offload and not cpu:
        backend = "cuda:nccl,cpu:gloo"
    _join_group_after_restart(backend, timeout)
    accelerator = _make_accelerator(
        cpu=cpu,
        precision=precision,
        timeout=timeout,
        sharding=sharding,
        bitwise=bitwise,
    )
    # Accelerate reads this attribute when it wraps a model. Its constructor does not take it.
    accelerator.ddp_handler = DDPHandler(parallel.ddp_bucket_cap_mb)
    group = (accelerator.process_index, accelerator.num_processes)
    if group != (rank(), _world_size()):
        raise UserError(
            f"this process is rank {group[0]} of {group[1]}, but the environment says RANK "
            f"{rank()} and WORLD_SIZE {_world_size()}; for one process, unset both; for several, "
            "use: accelerate launch --multi_gpu --num_processes N, or torchrun."
        )
    say("device", _device_line(accelerator, threads, remark, bitwise))
    return accelerator


def start_planned_accelerator(precision: str) -> TrainingAccelerator:
    """Make the Accelerator of a recipe that is only planned: of one process, on the CPU.

    It joins no process group, and what this process computes with stays as it is.

    Args:
        precision: mixed precision, ``no`` or ``bf16``.

    Raises:
        UserError: if this is one of several processes.
    """
    if _world_size() > 1:
        raise UserError(
            f"this command is one process, but WORLD_SIZE is {_world_size()}; start it without a "
            "launcher, or unset WORLD_SIZE."
        )
    forget_accelerator()
    return _make_accelerator(
        cpu=True, precision=precision, timeout=timedelta(minutes=1), sharding=None, bitwise=False
    )


def forget_accelerator() -> None:
    """Forget the Accelerator that this process has made, so that it can make another one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _world_size() -> int:
    """Return how many processes the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _device_line(accelerator: Accelerator, threads: int, remark: str, bitwise: bool) -> str:
    """Return the line of the start-up log with the devices and the precision.

    Args:
        accelerator: the Accelerator of the run.
        threads: the threads of each process.
        remark: what to say after the precision.
        bitwise: whether the run has ``--bitwise``.
    """
    world = int(accelerator.num_processes)
    is_cuda = accelerator.device.type == "cuda"
    is_cpu = accelerator.device.type == "cpu"
    device = torch.cuda.get_device_name() if is_cuda else accelerator.device.type

    precision = accelerator.mixed_precision
    if is_cpu and precision == "bf16" and not cpu_has_bfloat16():
        remark += ", which this CPU emulates: --mixed_precision no is many times as fast"
    if precision == "no":
        uses_tf32 = is_cuda and not bitwise
        precision = "float32 (products in TF32)" if uses_tf32 else "float32"
    return (
        f"{pluralize(world, 'process')} on {device}, {pluralize(threads, 'thread')} each, "
        f"{precision}{remark}"
    )


def use_cpu() -> bool:
    """Return whether this process runs on the CPU.

    Raises:
        UserError: if this machine has fewer GPUs than processes.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or is_on("ACCELERATE_USE_CPU"):
        return True
    if device.type == "mps" and _world_size() > 1:
        return True  # the GPUs of Macs cannot form a process group

    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.accelerator.device_count()
    if processes > gpus:
        raise UserError(
            f"{processes} processes were started on a machine with {pluralize(gpus, 'GPU')}; "
            f"start one per GPU (--num_processes), or use {shipped_config('cpu_ddp')}."
        )
    return False


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has instructions for matrix products in bfloat16.

    Without them, such products take up to a hundred times as long.
    """
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())


# Options of mallopt, from malloc.h of the GNU C library.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def _set_up_process(parallel: ParallelConfig, cpu: bool) -> int:
    """Set the arithmetic, the threads and the memory of this process; return its threads.

    All of it is always set, because an earlier run of this process may have set it differently.

    Args:
        parallel: the flags of the run.
        cpu: whether the run uses the CPU.
    """
    bitwise = parallel.bitwise
    uses_tf32 = not cpu and not bitwise
    torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")
    is_deterministic = not cpu and bitwise  # on a CPU, operations are anyway
    # The call imports a compiler, which takes a second or more.
    if torch.are_deterministic_algorithms_enabled() != is_deterministic:
        torch.use_deterministic_algorithms(is_deterministic)
    if is_deterministic:
        # Without a fixed workspace, cuBLAS may choose a different algorithm each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    # Without --threads, the processes of this machine share its cores, or each has one thread if
    # the run is bitwise, because sums over more threads round differently. The launcher's
    # OMP_NUM_THREADS does not count: it is 1 if the user has set none.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = 1 if bitwise else max(1, cpu_cores() // processes)
    threads = parallel.threads or shared
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # without it, accelerate sets another number

    # On a CPU, the GNU C library keeps the memory that a step frees, for the next step. Clearing
    # new pages would take up to a fifth of a step.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    has_malloc_options = any(name.startswith("MALLOC_") for name in os.environ)
    if cpu and mallopt is not None and not has_malloc_options:
        mallopt(_MMAP_THRESHOLD, 1 << 30)  # blocks of up to 1 GiB come from the heap
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)  # the heap never shrinks
    return threads


def _choose_precision(requested: str, cpu: bool, is_sharded: bool) -> tuple[str, str]:
    """Return the mixed precision of a run, and a remark if the user may have meant another.

    The launcher's ``no`` does not count: ``accelerate launch`` also exports it if the user set
    nothing, or a variable.

    Args:
        requested: the value of ``--mixed_precision``.
        cpu: whether the run uses the CPU.
        is_sharded: whether the model is sharded.
    """
    exported = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    launcher = exported or "no"
    if requested != "auto":
        is_another = launcher not in ("no", requested)
        return requested, f" (the launcher asked for {launcher})" if is_another else ""
    if launcher != "no":
        return launcher, ""

    if cpu or not torch.cuda.is_available():
        return "no", ""
    if torch.cuda.is_bf16_supported(including_emulation=False):
        precision = "bf16"
    elif is_sharded:
        return "no", ""  # sharded models do not support fp16
    else:
        precision = "fp16"
    advice = "; for float32: --mixed_precision no after the recipe" if exported else ""
    return precision, f" (default{advice})"


def _join_group_after_restart(backend: str, timeout: timedelta) -> None:
    """Join the process group under new keys if the launcher has restarted its processes.

    With a static rendezvous, which is accelerate's default, the store still has the addresses of
    the processes that died. The first process to start would try to reach those.
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
    """Raise :class:`UserError` if this run cannot use a precision, or cannot be ``bitwise``."""
    if precision not in ("no", "bf16", "fp16"):
        raise UserError(
            f"the launcher asks for the mixed precision {precision}, which is not supported; "
            "add --mixed_precision bf16 after the recipe."
        )
    if precision == "fp16" and (cpu or sharding is not None):
        # On a CPU, accelerate would accept it, and compute in float32.
        raise UserError(
            "--mixed_precision fp16 needs a GPU, and a model that is not sharded; "
            "add --mixed_precision bf16 or no after the recipe."
        )
    if sharding is not None and bitwise:
        raise UserError(
            "--bitwise is not supported for sharded models; "
            "leave --bitwise out, or use a DDP config."
        )


def _make_accelerator(
    cpu: bool, precision: str, timeout: timedelta, sharding: Sharding | None, bitwise: bool
) -> TrainingAccelerator:
    # Accelerate would divide the loss by this number.
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    if sharding is None:
        # Accelerate would shard if the config says so, even for a single process.
        for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
            os.environ.pop(name, None)
    elif cpu:
        let_cpus_shard(timeout=timeout)

    data_loading = DataLoaderConfiguration(
        split_batches=True,
        even_batches=False,
        dispatch_batches=False,
        use_seedable_sampler=False,
        non_blocking=not cpu,
    )
    sharding_arguments: dict[str, object] = {}
    if sharding is not None:
        sharding_arguments = sharding_settings(sharding, cpu, precision)
    return TrainingAccelerator(
        sharding=sharding,
        bitwise=bitwise,
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=1,
        dataloader_config=data_loading,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        rng_types=[],  # the order of the data follows from the seed alone, not from a generator
        **sharding_arguments,
    )
