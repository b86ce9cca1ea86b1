"""Figures of one GPU, in three calls of less than nine minutes each: correctness, gpt2, llama.

python -m benchmarks.gpu CALL --out FOLDER [--nanogpt FOLDER] [--text FILE] [--rehearse] [--sections NAME ...]

Each section is a process of its own, ours before any peer's. What it prints goes to FOLDER/CALL-SECTION.log, and its
figures to FOLDER/figures.jsonl as soon as they are there; one that dies, or takes too long, takes no other with it.
With --rehearse all of it runs at a tiny size on the CPU, and the figures mean nothing.
"""

import argparse
import collections
import copy
import importlib.util
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd import DeviceType

from benchmarks.inputs import letters_of_docs, write_chats, write_tokenizer
from benchmarks.runs import (
    FINETUNE_RECIPE,
    GPT_RECIPE,
    ROOT,
    UPDATES_ALONE,
    flags,
    gpt_flags,
    median_reading,
    metrics,
    newest,
    peer,
    place,
    run,
    with_ignored,
)

CALL_SECONDS = 530.0
Figures = dict[str, object]
Llama = tuple[int, int, int]  # layers, width, inner width


@dataclass(frozen=True)
class Sizes:
    gpt2: tuple[int, int, int, int, int] = (
        12,
        12,
        768,
        1024,
        16,
    )  # layers, heads, width, block, rows
    gpt2_vocabulary: int = 50_304
    letters: tuple[int, int, int, int, int] = (6, 6, 384, 256, 64)
    letters_updates: int = 900
    billion: Llama = (20, 2048, 5632)
    eight_billion: Llama = (32, 4096, 14_336)
    llama_vocabulary: int = 128_256
    lengths: tuple[int, ...] = (1024, 4096)
    tokens: int = 8192  # of a micro-batch of a Llama
    half_a_million: int = 512  # rows
    updates: int = 40
    product: int = 8192
    device: str = "cuda"


TINY = Sizes(
    gpt2=(2, 2, 32, 64, 4),
    gpt2_vocabulary=5000,
    letters=(2, 2, 32, 32, 8),
    letters_updates=40,
    billion=(2, 64, 128),
    eight_billion=(2, 64, 128),
    llama_vocabulary=6000,
    lengths=(64, 128),
    tokens=256,
    half_a_million=16,
    updates=30,
    product=256,
    device="cpu",
)


class Call:
    """What the sections of a call are given: sizes, a folder for what they write, and the peers' places."""

    def __init__(self, sizes: Sizes, folder: Path, nanogpt: str | None, text: Path | None) -> None:
        self.sizes, self.folder, self.nanogpt, self.text = sizes, folder, nanogpt, text
        self.cpu = sizes.device == "cpu"

    def recipe(
        self, name: str, run_name: str, *words: str, precision: str = "bf16", **variables: str
    ) -> Path:
        """Run a recipe in a process of its own; returns its folder."""
        folder = self.folder / run_name
        precision = (
            "no" if self.cpu else precision
        )  # a CPU may emulate bfloat16, a hundred times as slowly
        told = {
            "ACCELERATE_MIXED_PRECISION": precision,
            "LLMTRAIN_CACHE": str(self.folder / "cache"),
            **variables,
        }
        told |= {"ACCELERATE_USE_CPU": "true"} if self.cpu else {}
        run([sys.executable, name, *words, *place(folder)], **told)
        return folder

    def speed(self, folder: Path) -> Figures:
        """Return the speed of a run, and the most memory that it held."""
        lines = [line for line in metrics(folder) if "train/tokens_per_second" in line]
        found: Figures = {"tokens/s": median_reading(folder, "train/tokens_per_second")}
        if "train/mfu" in lines[-1]:
            found["mfu"] = median_reading(folder, "train/mfu")
        found["GiB"] = max(
            size for line in lines for sizes in line["memory"].values() for size in sizes
        )
        return found | {"phases": {name: ranks[0] for name, ranks in lines[-1]["phases"].items()}}


def seconds_of(action: Callable[[], object], device: str, times: int = 20) -> float:
    """Return the median seconds of an action on a device, without the first three."""
    taken = []
    for _ in range(times + 3):
        began = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[3:])


# --- correctness


