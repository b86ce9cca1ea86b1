"""Verdicts on the passes of the device against float64, and on runs in 16 bits against float32.

Two runs in float32 whose first weights are one ulp apart show how far rounding alone carries a run.

Repeat them with `python -m benchmarks.gpu --out FOLDER --sections passes curves`.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import llmtrain as lt
from benchmarks.gpu.call import Call, GPTSize
from benchmarks.gpu.loops import GPTSettings, build_gpt, common_settings
from benchmarks.gpu.rows import packed_rows, text_rows
from llmtrain.models.attention import can_use_varlen, causal_attention, ready_documents
from llmtrain.models.documents import Documents
from llmtrain.models.loss import linear_nll
from llmtrain.training.muon import orthogonal

# The largest relative errors allowed: a few times those of a correct kernel.
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return the norm of the error, as a share of the norm of the exact result."""
    exact = exact.detach().double().cpu()
    return float((result.detach().double().cpu() - exact).norm() / exact.norm())


def judge(call: Call) -> None:
    """Judge the optimizers, the attention of packed rows, the loss and the model."""
    matmul_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        judge_found_inf(call)
        judge_muon(call)
        judge_plain_attention(call)
        judge_packed_attention(call)
        judge_loss(call)
        judge_packed_model(call)
    finally:
        torch.set_float32_matmul_precision(matmul_precision)


def judge_found_inf(call: Call) -> None:
    """Judge whether fused AdamW skips a step, and does not count it, if ``found_inf`` is 1."""
    weight = torch.nn.Parameter(torch.ones(64, device=call.device))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = [weight.clone(), *(value.clone() for value in optimizer.state[weight].values())]

    weight.grad = torch.full_like(weight, float("nan"))
    optimizer.found_inf = torch.ones((), device=call.device)
    optimizer.grad_scale = None
    optimizer.step()
    after = [weight, *optimizer.state[weight].values()]
    is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    optimizer.found_inf = torch.zeros((), device=call.device)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moves = not torch.equal(before[0], weight)
    call.journal.judge("fused AdamW takes found_inf", is_same and moves)


def judge_muon(call: Call) -> None:
    """Compare Muon's orthogonal updates with float64, and check their singular values."""
    width = call.sizes.gpt2.width
    torch.manual_seed(0)
    momenta = torch.randn(2, width, 3 * width).bfloat16().float()
    exact = orthogonal(momenta.double().to(call.device))
    for dtype in _dtypes(call):
        result = orthogonal(momenta.to(call.device, dtype))
        error = relative_error(result, exact)
        values = torch.linalg.svdvals(result.float())
        smallest = float(values.min())
        largest = float(values.max())
        call.journal.judge(
            f"Muon's update in {dtype}, by float64",
            error < 10 * _BOUNDS[dtype] and smallest > 0.6 and largest < 1.3,
            relative_error=error,
            singular_values=[smallest, largest],
        )


def judge_plain_attention(call: Call) -> None:
    """Compare attention over rows of one document with dense attention in float64."""
    size = call.sizes.gpt2
    inputs = _AttentionInputs.of(size, rows=2)
    mask = torch.ones(size.block, size.block, dtype=torch.bool).tril()
    exact = inputs.exact(mask)
    for dtype in _dtypes(call):
        inputs.judge(call, "attention over plain rows", causal_attention, dtype=dtype, exact=exact)


def judge_packed_attention(call: Call) -> None:
    """Compare attention over packed rows with dense attention in float64."""
    size = call.sizes.check
    rows = packed_rows(vocabulary=64, block=size.block, count=size.rows)
    positions = torch.from_numpy(rows.train.column("position_ids"))[:, :-1]
    documents = Documents.of(positions, on_gpu=call.on_gpu)
    inputs = _AttentionInputs.of(size, rows=size.rows)
    exact = inputs.exact(_mask_of_documents(positions))
    for name, dtype, attend in _packed_kernels(call, documents):
        inputs.judge(call, f"{name} over packed rows", attend, dtype=dtype, exact=exact)


