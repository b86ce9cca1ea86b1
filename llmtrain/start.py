"""From the environment to an Accelerator and back: what was launched, on which device, in which precision; and out."""

import contextlib
import ctypes
import io
import itertools
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import yaml
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate import __version__ as accelerate_version
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs

from llmtrain.console import complain, rank, say
from llmtrain.errors import ToldElsewhereError, UserError, explained
from llmtrain.launching import shipped_config
from llmtrain.parallel.ddp import DDPConfig, DDPHandler
from llmtrain.parallel.fsdp import Sharding, is_sharded, let_cpus_shard

_ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_GRACE_SECONDS = 5.0  # for rank 0 to say what went wrong, before another rank says it

paper: Any = None  # a PaperAccelerator, while a recipe is asked for its model alone


@dataclass(frozen=True)
class Launcher:
    """What the person said to the launcher, as far as this process can see.

    Launchers fill in defaults and pass them on in the environment, where they look like wishes: ``accelerate launch``
    says precision "no" and 1 thread to whoever said nothing. What was truly said stands on the launcher's command
    line, in the config file that it read, and in the environment that it was started with.
    """

    words: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    config_file: Path | None = None

    @classmethod
    def find(cls) -> "Launcher":
        """The parent process, where it is ``accelerate launch`` or ``torchrun``; else nothing but the environment."""
        own = dict(os.environ)
        try:
            parent = psutil.Process().parent()
            words = parent.cmdline() if parent is not None else []
            entry = words[2] if words[1:2] == ["-m"] else Path(words[1]).name if len(words) > 1 else ""
            is_accelerate = entry in _ACCELERATE and (entry != "accelerate" or "launch" in words)
            if parent is None or not (is_accelerate or entry in _TORCHRUN):
                return cls([], {}, own)
            for word in reversed(sys.orig_argv):  # which ends as the launcher's do: with the recipe and its flags
                if words[-1:] != [word]:
                    break
                words.pop()
            config, path = _accelerate_config(words, parent.cwd()) if is_accelerate else ({}, None)
            return cls(words, config, parent.environ(), path)
        except (psutil.Error, OSError):  # another user's process, or one that is gone
            return cls([], {}, own)

    @classmethod
    def to_come(cls, words: list[str]) -> "Launcher":
        """What ``accelerate launch`` would go by, were it started here with these flags."""
        config, path = _accelerate_config(words, ".")
        return cls(words, config, dict(os.environ), path)

    def said(self, flag: str, variable: str | None = None) -> Any:
        """The value given for an ``accelerate launch`` flag, config key or environment variable; else ``None``. Of a
        flag that takes no value ``True``."""
        for word, following in itertools.zip_longest(self.words, self.words[1:], fillvalue="-"):
            name, equals, value = word.partition("=")
            if name.replace("-", "_") == f"__{flag}":
                return value if equals else (following if following[:1] != "-" else True)
        if self.config.get(flag) is not None:
            return self.config[flag]
        return self.environment.get(variable) if variable else None

    def wants_cpu(self) -> bool:
        """Whether the CPU was asked for, even where there is a GPU."""
        said = self.said("use_cpu", "ACCELERATE_USE_CPU")
        return "--cpu" in self.words or str(said).lower() in ("true", "1", "yes")


def _accelerate_config(words: list[str], folder: str) -> tuple[dict[str, Any], Path | None]:
    """What the config file of a launcher with these words says, and where it is."""
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    there = path.is_file() and "--cpu" not in words  # with which accelerate reads no default
    for i, word in enumerate(words):
        if word.partition("=")[0].replace("-", "_") == "__config_file":
            path, there = Path(folder) / (word.partition("=")[2] or words[i + 1]), True
    if not there:
        return {}, None
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        if isinstance(config := yaml.safe_load(path.read_text()), dict):
            return config, path
    return {}, path


# What accelerate can be told to use and this loop does not: variable that its launcher sets -> its name
_UNSUPPORTED = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


def check_launch() -> None:
    """Stop where what was launched is not what was asked for, before any work is done. Raises :class:`UserError`."""
    launcher = Launcher.find()
    Sharding.asked(int(os.environ.get("WORLD_SIZE", "1")))
    for variable, name in _UNSUPPORTED.items():
        if os.environ.get(variable, "").lower() in ("true", "1"):
            ignored = "" if torch.accelerator.is_available() else " (which accelerate silently ignores on a CPU)"
            command = ["accelerate", "launch", "--config_file", str(shipped_config("multi_gpu")), *sys.argv]
            raise UserError(
                f"the accelerate config asks for {name}{ignored}, which llmtrain does not support yet; use: "
                f"{shlex.join(command)}"
            )
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if "WORLD_SIZE" not in os.environ and by_accelerate:
        # accelerate names an address where it was asked for more than one; its command line may be hidden from us
        asked = int(launcher.said("num_processes") or 1) if launcher.words else None
        if asked != 1:
            raise UserError(
                f"{asked or 'several'} processes were asked for and accelerate started one (it does so for CPU "
                f"configs); use: accelerate launch --multi_gpu --num_processes {asked or 2} {shlex.join(sys.argv)}"
            )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and no launcher says which rank this is; unset WORLD_SIZE, or "
            f"use: accelerate launch --multi_gpu --num_processes {os.environ['WORLD_SIZE']} {shlex.join(sys.argv)}"
        )
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", ""):
        raise UserError(
            f"the accelerate config sets gradient_accumulation_steps to {steps}; leave it out: llmtrain derives it "
            "from --global_batch_size and --per_device_train_batch_size."
        )


