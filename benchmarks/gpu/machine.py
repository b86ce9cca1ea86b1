"""The card and its software, its rates of products and copies, and the kernels of attention.

Repeat it with `python -m benchmarks.gpu --out FOLDER --sections machine`.
"""

import importlib.metadata
import subprocess

import torch
import torch.nn.functional as F

from benchmarks.gpu.call import Call
from benchmarks.gpu.turns import median_ms

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "trl", "liger-kernel")


def measure(call: Call) -> None:
    """Record versions, the rates of products and copies, and the kernels of attention."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    call.journal.record("machine", "versions", **versions)

    if call.on_gpu:
        query = "driver_version,clocks.sm,clocks.max.sm,power.limit"
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        call.journal.record(
            "machine",
            "card",
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
            driver_and_clocks=answer.stdout.strip(),
            data_sheet_tflops=call.peak / 1e12,
        )
    _rates(call)
    _attention_kernels(call)


def _rates(call: Call) -> None:
    n = call.sizes.product
    a = torch.randn(n, n, device=call.device, dtype=call.half)
    b = torch.randn(n, n, device=call.device, dtype=call.half)
    data = torch.randint(255, (n * n * 16,), device=call.device, dtype=torch.uint8)
    product_ms = median_ms(lambda: a @ b, call.device, call.sizes.repeats)
    copy_ms = median_ms(data.clone, call.device, call.sizes.repeats)
    call.journal.record(
        "machine",
        "rates",
        product_tflops=2 * n**3 / product_ms / 1e9,
        copy_terabytes=2 * data.numel() / copy_ms / 1e9,
    )


def _attention_kernels(call: Call) -> None:
    """Record which kernels torch chooses for attention, and how long they take."""
    size = call.sizes.gpt2
    qkv = torch.randn(
        size.rows, size.block, 3 * size.width, device=call.device, dtype=call.half
    ).requires_grad_()

    def attend() -> torch.Tensor:
        heads = [
            part.view(size.rows, size.block, size.heads, -1).transpose(1, 2)
            for part in qkv.chunk(3, dim=-1)
        ]
        return F.scaled_dot_product_attention(*heads, is_causal=True)

    def attend_and_back() -> None:
        torch.autograd.grad(attend().sum(), qkv)

    names: list[str] = []
    if call.on_gpu:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            attend_and_back()
            torch.cuda.synchronize()
        words = ("attention", "flash", "fmha", "cudnn", "sdpa")
        names = [
            event.name[:90]
            for event in profile.events()
            if any(word in event.name.lower() for word in words)
        ]
    call.journal.record(
        "machine",
        "attention of GPT-2",
        kernels=names,
        forward_ms=median_ms(attend, call.device, call.sizes.repeats),
        both_ms=median_ms(attend_and_back, call.device, call.sizes.repeats),
    )