def machine(call: Call) -> Figures:
    """Versions, the rates of products and copies, and the kernel of attention that is chosen."""
    import accelerate
    import transformers

    n, device = call.sizes.product, call.sizes.device
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    whole = torch.empty(n * n * 16, device=device, dtype=torch.uint8)
    found: Figures = {"torch": torch.__version__, "transformers": transformers.__version__}
    found |= {
        "accelerate": accelerate.__version__,
        "device": "cpu" if call.cpu else torch.cuda.get_device_name(),
    }
    found["TFLOP/s"] = 2 * n**3 / seconds_of(lambda: a @ b, device) / 1e12
    found["copy TB/s"] = 2 * len(whole) / seconds_of(whole.clone, device) / 1e12
    for name, length, masked in (
        ("plain", 1024, False),
        ("boolean mask", 1024, True),
        ("odd length", 1023, False),
    ):
        q = torch.randn(2, 12, length, 64, device=device, dtype=torch.bfloat16)
        mask = (
            torch.ones(length, length, dtype=torch.bool, device=device).tril() if masked else None
        )
        with torch.profiler.profile() as profile:
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=not masked)
        names = [event.key for event in profile.key_averages() if "attention" in event.key]
        found[f"attention, {name}"] = max(names, key=len)
    return found


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().cpu().double() - exact.double()).norm() / exact.double().norm())