def start_accelerator(ddp: DDPConfig | None = None, bitwise: bool = False, stages: int = 1) -> Accelerator:
    """Join the process group and make the one Accelerator of this run, which shards where its config asks for it.

    Without an accelerator device the processes meet over gloo. Precision is the launcher's; where it was told none, a
    GPU that has bfloat16 uses it. ``bitwise`` gives a CPU process one thread, on every layout, unless another number
    was asked for: sums over more threads round differently. A collective that is not joined within
    ``ddp_timeout`` seconds, and a minute in which the heartbeat says who is missing, fails.
    """
    if paper is not None:
        return paper
    if "WORLD_SIZE" not in os.environ:  # an earlier run of this process, in a notebook say, is over
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    ddp = ddp or DDPConfig()
    check_launch()
    launcher = Launcher.find()
    cpu = use_cpu(launcher)
    if bitwise and not cpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
        torch.use_deterministic_algorithms(True)
    threads = _share_threads(launcher, bitwise) if cpu else torch.get_num_threads()
    precision = _precision(launcher, cpu)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sharding = Sharding.asked(world, stages)
    _check_precision(precision, cpu, sharding, bitwise)
    _check_exchange(ddp, sharding, bitwise, precision)
    if Sharding.is_asked() and sharding is None:
        say("sharded", "nothing, nor is anything offloaded: no two processes share a model")
    backend = "gloo" if cpu else "cuda:nccl,cpu:gloo" if sharding and sharding.cpu_offload else "nccl"
    _meet_after_restart(backend, ddp.ddp_timeout + 60)
    accelerator = _make_accelerator(cpu, precision, ddp.ddp_timeout + 60, sharding)
    accelerator.ddp_handler = DDPHandler(ddp)  # which it would not take as an argument, being of a class of its own
    if accelerator.num_processes != world:
        raise UserError(
            f"the launcher started {world} processes and this one is in a group of {accelerator.num_processes}; "
            "each would train alone. Start with: accelerate launch --multi_gpu --num_processes N, or torchrun."
        )
    if sharding is not None:
        sharding.set_mesh(accelerator)
    if bool(sharding) != is_sharded(accelerator):
        raise UserError(
            f"accelerate {accelerate_version} does not shard as it was asked to; use 1.15, or a DDP config."
        )
    device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else accelerator.device.type
    several = ("MULTI_GPU", "FSDP")
    asked_gpu = (launcher.config.get("distributed_type") in several or "--multi_gpu" in launcher.words) and world > 1
    over = " over gloo (no GPU here)" if cpu and asked_gpu and not launcher.said("use_cpu") else ""
    how = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    said = "" if launcher.said("mixed_precision", "ACCELERATE_MIXED_PRECISION") or how == "float32" else " (default)"
    if cpu and how == "bf16" and not cpu_has_bfloat16():
        said = ", which this CPU emulates: --mixed_precision no is many times as fast"
    say("device", f"{_count(world, 'process')} on {device}{over}, {_count(threads, 'thread')} each, {how}{said}")
    return accelerator