class _AttentionInputs(NamedTuple):
    """Queries, keys and values [3, B, H, T, D], and the gradient of the output [B, H, T, D].

    All are numbers that bfloat16 has, so that only the arithmetic is measured.
    """

    qkv: Tensor
    upstream: Tensor

    @classmethod
    def of(cls, size: GPTSize, rows: int) -> "_AttentionInputs":
        """Return random inputs for some rows."""
        torch.manual_seed(0)
        shape = (3, rows, size.heads, size.block, size.width // size.heads)
        return cls(
            qkv=torch.randn(shape).bfloat16().float(),
            upstream=torch.randn(shape[1:]).bfloat16().float(),
        )

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float(self.qkv.shape[-1] ** -0.5)

    def exact(self, mask: Tensor) -> list[Tensor]:
        """Return the output and the gradient of the inputs in float64, for a boolean mask."""

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.mT * self.scale
            return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v

        return _output_and_gradient(dense, self.qkv.double(), self.upstream.double())

    def judge(
        self, call: Call, name: str, attend: Attention, *, dtype: torch.dtype, exact: list[Tensor]
    ) -> None:
        """Compare an attention on the device with the exact results."""
        results = _output_and_gradient(
            attend, self.qkv.to(call.device, dtype), self.upstream.to(call.device, dtype)
        )
        errors = [relative_error(a, b) for a, b in zip(results, exact, strict=True)]
        call.journal.judge(
            f"{name} in {dtype}, forward and backward, by float64",
            all(error < _BOUNDS[dtype] for error in errors),
            forward=errors[0],
            backward=errors[1],
        )


def _mask_of_documents(positions: Tensor) -> Tensor:
    """Return which keys each query sees, bool [B, 1, T, T], from position ids that restart."""
    document = (positions == 0).cumsum(1)
    is_same_document = document[:, :, None] == document[:, None, :]
    return is_same_document.tril()[:, None]


def _packed_kernels(call: Call, documents: Documents) -> list[tuple[str, torch.dtype, Attention]]:
    """Return the kernels that this device has for packed rows, each with a dtype."""
    on_device = documents.to(call.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, ready_documents(on_device, q.dtype))

    if not call.on_gpu:
        return [("blocks", torch.float32, attend)]
    kernels: list[tuple[str, torch.dtype, Attention]] = [("a mask", torch.float32, attend)]
    if can_use_varlen(torch.bfloat16):
        kernels.append(("varlen", torch.bfloat16, attend))
    else:
        call.journal.record("passes", "varlen", left_out="the package does not use it on this card")
    return kernels


def _output_and_gradient(attend: Attention, qkv: Tensor, upstream: Tensor) -> list[Tensor]:
    qkv = qkv.clone().requires_grad_()
    output = attend(qkv[0], qkv[1], qkv[2])
    (gradient,) = torch.autograd.grad(output, qkv, upstream)
    return [output, gradient]


def judge_loss(call: Call) -> None:
    """Compare the loss and its gradients with torch's in float64, for each vocabulary."""
    size = call.sizes.gpt2
    rows = 2  # the float64 logits of all rows would fill the card
    for vocabulary in call.sizes.vocabularies:
        torch.manual_seed(0)
        hidden = torch.randn(rows, size.block, size.width).bfloat16().float()
        weight = (0.02 * torch.randn(vocabulary, size.width)).bfloat16().float()
        targets = torch.randint(vocabulary, (rows, size.block))
        targets = targets.masked_fill(torch.rand(targets.shape) < 0.3, -100).to(call.device)

        def exact_loss(h: Tensor, w: Tensor, targets: Tensor = targets) -> Tensor:
            logits = (h @ w.T).flatten(0, 1)
            return F.cross_entropy(logits, targets.flatten(), reduction="sum")

        def our_loss(h: Tensor, w: Tensor, targets: Tensor = targets) -> Tensor:
            return linear_nll(h, w, targets)

        exact = _loss_and_gradients(
            exact_loss, hidden, weight, device=call.device, dtype=torch.float64
        )
        for dtype in _dtypes(call):
            outcome = _loss_and_gradients(our_loss, hidden, weight, device=call.device, dtype=dtype)
            errors = [relative_error(a, b) for a, b in zip(outcome, exact, strict=True)]
            call.journal.judge(
                f"the loss of V {vocabulary:,} in {dtype}, forward and backward, by float64",
                all(error < _BOUNDS[dtype] for error in errors),
                loss=errors[0],
                hidden=errors[1],
                weight=errors[2],
            )


def _loss_and_gradients(
    loss: Callable[[Tensor, Tensor], Tensor],
    hidden: Tensor,
    weight: Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor]:
    hidden = hidden.to(device, dtype, copy=True).requires_grad_()
    weight = weight.to(device, dtype, copy=True).requires_grad_()
    nll = loss(hidden, weight)
    return [nll, *torch.autograd.grad(nll, (hidden, weight))]


def judge_packed_model(call: Call) -> None:
    """Judge a GPT on packed rows, forward and backward, by the same model on the CPU in float64."""
    size = call.sizes.check
    rows = packed_rows(vocabulary=500, block=size.block, count=size.rows)
    columns = {
        name: torch.from_numpy(rows.train.column(name))
        for name in ("input_ids", "labels", "position_ids")
    }
    model = call.new_gpt(size, vocabulary=500).cpu()
    exact = _model_pass(model, columns, device=torch.device("cpu"), dtype=torch.float64)
    for dtype in _dtypes(call):
        # Weights in bfloat16 are rounded, too.
        bound = _BOUNDS[dtype] * (1 if dtype == torch.float32 else 2)
        outcome = _model_pass(model, columns, device=call.device, dtype=dtype)
        errors = {name: relative_error(outcome[name], exact[name]) for name in exact}
        call.journal.judge(
            f"a GPT on packed rows in {dtype}, forward and backward, by float64 on the CPU",
            all(error < bound for error in errors.values()),
            loss=errors.pop("nll"),
            gradient=max(errors.values()),
            worst=max(errors, key=errors.__getitem__),
        )


def _model_pass(
    model: lt.GPT, columns: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the nll and the gradient of each weight, by name."""
    model = copy.deepcopy(model).to(device, dtype).train()
    batch = {**columns, **model.prepare_batch(columns)}
    placed = {name: value.to(device) for name, value in batch.items()}
    nll = model(**placed)
    nll.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return {"nll": nll, **gradients}


def _dtypes(call: Call) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] if call.on_gpu else [torch.float32]


# --- runs in 16 bits

_CURVE_BOUND = 0.02  # nats that 16 bits may add
_LEARNING_RATES = {"adamw": 2e-3, "muon": 2e-2}


def judge_curves(call: Call) -> None:
    """Judge AdamW and Muon in 16 bits by float32, and by how far one ulp carries a run."""
    for optim in ("adamw", "muon"):
        exact = losses_of_run(call, optim, "no")
        nudged = losses_of_run(call, optim, "no", nudge=True)
        floor = _largest_difference(exact, nudged)
        call.journal.record("curves", f"{optim}: one ulp in each embedding", nats=floor)
        for precision in ("bf16", "fp16") if call.on_gpu else ("no",):
            nats = _largest_difference(exact, losses_of_run(call, optim, precision))
            call.journal.judge(
                f"{optim} in {precision}, {call.sizes.curve_steps} steps, by float32",
                nats <= _CURVE_BOUND,
                nats=nats,
                bound=_CURVE_BOUND,
            )


def _largest_difference(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def losses_of_run(call: Call, optim: str, precision: str, nudge: bool = False) -> list[float]:
    """Return the loss of each step of a small run."""
    size = call.sizes.recipe
    folder = call.folder / f"curve-{optim}-{precision}-{nudge}"
    shared = common_settings(folder, size.rows, compiled=False)
    shared["optim"] = lt.OptimConfig(
        optim=optim,
        max_steps=call.sizes.curve_steps,
        warmup_steps=2,
        learning_rate=_LEARNING_RATES[optim],
    )
    shared["log"] = lt.LogConfig(logging_steps=1)
    shared["parallel"] = lt.ParallelConfig(torch_compile="never", mixed_precision=precision)
    settings = GPTSettings(model=size.config(), **shared)
    rows = text_rows(call.sizes.recipe_vocabulary, size.block, 4 * size.rows)
    accelerator = lt.start(settings)
    # Exact products, so that a nudge is the only difference.
    torch.set_float32_matmul_precision("highest")
    bundle = lt.place(accelerator, build_gpt, settings=settings, rows=rows)
    if nudge:
        weight = next(bundle.model.parameters()).data
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, 10.0)))
    optimizer = lt.make_optimizer(accelerator, bundle.model, settings.optim)
    with lt.open_run(accelerator, settings, rows, bundle, optimizer) as run:
        lt.train(run, *accelerator.prepare(bundle.model, optimizer, *lt.loaders(run)))
    losses: list[float] = run.history()["train/loss"].dropna().tolist()
    return losses