def losses(call: Call) -> Figures:
    """Relative errors of the loss and its gradients, both ways, against float64 on the CPU."""
    from llmtrain.models import nll_kernels
    from llmtrain.models.loss import linear_nll

    # numbers that bfloat16 has, too, so that what is measured is the arithmetic
    hidden, weight = (
        torch.randn(2, 96, 128).bfloat16().float(),
        torch.randn(3000, 128).bfloat16().float(),
    )
    targets = torch.randint(3000, (2, 96)).masked_fill(torch.rand(2, 96) < 0.3, -100)

    def outcome(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        h, w = (one.to(device, dtype).requires_grad_() for one in (hidden, weight))
        nll = linear_nll(h, w, targets.to(device))
        return [nll, *torch.autograd.grad(nll, (h, w))]

    exact, found = outcome("cpu", torch.float64), {}
    limits = nll_kernels.LOGIT_LIMITS[call.sizes.device]
    for way, in_place in (("held", 1 << 30), ("blockwise", -1)):
        nll_kernels.LOGIT_LIMITS[call.sizes.device] = limits._replace(in_place=in_place)
        for dtype in (torch.bfloat16, torch.float32):
            for tf32 in ("highest", "high"):
                torch.set_float32_matmul_precision(tf32)
                worst = max(map(_relative, outcome(call.sizes.device, dtype), exact))
                found[f"{way}, {dtype}, {tf32}"] = worst
    return found


def models(call: Call) -> Figures:
    """Relative errors of a forward and a backward pass against float64 on the CPU."""
    from transformers import AutoModelForCausalLM

    from llmtrain import GPT, GPTConfig
    from llmtrain.models.causal_lm import make_causal_lm
    from llmtrain.models.probe import probe

    ids = torch.randint(500, (4, 65))
    llama = AutoModelForCausalLM.from_config(
        _llama(call, call.sizes.eight_billion if call.cpu else (4, 256, 704), 64)
    )
    found = {}
    for name, model in {
        "gpt": GPT(GPTConfig(4, 4, 128, 64), 500),
        "llama": make_causal_lm(llama, row_length=64),
    }.items():
        if name == "llama":
            probe(model)

        def outcome(device: str, dtype: torch.dtype, model: Any = model) -> list[torch.Tensor]:
            # A copy, because a cast to bfloat16 also rounds buffers that no state dict restores.
            model = copy.deepcopy(model).to(device, dtype)
            nll = model(ids.to(device), ids.to(device))
            nll.backward()
            return [nll, torch.cat([p.grad.flatten().cpu().double() for p in model.parameters()])]

        exact = [one.detach().clone() for one in outcome("cpu", torch.float64)]
        for dtype in (torch.bfloat16, torch.float32):
            found[f"{name}, {dtype}"] = max(
                map(_relative, outcome(call.sizes.device, dtype), exact)
            )
    return found


SHORT = flags(n_layer=4, n_head=4, n_embd=128, block_size=128, architecture="gpt2")
SHORT += flags(logging_steps=1, eval_steps=0, save_steps=1000)


def recipes(call: Call) -> Figures:
    """Losses of 20 updates in each precision, beside float32's."""
    found: Figures = {}
    for optim in ("adamw", "muon"):
        series = {}
        for precision in ("no", "bf16", "fp16"):
            words = SHORT + flags(optim=optim, max_steps=20, dropout=0.1)
            folder = call.recipe(GPT_RECIPE, f"{optim}-{precision}", *words, precision=precision)
            series[precision] = [
                line["train/loss"] for line in metrics(folder) if "train/loss" in line
            ]
            pairs = zip(series[precision], series["no"], strict=True)
            found[f"{optim}, {precision}"] = max(abs(a - b) for a, b in pairs)
    return found


def graphs(call: Call) -> Figures:
    """Blocks compiled, and compiled again, of twelve layers with dropout."""
    words = [word if word != "4" or i != 1 else "12" for i, word in enumerate(SHORT)]
    words += flags(max_steps=20, dropout=0.2, torch_compile="always", global_batch_size=32)
    with open(call.folder / "graphs.txt", "w") as log:  # noqa: PTH123
        told = {**os.environ, "TORCH_LOGS": "recompiles,graph_breaks"}
        told["ACCELERATE_MIXED_PRECISION"] = "no" if call.cpu else "bf16"
        told |= {"ACCELERATE_USE_CPU": "true"} if call.cpu else {}
        folder = call.folder / "graphs"
        command = [sys.executable, GPT_RECIPE, *words, *place(folder)]
        status = subprocess.run(command, env=told, stdout=log, stderr=log, check=False).returncode
    text = (call.folder / "graphs.txt").read_text()
    print(text)
    return {
        "status": status,
        "recompiled": text.count("Recompiling function"),
        "breaks": text.count("Graph break in"),
    }


def alone(call: Call) -> Figures:
    """Statuses of one process under torchrun: DDP with its hooks and saves in the background, and FSDP2."""
    launch = [
        str(Path(sys.executable).parent / "torchrun"),
        "--standalone",
        "--nproc-per-node",
        "1",
    ]
    runs = {
        f"ddp, {hook}": ({}, flags(ddp_comm_hook=hook, async_save=True))
        for hook in ("none", "bf16", "fp16")
    }
    shard = {"LLMTRAIN_SHARD_ALONE": "1", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    runs |= {"fsdp2": (shard, []), "fsdp2, offload": ({**shard, "FSDP_OFFLOAD_PARAMS": "true"}, [])}
    found: Figures = {}
    for name, (own, more) in runs.items():
        compiled = flags(torch_compile="never" if call.cpu else "always")
        words = [*SHORT, *more, *compiled, *flags(max_steps=8, save_steps=4)]
        told = {**os.environ, **own, "ACCELERATE_MIXED_PRECISION": "no" if call.cpu else "bf16"}
        told |= {"ACCELERATE_USE_CPU": "true"} if call.cpu else {}
        for resumed in ("", ", resumed"):
            steps = flags(max_steps=12) if resumed else []
            folder = call.folder / name.replace(", ", "-")
            since = (
                flags(resume_from_checkpoint=folder, output_dir=call.folder / f"{folder.name}-on")
                if resumed
                else []
            )
            command = [*launch, GPT_RECIPE, *words, *place(folder), *steps, *since]
            ended = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
            print(ended.stdout, ended.stderr)
            found[name + resumed] = ended.returncode
    return found


def _watched(
    recipe: str, words: list[str], around: Callable[[Iterator[Any]], Iterator[Any]], folder: Path
) -> None:
    """Run a recipe in this process, with its batches wrapped."""
    from llmtrain.training import loop

    honest = loop._read_ahead
    loop._read_ahead = lambda *arguments: around(honest(*arguments))  # type: ignore[assignment]
    sys.argv = [recipe]
    runpy.run_path(recipe)["main"]([*words, *place(folder)])


def waits(call: Call) -> Figures:
    """Times that the host waits for the device in an update, as torch sees them."""
    counts: list[int] = []

    def counted(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                if not call.cpu:
                    torch.cuda.set_sync_debug_mode("warn")
                yield batch
                if not call.cpu:
                    torch.cuda.set_sync_debug_mode("default")
            found = [one for one in seen if "synchronizing CUDA" in str(one.message)]
            for one in found:
                print(f"waits at {one.filename}:{one.lineno}")
            counts.append(len(found))

    words = flags(
        n_layer=4,
        n_head=4,
        n_embd=128,
        block_size=128,
        eval_steps=0,
        logging_steps=100,
        max_steps=10,
    )
    words += flags(global_batch_size=32, per_device_train_batch_size=16)
    _watched(GPT_RECIPE, words, counted, call.folder / "waits")
    return {"waits": counts[2:-1]}


def resumed(call: Call) -> Figures:
    """Whether a killed run ends in the same bits, with --bitwise and without; and what --bitwise costs."""
    found: Figures = {}
    for name, more in {"plain": [], "bitwise": ["--bitwise"]}.items():
        command = [
            sys.executable,
            "-m",
            "llmtrain",
            "verify",
            "resume",
            "--steps",
            "12",
            "--layouts",
            "1",
            "--json",
        ]
        told = {**os.environ, "ACCELERATE_USE_CPU": "true"} if call.cpu else dict(os.environ)
        words = flags(n_layer=4, n_head=4, n_embd=128, block_size=128, eval_steps=0, dropout=0.1)
        command += [GPT_RECIPE, *words, *more]
        ended = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
        print(ended.stdout, ended.stderr)
        found[f"{name}: status"] = ended.returncode
        folder = call.recipe(
            GPT_RECIPE, f"cost-{name}", *SHORT, *more, *flags(max_steps=40, logging_steps=10)
        )
        found[f"{name}: tokens/s"] = median_reading(folder, "train/tokens_per_second")
    return found


def packed(call: Call) -> Figures:
    """Losses of packed conversations here and on the CPU, in float32."""
    write_chats(chats := call.folder / "chats.jsonl")
    write_tokenizer(call.folder / "words", chat=True)
    words = flags(
        dataset=chats,
        from_config="llama",
        tokenizer=call.folder / "words",
        block_size=256,
        max_steps=5,
    )
    words += flags(
        logging_steps=1, eval_steps=0, global_batch_size=8, per_device_train_batch_size=4
    )
    here = call.recipe(FINETUNE_RECIPE, "packed-gpu", *words, precision="no")
    there = call.recipe(
        FINETUNE_RECIPE, "packed-cpu", *words, precision="no", CUDA_VISIBLE_DEVICES=""
    )
    pairs = [
        [line["train/loss"] for line in metrics(one) if "train/loss" in line]
        for one in (here, there)
    ]
    return {"losses differ by": max(abs(a - b) for a, b in zip(*pairs, strict=True))}


# --- GPT-2


def write_larger_tokenizer(folder: Path, vocabulary: int) -> Path:
    """Write a tokenizer of a few thousand tokens, and more that no text has: for a head of a known size."""
    write_tokenizer(folder, chat=True)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    first = 1 + max(
        *content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])
    )
    content["model"]["vocab"] |= {
        f"<unused {number}>": number for number in range(first, vocabulary)
    }
    file.write_text(json.dumps(content))
    return folder


def loss_alone(call: Call) -> Figures:
    """Milliseconds of the head's loss, forward and backward."""
    from llmtrain.models.loss import linear_nll

    _, _, width, block, rows = call.sizes.gpt2
    device, dtype = call.sizes.device, torch.bfloat16
    hidden = torch.randn(rows, block - 1, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(call.sizes.gpt2_vocabulary, width, device=device, requires_grad=True)
    targets = torch.randint(call.sizes.gpt2_vocabulary, (rows, block - 1), device=device)

    def compiled(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            (h @ w.to(h.dtype).T).float().flatten(0, 1), t.flatten(), reduction="sum"
        )

    ways: dict[str, Callable[..., torch.Tensor]] = {
        "ours": linear_nll,
        "compiled": torch.compile(compiled),
    }
    return {
        f"ms, {name}": 1e3
        * seconds_of(partial(_forward_backward, way, hidden, weight, targets), device)
        for name, way in ways.items()
    }


def _forward_backward(way: Callable[..., torch.Tensor], *given: torch.Tensor) -> None:
    torch.autograd.grad(way(*given), given[:2])


def _gpt2_words(call: Call, **more: object) -> list[str]:
    tokenizer = call.folder / "gpt2-words"
    if not tokenizer.exists():
        write_larger_tokenizer(tokenizer, call.sizes.gpt2_vocabulary)
    settings: dict[str, object] = {
        "tokenizer": tokenizer,
        "max_steps": call.sizes.updates,
        "torch_compile": "always",
    }
    return gpt_flags(*call.sizes.gpt2) + flags(**settings | UPDATES_ALONE | more)


def gpt2(call: Call, **more: object) -> Figures:
    """Speed, MFU, memory and phases of GPT-2 at the recipe's flags, or with some changed."""
    return call.speed(call.recipe(GPT_RECIPE, "gpt2", *_gpt2_words(call, **more)))


def half_a_million(call: Call) -> Figures:
    """Half a million tokens an update, accumulated."""
    return gpt2(call, global_batch_size=call.sizes.half_a_million, max_steps=6, logging_steps=1)


def profile(call: Call) -> Figures:
    """The share of three steps in which the device idles, and its 25 longest kernels."""
    found: Figures = {}

    def profiled(batches: Iterator[Any]) -> Iterator[Any]:
        recording = None
        for number, batch in enumerate(batches):
            if number == 10:
                recording = torch.profiler.profile().__enter__()
            yield batch
            if number == 12 and recording is not None:
                if not call.cpu:
                    torch.cuda.synchronize()
                recording.__exit__(None, None, None)
                recording.export_chrome_trace(str(call.folder / "trace.json.gz"))
                found.update(_device_times(recording))

    words = _gpt2_words(call, max_steps=16, logging_steps=100, eval_steps=0)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no" if call.cpu else "bf16"
    _watched(GPT_RECIPE, words, profiled, call.folder / "profile")
    return found


def _device_times(recording: torch.profiler.profile) -> Figures:
    """Return the share of time in which the device idles, and its longest kernels' shares."""
    kernels = [event for event in recording.events() if event.device_type == DeviceType.CUDA]
    # Marks of the profiler, such as those around an optimizer's step, contain kernels.
    kernels = [event for event in kernels if "#" not in event.name]
    if not kernels:
        return {}
    start = min(event.time_range.start for event in kernels)
    end = max(event.time_range.end for event in kernels)

    times = collections.Counter[str]()
    for event in kernels:
        times[event.name[:80]] += event.time_range.elapsed_us()
    return {
        "idle": 1 - times.total() / (end - start),
        "kernels": {name: time / (end - start) for name, time in times.most_common(25)},
    }


def letters(call: Call) -> Figures:
    """Seconds of training until an evaluation finds 1.47 nats, of a text by letters."""
    sizes, text = call.sizes, call.text or call.folder / "text.txt"
    if not call.text:
        text.write_text(letters_of_docs())
    updates, every = sizes.letters_updates, sizes.letters_updates // 9
    words = gpt_flags(*sizes.letters) + flags(
        dataset=text, tokenizer="char", eval_fraction=0.1, dropout=0.2
    )
    words += flags(
        max_steps=updates, eval_steps=every, logging_steps=updates // 18, torch_compile="always"
    )
    folder = call.recipe(GPT_RECIPE, "letters", *words)
    found = [line["eval/loss"] for line in metrics(folder) if "eval/loss" in line]
    there = next((number * every for number, loss in enumerate(found) if loss <= 1.47), None)
    speed = median_reading(folder, "train/tokens_per_second")
    seconds = None if there is None else there * sizes.letters[3] * sizes.letters[4] / speed
    return {"nats": found, "seconds to 1.47": seconds, "tokens/s": speed}


def nanogpt(call: Call) -> Figures:
    """nanoGPT's own loop, compiled."""
    if call.nanogpt is None:
        return {"skipped": "it needs --nanogpt FOLDER"}
    sizes, tokens = call.sizes, call.folder / "tokens"
    np.random.default_rng(0).integers(
        sizes.gpt2_vocabulary, size=2_000_000, dtype=np.uint16
    ).tofile(tokens)
    theirs = [
        call.nanogpt,
        "--tokens",
        tokens,
        "--vocabulary",
        sizes.gpt2_vocabulary,
        "--steps",
        sizes.updates,
    ]
    theirs += ["--shape", *sizes.gpt2, "--bf16", "--fused", "--compile", "--device", sizes.device]
    return {"tokens/s": peer("nanogpt", *theirs)}


# --- Llama


def _llama(call: Call, shape: Llama, length: int) -> Any:
    from transformers import LlamaConfig

    layers, width, inner = shape
    heads = {
        "num_attention_heads": max(width // 128, 2),
        "num_key_value_heads": max(width // 512, 1),
    }
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, **heads}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    return LlamaConfig(
        vocab_size=call.sizes.llama_vocabulary, max_position_embeddings=length, **sizes, **ends
    )


def _finetune(call: Call, name: str, length: int, *words: str, **model: object) -> Path:
    rows = max(call.sizes.tokens // length, 1)
    settings = {
        "block_size": length - 1,
        "global_batch_size": rows,
        "per_device_train_batch_size": rows,
    }
    words += (
        *flags(**model, **settings),
        *flags(learning_rate=1e-4, logging_steps=4, **UPDATES_ALONE),
    )
    return call.recipe(FINETUNE_RECIPE, name, *words)


def _chats(call: Call) -> Path:
    if not (chats := call.folder / "chats.jsonl").exists():
        write_chats(chats)
    return chats


def billion(
    call: Call, packed: bool, length: int, checkpointing: bool, compiled: bool = False
) -> Figures:
    """A Llama of a billion weights, all trained, on text or packed conversations."""
    model = call.folder / "billion"
    if not model.exists():
        write_larger_tokenizer(model, call.sizes.llama_vocabulary)
        _llama(call, call.sizes.billion, max(call.sizes.lengths)).save_pretrained(model)
    words = ["--gradient_checkpointing"] if checkpointing else []
    words += flags(torch_compile="always" if compiled else "never", max_steps=12)
    data = _chats(call) if packed else "builtin:python-docs"
    folder = _finetune(call, "b", length, *words, dataset=data, from_config=model, tokenizer=model)
    return call.speed(folder)


def checkpoint(call: Call) -> Figures:
    """Seconds that an update with a save in the background takes more than another; bytes; the plan's memory."""
    billion(call, False, call.sizes.lengths[0], True)  # which writes the model
    words = [
        "--gradient_checkpointing",
        "--async_save",
        *flags(max_steps=12, save_steps=6, logging_steps=1),
    ]
    model = call.folder / "billion"
    own = {"dataset": "builtin:python-docs", "from_config": model, "tokenizer": model}
    rows = max(call.sizes.tokens // call.sizes.lengths[0], 1)
    settings = {
        "block_size": call.sizes.lengths[0] - 1,
        "global_batch_size": rows,
        "eval_fraction": 0,
    }
    words += flags(**own, **settings, per_device_train_batch_size=rows)
    folder = call.recipe(FINETUNE_RECIPE, "saves", *words)
    times = {line["step"]: line["time"] for line in metrics(folder) if "train/loss" in line}
    steps = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
    usual = statistics.median(seconds for step, seconds in steps.items() if step not in (1, 2, 7))
    size = sum(
        file.stat().st_size
        for file in newest(folder, "checkpoints/*6/MANIFEST.json").parent.rglob("*")
    )
    device = "cpu" if call.cpu else "h200-141gb"
    command = [
        sys.executable,
        "-m",
        "llmtrain",
        "plan",
        "--device",
        device,
        "--json",
        FINETUNE_RECIPE,
        *words,
    ]
    plan = json.loads(run(command, LLMTRAIN_CACHE=str(call.folder / "cache")))
    planned = (
        sum(value for key, value in plan["ways"][0]["bytes"].items() if key != "total") / 2**30
    )
    found: Figures = {
        "stall, seconds": steps.get(7, 0) - usual,
        "update, seconds": usual,
        "GB": size / 1e9,
    }
    return found | {"GiB planned": planned, "GiB": call.speed(folder)["GiB"]}


def lora(call: Call) -> Figures:
    """LoRA on a Llama of eight billion weights, on packed conversations; all tokens count."""
    from transformers import LlamaForCausalLM

    base, length = call.folder / "eight", call.sizes.lengths[0]
    if not base.exists():
        write_larger_tokenizer(base, call.sizes.llama_vocabulary)
        with torch.device(call.sizes.device):
            model = LlamaForCausalLM._from_config(
                _llama(call, call.sizes.eight_billion, length), dtype=torch.bfloat16
            )
        model.save_pretrained(base)
        del model
        if not call.cpu:
            torch.cuda.empty_cache()
    words = ["--gradient_checkpointing", *flags(lora_r=16, max_steps=20)]
    folder = _finetune(call, "lora", length, *words, dataset=_chats(call), model_name_or_path=base)
    found = call.speed(folder)
    return found | {"all tokens/s": with_ignored(folder, float(str(found["tokens/s"])))}


def trl(call: Call) -> Figures:
    """TRL on the same base and conversations, with wrapped packing and Liger's kernels."""
    if importlib.util.find_spec("trl") is None:
        return {"skipped": "trl is not installed"}
    base, length = call.folder / "eight", call.sizes.lengths[0]
    settings: dict[str, object] = {
        "packing": True,
        "packing_strategy": "wrapped",
        "gradient_checkpointing": True,
    }
    settings |= {
        "bf16": True,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "use_liger_kernel": not call.cpu,
    }
    rows = max(call.sizes.tokens // length, 1)
    theirs = [
        base,
        _chats(call),
        "--batch",
        rows,
        "--length",
        length,
        "--steps",
        20,
        "--device",
        call.sizes.device,
    ]
    return {"all tokens/s": peer("sft", *theirs, "--flags", json.dumps(settings), "--lora", 16)}


def sections_of(call: Call) -> dict[str, dict[str, Callable[[], Figures]]]:
    """Return the sections of each call, ours first."""
    short, long = call.sizes.lengths
    kinds = [
        (False, short, True),
        (False, short, False),
        (True, short, True),
        (True, long, True),
        (False, long, True),
    ]
    names = {
        f"{'packed' if is_packed else 'text'}-{length}{'' if again else '-kept'}": (
            is_packed,
            length,
            again,
        )
        for is_packed, length, again in kinds
    }
    checks = (machine, losses, models, recipes, graphs, alone, waits, resumed, packed)
    adamw = {"optim": "adamw", "learning_rate": 6e-4}
    gpt2s: dict[str, dict[str, Any]] = {
        "gpt2": {},
        "gpt2-adamw": adamw,
        "gpt2-eager": {"torch_compile": "never"},
    }
    return {
        "correctness": {check.__name__: partial(check, call) for check in checks},
        "gpt2": {
            "loss": partial(loss_alone, call),
            **{name: partial(gpt2, call, **changed) for name, changed in gpt2s.items()},
            "half-a-million": partial(half_a_million, call),
            "profile": partial(profile, call),
            "letters": partial(letters, call),
            "nanogpt": partial(nanogpt, call),
        },
        "llama": {
            **{name: partial(billion, call, *kind) for name, kind in names.items()},
            "text-compiled": partial(billion, call, False, short, True, True),
            "checkpoint": partial(checkpoint, call),
            "lora": partial(lora, call),
            "trl": partial(trl, call),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("call", choices=["correctness", "gpt2", "llama"])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for all that is measured and printed"
    )
    parser.add_argument("--nanogpt", help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text; tinyshakespeare, say")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--sections", nargs="*", help="those alone")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # a section, in this process
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        sys.exit(
            "error: there is no GPU here; --rehearse tries everything at a tiny size on the CPU."
        )
    os.environ.setdefault("PYTHONPATH", str(ROOT))  # the package need not be installed
    out, work = arguments.out.absolute(), Path("/tmp/llmtrain-gpu")
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(exist_ok=True)
    call = Call(TINY if arguments.rehearse else Sizes(), work, arguments.nanogpt, arguments.text)
    sections = sections_of(call)[arguments.call]
    if arguments.here:
        print(json.dumps(sections[arguments.here]()), flush=True)
        return
    until, failed = time.monotonic() + CALL_SECONDS, collections.Counter[str]()
    for name in arguments.sections or sections:
        began, log = time.monotonic(), out / f"{arguments.call}-{name}.log"
        with log.open("w") as file:
            command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--here", name]
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status: int | None = process.wait(
                    max(until - began, 1.0) if not arguments.rehearse else None
                )
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                status = None
        figures: object = (
            f"failed ({'no time was left' if status is None else status}); see {log.name}"
        )
        if status == 0:
            figures = json.loads(log.read_text().splitlines()[-1])
        failed[name] += status != 0
        seconds = round(time.monotonic() - began, 1)
        line = {"call": arguments.call, "section": name, "seconds": seconds, "found": figures}
        print(json.dumps(line), flush=True)
        with (out / "figures.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    sys.exit(1 if failed.total() else 0)


if __name__ == "__main__":
    main()