def use_cpu(launcher: Launcher) -> bool:
    """Whether a run of this process is on the CPU. Raises :class:`UserError` where it has not a GPU of its own."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or launcher.wants_cpu():
        return True
    if device.type == "mps" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return True  # Macs' GPUs form no group
    here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if here > devices:
        raise UserError(
            f"{here} processes were started on a machine with {_count(devices, 'GPU')}; start one a GPU "
            f"(--num_processes), or use {shipped_config('cpu_ddp')}."
        )
    return False


def cpu_has_bfloat16() -> bool:
    """Whether products in it have instructions here; else they take up to a hundred times as long."""
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return known is not None and bool(known())


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}{'es' if word.endswith('s') else 's'}"


def _share_threads(launcher: Launcher, bitwise: bool = False) -> int:
    """Pin the threads of a CPU process: as many as were asked for, else this machine's cores shared out.

    The number is part of what a run computes (sums over more threads round differently), so it is set and recorded.
    """
    asked = launcher.said("num_cpu_threads_per_process", "OMP_NUM_THREADS")
    if asked in _SHARED:
        asked = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = 1 if bitwise else max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    threads = int(asked) if asked else share
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if not asked:
        _SHARED.add(str(threads))
    return threads


_SHARED: set[str] = set()  # what earlier runs of this process wrote into the environment, where nobody asked


def _precision(launcher: Launcher, cpu: bool) -> str:
    said = launcher.said("mixed_precision", "ACCELERATE_MIXED_PRECISION")
    if said is not None:
        return "no" if said is False else str(said).lower()  # YAML reads a bare `no` as false
    return "bf16" if not cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"


def _meet_after_restart(backend: str, timeout: float) -> None:
    """Join the group under keys of this attempt's own, where the launcher has restarted its processes.

    With a static rendezvous, which is accelerate's default, its store still holds the addresses of the processes that
    died, and whoever starts first would try to reach those.
    """
    attempt, world = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), int(os.environ.get("WORLD_SIZE", "1"))
    if attempt == "0" or world == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    wait = timedelta(seconds=timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, world, is_master=False, timeout=wait)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore(f"attempt-{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=wait,
    )


def _check_precision(precision: str, cpu: bool, sharding: Sharding | None, bitwise: bool) -> None:
    if precision not in ("no", "bf16", "fp16"):
        raise UserError(f"mixed precision '{precision}' is not supported; use no, bf16 or fp16.")
    if cpu and precision == "fp16":  # which accelerate would take, and compute in float32
        raise UserError("mixed precision fp16 needs a GPU; on a CPU use no or bf16.")
    if sharding and precision == "fp16":
        raise UserError("mixed precision fp16 is not supported where the model is sharded; use bf16 or no.")
    if sharding and bitwise:
        raise UserError(
            "--bitwise adds gradients in an order that FSDP does not know; use a DDP config, or leave it out."
        )


def _check_exchange(ddp: DDPConfig, sharding: Sharding | None, bitwise: bool, precision: str) -> None:
    scaled = precision == "fp16" and (ddp.sync_every > 1 or ddp.ddp_comm_hook == "powersgd")
    if ddp.approximation is None or not (sharding or bitwise or scaled):
        return
    asked = f"--sync_every {ddp.sync_every}" if ddp.sync_every > 1 else f"--ddp_comm_hook {ddp.ddp_comm_hook}"
    why = "is for DDP, and the accelerate config shards the model"
    if scaled:  # each process would find a scale of its own, and owe in units of it
        why = "does not go with fp16, whose loss scale moves; use bf16"
    elif bitwise:
        why = "is approximate, and --bitwise is exact"
    raise UserError(f"{asked} {why}; leave one of them out.")


def _make_accelerator(cpu: bool, precision: str, timeout: float, sharding: Sharding | None) -> Accelerator:
    wait = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
    if not sharding:  # one process has nobody to share with, whatever its config says
        for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
            os.environ.pop(name, None)
    elif cpu:
        let_cpus_shard(timeout=wait.timeout)
    return Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=1,
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, even_batches=False, dispatch_batches=False, use_seedable_sampler=False
        ),
        kwargs_handlers=[wait],
        rng_types=[],  # the order of the data is a function of the seed, not of a generator
        **(sharding.settings(cpu, precision) if sharding else {}),
    )


def launch(main: Callable[[], None]) -> NoReturn:
    """Run a recipe's ``main`` as this process's whole life: the one way out.

    A finished process meets the others, leaves the group and ends without running destructors: gloo's threads
    sometimes abort a process that is already done. :class:`UserError`, and what else a person can mend, becomes one
    line on stderr and status 2, said once over all ranks; with ``--debug`` its traceback stands above it.
    """
    status = 0
    if Launcher.find().words:  # under a launcher, not where a shell may end before the run does
        _die_with_launcher()
    elif "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() == 1:
        os._exit(1)  # the launcher died while this process was being loaded: nobody is there to meet
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a sign must not end a run
    try:
        check_launch()
        main()
        leave_group()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as error:  # --help
        if isinstance(error.code, str):
            complain(error.code)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        line = explained(error)
        if line is None or "--debug" in sys.argv:
            traceback.print_exc()
        if line is not None and not isinstance(error, ToldElsewhereError):
            _complain_once(line)
        status = 1 if line is None else 2
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(status)


def _die_with_launcher() -> None:
    """Linux: stop this process when its launcher is killed, which otherwise leaves its workers training alone."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
        parent = os.getppid()
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


_LEFT: list[Any] = []  # groups, kept to the end of the process


def leave_group() -> None:
    """Meet the other processes for the last time. What one of them does after it, nobody waits for.

    The group is left, not freed: DDP's reducer holds it too, and were that the last to let go, with the interpreter's
    lock in its hand, it would wait for a thread of gloo's that may wait for this lock.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        state = PartialState()
        state.wait_for_everyone()
        _LEFT.append(torch.distributed.group.WORLD)
        state.destroy_process_group()


def _complain_once(message: str) -> None:
    if rank():
        time.sleep(_GRACE_SECONDS)  # the launcher ends this process as soon as rank 0, which fails alike, is gone
    complain(message)
