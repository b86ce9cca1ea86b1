"""The card and its software, and milliseconds of kernels: products, attention, the loss and Muon.

The output layer with its loss is compared with a compiled cross-entropy, with its three matrix
products alone, and with Liger's kernel if that is installed.

Repeat it with `python -m benchmarks.gpu --out FOLDER --sections machine loss muon`.
"""

import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.call import Call
from benchmarks.gpu.turns import median_ms
from llmtrain.models.loss import linear_nll
from llmtrain.training.muon import Muon

# --- the machine

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "trl", "liger-kernel")


def measure_machine(call: Call) -> None:
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


# --- the loss and Muon

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def measure_loss(call: Call) -> None:
    """Record the milliseconds of the head and its loss, forward and backward, for each loss."""
    size = call.sizes.gpt2
    for vocabulary in call.sizes.vocabularies:
        hidden = torch.randn(
            size.rows, size.block, size.width, device=call.device, dtype=call.half
        ).requires_grad_()
        weight = torch.randn(vocabulary, size.width, device=call.device).mul_(0.02).requires_grad_()
        targets = torch.randint(vocabulary, (size.rows, size.block), device=call.device)
        for name, loss in _losses(call).items():
            pass_both = partial(_pass_both, loss, hidden, weight, targets)
            milliseconds = median_ms(pass_both, call.device, call.sizes.repeats)
            call.journal.record("loss", f"loss, V {vocabulary:,}: {name}", ms=milliseconds)


def _pass_both(
    loss: Loss, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> None:
    torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))


def _losses(call: Call) -> dict[str, Loss]:
    def of_logits(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        logits = (h @ w.to(h.dtype).T).float().flatten(0, 1)
        return F.cross_entropy(logits, t.flatten(), reduction="sum")

    def products_alone(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (h @ w.to(h.dtype).T).sum()  # its backward pass has the other two products

    losses: dict[str, Loss] = {
        "ours": linear_nll,
        "compiled cross-entropy": torch.compile(of_logits, dynamic=False, backend=call.backend),
        "its three products": products_alone,
    }
    if call.on_gpu and importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def liger(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = liger_fused_linear_cross_entropy(
                h.flatten(0, 1), w.to(h.dtype), t.flatten(), reduction="sum"
            )
            return loss

        losses["Liger"] = liger
    return losses


def measure_muon(call: Call) -> None:
    """Record the milliseconds of Muon's step for the matrices of GPT-2."""
    size = call.sizes.gpt2
    shapes = [(1, 1), (1, 3), (1, 4), (4, 1)]  # in widths: the four matrices of a block
    matrices = [
        torch.nn.Parameter(
            torch.randn(rows * size.width, columns * size.width, device=call.device) * 0.02
        )
        for _ in range(size.layers)
        for rows, columns in shapes
    ]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    muon = Muon(matrices, lr=1e-3, weight_decay=0.1, dtype=call.half)
    milliseconds = median_ms(muon.step, call.device, call.sizes.repeats)
    call.journal.record("muon", f"Muon, {len(matrices)} matrices", ms=milliseconds)
